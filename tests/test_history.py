"""History: against a plain loop, bit for bit; resumed, refused, and the same on any way home."""

import copy
import importlib.util
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from device_stub import Device
from helpers import same, saved_and_loaded, small_net

import adambs

f4 = np.float32


class Loop:
    """The oracle: every visit is kept, and everything is computed from the visits."""

    def __init__(self, n, learned=0.5):
        self.scores = [[] for _ in range(n)]
        self.losses = [[] for _ in range(n)]
        self.excesses = [[] for _ in range(n)]
        self.steps = []  # weighted sum of the losses (or scores), and of ones, for each step
        self.threshold = learned

    def __call__(self, draw, scores, losses=None):
        values = np.asarray(scores if losses is None else losses)
        weights = 1 / (len(self.scores) * draw.probabilities.numpy())
        self.steps.append((sum(weights * values), sum(weights)))
        fading = 0.95 ** np.arange(len(self.steps))[::-1]
        usual = sum(fading * [a for a, _ in self.steps]) / sum(fading * [b for _, b in self.steps])
        for j, value in zip(draw.indices.tolist(), values, strict=True):
            self.excesses[j].append(value - usual)
        for k, j in enumerate(draw.indices.tolist()):
            self.scores[j].append(float(f4(scores[k])))
            if losses is not None:
                self.losses[j].append(float(losses[k]))

    def table(self):
        seen = zip(self.scores, self.losses, self.excesses, strict=True)
        rows = [self.row(*(np.array(values) for values in each)) for each in seen]
        return {name: np.array([row[name] for row in rows]) for name in rows[0]}

    def row(self, s, losses, excesses):
        low = s < self.threshold
        slope = np.polyfit(np.arange(1, len(s) + 1), s, 1)[0] if len(s) > 1 else math.nan
        return {
            "visits": len(s),
            "last_score": s[-1] if len(s) else math.nan,
            "mean_score": s.mean() if len(s) else math.nan,
            "scatter": s.std() if len(s) else math.nan,
            "trend": slope,
            "learned_at": int(low.argmax()) + 1 if low.any() else 0,
            "forgotten": int((low[:-1] & ~low[1:]).sum()),
            "excess": np.average(excesses, weights=[0.3] + [1] * (len(s) - 1)) if len(s) else math.nan,
            "last_loss": losses[-1] if len(losses) else math.nan,
            "mean_loss": losses.mean() if len(losses) else math.nan,
        }


def trained(n=50, K=6, steps=120, seed=0, with_losses=True, history=None, sampler=None, loop=None):
    """A sampler with random scores and losses, observed by a history and by the oracle."""
    rng = np.random.default_rng(seed)
    sampler = sampler or adambs.BanditSampler(n, K, seed=seed, gate=0)
    history = history or adambs.History(n, with_losses=with_losses).watch(sampler)
    loop = loop or Loop(n)
    for _ in range(steps):
        draw = sampler.draw()
        scores, losses = rng.gamma(0.7, 0.6, K), rng.normal(size=K)
        if with_losses:
            history.losses(draw, torch.from_numpy(losses))
        sampler.update(draw, scores)
        loop(draw, scores, losses if with_losses else None)
    return sampler, history, loop


@pytest.mark.parametrize("with_losses", [False, True])
@pytest.mark.parametrize(("n", "K", "steps"), [(50, 6, 120), (3, 2, 400), (500, 5, 20), (1, 1, 30)])
def test_the_table_is_that_of_a_plain_loop(n, K, steps, with_losses):
    _, history, loop = trained(n, K, steps, with_losses=with_losses)
    table, expected = history.table(), loop.table()
    assert list(table) == list(expected)[: 10 if with_losses else 8]
    for name in ("visits", "learned_at", "forgotten"):
        np.testing.assert_array_equal(table[name], expected[name])
    np.testing.assert_allclose(table["last_score"], expected["last_score"], rtol=2.0**-8)
    for name in set(table) - {"visits", "learned_at", "forgotten", "last_score"}:
        np.testing.assert_allclose(table[name], expected[name], rtol=2e-5, atol=2e-5, err_msg=name)


def test_each_visit_is_rounded_as_the_equations_say():
    """Bit for bit: Welford's recursions in float64, kept as float32."""
    rng = np.random.default_rng(1)
    history = adambs.History(4)
    kept = [[0, f4(0), f4(0), f4(0)] for _ in range(4)]  # visits, mean, squares, slope
    for number in range(200):
        indices, scores = rng.integers(0, 4, 3), rng.gamma(0.5, 1.0, 3)
        history(adambs.Draw(number, indices, np.ones(3), 4), scores)
        for j, score in zip(indices, scores, strict=True):
            y, row = float(f4(score)), kept[j]
            row[0] += 1
            old = float(row[1])
            new = old + (y - old) / row[0]
            row[1] = f4(new)
            row[2] = f4(float(row[2]) + max((y - old) * (y - new), 0.0))
            row[3] = f4(float(row[3]) + 0.5 * row[0] * (y - new))
    records = history.state_dict()["records"]
    for place, name in enumerate(("visits", "mean", "squares", "slope")):
        assert records[name].tolist() == [float(row[place]) for row in kept], name


def test_it_takes_32_bytes_an_example():
    assert adambs.History(1000, with_losses=True).nbytes == 32_000


def test_nothing_is_observed_unless_asked_for():
    assert adambs.BanditSampler(10, 2).observers == []


def test_large_scores_and_many_visits_stay_finite():
    history = adambs.History(1)
    for number in range(300):
        history(adambs.Draw(number, np.zeros(1, np.int64), np.ones(1), 1), np.array([1e300 * (number % 2)]))
    table = history.table()
    assert all(np.isfinite(column).all() for column in table.values())
    assert table["last_score"][0] == pytest.approx(1e15, rel=2.0**-8)


def test_counters_stop_at_the_largest_that_they_can_hold():
    history = adambs.History(1)
    indices = np.zeros(600, np.int64)
    scores = np.tile([0.0, 1.0], len(indices) // 2)
    history(adambs.Draw(0, indices, np.ones(len(indices)), 1), scores)
    assert history.table()["forgotten"][0] == 255
    never = adambs.History(1)
    never(adambs.Draw(0, indices, np.ones(len(indices)), 1), np.append(np.ones(len(indices) - 1), 0.0))
    assert never.table()["learned_at"][0] == 255
    assert never.table()["visits"][0] == len(indices)


def test_a_run_that_is_resumed_has_the_history_of_one_that_was_not():
    sampler, history, loop = trained(steps=60)
    state, p = saved_and_loaded(history.state_dict()), saved_and_loaded(sampler.state_dict())
    trained(steps=40, seed=5, sampler=sampler, history=history, loop=loop)
    again = adambs.BanditSampler(50, 6, gate=0)
    again.load_state_dict(p)
    other = adambs.History(50, with_losses=True).watch(again)
    other.load_state_dict(state)
    trained(steps=40, seed=5, sampler=again, history=other, loop=Loop(50))
    assert same(history.state_dict(), other.state_dict())


def test_late_scores_from_a_device_are_in_the_table_and_in_the_state():
    states = []
    for feedback in ("at once", "late"):
        sampler = adambs.BanditSampler(30, 4, gate=0, feedback=feedback)
        history = adambs.History(30, with_losses=True).watch(sampler)
        rng = np.random.default_rng(0)
        for _ in range(20):
            draw = sampler.draw()
            scores = torch.from_numpy(rng.random(4)).float()
            history.losses(draw, scores * 2)
            sampler.update(draw, scores)
        states.append(history.state_dict())
    assert states[0]["records"]["visits"].sum() == 80
    assert same(*states)


def test_losses_of_a_device_are_not_waited_for():
    with Device() as device:
        sampler = adambs.BanditSampler(30, 4, gate=0)
        history = adambs.History(30, with_losses=True).watch(sampler)
        draw = sampler.draw()
        history.losses(draw, device.put(torch.arange(4.0)))
        sampler.update(draw, device.put(torch.ones(4)))
        assert device.waits == []
        table = history.table()
    assert table["visits"].sum() == 4
    assert sorted(table["last_loss"][table["visits"] > 0]) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "damage", ["n", "learned", "with_losses", "missing", "shape", "nan", "impossible", "format"]
)
def test_a_state_of_another_history_is_refused_and_changes_nothing(damage):
    _, history, _ = trained(steps=10)
    before = copy.deepcopy(history.state_dict())
    state = copy.deepcopy(before)
    words = {
        "n": "history of 51 examples, this one has 50",
        "learned": "learned = 0.25",
        "with_losses": "with_losses = False",
        "missing": "no 'mean'",
        "shape": "shape",
        "nan": "example 3 cannot be like that",
        "impossible": "example 0 cannot be like that",
        "format": "format 9",
    }[damage]
    match damage:
        case "missing":
            del state["records"]["mean"]
        case "shape":
            state["records"]["mean"] = torch.zeros(49)
        case "nan":
            state["records"]["mean"][3] = math.nan
        case "impossible":
            state["records"]["learned_at"][0] = 200
        case _:
            state[damage] = {"n": 51, "learned": 0.25, "with_losses": False, "format": 9}[damage]
    with pytest.raises(ValueError, match=words):
        history.load_state_dict(state)
    assert same(history.state_dict(), before)


def draw_of(n):
    return adambs.Draw(0, np.arange(2), np.ones(2), n)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda h: adambs.History(0), ValueError, "n must be at least 1"),
        (lambda h: adambs.History(5, learned=0), ValueError, "learned must be positive"),
        (lambda h: h.watch(adambs.BanditSampler(6, 2)), ValueError, "5 examples and the sampler of 6"),
        (lambda h: h.watch("p"), TypeError, "must be a BanditSampler"),
        (lambda h: h.losses(draw_of(5), torch.ones(2)), ValueError, "with_losses=True"),
        (lambda h: h(draw_of(6), np.ones(2)), ValueError, "the draw of 6"),
        (lambda h: h.suspects(labels=[0, 1]), ValueError, r"shape \(5,\)"),
        (lambda h: h.suspects(labels=[0.5] * 5), TypeError, "whole numbers or words"),
        (lambda h: h.suspects(final=np.ones(4)), ValueError, "final must be 5 floats"),
        (lambda h: h.suspects(final=torch.ones(5, dtype=torch.int64)), ValueError, "final must be 5 floats"),
        (lambda h: h.suspects(final=[1.0, math.nan, 1.0, 1.0, 1.0]), ValueError, r"final\[1\] is not finite"),
        (lambda h: h.suspects(k=0), ValueError, "k must be at least 1"),
        (lambda h: h.easy(0), ValueError, "k must be at least 1"),
    ],
)
def test_bad_input_is_refused(call, error, words):
    history = adambs.History(5)
    with pytest.raises(error, match=words):
        call(history)
    assert same(history.state_dict(), adambs.History(5).state_dict())


def test_losses_that_are_reduced_missing_or_infinite_are_refused():
    sampler = adambs.BanditSampler(10, 2, gate=0)
    history = adambs.History(10, with_losses=True).watch(sampler)
    draw = sampler.draw()
    with pytest.raises(ValueError, match="it looks reduced already"):
        history.losses(draw, torch.tensor(0.5))
    with pytest.raises(ValueError, match=r"losses\[1\] is inf"):
        history.losses(draw, torch.tensor([0.5, math.inf]))
    with pytest.raises(ValueError, match="draw 0 came back without losses"):
        sampler.update(draw, [1.0, 1.0])
    assert history.table()["visits"].sum() == 0


def test_a_history_watches_one_sampler():
    history = adambs.History(10).watch(adambs.BanditSampler(10, 2))
    with pytest.raises(ValueError, match="watches a sampler already"):
        history.watch(adambs.BanditSampler(10, 2))


def test_suspects_are_the_hard_ones_of_their_class_with_a_reason():
    n = 60
    history = adambs.History(n)
    labels = np.array(["common"] * 50 + ["rare"] * 10)
    rng = np.random.default_rng(0)
    for number in range(12):
        scores = np.where(labels == "rare", 0.9, 0.1) + 0.02 * rng.random(n)
        scores[[7, 55]] = 1.35
        history(adambs.Draw(number, np.arange(n), np.ones(n), n), scores)
    found = history.suspects(labels=labels, k=5)
    assert {found[0].index, found[1].index} == {7, 55}
    assert found[0].label == "common"
    assert "never learned in 12 visits" in found[0].reason
    # Without labels the whole rare class would be accused.
    assert sum(s.index >= 50 for s in history.suspects(k=11)) == 10


def test_a_suspicion_is_what_the_documentation_says():
    rng = np.random.default_rng(4)
    _, history, _ = trained(n=40, K=5, steps=60, with_losses=False)
    table, classes, final = history.table(), rng.integers(0, 3, 40), rng.gamma(1.0, 0.1, 40)
    r = final.mean() / table["mean_score"].mean()
    assert 0.05 < r < 1
    found = (table["excess"] - table["excess"].mean()) / table["excess"].std()
    found += 0.2 * np.log(table["visits"] / table["visits"].mean())
    found += r**2 * (final - final.mean()) / final.std()
    expected = [found[j] - np.quantile(found[classes == classes[j]], 0.25) / 2 for j in range(40)]
    ranking = history.suspects(labels=classes, k=40, final=torch.from_numpy(final))
    assert [s.index for s in ranking] == np.argsort(expected)[::-1].tolist()
    for s in ranking:
        assert s.suspicion == pytest.approx(expected[s.index], rel=1e-6, abs=1e-9)


def test_when_an_example_was_visited_does_not_matter():
    """The losses of all fall alike; whoever was visited late, when losses were low, is not the easier."""
    history = adambs.History(30)
    rng = np.random.default_rng(0)
    hard = np.arange(30) % 3 == 0
    for number in range(120):
        among = np.arange(15) if number < 60 else np.arange(15, 30)
        indices = rng.choice(among, 5)
        scores = np.exp(-number / 40) + np.where(hard[indices], 0.2, 0.0)
        history(adambs.Draw(number, indices, np.ones(5), 30), scores)
    first = [s.index for s in history.suspects(k=10)]
    assert hard[first].sum() >= 9
    by_mean = np.argsort(-history.table()["mean_score"])[:10]
    assert hard[by_mean].sum() < 9


def test_ties_are_broken_by_visits_and_then_by_index():
    history = adambs.History(6)
    for number, j in enumerate([4, 4, 2, 3, 5, 5]):
        history(adambs.Draw(number, np.array([j]), np.ones(1), 6), np.ones(1))
    assert [s.index for s in history.suspects()] == [4, 5, 2, 3]


def test_easy_examples_are_learned_and_never_forgotten():
    history = adambs.History(4)
    visits = [[0.1, 0.1, 0.1], [0.2, 0.9, 0.1], [0.05, 0.05, 0.05], [0.9, 0.9, 0.9]]
    for number in range(3):
        history(adambs.Draw(number, np.arange(4), np.ones(4), 4), np.array([row[number] for row in visits]))
    assert history.easy(3).tolist() == [2, 0]


def test_csv_and_parquet_hold_the_table(tmp_path):
    _, history, _ = trained(n=20, steps=3)
    history.to_csv(tmp_path / "history.csv")
    read = np.genfromtxt(tmp_path / "history.csv", delimiter=",", names=True)
    for name, column in history.table().items():
        np.testing.assert_array_equal(read[name], column)
    if any(importlib.util.find_spec(name) for name in ("pyarrow", "pandas")):
        history.to_parquet(tmp_path / "history.parquet")
        assert (tmp_path / "history.parquet").stat().st_size > 0
    else:
        with pytest.raises(ModuleNotFoundError, match="use to_csv"):
            history.to_parquet(tmp_path / "history.parquet")


def test_flipped_labels_come_first_in_a_real_training():
    """Two blobs, five labels flipped: what was flipped is at the head of the ranking."""
    rng = np.random.default_rng(0)
    y = np.arange(200) % 2
    x = torch.from_numpy(rng.normal(size=(200, 6)) + 3 * y[:, None]).float()
    given = y.copy()
    given[[3, 50, 77, 120, 199]] ^= 1
    sampler = adambs.BanditSampler(200, 10, seed=0)
    history = adambs.History(200, with_losses=True).watch(sampler)
    model = small_net(0)
    optimizer = adambs.AdamBS(model.parameters(), sampler, lr=0.01)
    for (inputs, labels), draw in (
        batch
        for _ in range(4)
        for batch in adambs.BanditLoader(torch.utils.data.TensorDataset(x, torch.from_numpy(given)), sampler)
    ):
        logits = model(inputs)
        losses = F.cross_entropy(logits, labels, reduction="none")
        history.losses(draw, losses)
        optimizer.zero_grad()
        draw.mean(losses).backward()
        optimizer.step(draw, adambs.scores.cross_entropy(logits, labels))
    first = {s.index for s in history.suspects(labels=given, k=7)}
    assert first > {3, 50, 77, 120, 199}
