"""Shares: what each loss of a batch is multiplied by in its mean, weight / K."""

import functools
from typing import Any

import numpy as np
import torch

from adambs._jit import carray, kernel, pointer
from adambs._types import Floats


@kernel
def all_one(ratios: Floats) -> bool:
    """Whether all weights 1 / r are one."""
    even = True
    for k in range(len(ratios)):
        even &= ratios[k] == 1.0
    return even


def capped_shares(shares: torch.Tensor, scores: Any, limit: Any, one: Any) -> torch.Tensor:
    """Weights in units of ``one``, lowered: weight x score at most ``limit`` in the same units, and no weight
    below one. ``limit`` and ``one`` are numbers or tensors of the shares' shape. Nothing waits for a device.
    """
    s = torch.as_tensor(scores).detach().to(shares)
    s = s.clamp(max=torch.finfo(s.dtype).max)  # or an infinite limit over an infinite score would be NaN
    if s.shape != shares.shape:
        raise ValueError(
            f"scores must have shape {tuple(shares.shape)}, one number an example, not {tuple(s.shape)}"
        )
    return torch.minimum(shares, (limit / s).clamp(min=one))


def usual(values: Any, K: int) -> bool:
    """Whether these are K numbers as they nearly always come, whose memory compiled code may read."""
    return (
        type(values) is torch.Tensor
        and values.dtype is torch.float32
        and values.is_cpu
        and values.shape == (K,)
        and values.is_contiguous()
        and not torch._C._are_functorch_transforms_active()
    )


def plain_mean(losses: torch.Tensor) -> torch.Tensor:
    """The mean, with the gradient of ``losses.mean()`` to the bit; in half its time if they are usual."""
    K = losses.numel()
    return torch.dot(losses, equal_shares(K)) if usual(losses, K) else losses.mean()


@functools.lru_cache(maxsize=16)
def equal_shares(K: int) -> torch.Tensor:
    """1 / K for each of K examples, float32 on the CPU. To be read, not to be changed."""
    with torch.inference_mode(False):  # a tensor that is made in that mode can never be trained with
        return torch.from_numpy(np.full(K, 1 / K, np.float32))


@kernel
def fill_capped_shares(ratios: Floats, scores_at: int, most: float, unit: float, shares_at: int) -> None:
    """:func:`capped_shares` of weights 1 / r, from and to addresses of float32; these weights as they are if
    the address of the scores is zero. A score that is NaN makes its share NaN, as there."""
    K = len(ratios)
    shares = carray(pointer(shares_at), (K,), np.float32)
    if scores_at == 0:
        for k in range(K):
            shares[k] = unit / ratios[k]
        return
    scores = carray(pointer(scores_at), (K,), np.float32)
    limit, one = np.float32(most), np.float32(unit)
    for k in range(K):
        share, highest = np.float32(unit / ratios[k]), limit / scores[k]
        highest = one if highest < one else highest
        shares[k] = share if highest > share else highest
