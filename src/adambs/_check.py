"""Checks of arguments. Each error names the argument, the value and the way out."""

import math
import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adambs._jit import kernel


def whole(name: str, value: Any, *, least: int) -> int:
    """``value`` as an int of at least ``least``."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r} ({type(value).__name__})") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}")
    return number


def positive(name: str, value: Any) -> float:
    """``value`` as a positive, finite float."""
    number = _real(name, value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be positive and finite, not {number}")
    return number


def at_least(name: str, value: Any, least: float) -> float:
    """``value`` as a finite float of at least ``least``."""
    number = _real(name, value)
    if not (math.isfinite(number) and number >= least):
        raise ValueError(f"{name} must be finite and at least {least:g}, not {number}")
    return number


def fraction(name: str, value: Any, hint: str) -> float:
    """``value`` as a float strictly between 0 and 1."""
    number = _real(name, value)
    if not 0 < number < 1:
        raise ValueError(f"{name} must lie strictly between 0 and 1, not {number}: {hint}")
    return number


def unit_interval(name: str, value: Any) -> float:
    """``value`` as a float in [0, 1]."""
    number = _real(name, value)
    if not 0 <= number <= 1:
        raise ValueError(f"{name} must lie between 0 and 1, not {number}")
    return number


def share(name: str, value: Any) -> float:
    """``value`` as a float in [0, 1): a share that may be nothing but not all."""
    number = _real(name, value)
    if not 0 <= number < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, not {number}")
    return number


def _real(name: str, value: Any) -> float:
    if isinstance(value, bool | str):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, not {value!r} ({type(value).__name__})") from None


def vector(name: str, values: Any, length: int) -> NDArray[np.float64]:
    """``values`` (a tensor on any real device, an array, a list) as ``length`` float64 on the CPU.

    Finite and not negative. O(length); shares memory with ``values`` where it can, so only read it.
    """
    if hasattr(values, "detach"):  # a torch.Tensor
        if values.device.type == "meta":
            raise ValueError(f"{name} is on the meta device and has no values: give a real tensor")
        values = values.detach().cpu()
        if values.dtype.is_complex:
            raise TypeError(f"{name} must be real numbers, not {values.dtype}")
        values = values.double().numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise TypeError(f"{name} must be {length} numbers, not {values!r}") from None
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{name} must be {length} numbers, not {values!r}")
    if array.shape != (length,):
        raise ValueError(f"{name} must have shape ({length},), one number an example, not {array.shape}")
    array = np.ascontiguousarray(array, dtype=np.float64)
    bad = _first_bad(array)
    if bad >= 0:
        raise ValueError(f"{name}[{bad}] is {array[bad]}: every entry must be finite and not negative")
    return array


@kernel
def _first_bad(array: NDArray[np.float64]) -> int:
    for k in range(array.shape[0]):
        if not (0.0 <= array[k] < np.inf):
            return k
    return -1
