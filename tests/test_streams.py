"""Arms that are sources: unbiased for the mixture, p as the theory has it, workers and resumes."""

import numpy as np
import pytest
import torch
from helpers import same, saved_and_loaded
from torch.utils.data import IterableDataset, get_worker_info

import adambs
from adambs.sources import Worth


class Numbers(IterableDataset):
    """The numbers from ``start``, ``count`` of them."""

    def __init__(self, start, count=1000):
        self.start, self.count = start, count

    def __iter__(self):
        return iter(range(self.start, self.start + self.count))


def a_stream(**options):
    sources = {"small": Numbers(0), "large": Numbers(10_000), "huge": Numbers(20_000)}
    return adambs.BanditStream(sources, **{"batch_size": 8, "seed": 1, "shares": [1, 2, 1], **options})


def score(values):
    """What an example of each source is worth."""
    return torch.tensor([1.0, 4.0, 0.5])[values // 10_000] * (1 + (values % 7) / 7)


def train(stream, steps):
    """Some steps; which values came, and with which weights."""
    seen = []
    for batch, draw in stream:
        seen.append((batch.tolist(), draw.weights.tolist()))
        stream.update(draw, score(batch))
        if len(seen) == steps:
            return seen
    return seen


def test_worth_is_the_minimiser_of_the_second_moment():
    """p against a numerical search, when each source's mean square is known."""
    shares, squares = np.array([0.2, 0.5, 0.3]), np.array([4.0, 0.25, 9.0])
    worth = Worth(shares, 0.0, 1e12)
    rng = np.random.default_rng(0)
    for _ in range(300):
        sources = rng.integers(0, 3, 1000)
        worth.update(sources, np.sqrt(squares)[sources])
    from scipy.optimize import minimize

    def second_moment(z):
        p = np.exp(z) / np.exp(z).sum()
        return (shares**2 * squares / p).sum()

    best = minimize(second_moment, np.zeros(3), tol=1e-12).x
    np.testing.assert_allclose(worth.p(), np.exp(best) / np.exp(best).sum(), rtol=1e-3)  # the prior
    reduction = (shares * squares).sum() / second_moment(best)
    assert worth.variance_reduction() == pytest.approx(reduction, rel=1e-3)
    assert Worth(shares, 0.1, 100).variance_reduction() == pytest.approx(1)  # nothing is known


def test_old_scores_fade():
    worth = Worth(np.array([0.5, 0.5]), 0.1, 20.0)
    for _ in range(200):
        worth.update(np.array([0, 0, 1, 1]), np.array([3.0, 3.0, 1.0, 1.0]))
    assert worth.p()[0] > 0.65
    for _ in range(200):
        worth.update(np.array([0, 0, 1, 1]), np.array([1.0, 1.0, 3.0, 3.0]))
    assert worth.p()[1] > 0.65
    assert worth.p().min() >= 0.1 * 0.5


def test_the_weighted_mean_is_unbiased_for_the_mixture():
    """z-test of draw.mean against the mixture of the sources by their shares; draws follow p."""
    stream = a_stream(batch_size=16, steps=600)
    found = []
    for batch, draw in stream:
        found.append(draw.mean(score(batch).double()).item())
        stream.update(draw, score(batch))
    means = [score(torch.arange(s, s + 7 * 50)).mean().item() for s in (0, 10_000, 20_000)]
    expected = np.dot([0.25, 0.5, 0.25], means)
    found = np.array(found)
    z = (found.mean() - expected) / (found.std() / np.sqrt(len(found)))
    assert abs(z) < 4
    p = stream.probabilities()
    assert p["large"] > 0.7  # a share of one half
    assert p["huge"] < 0.15
    numbers = stream.numbers("bandit/")
    assert numbers["bandit/p/large"] == p["large"]
    assert numbers["bandit/variance_reduction"] == stream.worth.variance_reduction() > 1.1
    naive = np.random.default_rng(0).choice(3, p=[0.25, 0.5, 0.25], size=(600, 16))
    assert found.std() < 0.5 * np.array(means)[naive].mean(1).std()  # far less noise than the mixture itself


def test_draws_follow_p():
    stream = a_stream(batch_size=5000)
    draw = stream.draw()
    stream.update(draw, score(draw.indices * 10_000))
    p = np.array(list(stream.probabilities().values()))
    draw = stream.draw()
    assert draw.probabilities.numpy() == pytest.approx(p[draw.indices])
    counts = np.bincount(draw.indices.numpy(), minlength=3)
    assert ((counts - 5000 * p) ** 2 / (5000 * p)).sum() < 20  # chi-square, two degrees of freedom


def test_each_source_is_read_in_its_order_and_begins_again():
    stream = adambs.BanditStream([Numbers(0, 5), Numbers(100, 3)], batch_size=7)
    values = [v for batch, _ in train(stream, 6) for v in batch]
    for start, count in ((0, 5), (100, 3)):
        own = [v for v in values if start <= v < start + count]
        assert own == [start + k % count for k in range(len(own))]


def test_workers_part_the_sources():
    """Two workers read what one reads, each every second example, none twice in a pass."""
    values = [v for batch, _ in train(a_stream(num_workers=2), 20) for v in batch]
    assert len(values) == len(set(values))
    assert {v % 2 for v in values} == {0, 1}


class Dividing(Numbers):
    """Yields to each worker its own part, as Hugging Face's streams do."""

    def __iter__(self):
        info = get_worker_info()
        part, parts = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(self.start + part, self.start + self.count, parts))


@pytest.mark.parametrize("sharded", [False, True])
def test_sources_that_divide_themselves_are_read_whole(sharded):
    """Once in each pass, whether they may divide themselves or not; and a resume reads over as much."""

    def a_dividing_stream():
        return adambs.BanditStream([Dividing(0, 80)], batch_size=8, num_workers=2, sharded=sharded)

    stream, again = a_dividing_stream(), a_dividing_stream()
    first = train(stream, 4)
    again.load_state_dict(stream.state_dict())
    rest = train(again, 6)
    assert sorted(v for batch, _ in first + rest for v in batch) == list(range(80))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_bit_for_bit(workers):
    whole, half = a_stream(num_workers=workers), a_stream(num_workers=workers)
    expected = train(whole, 25)
    first = train(half, 11)
    state = saved_and_loaded(half.state_dict())
    again = a_stream(num_workers=workers)
    again.load_state_dict(state)
    assert first + train(again, 14) == expected
    if workers == 0:
        assert same(again.state_dict(), whole.state_dict())
    assert train(half, 14) == expected[11:]  # left and taken up again


def test_late_feedback_by_number_and_carried_draws():
    stream, expected = a_stream(carry=True, feedback="late", collate_fn=as_tuple), a_stream()
    train(expected, 10)
    for step, (values, drawn) in enumerate(stream):
        stream.update(drawn.number, score(values))
        if step == 9:
            break
    assert stream.probabilities() == expected.probabilities()


def as_tuple(values):
    return (torch.tensor(values),)


BAD = [
    ({"sources": []}, ValueError, "sources is empty"),
    ({"sources": Numbers(0)}, TypeError, "sources must be a dict or a list .* not a Numbers"),
    ({"sources": "ab"}, TypeError, "sources must be a dict or a list .* not a str"),
    ({"sources": [iter([1, 2])]}, TypeError, "source '0' must be iterable, and anew each time"),
    ({"shares": [1.0]}, ValueError, r"shares must have shape \(2,\)"),
    ({"shares": [1.0, 0.0]}, ValueError, "shares must all be positive"),
    ({"uniform": 0.0}, ValueError, "uniform must lie strictly between 0 and 1"),
    ({"memory": 1.0}, ValueError, "memory must be above 1"),
    ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
    ({"shuffle": True}, TypeError, "BanditStream takes no shuffle"),
]


@pytest.mark.parametrize(("options", "error", "words"), BAD)
def test_bad_arguments(options, error, words):
    with pytest.raises(error, match=words):
        adambs.BanditStream(**{"sources": [Numbers(0), Numbers(5)], "batch_size": 4, **options})


def test_bad_use():
    stream = adambs.BanditStream([Numbers(0), Numbers(0, 0)], batch_size=32)
    with pytest.raises(ValueError, match="source '1' has no example for reader 0 of 1"):
        train(stream, 1)
    with pytest.raises(TypeError, match="the stream is endless"):
        len(stream)
    saved = a_stream(num_workers=2)
    train(saved, 3)
    other = a_stream()
    other.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match="saved with 1 processes of 2 workers, and there are 1 of 1"):
        train(other, 1)
    before = other.state_dict()
    with pytest.raises(ValueError, match="state is of a sampler with batch_size = 16"):
        other.load_state_dict(a_stream(batch_size=16).state_dict())
    assert same(before, other.state_dict())


def doubles(bad):
    return torch.tensor([2.0, bad, 3.0], dtype=torch.float64)


DAMAGES = [
    (
        "worth",
        "squares",
        torch.tensor([-1.0, 1.0, 1.0], dtype=torch.float64),
        "must hold numbers from 0 to",
    ),
    ("worth", "counts", torch.ones(2, dtype=torch.float64), "counts"),
    ("progress", "taken", [[0, 0, 1.5, 2, 3]], "not all whole numbers"),
    ("progress", "taken", [[0, 0, -1, 2, 3]], "finite and not negative"),
    ("progress", "taken", None, "progress"),
    ("progress", "readers", [1], "readers"),
    *(("progress", "readers", bad, "readers") for bad in ([0, 0], [0, 1], [1, 0], [2**70, 1], [1, 2**70])),
    *(("progress", "readers", bad, "readers") for bad in ([1.5, 1], [9, 1])),  # nine processes, batches of 8
    ("progress", "taken", [[0, 0, 10, 10, 2**52]], "examples, and 3 batches of 8 were delivered"),
    ("progress", "taken", [[0, 1, 10, 10, 4]], "no such one"),
    ("progress", "taken", [[0, 0, 10, 10, 2]] * 2, "no such one"),
    ("progress", "delivered", 0, "readers"),
    *(("worth", "squares", doubles(bad), "squares") for bad in (1e308, 1e250, 1e205, 1e-250, 5e-324)),
    *(("worth", "counts", doubles(bad), "counts") for bad in (1e308, 2.0**54, 1e-250, 5e-324)),
    ("worth", "counts", doubles(0.0), "squares"),  # of no examples
    ("progress", "delivered", "three", "delivered"),
]


@pytest.mark.parametrize(("part", "name", "value", "words"), DAMAGES)
def test_a_damaged_state_is_refused_and_changes_nothing(part, name, value, words):
    saved, other = a_stream(), a_stream()
    train(saved, 3)
    train(other, 2)
    state, before = saved.state_dict(), other.state_dict()
    state[part][name] = value
    with pytest.raises(ValueError, match=words):
        other.load_state_dict(state)
    assert same(before, other.state_dict())


@pytest.mark.parametrize("size", [0.0, 5e-324, 1e-200, 1e-100, 1e100, 1e200, 1e308])
def test_scores_of_any_size_leave_a_state_that_loads(size):
    """Also when they end, and what was learned fades for a long time."""
    stream, again = a_stream(memory=1.5), a_stream(memory=1.5)
    for step in range(1500):
        draw = stream.draw()
        stream.update(draw, np.full(8, size if step < 20 else 0.0))
        if step in (0, 19, 500, 1499):
            again.load_state_dict(stream.state_dict())
            assert sum(again.probabilities().values()) == pytest.approx(1)
            assert np.isfinite(again.numbers()["variance_reduction"])


@pytest.mark.parametrize("feedback", ["at once", "late"])
def test_a_bad_score_names_its_source(feedback):
    stream, scores = a_stream(feedback=feedback), np.ones(8)
    stream.load_state_dict(stream.state_dict())
    draw, scores[3] = stream.draw(), np.nan
    name = stream.names[draw.indices[3]]

    def go_on():
        stream.update(draw, torch.from_numpy(scores))
        stream.draw()

    with pytest.raises(ValueError, match=rf"scores\[3\] is nan \(draw 0, from source '{name}'\)"):
        go_on()


def test_processes_without_a_group_are_warned_once(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    stream = a_stream()
    with pytest.warns(RuntimeWarning, match="WORLD_SIZE is 4 and torch.distributed is not initialised"):
        train(stream, 1)
    train(stream, 2)
    train(a_stream(group=False), 1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    train(a_stream(), 1)


def test_repr():
    stream = a_stream()
    train(stream, 2)
    words = "BanditStream(3 sources: 'small', 'large', 'huge'; batch_size=8, seed=1: 2 batches delivered)"
    assert repr(stream) == words
    assert "'4', ...; batch_size" in repr(adambs.BanditStream([Numbers(0)] * 9, 8))
