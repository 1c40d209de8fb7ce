"""BanditLoader: each batch with its own draw, through a real DataLoader."""

import math

import numpy as np
import pytest
import torch
from helpers import same, saved_and_loaded
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import adambs

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


def run(sampler, loader, steps, log):
    """So many steps of something that depends on every draw and changes p."""
    while steps:
        for (x, _), draw in loader:
            log.append((x, draw.probabilities))
            sampler.update(draw, torch.cos(x.double()) ** 2)
            steps -= 1
            if not steps:
                return sampler.state_dict()  # in the loop, as a training script saves
    raise AssertionError


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dataset", [Squares, tensors])
@pytest.mark.parametrize("stop", [1, 7, 13, 14, 30])  # 13 is the end of the first epoch
def test_a_run_resumed_anywhere_gets_the_batches_it_would_have_got(dataset, options, stop):
    def fresh():
        sampler = adambs.BanditSampler(50, 4, rule=FAST_RULE, seed=1)
        return sampler, adambs.BanditLoader(dataset(), sampler, **options)

    straight, resumed = [], []
    expected = run(*fresh(), 40, straight)
    state = run(*fresh(), stop, resumed)
    sampler, loader = fresh()
    sampler.load_state_dict(saved_and_loaded(state))
    found = run(sampler, loader, 40 - stop, resumed)
    assert same(straight, resumed)
    assert same(expected, found)


def test_a_state_saved_after_the_loop_begins_a_new_epoch():
    sampler = adambs.BanditSampler(50, 4)
    list(adambs.BanditLoader(tensors(), sampler))
    resumed = adambs.BanditSampler(50, 4)
    resumed.load_state_dict(saved_and_loaded(sampler.state_dict()))
    loader = adambs.BanditLoader(tensors(), resumed)
    assert [sum(1 for _ in loader) for _ in range(2)] == [13, 13]


def test_a_loop_that_breaks_begins_a_new_epoch_next_time():
    sampler = adambs.BanditSampler(50, 4)
    loader = adambs.BanditLoader(Squares(), sampler, num_workers=1)
    for _ in loader:
        break
    assert sum(1 for _ in loader) == 13


def test_two_iterations_at_once_do_not_mix():
    sampler = adambs.BanditSampler(50, 4)
    one, two = (adambs.BanditLoader(Squares(), sampler, num_workers=w) for w in (0, 1))
    for ((x, _), draw), ((z, _), other) in zip(one, two, strict=True):
        assert torch.equal(x, draw.indices)
        assert torch.equal(z, other.indices)


class Seeds(Squares):
    def __getitem__(self, i):
        return torch.initial_seed(), 0.0


def test_workers_are_seeded_by_the_sampler():
    def seeds(seed):
        loader = adambs.BanditLoader(Seeds(8), adambs.BanditSampler(8, 4, seed=seed), num_workers=1)
        return [int(x[0]) for (x, _), _ in loader]

    assert seeds(0) == seeds(0)
    assert seeds(0) != seeds(1)


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
