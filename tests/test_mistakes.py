"""The likeliest mistakes of a training loop: none is silent, and each is said once."""

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import small_data, small_net
from torch.utils.data import TensorDataset

import adambs

X, Y = small_data(200)


def train(way, epochs=3, **options):
    """A loop with one thing done wrong, or none; the warnings it has caused."""
    sampler = adambs.BanditSampler(len(X), 5, **{"gate": 0, **options})
    net = small_net()
    optimizer = adambs.AdamBS(net.parameters(), sampler, lr=1e-2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(epochs):
            for (x, y), draw in adambs.BanditLoader(TensorDataset(X, Y), sampler):
                way(net, optimizer, x, y, draw)
    return caught


def right(net, optimizer, x, y, draw):
    logits = net(x)
    optimizer.zero_grad()
    draw.mean(F.cross_entropy(logits, y, reduction="none")).backward()
    optimizer.step(draw, adambs.scores.cross_entropy(logits, y))


def right_with_the_weights(net, optimizer, x, y, draw):
    logits = net(x)
    optimizer.zero_grad()
    (draw.weights.float() * F.cross_entropy(logits, y, reduction="none")).mean().backward()
    optimizer.step(draw, adambs.scores.cross_entropy(logits, y))


def right_in_another_order(net, optimizer, x, y, draw):
    logits = net(x)
    optimizer.sampler.update(draw, adambs.scores.cross_entropy(logits, y))
    optimizer.zero_grad()
    draw.mean(F.cross_entropy(logits, y, reduction="none")).backward()
    optimizer.step()


def right_by_number(net, optimizer, x, y, draw):
    carried = draw.carried()
    logits = net(x)
    optimizer.zero_grad()
    carried.mean(F.cross_entropy(logits, y, reduction="none")).backward()
    optimizer.step(carried.number, adambs.scores.cross_entropy(logits, y))


def unweighted(net, optimizer, x, y, draw):
    logits = net(x)
    optimizer.zero_grad()
    F.cross_entropy(logits, y).backward()
    optimizer.step(draw, adambs.scores.cross_entropy(logits, y))


def without_feedback(net, optimizer, x, y, draw):
    optimizer.zero_grad()
    draw.mean(F.cross_entropy(net(x), y, reduction="none")).backward()
    optimizer.step()


def mean_losses(net, optimizer, x, y, draw):
    optimizer.zero_grad()
    losses = F.cross_entropy(net(x), y, reduction="none")
    draw.mean(losses).backward()
    optimizer.step(draw, losses.mean().expand(5))


@pytest.mark.parametrize(
    "way", [right, right_with_the_weights, right_in_another_order, right_by_number], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("feedback", ["at once", "late"])
def test_a_right_loop_is_not_warned(way, feedback):
    assert not train(way, feedback=feedback)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (unweighted, "train on draw.mean(losses) instead of losses.mean(), or the gradient is biased"),
        (without_feedback, "an epoch of 40 batches is over and no scores came back, so p cannot learn"),
        (mean_losses, "they look like a loss after a mean reduction. Give one score for each example"),
    ],
    ids=lambda value: getattr(value, "__name__", "words"),
)
@pytest.mark.parametrize("feedback", ["at once", "late"])
def test_a_mistake_is_warned_of_once_in_words(way, words, feedback):
    [warning] = train(way, feedback=feedback)
    assert words in str(warning.message)
    assert warning.category is RuntimeWarning


def test_the_warning_points_at_the_training_loop():
    for way in (unweighted, without_feedback):
        [warning] = train(way)
        assert warning.filename == __file__


def test_weights_of_one_need_no_weighting():
    """While the gate is closed, losses.mean() is the same as draw.mean(losses)."""
    assert not train(unweighted, gate=1e9)


def test_scores_that_are_alike_for_a_reason_are_no_mistake():
    """Always the same ones, and batches of one example."""
    sampler, one = adambs.BanditSampler(20, 4), adambs.BanditSampler(20, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(20):
            sampler.update(sampler.draw().number, np.ones(4))
            one.update(one.draw().number, [float(k)])
    assert not caught


def test_most_scores_above_the_bound_of_the_rule_are_told_once():
    sampler = adambs.BanditSampler(100, 5, rule=adambs.Exp3(L=1.0))

    def go_on():
        for _ in range(120):
            draw = sampler.draw()
            assert draw.weights.numel() == 5
            sampler.update(draw, np.arange(2.0, 7))

    with pytest.warns(RuntimeWarning, match=r"250 of the first 250 scores were above the bound") as caught:
        go_on()
    assert len(caught) == 1


def test_an_epoch_that_was_left_early_is_no_mistake():
    sampler = adambs.BanditSampler(len(X), 5)
    loader = adambs.BanditLoader(TensorDataset(X, Y), sampler)
    for _ in loader:
        break
    assert loader.sampler.epochs.current.finished


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.5])
def test_a_bad_score_names_the_example_of_the_data_set(bad):
    sampler = adambs.BanditSampler(1000, 4, seed=2)
    draw = sampler.draw()
    scores = [1.0, 2.0, bad, 1.0]
    index = draw.indices[2].item()
    with pytest.raises(
        ValueError, match=rf"scores\[2\] is {bad} \(draw 0, example {index} of the data set\)"
    ):
        sampler.update(draw, scores)


def test_no_hint_averages_over_padding():
    draw = adambs.BanditSampler(10, 4).draw()
    with pytest.raises(ValueError, match=r"losses.flatten\(1\).sum\(1\) / T with a constant T") as caught:
        draw.mean(torch.ones(4, 7))
    assert ".mean(" not in str(caught.value)
