"""The closed forms of `output.py` for plain tensors on the CPU: one compiled loop each.

A batch is small, so that what a score costs there is not arithmetic but the dispatch of a dozen torch
operations, at one to four microseconds each. Sums are float64, and squares that could still underflow are
taken in larger units.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adambs._jit import kernel

_FLOATS = (torch.float32, torch.float64)  # what the loops are compiled for

# Up to so many logits a loop of exponentials takes less time than a call of torch's softmax.
_FEW = 1024

_TINY = float(np.finfo(np.float64).tiny)


def readable(*tensors: Tensor) -> bool:
    """Whether the tensors' values may be read here, at once and without a wait.

    Not on another device, not of a tensor subclass (which may hold its values anywhere), not while
    torch.compile or a transform of torch.func is tracing.
    """
    return _nothing_is_traced() and all(type(t) in (Tensor, nn.Parameter) and t.is_cpu for t in tensors)


def _nothing_is_traced() -> bool:
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def usual(logits: Tensor, target: Tensor) -> bool:
    """Whether these are (K, C) logits and K classes as they nearly always come.

    Asked before anything else, because each question costs about a microsecond in a training step.
    """
    return (
        type(logits) is Tensor
        and type(target) is Tensor
        and logits.is_cpu
        and target.is_cpu
        and logits.dtype in _FLOATS
        and target.dtype is torch.int64
        and len(shape := logits.shape) == 2
        and target.shape == shape[:1]
        and logits.is_contiguous()
        and target.is_contiguous()
        and _nothing_is_traced()
    )


def one_class_norms(z: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return the norms of softmax(z_k) - e_y, 0 where y is ignored. O(K C).

    Args:
        z: (K, C) logits, float32 or float64.
        target: (K,) class indices.
        ignore_index: The class whose examples have no loss.
    """
    y = (target if target.dtype is torch.int64 else target.long()).numpy()
    if z.numel() <= _FEW:
        logits = z.numpy()
        norms = np.empty(len(y), logits.dtype)
        wrong = _one_class_of_logits(logits, y, ignore_index, norms)
    else:
        p = z.softmax(1).numpy()
        norms = np.empty(len(y), p.dtype)
        wrong = _one_class(p, y, ignore_index, norms)
    if wrong >= 0:
        check_classes(target, ignore_index, z.shape[1])
    return torch.from_numpy(norms)


def check_classes(target: Tensor, ignore_index: int, C: int) -> None:
    """Raise if a class, other than the ignored one, is not among the C classes. O(K)."""
    y = _flat(target.long())
    wrong = _first_wrong(y, ignore_index, C)
    if wrong >= 0:
        raise ValueError(f"target holds class {y[wrong]}, logits have {C} classes")


def sigmoid_norms(z: Tensor, y: Tensor) -> Tensor:
    """Return the norms of (1 - y) σ(z) - y σ(-z) over all dimensions but the first. O(numel).

    Args:
        z: (K,) or (K, m) logits, float32 or float64.
        y: Targets of the same shape and dtype.
    """
    logits = _flat(z)
    norms = np.empty(len(z), logits.dtype)
    _sigmoid(logits, _flat(y), norms)
    return torch.from_numpy(norms)


def row_norms(g: Tensor, factor: float) -> Tensor | None:
    """Return factor ‖g_k‖ over all dimensions but the first, None if g's type has no loop. O(numel)."""
    if g.dtype not in _FLOATS:
        return None
    entries = _flat(g)
    norms = np.empty(len(g), entries.dtype)
    _rows(entries, factor, norms)
    return torch.from_numpy(norms)


def _flat(tensor: Tensor) -> NDArray[Any]:
    """View (or copy, if it has gaps) all entries as one row: one type of array to compile for."""
    return tensor.contiguous().numpy().reshape(-1)


@kernel
def _one_class(p: NDArray[Any], y: NDArray[np.int64], ignored: int, norms: NDArray[Any]) -> int:
    """Fill ``norms`` and overwrite p_y; stop at an example whose class does not exist and return it, or -1.

    g_c = p_c but for g_y = p_y - 1, which is minus the sum of the others: taken as such, it does not
    cancel where p_y is nearly 1.
    """
    for k in range(p.shape[0]):
        if y[k] == ignored:
            norms[k] = 0.0
            continue
        if not 0 <= y[k] < p.shape[1]:
            return k
        p[k, y[k]] = 0.0
        total, squares = 0.0, 0.0
        for c in range(p.shape[1]):
            v = np.float64(p[k, c])
            total += v
            squares += v * v
        scale = 1.0
        if total < 1e-150:  # float64 logits, 345 apart: the squares have underflowed
            scale, squares = 1e200, 0.0
            for c in range(p.shape[1]):
                squares += (scale * p[k, c]) ** 2
        norms[k] = np.sqrt((scale * total) ** 2 + squares) / scale
    return -1


@kernel
def _one_class_of_logits(z: NDArray[Any], y: NDArray[np.int64], ignored: int, norms: NDArray[Any]) -> int:
    """:func:`_one_class` from the logits: p_c = e_c / (the sum of all e), e_c = exp(z_c - max z)."""
    e = np.empty(z.shape[1])
    for k in range(z.shape[0]):
        if y[k] == ignored:
            norms[k] = 0.0
            continue
        if not 0 <= y[k] < z.shape[1]:
            return k
        largest = np.float64(z[k, 0])
        for c in range(1, z.shape[1]):
            largest = max(largest, np.float64(z[k, c]))
        total = 0.0
        for c in range(z.shape[1]):
            e[c] = np.exp(np.float64(z[k, c]) - largest)
            total += e[c]
        e[y[k]] = 0.0
        others, squares = 0.0, 0.0
        for c in range(z.shape[1]):
            v = e[c] / total
            others += v
            squares += v * v
        scale = 1.0
        if others < 1e-150:  # logits 345 apart: the squares have underflowed
            scale, squares = 1e200, 0.0
            for c in range(z.shape[1]):
                squares += (scale * (e[c] / total)) ** 2
        norms[k] = np.sqrt((scale * others) ** 2 + squares) / scale
    return -1


@kernel
def _first_wrong(y: NDArray[np.int64], ignored: int, C: int) -> int:
    for k in range(y.size):
        if y[k] != ignored and not 0 <= y[k] < C:
            return k
    return -1


@kernel
def _sigmoid(z: NDArray[Any], y: NDArray[Any], norms: NDArray[Any]) -> None:
    """σ(z) and σ(-z) are e / (1 + e) and 1 / (1 + e) with e = exp(-|z|): neither cancels."""
    K = norms.size
    m = z.size // max(K, 1)
    g = np.empty(m)
    for k in range(K):
        for c in range(m):
            t = k * m + c
            e = np.exp(-abs(np.float64(z[t])))
            low, high = e / (1.0 + e), 1.0 / (1.0 + e)
            positive, negative = (high, low) if z[t] > 0 else (low, high)  # σ(z), σ(-z)
            g[c] = (1.0 - y[t]) * positive - y[t] * negative
        norms[k] = _norm(g)


@kernel
def _rows(g: NDArray[Any], factor: float, norms: NDArray[Any]) -> None:
    K = norms.size
    m = g.size // max(K, 1)
    for k in range(K):
        norms[k] = factor * _norm(g[k * m : (k + 1) * m])


@kernel
def _norm(g: NDArray[Any]) -> float:
    """‖g‖, NaN if anything in g is. Four sums at once: one alone would wait for its own last addition."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    fours = g.size - g.size % 4
    for t in range(0, fours, 4):
        a += np.float64(g[t]) ** 2
        b += np.float64(g[t + 1]) ** 2
        c += np.float64(g[t + 2]) ** 2
        d += np.float64(g[t + 3]) ** 2
    for t in range(fours, g.size):
        a += np.float64(g[t]) ** 2
    squares = (a + b) + (c + d)
    if 1e-280 < squares < 1e280:
        return float(np.sqrt(squares))
    # Zero, NaN, or numbers so small or large that float64 has no room for their squares.
    largest = 0.0
    for t in range(g.size):
        largest = max(largest, abs(g[t]))
    unit = max(largest, _TINY)
    squares = 0.0
    for t in range(g.size):
        squares += (g[t] / unit) ** 2
    return float(unit * np.sqrt(squares))
