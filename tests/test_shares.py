"""What each loss of a batch is multiplied by in its mean."""

import math

import numpy as np
import pytest
import torch

import adambs
from adambs.shares import all_one, capped_shares, equal_shares, fill_capped_shares


def even_draw(K):
    return adambs.Draw(0, np.arange(K), np.ones(K), K)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_batch_with_weights_of_one_has_the_gradient_of_a_plain_mean(dtype):
    """To the bit, for every K."""
    for K in [*range(1, 300), 1000, 4095, 50_000]:
        losses = torch.linspace(0.0, 3.0, K).to(dtype).requires_grad_()
        ours, plain = (
            even_draw(K).mean(losses),
            losses.float().mean() if dtype.itemsize == 2 else losses.mean(),
        )
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=0.0)
        assert ours.dtype == plain.dtype
        assert torch.equal(*(torch.autograd.grad(mean, losses)[0] for mean in (ours, plain)))


def test_shares_that_were_first_wanted_in_inference_mode_can_be_trained_with():
    equal_shares.cache_clear()
    losses = torch.ones(7, requires_grad=True)
    with torch.inference_mode():
        assert even_draw(7).mean(torch.ones(7)).item() == pytest.approx(1.0)
    even_draw(7).mean(losses).backward()
    assert torch.equal(losses.grad, torch.full((7,), 1 / 7))


def test_equal_shares_stay_as_they_are():
    losses = torch.rand(5, requires_grad=True)
    mean = even_draw(5).mean(losses)
    gradient = torch.autograd.grad(mean, losses, create_graph=True)[0]
    gradient.data.mul_(100.0)
    assert torch.equal(equal_shares(5), torch.full((5,), 0.2))


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.0], True),
        ([1.0, 1.0], True),
        ([1.0, 1.0 + 1e-15], False),
        ([0.5, 1.0], False),
        ([math.nan], False),
    ],
)
def test_all_one(ratios, expected):
    assert all_one(np.array(ratios)) == expected


@pytest.mark.parametrize("limit", [math.inf, 2.0, 1e-3])
def test_the_compiled_loop_fills_what_torchs_operations_give(limit):
    rng = np.random.default_rng(0)
    ratios, scores = rng.gamma(1.0, 1.0, 50), torch.from_numpy(rng.gamma(0.3, 1.0, 50)).float()
    shares, unit = torch.empty(50), 1 / 50
    fill_capped_shares(ratios, scores.data_ptr(), limit * unit, unit, shares.data_ptr())
    by_torch = capped_shares(torch.from_numpy(unit / ratios).float(), scores, limit * unit, unit)
    torch.testing.assert_close(shares, by_torch, rtol=1e-6, atol=0.0)
    fill_capped_shares(ratios, 0, limit * unit, unit, shares.data_ptr())
    torch.testing.assert_close(shares, torch.from_numpy(unit / ratios).float(), rtol=1e-6, atol=0.0)
