"""The noise scale of a batch from its parts, against gradients whose signal and noise are known."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import small_data, small_net

import adambs
from adambs.probing.measures import of_a_batch


@pytest.mark.parametrize(("K", "parts"), [(8, 2), (8, 4), (9, 3)])
def test_signal_and_noise_are_those_of_the_data(K, parts):
    """The gradient of example j of a linear loss is its vector, so both are known exactly."""
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(50, 30)) + 0.5
    signal = np.square(vectors.mean(0)).sum()
    noise = (np.square(vectors).sum(1).mean() - signal) / K
    theta, found = torch.zeros(30, dtype=torch.float64, requires_grad=True), []
    for _ in range(3000):
        losses = torch.from_numpy(vectors[rng.integers(0, 50, K)]) @ theta
        each = adambs.noise_scale(losses, [theta], parts)
        found.append((each.signal, each.noise))
    errors = np.std(found, axis=0, ddof=1) / math.sqrt(len(found))
    z = (np.mean(found, axis=0) - (signal, noise)) / errors
    assert abs(z).max() < 3.5


def test_weights_of_a_draw_are_part_of_it():
    """With the best p of a linear loss with parallel gradients, all noise is gone."""
    sizes = np.random.default_rng(0).gamma(1.0, 1.0, 60) + 0.1
    sampler = adambs.BanditSampler(60, 6, rule=adambs.Tracking(uniform=1e-9), initial_weights=sizes)
    theta = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    draw = sampler.draw()
    losses = torch.from_numpy(sizes)[draw.indices] * theta.sum()
    weighted = adambs.noise_scale(losses * draw.weights, [theta])
    assert weighted.ratio < 1e-9
    assert weighted.signal == pytest.approx(4 * sizes.mean() ** 2)
    assert adambs.noise_scale(losses, [theta]).ratio > 1e-3


def test_the_step_goes_on_as_if_nothing_had_been_asked():
    x, y = small_data()
    gradients = []
    for asked in (False, True):
        net = small_net()
        losses = F.cross_entropy(net(x), y, reduction="none")
        if asked:
            found = adambs.noise_scale(losses, net.parameters())
            assert all(parameter.grad is None for parameter in net.parameters())
            whole = found + adambs.noise_scale(losses, net.parameters())
            assert whole.ratio == pytest.approx(found.ratio)
        losses.mean().backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("ratio", [0.01, 1.0, 30.0])
def test_what_a_reduction_is_worth_is_the_probes(ratio):
    scale = adambs.NoiseScale(2.0, 2.0 * ratio)
    for reduction in (0.5, 1.0, 1.3, 8.0):
        assert scale.worth(reduction) == pytest.approx(of_a_batch(reduction, ratio))
        assert scale.worth(reduction) <= scale.most
    assert ("not the limit" in str(scale)) == (ratio < 0.5)


def test_a_signal_that_drowns():
    drowned = adambs.NoiseScale(-0.1, 3.0)
    assert drowned.ratio == drowned.most == math.inf
    assert drowned.worth(1.7) == 1.7


def test_what_cannot_be_split_is_refused():
    theta = torch.zeros(2, requires_grad=True)
    with pytest.raises(ValueError, match="losses has 2 examples, too few for 3 parts"):
        adambs.noise_scale(theta * 2, [theta], 3)
    with pytest.raises(ValueError, match="parts must be"):
        adambs.noise_scale(theta * 2, [theta], 1)
    with pytest.raises((TypeError, ValueError)):
        adambs.noise_scale((theta * 2).mean(), [theta])
