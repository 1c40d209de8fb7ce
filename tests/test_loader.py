"""BanditLoader: each batch with its own draw, through a real DataLoader."""

import copy
import gc
import itertools
import math
import pickle
import random
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import same, saved_and_loaded
from torch.utils import _pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)
from torch.utils.data._utils.pin_memory import pin_memory

import adambs

# These loops fetch batches and train nothing.
pytestmark = [
    pytest.mark.filterwarnings("ignore:batches were drawn with unequal p"),
    pytest.mark.filterwarnings("ignore:an epoch of .* batches is over"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # of torch, for what torchdata does
]

FAST_RULE = adambs.Exp3(step=1.0)


class Squares(Dataset):
    """Example i is (i, i^2), one at a time."""

    def __init__(self, n=50):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        assert type(i) is int
        return i, float(i**2)


def tensors(n=50):
    return TensorDataset(torch.arange(n), torch.arange(n).double() ** 2)


def subset(n=50):
    inner = Subset(TensorDataset(torch.arange(-10, n), torch.arange(-10, n).double() ** 2), range(5, n + 10))
    return Subset(inner, range(5, n + 5))


def reversed_pairs(examples):
    return [(y, x) for x, y in examples][::-1]


DATASETS = [
    Squares,
    tensors,
    subset,
    lambda: list(zip(range(50), [i**2 for i in range(50)], strict=True)),
]
OPTIONS = [
    {},
    {"num_workers": 2},
    {"num_workers": 1, "prefetch_factor": 7, "persistent_workers": True},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dataset", DATASETS)
def test_each_batch_arrives_with_the_draw_that_drew_it(dataset, options):
    sampler = adambs.BanditSampler(50, 4, rule=FAST_RULE)
    loader = adambs.BanditLoader(dataset(), sampler, **options)
    assert isinstance(loader.dataloader, DataLoader)
    for _ in range(2):
        batches = 0
        for (x, y), draw in loader:
            assert torch.equal(x, draw.indices)
            assert torch.equal(y.double(), draw.indices.double() ** 2)
            assert x.dtype == torch.int64
            sampler.update(draw, torch.rand(4))
            batches += 1
        assert batches == len(loader) == 13
    assert sampler.diagnostics().updates == 26


@pytest.mark.parametrize(
    ("K", "drop_last", "length"),
    [(4, False, 13), (4, True, 12), (5, False, 10), (5, True, 10), (50, True, 1)],
)
@pytest.mark.parametrize("dataset", [Squares, tensors])
def test_an_epoch_is_as_long_as_an_ordinary_one(dataset, K, drop_last, length):
    loader = adambs.BanditLoader(dataset(), adambs.BanditSampler(50, K), drop_last=drop_last)
    ordinary = DataLoader(dataset(), batch_size=K, drop_last=drop_last)
    assert len(loader) == len(ordinary) == length == sum(1 for _ in loader)
    assert {len(draw) for _, draw in loader} == {K}


def test_in_memory_tensors_are_indexed_by_batch(monkeypatch):
    calls = []
    original = TensorDataset.__getitem__
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, i: calls.append(i) or original(self, i))
    for dataset in (tensors(), subset()):
        calls.clear()
        list(adambs.BanditLoader(dataset, adambs.BanditSampler(50, 5)))
        assert len(calls) == 10
        assert all(len(call) == 5 for call in calls)


def test_a_dataset_of_ones_own_on_top_of_tensors_keeps_its_getitem():
    class Negated(TensorDataset):
        def __getitem__(self, i):
            assert isinstance(i, int)
            return -self.tensors[0][i]

    for x, draw in adambs.BanditLoader(Negated(torch.arange(50)), adambs.BanditSampler(50, 5)):
        assert torch.equal(x, -draw.indices)


@pytest.mark.parametrize("options", OPTIONS[:2])
@pytest.mark.parametrize("dataset", [Squares, tensors])
def test_any_collate_fn(dataset, options):
    loader = adambs.BanditLoader(dataset(), adambs.BanditSampler(50, 4), collate_fn=reversed_pairs, **options)
    for batch, draw in loader:
        assert [int(x) for _, x in batch] == draw.indices.tolist()[::-1]


def test_prefetched_batches_carry_the_probabilities_they_were_drawn_with():
    """With batches in flight p moves on, and the draw keeps the old one."""
    sampler = adambs.BanditSampler(50, 5, rule=FAST_RULE)
    stale = 0
    for _ in range(5):
        for (x, _), draw in adambs.BanditLoader(Squares(), sampler, num_workers=2, prefetch_factor=2):
            assert torch.equal(x, draw.indices)
            stale += not torch.equal(sampler.probabilities(draw.indices), draw.probabilities)
            sampler.update(draw, torch.linspace(0, 1, 5))
    assert stale > 20


def test_unbiased_with_workers_and_prefetch_while_p_learns():
    n = 50
    values = np.random.default_rng(0).normal(size=n) + 1
    sampler = adambs.BanditSampler(n, 5, rule=FAST_RULE, seed=2)
    loader = adambs.BanditLoader(Squares(n), sampler, num_workers=2, persistent_workers=True)
    estimates = []
    for _ in range(150):
        for (x, _), draw in loader:
            estimates.append((draw.weights.numpy() * values[x]).mean())
            sampler.update(draw, np.abs(values[draw.indices]).clip(max=1.4))
    z = (np.mean(estimates) - values.mean()) / (np.std(estimates, ddof=1) / math.sqrt(len(estimates)))
    assert abs(z) < 4
    assert sampler.probabilities().max() > 2 * sampler.probabilities().min()


# ----------------------------------------------------------------------------------------------
# Stopping and going on
# ----------------------------------------------------------------------------------------------


def run(sampler, loader, steps, log):
    """So many steps of something that depends on every draw and changes p."""
    while steps:
        for (x, *_), draw in loader:
            log.append((x, draw.probabilities))
            sampler.update(draw, torch.cos(draw.indices.double()) ** 2)
            steps -= 1
            if not steps:
                return sampler.state_dict()  # in the loop, as a training script saves
    raise AssertionError


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("rule", [None, FAST_RULE], ids=["default", "fast"])
@pytest.mark.parametrize("stop", [1, 7, 13, 30])  # 13 is the end of the first epoch
def test_a_run_resumed_anywhere_gets_the_batches_it_would_have_got(rule, options, stop):
    def fresh():
        sampler = adambs.BanditSampler(50, 4, rule=rule, seed=1)
        return sampler, adambs.BanditLoader(Squares(), sampler, **options)

    straight, resumed = [], []
    expected = run(*fresh(), 40, straight)
    state = run(*fresh(), stop, resumed)
    sampler, loader = fresh()
    loader.load_state_dict(saved_and_loaded(state))
    found = run(sampler, loader, 40 - stop, resumed)
    assert same(straight, resumed)
    assert same(expected, found)
    assert same(loader.state_dict(), sampler.state_dict())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("inside", [False, True])
def test_no_batch_is_lost_after_an_epochs_end(inside, options):
    """Saved at an epoch's end, in the loop or after it; loaded; left early; iterated again."""
    straight = adambs.BanditSampler(50, 4)
    for _ in adambs.BanditLoader(tensors(), straight, **options):
        if inside:
            state = straight.state_dict()  # at last that of the last batch
    sampler = adambs.BanditSampler(50, 4)
    loader = adambs.BanditLoader(tensors(), sampler, **options)
    loader.load_state_dict(saved_and_loaded(state if inside else straight.state_dict()))
    if inside:
        assert list(loader) == []  # the rest of that epoch
    next(iter(loader))
    assert [sum(1 for _ in loader) for _ in range(2)] == [13, 13]


@pytest.mark.parametrize("options", OPTIONS)
def test_an_epoch_that_was_left_early_is_over_for_all(options):
    """Left by islice, saved, resumed: as the run that was not stopped."""

    def some(sampler, loader, batches):
        for (x, _), draw in itertools.islice(loader, batches):
            log.append((x, draw.number, draw.probabilities))
            sampler.update(draw, torch.cos(x.double()) ** 2)

    def fresh():
        sampler = adambs.BanditSampler(50, 4, rule=FAST_RULE)
        return sampler, adambs.BanditLoader(Squares(), sampler, **options)

    log = []
    straight, loader = fresh()
    some(straight, loader, 5)
    state = saved_and_loaded(straight.state_dict())
    some(straight, loader, 20)  # 13 at most: one epoch
    expected, log = log[5:], []
    resumed, loader = fresh()
    resumed.load_state_dict(state)
    some(resumed, loader, 20)
    assert len(log) == 13
    assert same(log, expected)
    assert same(resumed.state_dict(), straight.state_dict())


@pytest.mark.parametrize("options", OPTIONS)
def test_an_iterator_that_is_kept_goes_on_and_so_does_a_resumed_one(options):
    sampler = adambs.BanditSampler(50, 4)
    kept = iter(adambs.BanditLoader(Squares(), sampler, **options))
    first = [next(kept) for _ in range(5)]
    state = saved_and_loaded(sampler.state_dict())
    resumed = adambs.BanditSampler(50, 4)
    resumed.load_state_dict(state)
    rest = [(batch, draw.number) for batch, draw in adambs.BanditLoader(Squares(), resumed, **options)]
    assert same(rest, [(batch, draw.number) for batch, draw in kept])
    assert len(first) + len(rest) == 13


def test_a_loop_that_breaks_begins_a_new_epoch_next_time():
    sampler = adambs.BanditSampler(50, 4)
    loader = adambs.BanditLoader(Squares(), sampler, num_workers=1)
    for _ in loader:
        break
    assert sum(1 for _ in loader) == 13


@pytest.mark.parametrize("workers", [(0, 0), (0, 1), (1, 1)])
def test_two_iterations_at_once_do_not_mix(workers):
    sampler = adambs.BanditSampler(50, 4, rule=FAST_RULE)
    one, two = (adambs.BanditLoader(Squares(), sampler, num_workers=w) for w in workers)
    if workers[0] == workers[1]:
        two = one  # two iterators of one loader
    numbers = set()
    for ((x, _), draw), ((z, _), other) in zip(one, two, strict=True):
        assert torch.equal(x, draw.indices)
        assert torch.equal(z, other.indices)
        numbers |= {draw.number, other.number}
        for each in (draw, other):
            sampler.update(each, torch.cos(each.indices.double()) ** 2)
    assert len(numbers) == 26


def test_two_iterations_at_once_of_persistent_workers_are_refused():
    """A DataLoader with persistent workers has one iterator: the second takes the batches of the first."""
    loader = adambs.BanditLoader(
        Squares(), adambs.BanditSampler(50, 4), num_workers=1, persistent_workers=True
    )
    one, two = iter(loader), iter(loader)
    next(one), next(two)
    with pytest.raises(RuntimeError, match="batches must keep their order"):
        next(one)


def test_workers_end_with_their_loader():
    """Not when the garbage collector comes by, which may be in a worker of another loader."""
    loader = adambs.BanditLoader(
        Squares(), adambs.BanditSampler(50, 4), num_workers=1, persistent_workers=True
    )
    for _ in loader:
        break
    (worker,) = loader.dataloader._iterator._workers
    gone = weakref.ref(loader)
    gc.disable()
    try:
        del loader
        assert gone() is None
        worker.join(60)
        assert not worker.is_alive()
    finally:
        gc.enable()


# ----------------------------------------------------------------------------------------------
# Random augmentation
# ----------------------------------------------------------------------------------------------


def dice():
    """A number from each global stream."""
    return [torch.rand(()).item(), np.random.rand(), random.random()]  # noqa: NPY002


class Augmented(Dataset):
    def __init__(self, n=50):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.tensor([i, *dice()], dtype=torch.float64)


class AugmentedAtOnce(Augmented):
    def __getitems__(self, indices):
        return [torch.tensor([i, *dice()], dtype=torch.float64) for i in indices]


def jittered(examples):
    return default_collate(examples), torch.tensor(dice(), dtype=torch.float64)


AUGMENTED = [
    {},
    {"num_workers": 1},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
]


@pytest.mark.parametrize("dataset", [Augmented, AugmentedAtOnce])
def test_augmentation_is_the_same_whoever_fetches(dataset):
    def epochs(options, seed=0):
        sampler = adambs.BanditSampler(50, 4, seed=seed)
        loader = adambs.BanditLoader(dataset(), sampler, collate_fn=jittered, **options)
        return [batch for _ in range(2) for batch, _ in loader]

    expected = epochs({})
    numbers = torch.cat([torch.cat([x[:, 1:].flatten(), noise]) for x, noise in expected])
    assert len(set(numbers.tolist())) == len(numbers)  # every batch has numbers of its own
    for options in AUGMENTED[1:]:
        assert same(epochs(options), expected)
    assert not same(epochs({}, seed=1), expected)


@pytest.mark.parametrize("options", AUGMENTED)
@pytest.mark.parametrize("before", [None, {"num_workers": 2}])
def test_augmentation_is_resumed_in_the_middle_of_an_epoch(options, before):
    """Also by other workers than those that had fetched batches ahead."""

    gate = None if before is None else 1e9  # draws from p would depend on how many are fetched ahead

    def fresh(options=options):
        sampler = adambs.BanditSampler(50, 4, seed=1, gate=gate)
        return sampler, adambs.BanditLoader(Augmented(), sampler, collate_fn=jittered, **options)

    straight, resumed = [], []
    run(*fresh(options if before is None else before), 30, straight)
    state = run(*fresh(options if before is None else before), 18, resumed)
    random.seed(5)
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    sampler, loader = fresh()
    sampler.load_state_dict(saved_and_loaded(state))
    run(sampler, loader, 12, resumed)
    assert same(straight, resumed)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"score": lambda batch: batch[0][:, 1]}])
def test_the_callers_streams_are_left_alone(options):
    sampler = adambs.BanditSampler(50, 4, candidates=adambs.Candidates(2, cost=1e-3))
    loader = adambs.BanditLoader(Augmented(), sampler, collate_fn=jittered, **options)
    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
    expected = dice(), dice()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
    found = [dice()]
    for _ in range(3):
        for (x, _), draw in loader:
            sampler.update(draw, x[:, 1])
    found.append(dice())
    assert tuple(found) == expected
    assert (sampler.diagnostics().looks > 0) == ("score" in options)


class Seeds(Squares):
    def __getitem__(self, i):
        return torch.initial_seed(), 0.0


def test_workers_are_seeded_by_the_sampler():
    def seeds(seed):
        loader = adambs.BanditLoader(Seeds(8), adambs.BanditSampler(8, 4, seed=seed), num_workers=1)
        return [int(x[0]) for (x, _), _ in loader]

    assert seeds(0) == seeds(0)
    assert seeds(0) != seeds(1)


class Recorded(Dataset):
    """Examples with random numbers, each written down with how it was asked for."""

    def __init__(self, n=50):
        self.n, self.asked, self.shown = n, [], []

    def __len__(self):
        return self.n

    def make(self, i):
        example = torch.tensor([i, *dice()], dtype=torch.float64)
        self.shown.append(example)
        return example

    def __getitem__(self, i):
        self.asked.append(1)
        return self.make(i)


class RecordedAtOnce(Recorded):
    def __getitem__(self, i):
        raise AssertionError("a dataset with __getitems__ is asked for whole batches")

    def __getitems__(self, indices):
        self.asked.append(len(indices))
        return [self.make(i) for i in indices]


@pytest.mark.parametrize("dataset", [Recorded, RecordedAtOnce])
def test_a_look_trains_on_what_was_scored(dataset):
    data = dataset()
    sampler = adambs.BanditSampler(50, 4, candidates=adambs.Candidates(3, cost=1e-3, ahead=1), gate=0)
    scored = []

    def score(batch):
        scored.append(batch)
        return batch[:, 1]

    looks = 0
    for _ in range(4):
        for x, draw in adambs.BanditLoader(data, sampler, score=score):
            fetched = torch.stack(data.shown)
            assert torch.equal(x[:, 0].long(), draw.indices)
            assert draw.learned == bool(scored)
            if scored:
                looks += 1
                (candidates,) = scored
                assert torch.equal(fetched, candidates)  # fetched once, all of them
                assert len(candidates[:, 0].unique()) == len(candidates) <= 12  # each of them once
                assert all(any(torch.equal(row, other) for other in candidates) for row in x)
            else:
                assert torch.equal(fetched, x)
            assert data.asked == ([len(fetched)] if dataset is RecordedAtOnce else [1] * len(fetched))
            sampler.update(draw, x[:, 1])
            for log in (data.asked, data.shown, scored):
                log.clear()
    assert looks == sampler.diagnostics().looks > 10


@pytest.mark.parametrize("dataset", [Recorded, RecordedAtOnce])
def test_a_window_trains_on_what_was_scored_also_after_a_resume_in_its_middle(dataset):
    """Candidates are fetched once for several batches; a resumed loader fetches the same pictures."""

    def make():
        candidates = adambs.Candidates(3, cost=1e-3, ahead=4)
        return adambs.BanditSampler(50, 4, candidates=candidates, gate=0)

    def batches(sampler, epochs, stop=None):
        found, scored = [], []

        def score(batch):
            scored.append(batch)
            return batch[:, 1]

        loader = adambs.BanditLoader(dataset(), sampler, score=score)
        for _ in range(epochs):
            for x, draw in loader:
                if draw.learned and scored:
                    assert all((row == scored[-1]).all(1).any() for row in x)
                sampler.update(draw, x[:, 1])
                found.append(x)
                if len(found) == stop:
                    return found, saved_and_loaded(sampler.state_dict())
        return found, scored

    straight, scored = batches(make(), 4)
    assert all(12 < len(batch) < 48 for batch in scored)  # 48 are drawn, and each is scored once
    sampler = make()
    first, state = batches(sampler, 4, stop=28)
    choices = len(sampler.ready.choices)
    assert 0 < choices < 4
    resumed = make()
    resumed.load_state_dict(state)
    rest, _ = batches(resumed, 2)
    assert same(first + rest, straight)


def test_getitems_is_used_once_a_batch():
    data = RecordedAtOnce()
    assert sum(1 for _ in adambs.BanditLoader(data, adambs.BanditSampler(50, 4))) == 13
    assert data.asked == [4] * 13


# ----------------------------------------------------------------------------------------------
# Batches that carry their draw
# ----------------------------------------------------------------------------------------------


def as_tuple(examples):
    return tuple(default_collate(examples))


def as_dict(examples):
    x, y = default_collate(examples)
    return {"x": x, "y": y}


def as_tensor(examples):
    return default_collate(examples)[0]


def of_tuple(batch):
    x, _, carried = batch
    return x, carried


def of_dict(batch):
    added = ["draw_number", "draw_indices", "draw_weights", "draw_limits", "draw_units"]
    assert list(batch) == ["x", "y", *added]
    return batch["x"], adambs.Carried(*(batch[f"draw_{name}"] for name in adambs.Carried._fields))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("collate_fn", "kind", "unpacked"),
    [
        (None, list, of_tuple),
        (as_tuple, tuple, of_tuple),
        (as_dict, dict, of_dict),
        (as_tensor, tuple, lambda batch: batch),
    ],
)
def test_a_batch_carries_its_draw(collate_fn, kind, unpacked, workers):
    """By its number a draw teaches what it teaches by itself, and the weights are the draw's."""
    plain, carrying = (adambs.BanditSampler(50, 4, rule=FAST_RULE) for _ in range(2))
    options = {"collate_fn": collate_fn, "num_workers": workers}
    draws = [draw for _ in range(2) for draw in with_feedback(plain, **options)]
    loader = adambs.BanditLoader(Squares(), carrying, carry=True, **options)
    for _ in range(2):
        for batch in loader:
            assert type(batch) is kind
            x, carried = unpacked(batch)
            draw = draws.pop(0)
            assert isinstance(carried, adambs.Carried)
            assert torch.equal(x, carried.indices)
            assert torch.equal(x, draw.indices)
            assert carried.number.tolist() == [draw.number] * 4
            assert torch.equal(carried.weights, draw.weights.float())
            assert carried.weights.dtype == torch.float32
            losses = torch.arange(4.0)
            torch.testing.assert_close(carried.mean(losses), draw.mean(losses))
            carrying.update(carried.number, torch.cos(x.double()) ** 2)
    assert not draws
    assert same(plain.state_dict(), carrying.state_dict())


def with_feedback(sampler, **options):
    for _, draw in adambs.BanditLoader(Squares(), sampler, **options):
        sampler.update(draw, torch.cos(draw.indices.double()) ** 2)
        yield draw


def test_what_is_done_to_a_batch_does_not_reach_the_sampler():
    sampler = adambs.BanditSampler(50, 4, rule=FAST_RULE)
    for batch in adambs.BanditLoader(Squares(), sampler, carry=True):
        *_, carried = batch
        carried.indices.add_(10**6)
        carried.weights.fill_(torch.nan)
        sampler.update(int(carried.number[0]), torch.rand(4))
    assert sampler.probabilities().sum().item() == pytest.approx(1)


# ----------------------------------------------------------------------------------------------
# Taking an unpacked draw for a tensor
# ----------------------------------------------------------------------------------------------

WAY_OUT = r"for \(x, y\), draw in loader"


@pytest.mark.parametrize("collate_fn", [None, as_tuple])
def test_for_x_y_in_loader_names_the_way_out(collate_fn):
    weight, logits = torch.ones(2, 4, dtype=torch.float64), torch.zeros(4, 3)
    for x, y in adambs.BanditLoader(tensors(), adambs.BanditSampler(50, 4), collate_fn=collate_fn):
        for unpacked in (x, y):
            for name in ("to", "cuda", "shape", "float"):
                with pytest.raises(AttributeError, match=WAY_OUT):
                    getattr(unpacked, name)
        for wrong in (
            lambda x=x: F.linear(x, weight),
            lambda x=x: torch.relu(x),
            lambda y=y: F.cross_entropy(logits, y),
            lambda y=y: torch.nn.CrossEntropyLoss()(logits, y),
            lambda y=y: torch.eq(torch.ones(4), y),
        ):
            with pytest.raises(TypeError, match=WAY_OUT):
                wrong()


@pytest.mark.parametrize(("collate_fn", "kind"), [(None, list), (as_tuple, tuple)])
def test_a_batch_is_the_list_or_tuple_that_it_was(collate_fn, kind, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device=None: self)  # which wants a device
    sampler = adambs.BanditSampler(50, 4)
    batch, draw = next(iter(adambs.BanditLoader(tensors(), sampler, collate_fn=collate_fn)))
    x, y = batch
    assert isinstance(batch, kind)
    assert torch.equal(torch.cat(batch), torch.cat([x, y]))
    assert torch.equal(torch.stack(batch), torch.stack([x, y]))
    moved = _pytree.tree_map(lambda tensor: tensor + 1, batch)
    assert isinstance(moved, kind)
    assert same(list(moved), [x + 1, y + 1])
    for twin in (pickle.loads(pickle.dumps(batch)), copy.copy(batch), copy.deepcopy(batch)):
        assert isinstance(twin, kind)
        assert same(list(twin), [x, y])
    for walk in (pin_memory, default_convert):
        assert isinstance(walk(batch), list | tuple)
        assert same(list(walk(batch)), [x, y])
    for twin in (pickle.loads(pickle.dumps(draw)), copy.deepcopy(draw)):
        assert draw.same_as(twin)


# ----------------------------------------------------------------------------------------------
# From and to other loaders
# ----------------------------------------------------------------------------------------------


def test_from_loader_takes_over_what_does_not_choose():
    ours = torch.Generator()
    loader = DataLoader(
        Squares(),
        batch_size=4,
        shuffle=True,
        drop_last=True,
        collate_fn=reversed_pairs,
        num_workers=1,
        prefetch_factor=3,
        persistent_workers=True,
        timeout=60,
        generator=ours,
    )
    bandit = adambs.BanditLoader.from_loader(loader, adambs.BanditSampler(50, 4))
    assert bandit.dataset is loader.dataset
    assert len(bandit) == 12
    for name in ("num_workers", "prefetch_factor", "persistent_workers", "timeout", "generator"):
        assert getattr(bandit.dataloader, name) == getattr(loader, name)
    for batch, draw in bandit:
        assert [int(x) for _, x in batch] == draw.indices.tolist()[::-1]

    other = adambs.BanditLoader.from_loader(
        loader,
        adambs.BanditSampler(50, 4),
        num_workers=0,
        prefetch_factor=None,
        persistent_workers=False,
        timeout=0,
        carry=True,
        drop_last=False,
    )
    assert len(other) == 13
    assert isinstance(next(iter(other))[-1], adambs.Carried)


def test_from_loader_without_options():
    loader = DataLoader(tensors(), batch_size=4)
    bandit = adambs.BanditLoader.from_loader(loader, adambs.BanditSampler(50, 4))
    (x, y), draw = next(iter(bandit))
    assert torch.equal(x, draw.indices)
    assert torch.equal(y, x.double() ** 2)
    assert len(bandit) == 13


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 5}, "loader has batch_size 5 and the sampler 4"),
        ({"batch_size": None}, "loader has batch_size None and the sampler 4"),
        (
            {"batch_size": 4, "sampler": torch.utils.data.WeightedRandomSampler([1.0] * 50, 50)},
            "by WeightedRandomSampler, and only one can",
        ),
        ({"batch_size": 4, "sampler": RandomSampler(Squares(), num_samples=10)}, "by RandomSampler"),
        ({"batch_size": 4, "sampler": RandomSampler(Squares(), replacement=True)}, "by RandomSampler"),
        (
            {"batch_sampler": BatchSampler(torch.utils.data.SubsetRandomSampler(range(50)), 4, False)},
            "by SubsetRandomSampler",
        ),
        ({"batch_sampler": [[0, 1, 2, 3]]}, "by list"),
        ({"batch_sampler": adambs.BanditSampler(50, 4)}, "by BanditSampler"),
    ],
)
def test_from_loader_refuses_one_that_chooses_for_itself(options, words):
    with pytest.raises(ValueError, match=words):
        adambs.BanditLoader.from_loader(DataLoader(Squares(), **options), adambs.BanditSampler(50, 4))


def test_from_loader_wants_a_loader():
    with pytest.raises(TypeError, match=r"loader must be a torch.utils.data.DataLoader, not list"):
        adambs.BanditLoader.from_loader([], adambs.BanditSampler(50, 4))
    plain = BatchSampler(SequentialSampler(range(50)), 4, False)  # what DataLoader makes by itself
    assert adambs.BanditLoader.from_loader(
        DataLoader(Squares(), batch_sampler=plain), adambs.BanditSampler(50, 4, seed=3), score=len
    )


def test_repr():
    loader = adambs.BanditLoader(tensors(), adambs.BanditSampler(50, 4))
    assert repr(loader) == (
        "BanditLoader(TensorDataset of 50, batch_size=4, num_workers=0: epoch 0, 0 of 13 batches)"
    )
    batches = iter(loader)
    next(batches), next(batches)
    assert repr(loader).endswith("epoch 1, 2 of 13 batches)")


def numbered(sampler, loader, steps, done=0, log=None):
    """Train with a plain loader. Draws are numbered from 0, so batches are, if none is fetched ahead."""
    while True:
        for x, _ in loader:
            if log is not None:
                log.append(x)
            sampler.update(done, torch.cos(x.double()) ** 2)
            done += 1
            if done == steps:
                return


def test_as_the_batch_sampler_of_a_plain_loader():
    sampler, twin = (adambs.BanditSampler(50, 4, rule=FAST_RULE) for _ in range(2))
    loader = DataLoader(Squares(), batch_sampler=sampler)
    assert len(loader) == 13
    numbered(sampler, loader, 30)
    for _ in range(30):
        draw = twin.draw()
        twin.update(draw, torch.cos(draw.indices.double()) ** 2)
    assert torch.equal(sampler.probabilities(), twin.probabilities())
    assert [sum(1 for _ in DataLoader(Squares(), batch_sampler=sampler, num_workers=w)) for w in (0, 2)] == [
        13,
        13,
    ]


@pytest.mark.parametrize("stop", [5, 13, 20])
def test_a_plain_loader_resumes_in_the_middle_of_an_epoch(stop):
    def fresh():
        sampler = adambs.BanditSampler(50, 4, rule=FAST_RULE)
        return sampler, DataLoader(Squares(), batch_sampler=sampler)

    straight, resumed = [], []
    sampler, loader = fresh()
    numbered(sampler, loader, 40, log=straight)
    expected = sampler.state_dict()
    sampler, loader = fresh()
    batches = (batch for _ in itertools.count() for batch in loader)
    for done, (x, _) in enumerate(itertools.islice(batches, stop)):
        resumed.append(x)
        sampler.update(done, torch.cos(x.double()) ** 2)
    state = saved_and_loaded(sampler.state_dict())
    sampler, loader = fresh()
    sampler.load_state_dict(state)
    if stop == 13:
        assert list(loader) == []  # the epoch was not over: nobody had asked for a 14th batch
    numbered(sampler, loader, 40, done=stop, log=resumed)
    assert same(resumed, straight)
    del sampler, loader
    assert expected["counters"]["updates"] == 40


def test_a_plain_loader_that_is_left_early_begins_a_new_epoch():
    sampler = adambs.BanditSampler(50, 4)
    loader = DataLoader(Squares(), batch_sampler=sampler)
    for _ in loader:
        break
    resumed = adambs.BanditSampler(50, 4)
    resumed.load_state_dict(saved_and_loaded(sampler.state_dict()))
    expected = [x for x, _ in loader]
    assert same([x for x, _ in DataLoader(Squares(), batch_sampler=resumed)], expected)
    assert len(expected) == 13


def stateful_loader(sampler, **options):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(Squares(), batch_sampler=sampler, **options)


@pytest.mark.parametrize("stop", [1, 5, 13, 20])
def test_a_stateful_data_loader_carries_the_sampler(stop):
    """Without workers, its state is the sampler's, in the middle of an epoch: bit for bit."""

    def fresh():
        sampler = adambs.BanditSampler(50, 4, rule=FAST_RULE)
        return sampler, stateful_loader(sampler)

    straight, resumed = [], []
    sampler, loader = fresh()
    numbered(sampler, loader, 40, log=straight)
    expected = sampler.state_dict()
    sampler, loader = fresh()
    numbered(sampler, loader, stop, log=resumed)
    state = saved_and_loaded(loader.state_dict())
    sampler, loader = fresh()
    loader.load_state_dict(state)
    numbered(sampler, loader, 40, done=stop, log=resumed)
    assert same(resumed, straight)
    assert same(sampler.state_dict(), expected)


def test_a_stateful_data_loader_with_workers_is_as_old_as_its_prefetching():
    """It saves the sampler as it was when the last delivered batch was drawn, which was some time ago.

    So every batch of the epoch still comes once, and batches that do not depend on feedback are the same; but
    p has not learned from the batches that were delivered since then. ``BanditLoader`` has no such gap.
    """
    workers, stop = 2, 7
    ahead = 2 * workers + 1  # two for each worker, and one more is drawn before the batch is handed out

    def fresh(rule):
        sampler = adambs.BanditSampler(50, 4, rule=rule)
        return sampler, stateful_loader(sampler, num_workers=workers)

    for rule in (adambs.Uniform(), FAST_RULE):
        sampler, loader = fresh(rule)
        straight = [batch[0] for batch in loader]
        sampler, loader = fresh(rule)
        batches = iter(loader)
        for done in range(stop):
            x, _ = next(batches)
            sampler.update(done, torch.cos(x.double()) ** 2)
        state = saved_and_loaded(loader.state_dict())
        del batches
        resumed, loader = fresh(rule)
        loader.load_state_dict(state)
        rest = []
        for x, _ in loader:
            if not rest:
                assert resumed.diagnostics().updates == stop - ahead
            rest.append(x)
        assert len(rest) == 13 - stop
        if isinstance(rule, adambs.Uniform):
            assert same(rest, straight[stop:])


@pytest.mark.parametrize("kind", ["torch", "torchdata"])
def test_the_sampler_as_sampler_names_the_way_out(kind):
    make = DataLoader
    if kind == "torchdata":
        make = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    with pytest.raises(TypeError, match=r"give it as batch_sampler=, or use adambs.BanditLoader"):
        next(iter(make(Squares(), batch_size=4, sampler=adambs.BanditSampler(50, 4))))


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize(
    ("dataset", "options", "error", "words"),
    [
        (Endless(), {}, TypeError, "Endless is not: choosing examples needs"),
        (Squares(51), {}, ValueError, "dataset has 51 examples but sampler.n is 50"),
        (Squares(), {"batch_size": 3}, TypeError, "takes no batch_size: the sampler has it"),
        (Squares(), {"shuffle": True}, TypeError, "takes no shuffle"),
        (Squares(), {"sampler": [1]}, TypeError, "sampler"),
        (Squares(), {"in_order": False}, TypeError, "takes no in_order"),
        (Squares(), {"colate_fn": list}, TypeError, "colate_fn"),
    ],
)
def test_the_loader_refuses(dataset, options, error, words):
    sampler = adambs.BanditSampler(50, 4)
    before = sampler.state_dict()
    with pytest.raises(error, match=words):
        adambs.BanditLoader(dataset, sampler, **options)
    assert same(sampler.state_dict(), before)


def test_the_loader_wants_a_sampler():
    with pytest.raises(TypeError, match="sampler must be a BanditSampler, not int"):
        adambs.BanditLoader(Squares(), 50)
