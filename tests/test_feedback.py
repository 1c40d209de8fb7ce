"""Feedback: one draw teaches once, by itself or by its number, at once or late; and no step waits."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from device_stub import Device
from helpers import same, saved_and_loaded, small_data, small_net, taught

import adambs


def made(**options):
    return adambs.BanditSampler(50, 5, **{"rule": adambs.Tracking(), "seed": 3, **options})


def test_one_draw_teaches_once():
    sampler = made()
    draw = sampler.draw()
    sampler.update(draw, np.arange(5.0))
    before = sampler.state_dict()
    for again in (
        draw,
        draw.number,
        draw.carried().number,
        copy.deepcopy(draw),
        pickle.loads(pickle.dumps(draw)),
    ):
        with pytest.raises(ValueError, match=r"draw 0 is not awaited: it has had its feedback already"):
            sampler.update(again, np.arange(5.0))
    assert same(sampler.state_dict(), before)


def test_a_report_that_was_checked_before_the_draw_was_taught_is_refused_too():
    sampler = made()
    draw = sampler.draw()
    first, second = sampler.check(draw, np.ones(5)), sampler.check(draw, np.ones(5))
    sampler.learn(first)
    with pytest.raises(ValueError, match="it has had its feedback already"):
        sampler.learn(second)


@pytest.mark.parametrize("feedback", ["at once", "late"])
def test_a_draw_its_number_and_its_copies_are_the_same_feedback(feedback):
    scores = np.random.default_rng(0).random((40, 5))
    ways = [
        lambda draw: draw,
        lambda draw: draw.number,
        lambda draw: np.int64(draw.number),
        lambda draw: torch.tensor(draw.number),
        lambda draw: draw.carried().number,
        lambda draw: pickle.loads(pickle.dumps(draw)),
    ]
    states = []
    for way in ways:
        sampler = made(feedback=feedback)
        for row in scores:
            sampler.update(way(sampler.draw()), torch.from_numpy(row))
        states.append(sampler.state_dict())
    assert all(same(state, states[0]) for state in states)


def test_numbers_count_the_draws_and_are_resumed():
    sampler = made()
    assert [sampler.draw().number for _ in range(4)] == [0, 1, 2, 3]
    resumed = made()
    resumed.load_state_dict(saved_and_loaded(sampler.state_dict()))
    assert resumed.draw().number == 4
    with pytest.raises(ValueError, match="draw 2 is not awaited"):
        resumed.update(2, np.ones(5))


def test_draws_come_back_late_out_of_order_or_never():
    sampler = made(rule=adambs.Exp3(step=0.3, L=1.0))
    draws = [sampler.draw() for _ in range(6)]
    p = sampler.probabilities().numpy()
    for k in (4, 0, 3):
        scores = np.linspace(0.1, 1, 5)
        p = adambs.reference.update(
            p, draws[k].indices.numpy(), scores, L=1.0, p_min=0.5 / 50, alpha_p=sampler.rule.alpha_p,
            drawn_with=np.full(50, 1 / 50),
        )  # fmt: skip
        sampler.update(draws[k], scores)
    np.testing.assert_allclose(sampler.probabilities(), p, rtol=1e-9)


def test_only_the_last_draws_without_feedback_are_remembered():
    sampler = made()
    most = sampler.awaited.most
    draws = [sampler.draw() for _ in range(most + 3)]
    for draw in draws[:3]:
        with pytest.raises(ValueError, match=f"older than the last {most} draws without feedback"):
            sampler.update(draw, np.ones(5))
    sampler.update(draws[3], np.ones(5))
    assert len(sampler.awaited._draws) == most - 1


@pytest.mark.parametrize("name", ["indices", "weights", "probabilities"])
def test_nothing_done_to_a_tensor_of_a_draw_reaches_the_sampler(name):
    sampler, twin = taught(made(), 20), taught(made(), 20)
    draw, other = sampler.draw(), twin.draw()
    getattr(draw, name).add_(5_000_000)
    carried = draw.carried()
    carried.indices.add_(7)
    carried.weights.zero_()
    scores = np.arange(5.0)
    report = sampler.check(draw, scores)
    scores.fill(math.nan)
    sampler.learn(report)
    twin.update(other, np.arange(5.0))
    assert same(sampler.state_dict(), twin.state_dict())


def test_late_feedback_is_learned_at_the_next_draw_and_gives_the_same_p():
    late, now = made(feedback="late"), made(feedback="at once")
    rng = np.random.default_rng(1)
    for _ in range(50):
        a, b = late.draw(), now.draw()
        assert torch.equal(a.indices, b.indices)
        scores = torch.from_numpy(rng.random(5))
        given = scores.clone()
        late.update(a, given)
        given.zero_()  # the sampler has its own copy
        now.update(b, scores)
        assert late.counters.updates == now.counters.updates - 1
        assert len(late.feedback.late) == 1
    assert same(late.state_dict(), now.state_dict())
    assert len(late.feedback.late) == 0


@pytest.mark.parametrize("read", ["probabilities", "diagnostics", "state_dict", "pickle", "copy"])
def test_whoever_reads_p_waits_for_what_is_late(read):
    late, now = made(feedback="late"), made()
    for sampler in (late, now):
        sampler.update(sampler.draw(), torch.arange(5.0))
    results = []
    for sampler in (late, now):
        if read == "pickle":
            results.append(pickle.loads(pickle.dumps(sampler)).state_dict())
        elif read == "copy":
            results.append(copy.deepcopy(sampler).state_dict())
        else:
            results.append(getattr(sampler, read)())
    assert (
        same(*results)
        if isinstance(results[0], dict | torch.Tensor)
        else repr(results[0]) == repr(results[1])
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_bad_scores_that_come_late_raise_at_the_next_draw_with_their_number_and_teach_nothing(bad):
    sampler, twin = made(feedback="late"), made(feedback="late")
    for _ in range(3):
        for each in (sampler, twin):
            each.update(each.draw(), torch.arange(5.0))
    draw = sampler.draw()
    twin.draw()
    scores = torch.ones(5)
    scores[2] = bad
    sampler.update(draw, scores)
    index = draw.indices[2].item()
    with pytest.raises(
        ValueError, match=rf"scores\[2\] is {bad} \(draw 3, example {index} of the data set\).*late"
    ):
        sampler.draw()
    assert torch.equal(
        sampler.draw().indices, twin.draw().indices
    )  # nothing was drawn by the call that raised
    assert same(sampler.state_dict(), twin.state_dict())


def test_late_feedback_checks_at_once_what_needs_no_waiting():
    sampler = made(feedback="late")
    draw = sampler.draw()
    with pytest.raises(ValueError, match=r"scores must have shape \(5,\)"):
        sampler.update(draw, torch.ones(4))
    with pytest.raises(ValueError, match="drawn by another sampler"):
        sampler.update(7, torch.ones(5))
    sampler.update(draw, torch.ones(5))
    with pytest.raises(ValueError, match="already"):
        sampler.update(draw, torch.ones(5))


def test_scores_that_are_no_tensor_are_never_late():
    sampler = made(feedback="late")
    sampler.update(sampler.draw(), [1.0, 2, 3, 4, 5])
    assert sampler.counters.updates == 1


def test_an_unknown_way_is_refused():
    with pytest.raises(
        ValueError, match="feedback must be one of 'automatic', 'at once', 'late', not 'soon'"
    ):
        made(feedback="soon")


def test_observers_see_each_draw_that_came_back_with_its_scores():
    sampler = made(candidates=adambs.Candidates(cost=1e-9), feedback="late")
    seen = []
    sampler.observers.append(lambda draw, scores: seen.append((draw.number, scores.tolist())))
    expected = []
    for step in range(6):
        draw = sampler.draw((lambda i: np.arange(1.0, len(i) + 1)) if step > 2 else None)
        scores = torch.rand(5, dtype=torch.float64)
        expected.append((draw.number, scores.tolist()))
        sampler.update(draw, scores)
    assert seen == expected[:-1]
    sampler.probabilities()
    assert seen == expected
    assert sampler.diagnostics().looks > 0


X, Y = small_data()


@pytest.mark.parametrize("way", ["step", "update", "number"])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"amsgrad": True}])
def test_no_step_waits_for_a_device(way, options):
    """A whole training step: draw, indices up, forward, scores, weighted mean, backward, step, feedback.

    The host waits only at the next draw, for scores that have long arrived.
    """
    sampler, twin = (adambs.BanditSampler(len(X), 10, gate=0, seed=1) for _ in range(2))
    there, here = small_net(), small_net()
    plain = adambs.AdamBS(here.parameters(), twin, lr=0.01, **options)
    with Device() as device:
        device.put(there)
        x, y = device.put(X), device.put(Y)
        optimizer = adambs.AdamBS(there.parameters(), sampler, lr=0.01, **options)
        for _ in range(25):
            draw = sampler.draw()
            indices = draw.indices.to(device.device, non_blocking=True)
            logits = there(x[indices])
            losses = F.cross_entropy(logits, y[indices], reduction="none")
            scores = adambs.scores.cross_entropy(logits, y[indices])
            optimizer.zero_grad()
            draw.mean(losses).backward()
            if way == "step":
                optimizer.step(draw, scores)
            else:
                number = draw.carried().number.to(device.device, non_blocking=True)
                sampler.update(draw if way == "update" else number, scores)
                optimizer.step()
            copies = len(device.copies)
        assert device.waits == []
        assert copies > 25
        for _ in range(25):
            draw = twin.draw()
            logits = here(X[draw.indices])
            losses = F.cross_entropy(logits, Y[draw.indices], reduction="none")
            plain.zero_grad()
            draw.mean(losses).backward()
            plain.step(draw, adambs.scores.cross_entropy(logits, Y[draw.indices]))
        for a, b in zip(there.parameters(), here.parameters(), strict=True):
            torch.testing.assert_close(device.read(a), b.detach(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(sampler.probabilities(), twin.probabilities(), rtol=1e-3)


def test_the_record_of_waits_sees_feedback_that_is_taken_at_once():
    sampler = adambs.BanditSampler(len(X), 10, gate=0, feedback="at once")
    with Device() as device:
        sampler.update(sampler.draw(), device.put(torch.ones(10)))
    assert device.waits == ["copy to the host"]


@pytest.mark.parametrize("skipped", [False, True])
def test_a_step_that_a_grad_scaler_skips_on_the_device_teaches_nothing_and_waits_for_nothing(skipped):
    sampler = adambs.BanditSampler(len(X), 10, gate=0, seed=1)
    net = small_net()
    optimizer = adambs.AdamBS(net.parameters(), sampler)
    with Device() as device:
        optimizer.found_inf = device.put(
            torch.tensor(float(skipped))
        )  # as GradScaler.step does for fused ones
        optimizer.step(sampler.draw(), device.put(torch.ones(10)))
        assert device.waits == []
        del optimizer.found_inf
    assert sampler.diagnostics().updates == (not skipped)
