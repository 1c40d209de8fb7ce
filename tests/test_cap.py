"""The cap on weight x score: what it lowers, what it says of it, and what it leaves alone."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from helpers import same, saved_and_loaded, small_data, small_net
from hypothesis import given
from hypothesis import strategies as st

import adambs
from adambs.cap import Cap
from adambs.moments import batch_moments


def capped_by_hand(weights, scores, limit):
    """In a loop: weight x score at most the limit, a weight above one never below it."""
    return [
        w if w * s <= limit else min(w, max(1.0, limit / s)) for w, s in zip(weights, scores, strict=True)
    ]


def a_draw(ratios, limit, correction=1.0):
    ratios = np.array(ratios)
    return adambs.Draw(0, np.arange(len(ratios)), ratios, len(ratios), limit=limit, correction=correction)


@given(
    ratios=st.lists(st.floats(0.05, 20), min_size=1, max_size=12),
    limit=st.floats(1e-3, 1e3),
    correction=st.sampled_from([1.0, 0.5]),
    seed=st.integers(0, 9999),
)
def test_the_mean_is_that_of_a_loop(ratios, limit, correction, seed):
    rng = np.random.default_rng(seed)
    K = len(ratios)
    losses, scores = rng.normal(size=K), rng.gamma(0.3, 1.0, K)
    scores[rng.random(K) < 0.2] = 0.0
    draw = a_draw(ratios, limit, correction)
    expected = np.dot(capped_by_hand(draw.weights.tolist(), scores, limit), losses) / K
    if draw.even:
        expected = losses.mean()
    given = torch.tensor(losses, requires_grad=True)
    mean = draw.mean(given, torch.from_numpy(scores))
    assert mean.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert draw.capped
    mean.backward()
    assert mean.item() == pytest.approx(float(given.grad @ given.detach()), abs=1e-9)


def test_the_compiled_loop_does_what_torchs_operations_do():
    rng = np.random.default_rng(0)
    ratios, ones = rng.gamma(1.0, 1.0, 500), torch.ones(500, requires_grad=True)
    scores = torch.from_numpy(rng.gamma(0.3, 1.0, 500)).float()
    scores[:4] = torch.tensor([0.0, math.nan, math.inf, 1e-45])
    spread = torch.stack([scores, scores], dim=1)[:, 0]  # the same numbers, with gaps between them
    for limit in (0.3, 1e-9, 1e30):
        draw = a_draw(ratios, limit)
        compiled, by_torch = (
            torch.autograd.grad(draw.mean(ones, given), ones)[0] for given in (scores, spread)
        )
        assert torch.equal(compiled.isnan(), by_torch.isnan())
        kept = ~by_torch.isnan()
        assert kept.sum() == 499
        torch.testing.assert_close(compiled[kept], by_torch[kept], rtol=1e-6, atol=0.0)


def test_under_a_transform_of_torch_func_the_mean_is_the_same():
    """There tensors have no memory of their own that compiled code could read or write."""
    x, y = small_data()
    sampler = adambs.BanditSampler(len(x), 8, rule=adambs.Tracking(), cap=1.0)
    weight = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))

    def mean(weight, draw):
        logits, labels = x[draw.indices] @ weight, y[draw.indices]
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        return draw.mean(losses, adambs.scores.cross_entropy(logits, labels))

    for _ in range(5):
        draw = sampler.draw()
        transformed = torch.func.grad(mean)(weight, copy.deepcopy(draw))
        leaf = weight.clone().requires_grad_()
        mean(leaf, draw).backward()
        torch.testing.assert_close(transformed, leaf.grad)
        sampler.update(draw, np.random.default_rng(draw.number).gamma(0.3, 1.0, 8))
    assert not draw.even


def test_without_scores_or_without_a_limit_nothing_is_lowered():
    losses, scores = torch.rand(4), torch.tensor([0.0, 1.0, 100.0, 1e6])
    plain = a_draw([0.1, 0.5, 1.0, 2.0], math.inf)
    assert torch.equal(plain.mean(losses), plain.mean(losses, scores))
    limited = a_draw([0.1, 0.5, 1.0, 2.0], 1.0)
    assert torch.equal(plain.mean(losses), limited.mean(losses))
    assert plain.capped
    assert not limited.capped


def test_parts_of_a_draw_are_capped_like_the_whole():
    draw = a_draw([0.05, 0.5, 1.0, 2.0, 0.1], 3.0)
    losses, scores = torch.rand(5, dtype=torch.float64), torch.tensor([1.0, 2.0, 30.0, 1.0, 9.0])
    parts = [draw.part(0, 2, 2), draw.part(2, 5, 2)]
    means = [parts[0].mean(losses[:2], scores[:2]), parts[1].mean(losses[2:], scores[2:])]
    assert draw.capped
    assert sum(means).item() / 2 == pytest.approx(draw.mean(losses, scores).item(), rel=1e-12)


def test_half_precision_scores_and_lists_are_taken_and_bad_shapes_refused():
    draw = a_draw([0.1, 0.5], 1.0)
    losses = torch.tensor([1.0, 2.0])
    assert draw.mean(losses.bfloat16(), torch.tensor([4.0, 0.5]).bfloat16()) == draw.mean(losses, [4.0, 0.5])
    with pytest.raises(ValueError, match=r"scores must have shape \(2,\), one number an example, not \(3,\)"):
        draw.mean(losses, torch.ones(3))


def test_the_limit_is_a_multiple_of_the_running_mean_and_what_is_taken_is_counted():
    """Against a second book that is kept by hand."""
    n, K = 60, 6
    sampler = adambs.BanditSampler(n, K, rule=adambs.Calibrated(uniform=0.05), cap=2.0, seed=3)
    rng = np.random.default_rng(0)
    mean = total = taken = 0.0
    count = 0
    for step in range(200):
        draw = sampler.draw()
        limit = 2.0 * mean if mean else math.inf
        assert draw.limit == pytest.approx(limit, rel=1e-12)
        scores = rng.gamma(0.3, 1.0, K) ** 2
        weights = draw.weights.numpy()
        products = weights * scores
        mean = 0.99 * mean + 0.01 * products.mean() if mean else products.mean()
        if step % 2:  # feedback may come before the mean is taken, and after it
            sampler.update(draw, scores)
        if step % 3:  # every third time nobody gives the scores to the mean: nothing is capped
            draw.mean(torch.ones(K), torch.from_numpy(scores))
            lowered = np.array(capped_by_hand(weights, scores, limit))
            count += int((lowered < weights).sum())
            taken += float((products - lowered * scores).sum())
            total += products.sum()
        if not step % 2:
            sampler.update(draw, scores)
    found = sampler.diagnostics()
    assert found.capped_weights == count > 10
    assert found.capped_share == pytest.approx(taken / total, rel=1e-9)
    assert 0 < found.capped_share < 1


def shares(draw, scores):
    """What the mean multiplies each loss by."""
    losses = torch.ones(len(draw.indices), dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(draw.mean(losses, scores), losses)
    return found


@pytest.mark.parametrize("correction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("way", ["the draw", "a copy", "carried"])
@pytest.mark.parametrize("first", ["update", "mean"])
@pytest.mark.parametrize("feedback", ["at once", "late"])
def test_the_cap_holds_in_any_order_and_counts_what_it_lowers(correction, way, first, feedback):
    """Also with weights to a power below one, which are what is lowered and counted."""
    n, K = 60, 6
    sampler = adambs.BanditSampler(
        n, K, rule=adambs.Calibrated(uniform=0.05), cap=1.5, seed=3, correction=correction, feedback=feedback
    )
    rng, lowered = np.random.default_rng(0), 0
    for _ in range(60):
        draw = sampler.draw()
        used = {"the draw": draw, "a copy": pickle.loads(pickle.dumps(draw)), "carried": draw.carried()}[way]
        scores = torch.from_numpy(rng.gamma(0.3, 1.0, K))
        weights = shares(used, None)
        whose = used.number if way == "carried" else used
        if first == "update":
            sampler.update(whose, scores)
        given = shares(used, scores)
        if first == "mean":
            sampler.update(whose, scores)
        lowered += int((given < weights * (1 - 1e-6)).sum())
    assert sampler.draw().limit < math.inf
    counted = sampler.diagnostics().capped_weights
    assert lowered > 10 if correction else lowered == 0  # with no correction all weights are one
    assert counted == (0 if way == "a copy" and first == "update" else lowered)


def test_scores_of_zero_for_long_leave_a_loss_as_it_is():
    sampler = adambs.BanditSampler(64, 8, rule=adambs.Calibrated())
    losses = torch.ones(8)
    for step in range(12_000):
        draw = sampler.draw()
        scores = torch.rand(8) if step < 200 else torch.zeros(8)
        if step % 100 == 0:
            for given in (scores, scores.double()):
                assert math.isfinite(draw.mean(losses, given))
        sampler.update(draw, scores)
    for huge in (1e300, 1e-310):
        draw = sampler.draw()
        assert math.isfinite(draw.mean(losses, np.full(8, huge)))
        sampler.update(draw, np.full(8, huge))
        assert math.isfinite(sampler.draw().mean(losses, np.full(8, huge)))


def test_a_surprise_comes_with_a_weight_that_does_not_throw_the_model():
    n, K = 500, 20
    norms = np.full(n, 0.001)
    norms[:20] = 1.0
    sampler = adambs.BanditSampler(n, K, rule=adambs.Calibrated(), seed=1)
    for _ in range(400):
        draw = sampler.draw()
        draw.mean(torch.ones(K), norms[draw.indices])
        sampler.update(draw, norms[draw.indices])
    assert sampler.diagnostics().capped_share < 0.02
    draw = sampler.draw()
    easy = int(draw.weights.argmax())
    scores = norms[draw.indices]
    scores[easy] = 1.0
    assert draw.weights[easy] > 5
    one = torch.zeros(K, dtype=torch.float64)
    one[easy] = K
    weight = draw.mean(one, scores).item()
    assert weight == pytest.approx(max(1.0, draw.limit), rel=1e-9)
    assert weight < 0.3 * draw.weights[easy]
    sampler.update(draw, scores)
    assert sampler.diagnostics().capped_weights > 0
    p = sampler.probabilities()
    assert p[draw.indices[easy]] > 5 * p[norms < 0.1].median()  # it comes back soon


def capping(sampler, steps):
    """The sampler after some steps with scores in the mean."""
    for step in range(steps):
        draw = sampler.draw()
        scores = np.random.default_rng(step).gamma(0.3, 1.0, sampler.batch_size)
        draw.mean(torch.ones(sampler.batch_size), scores)
        sampler.update(draw, scores)
    return sampler


def test_it_survives_checkpoints_pickles_and_copies():
    sampler = capping(adambs.BanditSampler(60, 6, rule=adambs.Calibrated(), cap=3.0), 20)
    draw = sampler.draw()
    for twin in (pickle.loads(pickle.dumps(draw)), copy.deepcopy(draw)):
        assert twin.limit == draw.limit < math.inf
    assert adambs.Draw.from_list(draw.to_list(), 60, 6).limit == draw.limit
    other = adambs.BanditSampler(60, 6, rule=adambs.Calibrated(), cap=3.0)
    other.load_state_dict(saved_and_loaded(sampler.state_dict()))
    assert same(other.state_dict(), sampler.state_dict())
    assert other.cap.limit == sampler.cap.limit
    with pytest.raises(ValueError, match="cap_factor"):
        adambs.BanditSampler(60, 6, rule=adambs.Calibrated()).load_state_dict(sampler.state_dict())
    for name, value in (("mean", -1.0), ("capped", 0.5), ("taken", math.nan), ("all", "x")):
        state = sampler.state_dict()
        state["cap"][name] = value
        with pytest.raises(ValueError, match=name):
            other.load_state_dict(state)


def test_no_cap_is_infinite_and_bad_ones_are_refused():
    sampler = capping(adambs.BanditSampler(60, 6, rule=adambs.Calibrated(), cap=math.inf), 5)
    assert sampler.draw().limit == math.inf
    other = adambs.BanditSampler(60, 6, rule=adambs.Calibrated(), cap=math.inf)
    other.load_state_dict(saved_and_loaded(sampler.state_dict()))
    for bad in (0.9, -1.0, math.nan):
        with pytest.raises(ValueError, match="cap must be finite and at least 1"):
            adambs.BanditSampler(60, 6, cap=bad)
    with pytest.raises(TypeError, match="cap must be a number"):
        adambs.BanditSampler(60, 6, cap="x")


def test_extreme_scores_leave_the_counts_finite():
    cap = Cap(10.0)
    for scores in ([1e308, 0.0], [0.0, 0.0], [5e-324, 1e-300], [1e308, 1e308]):
        for _ in range(300):
            _, _, *told = batch_moments(np.array([1e-9, 1.0]), np.array(scores), cap.limit)
            cap.learn(True, 2, *told)
    assert math.isfinite(cap.taken)
    assert cap.with_state(cap.state_dict()).state_dict() == cap.state_dict()


def test_a_loop_with_scores_in_the_mean_trains_as_one_without_while_nothing_is_capped():
    x, y = small_data()

    def trained(give):
        net = small_net()
        sampler = adambs.BanditSampler(len(x), 10, rule=adambs.Calibrated(), cap=1e9)
        optimizer = adambs.AdamBS(net.parameters(), sampler)
        for _ in range(20):
            draw = sampler.draw()
            logits = net(x[draw.indices])
            losses = torch.nn.functional.cross_entropy(logits, y[draw.indices], reduction="none")
            scores = adambs.scores.cross_entropy(logits, y[draw.indices])
            optimizer.zero_grad()
            (draw.mean(losses, scores) if give else draw.mean(losses)).backward()
            optimizer.step(draw, scores)
        return net.state_dict()

    assert same(trained(True), trained(False))


def surprised(sampler):
    """A sampler that has learned that most examples are easy, and a draw in which one of them is hard."""
    norms = np.full(sampler.n, 0.001)
    norms[:20] = 1.0
    for _ in range(400):
        draw = sampler.draw()
        draw.mean(torch.ones(len(draw)), norms[draw.indices])
        sampler.update(draw, norms[draw.indices])
    draw = sampler.draw()
    scores = torch.from_numpy(norms[draw.indices])
    scores[draw.weights.argmax()] = 1.0
    return draw, scores


@pytest.mark.parametrize("feedback", ["at once", "late"])
def test_a_carried_draw_is_capped_as_the_draw_itself_and_the_sampler_is_told(feedback):
    given, carrying = (
        adambs.BanditSampler(500, 20, rule=adambs.Calibrated(), seed=1, feedback=feedback) for _ in range(2)
    )
    draw, scores = surprised(given)
    carried = surprised(carrying)[0].carried()
    losses = torch.linspace(0.5, 1.5, 20)
    torch.testing.assert_close(carried.mean(losses, scores), draw.mean(losses, scores))
    assert carried.mean(losses, scores) < carried.mean(losses)
    one = torch.zeros(20)
    one[draw.weights.argmax()] = 20
    assert carried.mean(one, scores).item() == pytest.approx(max(1.0, draw.limit), rel=1e-5)
    assert carried.mean(losses.bfloat16(), scores.bfloat16()).dtype == torch.float32
    with pytest.raises(
        ValueError, match=r"scores must have shape \(20,\), one number an example, not \(3,\)"
    ):
        carried.mean(losses, scores[:3])
    given.update(draw, scores)
    carrying.update(carried.number, scores)
    assert carrying.diagnostics().capped_weights == given.diagnostics().capped_weights > 0
    assert same(carrying.state_dict(), given.state_dict())


def test_a_carried_draw_whose_mean_had_no_scores_counts_nothing():
    sampler = adambs.BanditSampler(500, 20, rule=adambs.Calibrated(), seed=1)
    draw, scores = surprised(sampler)
    before = sampler.state_dict()["cap"]
    carried = draw.carried()
    carried.mean(torch.rand(20))
    sampler.update(carried.number, scores)
    after = sampler.state_dict()["cap"]
    assert after.pop("mean") > before.pop("mean")
    assert same(after, before)
