"""What several processes with p in shards do together: cases for ``processes_script.py``.

The shards are the same six in one process and in several, so all of them must do the same.
"""

import copy
import hashlib
import itertools
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from helpers import small_data, small_net
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import adambs

LENGTHS = [31, 9, 20, 25, 15, 20]
N, B = sum(LENGTHS), 13
STEPS = 300
NORMS = np.random.default_rng(0).gamma(0.5, 0.5, N)
SEEDS = int(os.environ.get("ADAMBS_SEEDS", "400"))
"""Of the z-tests. With so many, a gate that opens in the middle of a pass is five standard errors off."""


def of_all(value):
    """The values of all ranks, in their order."""
    if not dist.is_initialized():
        return [value]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def digest(sampler):
    """Of what all ranks know of p as it is now: what each group is worth, and its members in each shard."""
    rule = sampler.rule
    for v, shard in rule.shards.items():  # and the examples that are here are in these groups
        assert np.array_equal(shard.sizes, rule.sizes[v])
    return hashlib.sha256(rule.group_ratios.tobytes() + rule.sizes.tobytes()).hexdigest()


def trained(*, own_data=False, workers=0, batch_size=B, clip=None, spike=1.0, **options):
    """The README's loop: parameters, p and draws of all ranks; a digest of p at each draw and at the end.

    Every 7th loss is ``spike`` times as large.
    """
    net = small_net(dtype=torch.float64)
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    sampler = adambs.ShardedSampler(LENGTHS, batch_size, seed=3, **options)
    optimizer = adambs.AdamBS(model.parameters(), sampler, lr=3e-3, clip=clip)
    x, y = small_data(N)
    data = TensorDataset(x.double(), y, torch.arange(N))
    if own_data:
        data = TensorDataset(*(tensor[sampler.start : sampler.stop] for tensor in data.tensors))
    loader = adambs.BanditLoader(data, sampler, num_workers=workers, persistent_workers=workers > 0)
    drawn, digests = [], []
    while len(drawn) < STEPS:
        for (inputs, labels, numbers), draw in loader:
            digests.append(digest(sampler))  # what was late has been learned, and nothing is waited for
            assert torch.equal(numbers, draw.indices)
            logits = model(inputs)
            optimizer.zero_grad()
            loss = draw.mean(F.cross_entropy(logits, labels, reduction="none"))
            (spike * loss if len(drawn) % 7 == 6 else loss).backward()
            optimizer.step(draw, adambs.scores.cross_entropy(logits, labels))
            drawn.append(draw.own.tolist())
            if len(drawn) == STEPS:
                break
    p = torch.cat(of_all(sampler.probabilities()))
    return {
        "parameters": torch.cat([value.detach().reshape(-1) for value in net.parameters()]),
        "p": p,
        "drawn": [list(itertools.chain(*parts)) for parts in zip(*of_all(drawn), strict=True)],
        "reshuffled": sampler.diagnostics().reshuffled,
        "updates": sampler.diagnostics().updates,
        "clipped": optimizer.clip.clipped,
        "digests": [*digests, digest(sampler)],
    }


def sharded():
    return trained(gate=1.005)


def sharded_and_stratified():
    """Every process has the data of its shards alone."""
    return trained(gate=0.0, stratified=True, own_data=True, workers=1)


def sharded_and_clipped():
    """Of a batch of four a process often has nothing, and then an example of weight zero. That the batch is
    from a pass, all know, and none clips."""
    return trained(gate=1e6, batch_size=4, clip=1.2, spike=10.0)


CASES = {
    "sharded": sharded,
    "sharded_and_stratified": sharded_and_stratified,
    "sharded_and_clipped": sharded_and_clipped,
}


# ----------------------------------------------------------------------------------------------
# What needs several
# ----------------------------------------------------------------------------------------------


def sampler_to_go_on():
    return adambs.ShardedSampler(LENGTHS, B, seed=5)


def go_on(sampler, steps):
    """So many batches of a loader that draws ahead: the examples of this process, and the state."""
    drawn = []
    loader = adambs.BanditLoader(TensorDataset(torch.arange(N)), sampler, num_workers=1)
    while True:
        for _, draw in loader:
            draw.mean(torch.ones(len(draw)))
            sampler.update(draw, NORMS[draw._indices])
            drawn.append(draw.own.tolist())
            if len(drawn) == steps:
                return drawn, copy.deepcopy(sampler.state_dict())


def moved_shards(folder):
    """1 -> W by a file, and a checkpoint of all for W -> 1."""
    sampler = sampler_to_go_on()
    sampler.load_state_dict(torch.load(folder / "one-sharded.pt", weights_only=True))
    drawn, state = go_on(sampler, 30)
    saved = {"sampler": state}
    dcp.save(saved, checkpoint_id=folder / f"sharded-{dist.get_world_size()}")
    again = sampler_to_go_on()
    found = {"sampler": {**again.state_dict()}}
    found["sampler"]["epochs"]["ahead"] = []
    dcp.load(found, checkpoint_id=folder / f"sharded-{dist.get_world_size()}")
    again.load_state_dict(found["sampler"])
    return {"drawn": drawn, "state": state, "further": go_on(again, 12)[0]}


def nothing_here(folder):
    """A rank to which nothing falls takes part with an example of weight zero."""
    W, rank = dist.get_world_size(), dist.get_rank()
    sampler = adambs.ShardedSampler([50] * W, W, seed=0, gate=0.0)
    twin = adambs.ShardedSampler([50] * W, W, seed=0, gate=0.0, group=False)
    empty, visits = 0, np.zeros(50 * W)
    history = adambs.History(50 * W).watch(sampler)
    for _ in range(40):
        draw, whole = sampler.draw(), twin.draw()
        np.add.at(visits, draw.own, 1)
        norms = torch.from_numpy(NORMS).repeat(2)
        if not len(draw.own):
            empty += 1
            assert draw.weights.tolist() == [0.0]
            assert draw.indices.tolist() == [50 * rank]
        means = of_all(draw.mean(norms[draw.indices]).item())
        np.testing.assert_allclose(np.mean(means), whole.mean(norms[whole.indices]).item(), rtol=1e-12)
        sampler.update(draw, norms[draw.indices])
        twin.update(whole, norms[whole.indices])
    np.testing.assert_array_equal(torch.cat(of_all(sampler.probabilities())), twin.probabilities())
    np.testing.assert_array_equal(history.table()["visits"], visits)  # not of examples of weight zero
    return {"empty": of_all(empty)}


def estimated(kind):
    """For z-tests: this rank's estimate of each step, a row for each seed.

    Samplers take turns: one after the other would wait for each gathering.
    """
    norms = np.ones(40)
    norms[[7, 23]] = 10.0
    samplers = [kind(40, 4, seed=1000 + seed) for seed in range(SEEDS)]
    found = np.empty((SEEDS, 12))
    for step, seed in itertools.product(range(12), range(SEEDS)):
        draw = samplers[seed].draw()
        scores = norms[draw._indices]
        found[seed, step] = draw.mean(torch.from_numpy(scores)).item()
        samplers[seed].update(draw, scores)
    return torch.from_numpy(found)


def estimates(folder):
    """Replicated and in shards."""
    kinds = {"replicated": adambs.BanditSampler, "sharded": adambs.ShardedSampler}
    return {name: estimated(kind) for name, kind in kinds.items()}


def raised(function):
    try:
        function()
    except (ValueError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def loaded_later(sampler):
    """Rank 1 loads a state when all are under way."""
    state = sampler.state_dict()
    draw = sampler.draw()
    sampler.update(draw, torch.ones(len(draw)))
    sampler.diagnostics()  # all have learned
    if dist.get_rank() == 1:
        sampler.load_state_dict(state)
        return raised(sampler.draw)
    draw = sampler.draw()
    sampler.update(draw, torch.ones(len(draw)))
    return raised(sampler.draw)


def mistakes_in_shards(folder):
    odd, messages = dist.get_rank() == 1, {}
    messages["a state later"] = loaded_later(adambs.ShardedSampler(LENGTHS, B))
    sampler = adambs.ShardedSampler(LENGTHS, B)
    lonely = adambs.ShardedSampler(LENGTHS, B, group=False)
    blank = lonely.state_dict()
    lonely.update(lonely.draw(), np.ones(B))
    taught = lonely.state_dict()
    sampler.load_state_dict(taught if odd else blank)
    messages["state"] = raised(sampler.draw)
    sampler.load_state_dict({**taught, "rule": blank["rule"]} if odd else taught)
    messages["state of the rule"] = raised(sampler.draw)
    sampler.load_state_dict(taught)
    messages["the same state"] = raised(sampler.draw)

    sampler = adambs.ShardedSampler(LENGTHS, B)  # one loads, the others do not
    if odd:
        sampler.load_state_dict(taught)
    messages["state on one rank"] = raised(sampler.draw)

    messages["seed"] = raised(adambs.ShardedSampler(LENGTHS, B, seed=int(odd)).draw)
    messages["batch_size"] = raised(adambs.ShardedSampler(LENGTHS, B + odd).draw)
    swapped = LENGTHS[::-1] if odd else LENGTHS
    messages["lengths"] = raised(adambs.ShardedSampler(swapped, B).draw)
    messages["kind"] = raised((adambs.ShardedSampler if odd else adambs.BanditSampler)(N, B).draw)
    messages["too few shards"] = raised(lambda: adambs.ShardedSampler([N], B))
    messages["too many ranks"] = raised(lambda: adambs.ShardedSampler(N, dist.get_world_size() - 1))

    sampler = adambs.ShardedSampler(LENGTHS, B, gate=0.0)
    draw = sampler.draw()
    scores = torch.ones(len(draw))
    if odd:
        scores[0] = torch.nan
    sampler.update(draw, scores)
    messages["nan"] = raised(sampler.draw)
    draw = sampler.draw()
    flag = torch.tensor(float(odd))
    sampler.learn(sampler.check(draw, torch.full((len(draw),), torch.nan), flag))  # a step that was skipped
    draw = sampler.draw()
    assert sampler.diagnostics().updates == 0
    sampler.update(draw, torch.ones(len(draw)))
    draw = sampler.draw()
    sampler.update(draw.number, torch.ones(len(draw)))
    assert sampler.diagnostics().updates == 2

    draws = [sampler.draw(), sampler.draw()]
    if odd:
        draws.reverse()
    sampler.update(draws[0], torch.ones(len(draws[0])))
    messages["another order"] = raised(sampler.draw)

    sampler = adambs.ShardedSampler(LENGTHS, B, gate=0.0)
    sampler.draw()
    if odd:
        sampler.rule.means[0] = 7.0
        sampler.rule._settle()
    draw = sampler.draw()
    if odd:
        sampler.rule.means[0] = 0.0
        sampler.rule._settle()
    sampler.update(draw, torch.ones(len(draw)))
    messages["another p"] = raised(sampler.draw)
    return messages


TOGETHER = {
    function.__name__: function for function in (moved_shards, nothing_here, estimates, mistakes_in_shards)
}
