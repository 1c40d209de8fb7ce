"""Looking before drawing: candidates, scores, a choice among them. And refresh, and the correction."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers import same, saved_and_loaded, taken_on_average, taught
from scipy.stats import chisquare

import adambs
from adambs.candidates import _LOOKS, _STEPS, choose
from adambs.proposals import RandomStream


def always():
    """Looking that always pays."""
    return adambs.Candidates(multiple=3, cost=1e-6, ahead=1)


def unequal(n, K, **options):
    """A sampler whose p and tau are far from one, and true scores that differ from the remembered."""
    sampler = adambs.BanditSampler(n, K, **{"candidates": always(), "gate": 0, **options})
    truth = np.random.default_rng(5).gamma(0.5, 1.0, n)
    return taught(sampler, 30), truth


def test_the_choice_among_candidates_is_unbiased():
    """The mean over many draws of the weighted sum of any quantity is its mean over all examples."""
    n, K = 40, 4
    sampler, truth = unequal(n, K, seed=3)
    values = np.random.default_rng(6).normal(1, 1, (n, 3))
    frozen = sampler.state_dict()
    estimates = []
    for _ in range(4000):
        random = sampler.state_dict()["random"]
        sampler.load_state_dict({**frozen, "random": random})  # the same p each time, fresh randomness
        draw = sampler.draw(lambda i: truth[i])
        assert draw.learned
        estimates.append((draw.weights.numpy()[:, None] * values[draw.indices]).mean(0))
    error = np.mean(estimates, 0) - values.mean(0)
    assert np.abs(error / (np.std(estimates, 0) / math.sqrt(len(estimates)))).max() < 4


@pytest.mark.parametrize("correction", [1.0, 0.5])
@pytest.mark.parametrize(
    ("B", "K"), [(12, 4), (40, 20), (6, 6), (5, 8)], ids=["few", "many", "all", "fewer than K"]
)
def test_each_candidate_is_chosen_as_often_as_it_should_be_and_never_twice_without_need(B, K, correction):
    """Against inclusion probabilities found by bisection. One that was drawn three times has three shares."""
    rng, random = np.random.default_rng(B), RandomStream(7)
    scores, ratios, copies = rng.gamma(0.3, 1.0, B), rng.gamma(2.0, 0.5, B), rng.integers(1, 4, B)
    a = copies * scores / ratios**correction
    q = taken_on_average(0.9 * a / a.sum() + 0.1 * copies / copies.sum(), K)
    assert B <= K or q.max() == 1.0
    rounds = 4000
    counts = np.zeros((rounds, B))
    first = np.zeros(B)
    for counted in counts:
        positions, chosen = choose(random, ratios, scores, copies, K, correction)
        np.add.at(counted, positions, 1)
        first[positions[0]] += 1
        np.testing.assert_allclose(chosen, (ratios * q * copies.sum() / (K * copies))[positions], rtol=1e-12)
    assert (counts >= np.floor(q - 1e-9)).all()
    assert (counts <= np.ceil(q - 1e-9)).all()
    spread = np.sqrt((q % 1) * (1 - q % 1) / rounds)
    assert (np.abs(counts.mean(0) - q) <= 4 * spread + 1e-12).all()
    assert chisquare(first, rounds * q / K).pvalue > 1e-3  # whoever is chosen may stand anywhere


@pytest.mark.parametrize("shape", [1.0, 0.2])
@pytest.mark.parametrize("m", [2, 5])
def test_the_variance_of_a_batch_falls_by_the_gain(shape, m):
    """Over many batches of signed numbers, against batches without a look; the formula is a bit careful."""
    n, K, rounds = 3000, 40, 1500
    rng = np.random.default_rng(8)
    sizes = rng.gamma(shape, 1.0, n)
    values = sizes * rng.choice([-1, 1], n)
    looking = adambs.Candidates(m, cost=1e-9, ahead=1)
    sampler = adambs.BanditSampler(n, K, rule=adambs.Uniform(), candidates=looking, seed=2)
    sampler.candidates.scatter.add(np.ones(n), sizes)
    plain, looked = (
        np.var([(d.weights.numpy() * values[d.indices]).mean() for d in draws])
        for draws in (
            [sampler.draw() for _ in range(rounds)],
            [sampler.draw(lambda i: sizes[i]) for _ in range(rounds)],
        )
    )
    assert 0.85 * sampler.candidates.gain < plain / looked < 1.45 * sampler.candidates.gain


@pytest.mark.parametrize("noise", [math.inf, 100.0, 30.0])
def test_it_looks_exactly_while_that_pays(noise):
    """Noise over signal falls from N / K to N / (K gain), and a step goes farther as one plus it falls."""
    n, K = 500, 10
    looking = adambs.Candidates(4, cost=0.24, ahead=1, noise=noise)
    sampler = adambs.BanditSampler(n, K, candidates=looking, seed=0, gate=0)
    looks = 0

    def score(indices):
        nonlocal looks
        looks += 1
        return np.ones(len(indices))

    for _ in range(300):  # all scores alike: p is right, tau is one
        sampler.update(sampler.draw(score), np.ones(K))
    assert (looks, sampler.candidates.tau) == (0, pytest.approx(1, rel=1e-4))
    rng = np.random.default_rng(1)
    seen = set()
    for _ in range(200):  # scores that nobody can foresee
        gain = sampler.candidates.gain
        worth = gain if noise == math.inf else (1 + noise / K) / (1 + noise / (K * gain))
        pays = worth > 1 + 4 * 0.24
        assert sampler.candidates.worth(K) == pytest.approx(worth)
        draw = sampler.draw(lambda i: rng.gamma(0.2, 1.0, len(i)))
        assert draw.learned == pays
        seen.add(pays)
        sampler.update(draw, rng.gamma(0.2, 1.0, K))
    assert seen == {False, True}
    sampler.draw(score)
    assert looks == 1
    assert sampler.diagnostics().tau == sampler.candidates.tau
    assert sampler.diagnostics().looks > 1


def test_the_cost_is_measured_once_by_the_clock_and_only_when_a_look_promises_something(monkeypatch):
    """A look that scores 3 K examples in 0.6 of a step costs 0.2 for every K."""
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    sampler = adambs.BanditSampler(1000, 10, seed=0, gate=0, candidates=adambs.Candidates(ahead=1))
    rng = np.random.default_rng(3)
    looks = []

    def score(indices):
        nonlocal now
        now += 0.6
        looks.append(len(indices))
        return rng.gamma(0.3, 1.0, len(indices))

    def train(scores):
        nonlocal now
        sampler.update(sampler.draw(score), scores)
        now += 100.0 if rng.random() < 0.1 else 1.0  # now and then something else takes the machine

    for _ in range(50):  # all alike
        train(np.ones(10))
    assert not looks
    while sampler.candidates.cost is None:  # nobody can foresee them
        promising = sampler.candidates.worth(10) > 1.25
        before = len(looks)
        train(rng.gamma(0.3, 1.0, 10))
        assert len(looks) - before == promising
    assert len(looks) == _LOOKS
    assert all(24 < scored <= 30 for scored in looks)  # what was drawn twice is scored once
    assert sampler.candidates.cost == pytest.approx(np.median([0.6 * 10 / scored for scored in looks]))


def test_candidates_teach_the_rule_and_the_chosen_do_not_teach_it_again():
    sampler = adambs.BanditSampler(1000, 10, rule=adambs.Tracking(), candidates=always(), seed=0)
    sampler.update(sampler.draw(), np.linspace(0.1, 1, 10))
    before = sampler.diagnostics()
    draw = sampler.draw(lambda i: np.full(len(i), 0.5))
    assert sampler.rule.seen.sum() == pytest.approx(10 + 30, abs=2)
    after_look = sampler.rule.state_dict()
    sampler.update(draw, np.full(10, 9.0))
    assert same(sampler.rule.state_dict(), after_look)
    after = sampler.diagnostics()
    assert (after.draws - before.draws, after.updates - before.updates) == (1, 1)
    assert after.scores - before.scores == 30


def test_probabilities_are_those_of_p_and_weights_make_up_for_the_choice_too():
    n, K = 60, 6
    sampler, truth = unequal(n, K, seed=2)
    p = sampler.probabilities()
    draw = sampler.draw(lambda i: truth[i])
    assert torch.equal(draw.probabilities, p[draw.indices])
    assert (draw.probabilities <= 1).all()
    assert not torch.allclose(draw.weights, 1 / (n * draw.probabilities))


def test_the_cost_is_a_recorded_choice():
    """A state carries it, another process can be told, and what the user has given stands."""
    measured = adambs.BanditSampler(50, 5)
    measured.candidates.cost = 0.2
    state = saved_and_loaded(measured.state_dict())
    fresh = adambs.BanditSampler(50, 5)
    fresh.load_state_dict(state)
    assert fresh.candidates.cost == 0.2
    given = adambs.BanditSampler(50, 5, candidates=adambs.Candidates(cost=0.7))
    given.load_state_dict(state)
    assert given.candidates.cost == 0.7
    with pytest.raises(ValueError, match="cost must be positive"):
        given.candidates.cost = 0


def test_a_measurement_is_resumed_where_it_stood(monkeypatch):
    """When the looks are made depends on counts, not on the clock; only the cost does."""
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    rng = np.random.default_rng(3)

    def train(sampler, steps):
        nonlocal now
        for _ in range(steps):
            draw = sampler.draw(lambda i: 1.0 + i.numpy() % 9)
            sampler.update(draw, rng.gamma(0.3, 1.0, 10))
            now += 1.0

    sampler = adambs.BanditSampler(1000, 10, seed=0, gate=0, candidates=adambs.Candidates(ahead=1))
    train(sampler, 22)
    assert 0 < sampler.diagnostics().looks < _LOOKS
    assert len(sampler.state_dict()["candidates"]["step_seconds"]) == _STEPS
    resumed = adambs.BanditSampler(1000, 10, seed=0, gate=0, candidates=adambs.Candidates(ahead=1))
    resumed.load_state_dict(saved_and_loaded(sampler.state_dict()))
    while resumed.candidates.cost is None:
        train(resumed, 1)
    assert resumed.diagnostics().looks == _LOOKS


def test_a_look_that_fails_changes_nothing():
    sampler, _ = unequal(50, 5)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=r"scores\[2\] is nan"):
        sampler.draw(lambda i: np.where(np.arange(len(i)) == 2, np.nan, 1.0))
    with pytest.raises(ZeroDivisionError):
        sampler.draw(lambda i: 1 / 0)
    assert same(sampler.state_dict(), before)


def test_scores_of_zero_choose_evenly():
    sampler, _ = unequal(50, 5)
    draw = sampler.draw(lambda i: torch.zeros(len(i)))
    assert torch.isfinite(draw.weights).all()


def test_small_data_has_fewer_candidates():
    sampler = taught(adambs.BanditSampler(7, 5, candidates=always()), 20)
    before = sampler.diagnostics().scores
    sampler.draw(lambda i: np.ones(len(i)))
    assert sampler.diagnostics().scores - before == 7


def test_looking_resumes_to_the_bit():
    truth = np.random.default_rng(2).gamma(0.5, 1.0, 60)

    def go_on(sampler):
        for _ in range(20):
            draw = sampler.draw(lambda i: truth[i])
            sampler.update(draw, truth[draw.indices])
        return sampler.state_dict()

    def make():
        return adambs.BanditSampler(60, 6, candidates=adambs.Candidates(3, cost=0.01), seed=4)

    straight = make()
    go_on(straight)
    resumed = make()
    resumed.load_state_dict(saved_and_loaded(straight.state_dict()))
    assert same(go_on(straight), go_on(resumed))
    state = straight.state_dict()
    for name, value in (("squares", math.nan), ("sum", -1.0), ("step_seconds", [1.0] * 21)):
        with pytest.raises(ValueError, match=rf"candidates.*is damaged.*{name}"):
            resumed.load_state_dict({**state, "candidates": {**state["candidates"], name: value}})


def test_a_look_chooses_for_several_steps_each_among_candidates_of_its_own():
    """From p: one call of the score, for each example once, and the batches are of the parts in turn."""
    n, K, m, ahead = 60, 6, 3, 4
    candidates = adambs.Candidates(m, cost=1e-6, ahead=ahead)
    sampler, truth = unequal(n, K, seed=2, candidates=candidates)
    asked = []

    def score(indices):
        asked.append(indices.numpy())
        return truth[indices]

    ratios = n * sampler.probabilities().numpy()
    scored = sampler.diagnostics().scores
    for k in range(2 * ahead):
        if k % ahead == 0:
            drawn = copy.deepcopy(sampler)._sources.candidates(m * K, ahead).indices
            assert len(np.unique(drawn)) < len(drawn) == ahead * m * K
        draw = sampler.draw(score)
        assert len(asked) == 1 + k // ahead
        assert np.array_equal(asked[-1], np.unique(drawn))
        assert np.array_equal(asked[-1][draw.positions], draw.indices)
        among = drawn[k % ahead * m * K : (k % ahead + 1) * m * K]
        assert np.isin(draw.indices, among).all()
        if k < ahead:  # p of the time of the look, though the rule has learned since
            once, copies = np.unique(among, return_counts=True)
            a = copies * truth[once] / ratios[once]
            q = taken_on_average(0.9 * a / a.sum() + 0.1 * copies / len(among), K)
            expected = dict(zip(once, ratios[once] * q * m / copies, strict=True))
            np.testing.assert_allclose(1 / draw.weights, [expected[j] for j in draw.indices.tolist()])
            assert len(np.unique(draw.indices)) == K < len(once)
            np.testing.assert_allclose(draw.probabilities, ratios[draw.indices] / n)
        sampler.update(draw, truth[draw.indices])
    assert sampler.diagnostics().looks == 2 * ahead  # batches
    assert sampler.diagnostics().scores - scored == 2 * ahead * m * K


def test_a_window_counts_for_the_head_start_of_a_context():
    """The gate has decided for all of its batches."""
    labels = np.arange(60) % 3
    candidates = adambs.Candidates(3, cost=1e-9, ahead=4)
    sampler = adambs.BanditSampler(60, 6, context=labels, candidates=candidates)
    sampler.candidates.scatter.add(np.ones(10), np.arange(1.0, 11))
    before = sampler.gate.head_start
    for k in range(8):
        sampler.draw(lambda i: 1.0 + i.numpy())
        assert sampler.gate.head_start == before - (4 if k < 4 else 8)


@pytest.mark.parametrize("gate", [0, None])
def test_a_window_resumes_to_the_bit_in_its_middle(gate):
    truth = np.random.default_rng(2).gamma(0.5, 1.0, 60)

    def make():
        candidates = adambs.Candidates(3, cost=1e-6, ahead=5)
        return adambs.BanditSampler(60, 6, candidates=candidates, seed=4, gate=gate)

    def go_on(sampler, steps):
        seen = []
        for _ in range(steps):
            draw = sampler.draw(lambda i: truth[i])
            sampler.update(draw, truth[draw.indices])
            seen += [draw.indices, draw.weights]
        return seen, sampler.state_dict()

    straight = make()
    go_on(straight, 7)
    assert 0 < len(straight.ready.choices) < 5
    resumed = make()
    resumed.load_state_dict(saved_and_loaded(straight.state_dict()))
    assert same(go_on(straight, 20), go_on(resumed, 20))

    go_on(straight, 1)
    state, ready = straight.state_dict(), straight.state_dict()["ready"]
    if not ready["choices"]:
        go_on(straight, 1)
        state, ready = straight.state_dict(), straight.state_dict()["ready"]
    positions, ratios, p_ratios = ready["choices"][0]
    before = resumed.state_dict()
    for damaged in (
        {"candidates": [60] * len(ready["candidates"])},
        {"candidates": []},
        {"choices": 1},
        {"choices": [[positions, ratios]]},
        {"choices": [[positions[1:], ratios, p_ratios]]},
        {"choices": [[positions, [0.0] * 6, p_ratios]]},
        {"choices": [[positions, [5e-324, *ratios[1:]], p_ratios]]},
        {"choices": [[positions, ratios, [1e300, *p_ratios[1:]]]]},
        {"choices": [[[0.5] * 6, ratios, p_ratios]]},
        {"epoch": -1},
    ):
        with pytest.raises(ValueError, match=r"state\['ready'\] is damaged"):
            resumed.load_state_dict({**state, "ready": {**ready, **damaged}})
    assert same(resumed.state_dict(), before)


def test_refresh_tells_the_rule_the_truth_about_all_or_some():
    n = 500
    truth = np.random.default_rng(0).gamma(0.5, 1.0, n)
    sampler = taught(adambs.BanditSampler(n, 10, rule=adambs.Tracking(uniform=0.2)), 30)
    done = []
    sampler.refresh(lambda i: truth[i], batch_size=120, progress=lambda *step: done.append(step))
    np.testing.assert_allclose(sampler.probabilities(), 0.8 * truth / truth.sum() + 0.2 / n, rtol=1e-9)
    assert done == [(120, 500), (240, 500), (360, 500), (480, 500), (500, 500)]
    truth[[3, 5]] = 7.0
    sampler.refresh(lambda i: torch.from_numpy(truth)[i], [3, 5])
    np.testing.assert_allclose(sampler.probabilities(), 0.8 * truth / truth.sum() + 0.2 / n, rtol=1e-9)
    with pytest.raises(ValueError, match="indices must lie in"):
        sampler.refresh(lambda i: truth[i], [500])
    with pytest.raises(ValueError, match="scores must have shape"):
        sampler.refresh(lambda i: np.ones(3))
    with pytest.raises(TypeError, match="Exp3 learns from draws alone"):
        adambs.BanditSampler(n, 10, rule=adambs.Exp3()).refresh(lambda i: truth[i])


def test_the_correction_is_an_exponent_of_the_weights():
    sampler = taught(adambs.BanditSampler(100, 10, correction=0.5), 50)
    draw = sampler.draw()
    expected = (1 / (100 * draw.probabilities)) ** 0.5
    torch.testing.assert_close(draw.weights, expected / expected.mean())
    assert draw.weights.std() > 0.1
    sampler.correction = 0.0
    torch.testing.assert_close(sampler.draw().weights, torch.ones(10, dtype=torch.float64))
    sampler.correction = 1.0
    later = sampler.draw()
    torch.testing.assert_close(later.weights, 1 / (100 * later.probabilities))
    assert draw.correction == 0.5  # that of the time of drawing
    for value in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="correction must lie between 0 and 1"):
            sampler.correction = value
    assert sampler.correction == 1.0


@pytest.mark.parametrize("correction", [0.0, 0.5])
def test_less_correction_of_p_leaves_the_choice_among_candidates_unbiased(correction):
    """Over many looks, the mean of weighted values is that over all examples with weights r^(1 - beta)."""
    n, K = 40, 4
    sampler, truth = unequal(n, K, seed=3, correction=correction)
    values = np.random.default_rng(6).normal(1, 1, n)
    frozen = sampler.state_dict()
    favour = (n * sampler.probabilities().numpy()) ** (1 - correction)
    sums = []
    for _ in range(4000):
        sampler.load_state_dict({**frozen, "random": sampler.state_dict()["random"]})
        draw = sampler.draw(lambda i: truth[i])
        i, w = draw.indices.numpy(), draw.weights.numpy()
        assert w.mean() == pytest.approx(1)
        unscaled = favour[i] / draw._ratios  # what the weights were, before their mean is one
        np.testing.assert_allclose(w, unscaled / unscaled.mean())
        sums.append([(unscaled * values[i]).mean(), unscaled.mean()])
    error = np.mean(sums, 0) - [(favour * values).mean(), favour.mean()]
    assert np.abs(error / (np.std(sums, 0) / math.sqrt(len(sums)))).max() < 4


def test_the_correction_of_a_draw_on_its_way_is_saved():
    data = torch.utils.data.TensorDataset(torch.arange(40.0))
    sampler = taught(adambs.BanditSampler(40, 4, correction=0.5), 50)
    loader = adambs.BanditLoader(data, sampler)
    batches = iter(loader)
    next(batches)
    sampler.epochs.current.ahead.append(sampler.draw())
    sampler.correction = 1.0
    copy = adambs.BanditSampler(40, 4)
    copy.load_state_dict(saved_and_loaded(sampler.state_dict()))
    assert copy.correction == 1.0
    assert copy.epochs.current.ahead[-1].correction == 0.5


class Listed(torch.utils.data.Dataset):
    """Examples one at a time."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor(float(index)), index % 3


@pytest.mark.parametrize(
    "dataset",
    [
        torch.utils.data.TensorDataset(torch.arange(40.0), torch.arange(40) % 3),
        torch.utils.data.Subset(
            torch.utils.data.TensorDataset(torch.arange(80.0) - 40, torch.arange(80) % 3), range(40, 80)
        ),
        Listed(),
    ],
)
def test_a_loader_looks_at_batches_of_candidates(dataset):
    sampler = adambs.BanditSampler(40, 4, candidates=always(), seed=1, gate=0)
    looked = []

    def score(batch):
        x, y = batch
        looked.append(len(x))
        assert torch.equal(y, batch[1])
        return 1 + x % 7

    loader = adambs.BanditLoader(dataset, sampler, score=score)
    for (x, _), draw in loader:
        assert torch.equal(x, draw.indices.float())
        sampler.update(draw, 1 + x % 7)
        assert draw.learned == (len(looked) > 0)
    assert sampler.diagnostics().updates == len(loader) == 10
    assert all(4 < scored <= 12 for scored in looked)  # each of them once
    assert len(looked) >= 8


def test_a_loader_with_workers_cannot_look():
    with pytest.raises(ValueError, match="score needs num_workers=0, not 2"):
        adambs.BanditLoader(Listed(), adambs.BanditSampler(40, 4), score=len, num_workers=2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: adambs.Candidates(1), "multiple must be at least 2"),
        (lambda: adambs.Candidates(3, cost=0), "cost must be positive"),
        (lambda: adambs.Candidates(noise=0), "noise must be positive"),
        (lambda: adambs.Candidates(3, ahead=0), "ahead must be at least 1"),
        (lambda: adambs.BanditSampler(5, 1, correction=2), "correction must lie between"),
    ],
)
def test_it_refuses(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_candidates_must_be_candidates():
    with pytest.raises(TypeError, match="candidates must be a Candidates, not 3"):
        adambs.BanditSampler(5, 1, candidates=3)
