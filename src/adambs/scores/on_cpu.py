"""The closed forms of `output.py` for plain tensors on the CPU: one compiled loop each.

A batch is small, so that what a score costs there is not arithmetic but the dispatch of a dozen torch
operations, at one to four microseconds each. Sums are float64, and squares that could still underflow are
taken in larger units; but where logits of float32 are moderate, float32 has room for all of it.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.compiler import is_compiling

from adambs._jit import carray, kernel, pointer, reordering_kernel
from adambs._types import Floats

_functorch_is_active = torch._C._are_functorch_transforms_active

_FLOATS = (torch.float32, torch.float64)  # what the loops are compiled for

# From so many logits on torch's softmax uses several threads, and is faster than a loop on one.
_MANY = 32768

# So many numbers stay in the processor's first cache.
_NEAR = 1024

_THIRTY = np.float32(30.0).view(np.int32)

_TINY = float(np.finfo(np.float64).tiny)


def readable(*tensors: Tensor) -> bool:
    """Whether the tensors' values may be read here, at once and without a wait.

    Not on another device, not of a tensor subclass (which may hold its values anywhere), not while
    torch.compile or a transform of torch.func is tracing.
    """
    return not (is_compiling() or _functorch_is_active()) and all(
        type(t) in (Tensor, nn.Parameter) and t.is_cpu for t in tensors
    )


def usual(logits: Tensor, target: Tensor) -> bool:
    """Whether these are (K, C) logits and K classes as they nearly always come.

    Asked before anything else. Within a training step each question takes a third of a microsecond, so there
    are as few as will do.
    """
    return (
        type(logits) is Tensor
        and type(target) is Tensor
        and logits.dtype in _FLOATS
        and target.dtype is torch.int64
        and logits.is_cpu
        and target.is_cpu
        and logits.dim() == 2
        and target.shape == logits.shape[:1]
        and logits.is_contiguous()
        and target.is_contiguous()
        and not (_functorch_is_active() or is_compiling() or logits.is_neg())
    )


def one_class_norms(z: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return the norms of softmax(z_k) - e_y, 0 where y is ignored. O(K C).

    Args:
        z: (K, C) logits, float32 or float64, contiguous.
        target: (K,) class indices, int64, contiguous.
        ignore_index: The class whose examples have no loss.
    """
    K, C = z.shape
    norms = z.new_empty(K)  # beside z, whatever the user's default device is
    if K * C > _MANY:
        p = z.detach().softmax(1)
        wrong = _one_class(p.numpy(), target.numpy(), ignore_index, norms.numpy())
    else:
        at, double, classes = z.data_ptr(), z.dtype is torch.float64, target.data_ptr()
        wrong = _one_class_of_logits(at, double, classes, K, C, ignore_index, norms.data_ptr())
    if wrong >= 0:
        check_classes(target, ignore_index, C)
    return norms


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


@reordering_kernel
def _one_class_of_logits(z: int, double: bool, y: int, K: int, C: int, ignored: int, norms: int) -> int:
    """:func:`_one_class` from the addresses of logits, classes and norms.

    p_c = e_c / (the sum of all e), e_c = exp(z_c - max z). Some rows at a time, as many as the processor has
    near at hand, and each loop over all of their entries, which it takes several at a time.
    """
    if not double and _all_moderate(carray(pointer(z), (K * C,), np.float32)):
        return _one_class_of_moderate(z, y, K, C, ignored, norms)
    rows = max(1, min(_NEAR // C, K))
    x, e = np.empty(rows * C), np.empty(rows * C)
    classes = carray(pointer(y), (K,), np.int64)
    for first in range(0, K, rows):
        count = min(rows, K - first)
        if double:
            _below_the_largest(carray(pointer(z), (K, C), np.float64), first, count, x)
        else:
            _below_the_largest(carray(pointer(z), (K, C), np.float32), first, count, x)
        _exponentials(x, e, count * C)
        for k in range(count):
            label = classes[first + k]
            norm = 0.0
            if label != ignored:
                if not 0 <= label < C:
                    return first + k
                norm = _without(e, k * C, C, label)
            if double:
                carray(pointer(norms), (K,), np.float64)[first + k] = norm
            else:
                carray(pointer(norms), (K,), np.float32)[first + k] = norm
    return -1


@reordering_kernel
def _all_moderate(z: NDArray[Any]) -> bool:
    """Whether all |z| <= 30: so that (C exp(z))^2 has room in float32, and exp(-z)^2. NaN is not."""
    bits, largest = (
        z.view(np.int32),
        np.int32(0),
    )  # without their signs, floats are in the order of their bits
    for t in range(len(z)):
        largest = max(largest, bits[t] & np.int32(0x7FFFFFFF))
    return bool(largest <= _THIRTY)


@reordering_kernel
def _one_class_of_moderate(z: int, y: int, K: int, C: int, ignored: int, norms: int) -> int:
    """:func:`_one_class_of_logits` of float32 in float32, without a largest logit to subtract.

    exp as in :func:`_exponentials`, by its series to the seventh power, whose rest is below 1e-8.
    """
    logits, classes = carray(pointer(z), (K * C,), np.float32), carray(pointer(y), (K,), np.int64)
    found = carray(pointer(norms), (K,), np.float32)
    e = np.empty(K * C, np.float32)
    bits = e.view(np.int32)
    for t in range(K * C):
        v = logits[t]
        k = (v * np.float32(1.4426950408889634) + np.float32(12582912.0)) - np.float32(12582912.0)
        r = (v - k * np.float32(0.693359375)) - k * np.float32(-2.12194440e-4)
        s = np.float32(1.0 / 5040.0)
        s = s * r + np.float32(1.0 / 720.0)
        s = s * r + np.float32(1.0 / 120.0)
        s = s * r + np.float32(1.0 / 24.0)
        s = s * r + np.float32(1.0 / 6.0)
        s = s * r + np.float32(0.5)
        s = s * r + np.float32(1.0)
        s = s * r + np.float32(1.0)
        e[t] = s
        bits[t] += np.int32(k) << np.int32(23)
    own, others, squares = np.empty(K, np.float32), np.empty(K, np.float32), np.empty(K, np.float32)
    for i in range(K):
        label = classes[i]
        if label == ignored:
            own[i] = 1.0
            continue
        if not 0 <= label < C:
            return i
        own[i] = e[i * C + label]
        e[i * C + label] = 0.0
    for i in range(K):
        total, total_of_squares = np.float32(0.0), np.float32(0.0)
        for c in range(C):
            x = e[i * C + c]
            total += x
            total_of_squares += x * x
        others[i], squares[i] = total, total_of_squares
    for i in range(K):  # a loop of its own, for several examples at once
        norm = np.sqrt(others[i] * others[i] + squares[i]) / (others[i] + own[i])
        found[i] = norm if classes[i] != ignored else 0.0
    return -1


@reordering_kernel
def _below_the_largest(z: NDArray[Any], first: int, count: int, x: Floats) -> None:
    """z_c - max z of some rows, one after the other."""
    C = z.shape[1]
    for k in range(count):
        a = b = c = d = z[first + k, 0]  # four at once: one alone would wait for its own last comparison
        fours = C - C % 4
        for t in range(0, fours, 4):
            a, b = max(a, z[first + k, t]), max(b, z[first + k, t + 1])
            c, d = max(c, z[first + k, t + 2]), max(d, z[first + k, t + 3])
        for t in range(fours, C):
            a = max(a, z[first + k, t])
        largest = np.float64(max(max(a, b), max(c, d)))
        for t in range(C):
            x[k * C + t] = np.float64(z[first + k, t]) - largest


@reordering_kernel
def _exponentials(x: Floats, e: Floats, count: int) -> None:
    """e = exp(x) for x <= 0, to the last bit or two; 0 below -708, NaN for NaN. Overwrites x.

    exp(x) = 2^k exp(r) with whole k and |r| <= log(2) / 2; exp(r) by its series to the twelfth power, whose
    rest is below 2e-16; times 2^k by adding k to the exponent's bits. Adding 1.5 x 2^52 rounds to whole
    numbers and leaves them in the lowest bits. Unlike a call of ``exp``, this is done for several x at once.
    """
    for t in range(count):
        v = x[t]
        shifted = v * 1.4426950408889634 + 6755399441055744.0
        k = shifted - 6755399441055744.0
        r = (v - k * 0.693147180369123816490) - k * 1.90821492927058770002e-10
        s = 1.0 / 479001600.0
        s = s * r + 1.0 / 39916800.0
        s = s * r + 1.0 / 3628800.0
        s = s * r + 1.0 / 362880.0
        s = s * r + 1.0 / 40320.0
        s = s * r + 1.0 / 5040.0
        s = s * r + 1.0 / 720.0
        s = s * r + 1.0 / 120.0
        s = s * r + 1.0 / 24.0
        s = s * r + 1.0 / 6.0
        s = s * r + 0.5
        s = s * r + 1.0
        s = s * r + 1.0
        in_range = v >= -708.0
        e[t] = s if in_range else (0.0 if v < -708.0 else v)
        x[t] = shifted if in_range else 6755399441055744.0
    bits, powers = e.view(np.int64), x.view(np.int64)
    for t in range(count):
        bits[t] += powers[t] << 52


@reordering_kernel
def _without(e: Floats, start: int, C: int, label: int) -> float:
    """The norm of p - e_y from the C exponentials from ``start`` on."""
    others, squares = 0.0, 0.0
    for c in range(C):
        v = 0.0 if c == label else e[start + c]
        others += v
        squares += v * v
    total = others + e[start + label]
    if not others < 1e-150 * total:
        return float(np.sqrt(others * others + squares) / total)
    squares = 0.0  # logits 345 apart: the squares have underflowed
    for c in range(C):
        v = 0.0 if c == label else 1e200 * e[start + c]
        squares += v * v
    return float(np.sqrt((1e200 * others) ** 2 + squares) / total / 1e200)


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
