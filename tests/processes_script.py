"""What several processes do together; ``test_processes.py`` starts them, and runs the same cases in one.

usage: processes_script.py FOLDER [CASE ...]

Under torch.distributed.run each rank saves FOLDER/W-rank.pt.
"""

import contextlib
import copy
import hashlib
import os
import pickle
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import sharded_cases
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import small_data, small_net
from sharded_cases import LENGTHS, loaded_later, raised
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

import adambs

N, B = 120, 13  # 13 = 6 + 7 = 4 + 4 + 5: parts are unequal
STEPS = 300
CASES, TOGETHER = dict(sharded_cases.CASES), dict(sharded_cases.TOGETHER)


def case(function):
    """A case that one process can do as well, with the same result."""
    CASES[function.__name__] = function
    return function


def together(function):
    """A case that needs several."""
    TOGETHER[function.__name__] = function
    return function


def data(dtype=torch.float64):
    x, y = small_data(N)
    return TensorDataset(x.to(dtype), y)


def digest(sampler):
    return hashlib.sha256(sampler.probabilities().numpy().tobytes()).hexdigest()


def wrapped(net):
    return DistributedDataParallel(net) if dist.is_initialized() else net


def result(net, sampler, digests):
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return {
        "parameters": torch.cat([value.detach().reshape(-1) for value in values]),
        "p": sampler.probabilities(),
        "digests": digests,
        "looks": sampler.diagnostics().looks,
        "reshuffled": sampler.diagnostics().reshuffled,
        "updates": sampler.diagnostics().updates,
        "capped": sampler.diagnostics().capped_weights,
    }


def trained(
    loader_options=None,
    *,
    dtype=torch.float64,
    wrap=wrapped,
    clip=None,
    capped=False,
    spike=1.0,
    steps=STEPS,
    batch_size=B,
    every=30,
    **options,
):
    """The README's loop: what it ends with, and a digest of p after each step.

    One loss in ``every`` is ``spike`` times as large.
    """
    net = wrap(small_net(dtype=dtype))
    sampler = adambs.BanditSampler(N, batch_size, seed=3, **options)
    optimizer = adambs.AdamBS(net.parameters(), sampler, lr=3e-3, clip=clip)
    options = dict(loader_options or {})
    if options.pop("looking", False):

        def score(batch):
            with torch.no_grad():
                return adambs.scores.cross_entropy(net(batch[0]), batch[1])

        options["score"] = score
    loader = adambs.BanditLoader(data(dtype), sampler, **options)
    digests = []
    while True:
        for batch in loader:
            (x, y), draw = (batch[:2], batch[2]) if loader.carry else batch
            if len(digests) == steps:
                return {**result(net, sampler, digests), "clipped": optimizer.clip.clipped}
            logits = net(x)
            losses, scores = (
                F.cross_entropy(logits, y, reduction="none"),
                adambs.scores.cross_entropy(logits, y),
            )
            optimizer.zero_grad()
            loss = draw.mean(losses, scores) if capped else draw.mean(losses)
            (loss * spike if len(digests) % every == every - 1 else loss).backward()
            number = draw.number if loader.carry else draw
            optimizer.step(number, scores)
            digests.append(digest(sampler))


@case
def default():
    return trained(gate=1.005)


@case
def calibrated_without_a_gate():
    return trained(gate=0.0)


@case
def context_cap_and_clip():
    return trained(context=np.arange(N) % 5, gate=0.0, cap=1.0, capped=True, clip=1.2, spike=20.0)


@case
def clip_where_a_pass_ends():
    """The first pass ends in the middle of a batch: what is left of it is all that some ranks have of that
    batch, with weights of one, and the others have draws from p. The clip acts there on all."""
    return trained(gate=0.5, clip=1.2, batch_size=16, spike=20.0, every=8, steps=30)


@case
def history():
    """Scores and losses that depend on nothing but the example and the step: the history is exact."""
    sampler = adambs.BanditSampler(N, B, seed=3, gate=0.0)
    kept = adambs.History(N, with_losses=True).watch(sampler)
    digests = []
    for step in range(60):
        draw = sampler.draw()
        digests.append(digest(sampler))  # what was late has been learned, and nothing is waited for
        assert draw.weights.min() > 0  # asked for, as whoever trains does
        values = ((37 * draw.indices + step) % 101).double() / 60
        kept.losses(draw, 2 * values)
        sampler.update(draw, values)
    digests.append(digest(sampler))
    return {"history": kept.state_dict(), "p": sampler.probabilities(), "digests": digests}


@case
def exp3():
    return trained(rule=adambs.Exp3(alpha_p=0.05))


@case
def tracking():
    return trained(rule=adambs.Tracking(), stratified=True)


@case
def exp3_with_a_baseline():
    return trained(rule=adambs.Exp3(offset="baseline", step=1.0))


@case
def vrb():
    return trained(rule=adambs.VRB())


@case
def avare():
    return trained(rule=adambs.Avare())


@case
def release():
    return trained(rule=adambs.Release())


@case
def exp3m():
    return trained(rule=adambs.Exp3M())


@case
def uniform():
    return trained(rule=adambs.Uniform())


@case
def correction():
    return trained(gate=0.0, correction=0.5)


@case
def carried():
    return trained({"carry": True}, gate=0.0)


@case
def workers():
    return trained({"num_workers": 1, "persistent_workers": True}, gate=0.0)


@case
def looking():
    return trained({"looking": True}, gate=0.0, candidates=adambs.Candidates(cost=1e-3))


@case
def looking_and_gated():
    return trained({"looking": True}, candidates=adambs.Candidates(cost=1e-3))


@case
def single():
    return trained(gate=0.0, dtype=torch.float32)


def in_pieces(net):
    """Parameters over all ranks, by FSDP2."""
    if dist.is_initialized():
        fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return net


@case
def fsdp():
    return trained(wrap=in_pieces, gate=0.0)


@together
def single_fsdp(folder):
    return trained(wrap=in_pieces, gate=0.0, dtype=torch.float32, steps=60)


@together
def single_looking(folder):
    """With the gate that there is by default."""
    return trained({"looking": True}, candidates=adambs.Candidates(cost=1e-3), dtype=torch.float32, steps=60)


@together
def single_gated(folder):
    """As the default, with a gate that opens for these data."""
    return trained(gate=1.005, dtype=torch.float32, steps=60)


@case
def accumulation():
    net = wrapped(small_net(dtype=torch.float64))
    sampler = adambs.BanditSampler(N, B, seed=3, gate=0.0)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    digests, x, y = [], *data().tensors
    for _ in range(STEPS // 2):
        optimizer.zero_grad()
        for last in (False, True):
            draw = sampler.draw()
            quiet = hasattr(net, "no_sync") and not last
            with net.no_sync() if quiet else contextlib.nullcontext():
                logits = net(x[draw.indices])
                losses = F.cross_entropy(logits, y[draw.indices], reduction="none")
                (draw.mean(losses) / 2).backward()
            sampler.update(draw, adambs.scores.cross_entropy(logits, y[draw.indices]))
            digests.append(digest(sampler))
        optimizer.step()
    return result(net, sampler, digests)


class PartlyUnused(torch.nn.Module):
    """Has parameters that no loss depends on."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = small_net(), small_net(seed=1)

    def forward(self, x):
        return self.used(x)


@case
def unused_parameters_dropped_batches_and_a_schedule():
    net = PartlyUnused().double()
    model = DistributedDataParallel(net, find_unused_parameters=True) if dist.is_initialized() else net
    sampler = adambs.BanditSampler(N, B, seed=3, gate=0.0)
    optimizer = adambs.AdamBS(model.parameters(), sampler, lr=3e-3)
    loader = adambs.BanditLoader(data(), sampler, drop_last=True)
    digests, steps = [], 0
    for epoch in range(4):
        sampler.correction = 1.0 - epoch / 4
        for (x, y), draw in loader:
            logits = model(x)
            optimizer.zero_grad()
            draw.mean(F.cross_entropy(logits, y, reduction="none")).backward()
            optimizer.step(draw, adambs.scores.cross_entropy(logits, y))
            steps += 1
            digests.append(digest(sampler))
    assert steps == 4 * (N // B)
    return result(net, sampler, digests)


@case
def refreshed():
    norms = torch.linspace(0.1, 3.0, N, dtype=torch.float64)
    sampler = adambs.BanditSampler(N, B, gate=0.0)
    digests = []

    def progress(done, total):
        digests.append(digest(sampler))

    sampler.refresh(lambda indices: norms[indices], batch_size=7, progress=progress)
    sampler.refresh(lambda indices: 2 * norms[indices], [5, 3], progress=progress)
    found = {"p": sampler.probabilities(), "draw": sampler.draw().whole.indices}
    return {**found, "digests": [*digests, digest(sampler)]}


# ----------------------------------------------------------------------------------------------
# Elastic: the same draws go on with any number of processes
# ----------------------------------------------------------------------------------------------


def elastic_sampler():
    return adambs.BanditSampler(N, B, seed=5)


def go_on(sampler, steps):
    """So many batches of a loader that draws ahead, with scores that the examples alone decide."""
    norms = np.random.default_rng(0).gamma(0.5, 0.5, N)
    x, y = small_data(N)
    seen, numbers = [], []
    loader = adambs.BanditLoader(TensorDataset(x, y, torch.arange(N)), sampler, num_workers=1)
    while True:
        for (_, _, i), draw in loader:
            assert torch.equal(i, draw.indices)
            sampler.update(draw, norms[draw.indices.numpy()])
            draw.mean(torch.ones(len(draw)))  # as whoever trains does
            seen.append(draw.whole.indices)
            numbers.append(draw.number)
            if len(seen) == steps:
                return {"state": copy.deepcopy(sampler.state_dict()), "draws": seen, "numbers": numbers}


@together
def elastic(folder):
    state = torch.load(folder / "one.pt", weights_only=True)
    sampler = elastic_sampler()
    sampler.load_state_dict(state)
    assert len(state["epochs"]["ahead"]) > 0
    return go_on(sampler, 44)


# ----------------------------------------------------------------------------------------------
# What a draw looks like
# ----------------------------------------------------------------------------------------------


@together
def parts(folder):
    rank, W = dist.get_rank(), dist.get_world_size()
    sampler = adambs.BanditSampler(N, B, seed=1, gate=0.0)
    twin = adambs.BanditSampler(N, B, seed=1, gate=0.0, group=False)
    whole, draw = twin.draw(), sampler.draw()
    start, stop = rank * B // W, (rank + 1) * B // W
    assert len(draw) == stop - start
    assert draw.number == whole.number == 0
    assert torch.equal(draw.whole.indices, whole.indices)
    assert torch.equal(draw.indices, whole.indices[start:stop])
    assert torch.equal(draw.probabilities, whole.probabilities[start:stop])
    assert torch.equal(draw.weights, whole.weights[start:stop])
    assert len(sampler) == len(twin)
    again = pickle.loads(pickle.dumps(draw))
    assert draw.whole.same_as(again)
    assert torch.equal(again.whole.indices, whole.indices)
    assert draw.to_list() == whole.to_list()
    copied = pickle.loads(pickle.dumps(sampler))  # a copy finds the group itself
    sampler.update(again, np.arange(start, stop) + 1.0)
    twin.update(whole, np.arange(B) + 1.0)
    assert torch.equal(sampler.probabilities(), twin.probabilities())
    draws = [sampler.draw(), copied.draw()]
    assert [len(draw) for draw in draws] == [stop - start] * 2
    sampler.update(draws[0].number, draws[0].weights)
    carried = sampler.draw().carried()
    sampler.update(carried.number, carried.weights)
    assert sampler.diagnostics().updates == 3
    batch = next(iter(sampler))
    assert len(batch) == stop - start
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            draw = sampler.draw()
            draw.mean(torch.ones(len(draw)))
            sampler.update(draw, 1 / draw.weights)
    assert not caught, caught  # the whole knows that its part was weighted
    return {"repr": repr(draw)}


class Noisy(Dataset):
    """Examples that look different each time."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return torch.tensor([i, torch.rand(()).item(), np.random.rand()], dtype=torch.float64)  # noqa: NPY002


@together
def noise(folder):
    """Random numbers differ between the ranks, and what one has scored is what another trains on."""
    found = {}
    for workers_ in (0, 1):
        sampler = adambs.BanditSampler(N, B, seed=1)
        loader = adambs.BanditLoader(Noisy(), sampler, num_workers=workers_)
        found[workers_] = torch.cat([x for x, draw in loader if sampler.update(draw, x[:, 1]) is None])

    scored, trained_on = [], []

    def score(batch):
        scored.append(batch)
        return batch[:, 1]

    sampler = adambs.BanditSampler(N, B, gate=0.0, candidates=adambs.Candidates(cost=1e-4))
    loader = adambs.BanditLoader(Noisy(), sampler, score=score)
    for _ in range(3):
        for x, draw in loader:
            assert torch.equal(x[:, 0].long(), draw.indices)
            if draw.learned:
                trained_on.append((len(scored) - 1, x))
            assert draw.weights.min() > 0
            sampler.update(draw, x[:, 1])
    return {"plain": found, "scored": scored, "trained_on": trained_on}


@together
def measured_cost(folder):
    """Clocks differ between the ranks; the cost that decides does not."""
    norms = torch.from_numpy(np.random.default_rng(0).gamma(0.3, 1.0, N))
    sampler = adambs.BanditSampler(N, B, gate=0.0, candidates=adambs.Candidates())
    for _ in range(60):
        draw = sampler.draw(lambda indices: norms[indices])
        assert draw.weights.min() > 0
        sampler.update(draw, norms[draw.indices])
    assert sampler.candidates.cost is not None
    return {"cost": sampler.candidates.cost, "looks": sampler.diagnostics().looks, "p": digest(sampler)}


@together
def late(folder):
    """A rank that comes late changes nothing."""
    if dist.get_rank() == 1:
        time.sleep(0.3)
    sampler = adambs.BanditSampler(N, B, seed=2, gate=0.0)
    digests = []
    for k in range(12):
        draw = sampler.draw()
        if dist.get_rank() == k % dist.get_world_size():
            time.sleep(0.02)
        sampler.update(draw, draw._indices + 1.0)
        if dist.get_rank() == k // 3 % dist.get_world_size():
            time.sleep(0.02)
        digests.append(digest(sampler))
    return {"digests": digests}


@together
def in_flight(folder):
    """Several gatherings at once, one of them of a skipped step: each draw has its own scores."""
    rank, W = dist.get_rank(), dist.get_world_size()
    sampler = adambs.BanditSampler(N, B, seed=2, gate=0.0)
    twin = adambs.BanditSampler(N, B, seed=2, gate=0.0, group=False)
    start, stop = rank * B // W, (rank + 1) * B // W
    digests = []
    for k in range(10):
        draws, wholes = [sampler.draw() for _ in range(4)], [twin.draw() for _ in range(4)]
        for i in (2, 0, 3, 1):
            scores = (wholes[i]._indices + 1.0) / (1 + i + k)
            flag = torch.tensor(float(i == 3 and rank == k % W))
            assert min(draws[i].weights.min(), wholes[i].weights.min()) > 0  # asked for, as training does
            sampler.learn(sampler.check(draws[i], scores[start:stop], flag))
            if i != 3:
                twin.update(wholes[i], scores)
        digests.append(digest(sampler))
        assert digests[-1] == digest(twin)
    assert sampler.diagnostics().updates == 30
    return {"digests": digests}


TIMEOUT = 2.0


def ready_to_be_left_alone(kind):
    """What waits for all ranks, with a sampler of a group of little time in which all is well until then."""
    options = {"gate": 0.0, "group": dist.new_group(timeout=timedelta(seconds=TIMEOUT))}
    if kind.startswith("sharded"):
        sampler = adambs.ShardedSampler(LENGTHS, B, **options)
    else:
        sampler = adambs.BanditSampler(N, B, candidates=adambs.Candidates(cost=1e-9), **options)
    if kind.endswith("first draw"):
        return sampler.draw
    draw = sampler.draw()
    scores = np.arange(len(draw)) + 1.0
    if kind.endswith("update"):
        return lambda: sampler.update(draw, scores) or sampler.draw()
    sampler.update(draw, scores)
    sampler.diagnostics()  # all have learned
    score = partial(torch.ones_like, dtype=torch.float64)
    return {"look": partial(sampler.draw, score), "refresh": partial(sampler.refresh, score)}[kind]


@together
def absent(folder):
    """A rank that never comes: the others are told when the group's time is up, and not later."""
    kinds = ("update", "first draw", "look", "refresh", "sharded update", "sharded first draw")
    waiting = {kind: ready_to_be_left_alone(kind) for kind in kinds}

    def told(function):
        start = time.monotonic()
        return {"message": raised(function), "seconds": time.monotonic() - start}

    found = {}
    if dist.get_rank() != 1:
        with ThreadPoolExecutor(len(kinds)) as threads:  # all at once, or each would take its time
            found = dict(zip(kinds, threads.map(told, waiting.values()), strict=True))
    dist.barrier()
    return found


@together
def skipped(folder):
    """A step that one rank has skipped is dropped by all."""
    sampler = adambs.BanditSampler(N, B, gate=0.0)
    draw = sampler.draw()
    flag = torch.tensor(float(dist.get_rank() == 1))
    sampler.learn(sampler.check(draw, np.arange(len(draw)) + 1.0, flag))
    assert sampler.diagnostics().updates == 0
    sampler.update(sampler.draw(), np.arange(len(draw)) + 1.0)
    assert sampler.diagnostics().updates == 1
    return {"p": digest(sampler)}


# ----------------------------------------------------------------------------------------------
# Mistakes: the same error on all ranks
# ----------------------------------------------------------------------------------------------


@together
def mistakes(folder):
    rank, W = dist.get_rank(), dist.get_world_size()
    odd = rank == 1
    messages = {}

    def differing(name, **options):
        rule = options.pop("rule", None)
        usual = {"n": N, "batch_size": B, "seed": 0, "rule": rule}
        messages[name] = raised(adambs.BanditSampler(**{**usual, **options}).draw)

    differing("seed", seed=int(odd))
    differing("n", n=N + odd)
    differing("batch_size", batch_size=B + odd)
    differing("gate", gate=1.5 if odd else 1.2)
    differing("rule", rule=adambs.Exp3() if odd else adambs.Tracking())
    differing("rule_settings", rule=adambs.Exp3(alpha_p=0.1 if odd else 0.2))
    differing("correction", correction=0.5 if odd else 1.0)
    differing("initial_weights", initial_weights=np.arange(N) + 1.0 + odd)
    messages["too many ranks"] = raised(adambs.BanditSampler(N, batch_size=W - 1).draw)

    sampler = adambs.BanditSampler(N, B)
    lonely = adambs.BanditSampler(N, B, group=False)
    lonely.update(lonely.draw(), np.ones(B))
    if odd:
        sampler.load_state_dict(lonely.state_dict())
    messages["state"] = raised(sampler.draw)
    sampler.load_state_dict(lonely.state_dict())
    messages["the same state"] = raised(sampler.draw)

    messages["a state later"] = loaded_later(adambs.BanditSampler(N, B))

    sampler = adambs.BanditSampler(N, B)
    draw = sampler.draw()
    scores = torch.ones(len(draw))
    if odd:
        scores[2] = torch.nan
    sampler.update(draw, scores)
    messages["nan"] = raised(sampler.draw)
    sampler.update(sampler.draw(), torch.ones(len(draw)))
    assert sampler.diagnostics().updates == 1
    sampler = adambs.BanditSampler(N, B, gate=0.0, candidates=adambs.Candidates(cost=1e-9))
    sampler.update(sampler.draw(), np.arange(len(draw)) + 1.0)
    messages["a refresh of nan"] = raised(
        lambda: sampler.refresh(lambda indices: torch.full((len(indices),), torch.nan if odd else 1.0))
    )
    messages["a look at nan"] = raised(
        lambda: sampler.draw(lambda indices: torch.full((len(indices),), torch.nan if odd else 1.0))
    )
    messages["shape"] = raised(lambda: sampler.update(sampler.draw(), torch.ones(len(draw) + 1)))

    def out_of_step(spoil):
        sampler = adambs.BanditSampler(N, B, gate=0.0)
        draws = [sampler.draw(), sampler.draw()]
        if odd:
            spoil(sampler, draws)
        draws.append(sampler.draw())
        sampler.update(draws[0], torch.ones(len(draw)))
        return raised(sampler.probabilities)

    messages["another draw"] = out_of_step(lambda sampler, draws: sampler.draw())
    messages["another order"] = out_of_step(lambda sampler, draws: draws.reverse())
    messages["another correction"] = out_of_step(lambda sampler, draws: setattr(sampler, "correction", 0.5))
    messages["another p"] = out_of_step(
        lambda sampler, draws: sampler.rule.observe(np.arange(9), np.arange(9) + 5.0)
    )
    messages["not a group"] = raised(lambda: adambs.BanditSampler(N, B, group="all"))
    return messages


@together
def groups(folder):
    """A group of one's own, a device mesh, and none."""
    assert len(adambs.BanditSampler(N, B, group=False).draw()) == B
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    assert len(adambs.BanditSampler(N, B, group=mesh["dp"]).draw().whole) == B
    assert len(adambs.BanditSampler(N, B, group=mesh["dp"]).draw()) < B
    assert len(adambs.BanditSampler(N, B, group=mesh["tp"]).draw()) == B  # a group of one process
    subgroup = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return {"message": raised(lambda: adambs.BanditSampler(N, B, group=subgroup))}
    sampler = adambs.BanditSampler(N, B, group=subgroup)
    draw = sampler.draw()
    sampler.update(draw, draw.weights)
    return {"length": len(draw), "p": digest(sampler)}


def run(folder, only=()):
    """The results of all cases, or of those that are named, and the seconds that each took."""
    cases = dict(CASES)
    if dist.is_initialized():
        cases |= {name: partial(function, folder) for name, function in TOGETHER.items()}
    cases = {name: cases[name] for name in only or cases}
    results, seconds = {}, {}
    for name, function in cases.items():
        start = time.perf_counter()
        results[name] = function()
        seconds[name] = round(time.perf_counter() - start, 2)
    return {**results, "seconds": seconds}


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="torch")
    warnings.filterwarnings("ignore", "in each of the first")  # tiny batches of a few different scores
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    torch.save(run(folder, sys.argv[2:]), folder / f"{dist.get_world_size()}-{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
