"""What several test modules share."""

import io
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import adambs


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    """A state after a trip through a checkpoint file that may hold no code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(a: Any, b: Any) -> bool:
    """Whether two nested states are equal, bit for bit."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    return a == b


def taught(sampler: adambs.BanditSampler, steps: int, seed: int = 0) -> adambs.BanditSampler:
    """The sampler after some steps of random scores, which make p uneven."""
    rng = np.random.default_rng(seed)
    norms = rng.gamma(0.5, 0.5, sampler.n)
    for _ in range(steps):
        draw = sampler.draw()
        assert draw.weights.min() > 0  # asked for, as whoever trains does
        sampler.update(draw, norms[draw.indices.numpy()])
    return sampler


def small_net(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A net of three layers on 6 features and 3 classes, the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def small_data(n: int = 60, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """n points in 6 dimensions with 3 classes, and outliers among them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 6)) * rng.gamma(0.5, 2.0, size=(n, 1))
    return torch.from_numpy(x).float(), torch.from_numpy(rng.integers(0, 3, n))


def weighted_draw(weights: torch.Tensor) -> adambs.Draw:
    """A draw of as many examples as there are weights, with these weights."""
    K = len(weights)
    return adambs.Draw(0, np.arange(K), 1 / weights.double().numpy(), K)


def a_draw(K: int) -> adambs.Draw:
    """A draw with uneven weights between 0.1 and 3.1, from torch's own random stream."""
    return weighted_draw(torch.rand(K, dtype=torch.float64) * 3 + 0.1)


CAP = 1.0
"""The lowest that there is: in a short run some weights are lowered."""


def capped_loop(net: Any, sampler: adambs.BanditSampler, optimizer: Any, accumulate: int = 1) -> None:
    """Three epochs of ``small_data``, without a framework, by draws that do not travel, with the cap."""
    loader = adambs.BanditLoader(torch.utils.data.TensorDataset(*small_data()), sampler)
    for _ in range(3):
        for b, ((x, y), draw) in enumerate(loader):
            logits = net(x)
            losses = nn.functional.cross_entropy(logits, y, reduction="none")
            scores = adambs.scores.cross_entropy(logits, y)
            (draw.mean(losses, scores) / accumulate).backward()
            sampler.update(draw, scores)
            if (b + 1) % accumulate == 0 or b + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()


def capped_alike(found: adambs.BanditSampler, expected: adambs.BanditSampler) -> bool:
    """Whether the cap has lowered weights, and the same in both runs, up to rounding."""
    a, b = found.diagnostics(), expected.diagnostics()
    close = a.capped_share == pytest.approx(b.capped_share, rel=1e-3)
    return close and a.capped_weights == b.capped_weights > 0


def optional(name: str) -> Any:
    """A library that need not be installed. Without it the tests of the module are skipped, and say so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of others
        return pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)


def learned(sampler: adambs.BanditSampler) -> bool:
    """Whether p is far from uniform, and batches were drawn from it."""
    seen, p = sampler.diagnostics(), sampler.probabilities()
    return bool(p.max() > 1.1 * p.min()) and seen.reshuffled < seen.draws


def taken_on_average(shares: Any, K: int) -> Any:
    """How often each of some candidates is among the K chosen: min(1, h share), by bisection for h.

    Where there are not more than K of them, in proportion to their shares.
    """
    if len(shares) <= K:
        return K * shares / shares.sum()
    low, high = 0.0, K / shares.min()
    for _ in range(200):
        h = (low + high) / 2
        low, high = (h, high) if np.minimum(1, h * shares).sum() < K else (low, h)
    return np.minimum(1, high * shares)
