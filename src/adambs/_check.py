"""Checks of arguments and of saved states. Each error names what is wrong, its value and the way out.

A wrong argument raises ``TypeError`` or ``ValueError``; a wrong or missing entry of a saved state always
raises ``ValueError``, so that a loader has one error to expect.
"""

import math
import operator
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adambs._jit import carray, kernel, pointer

# The smallest float of full precision. Dividing by less may overflow.
SMALLEST_NORMAL = sys.float_info.min

_PLAIN = (torch.float32, torch.float64)
_DTYPES = {
    "float64": (torch.float64, "numbers (float64)"),
    "float32": (torch.float32, "numbers (float32)"),
    "int64": (torch.int64, "whole numbers (int64)"),
    "int32": (torch.int32, "whole numbers (int32)"),
    "uint8": (torch.uint8, "bytes (uint8)"),
    "bool": (torch.bool, "flags (bool)"),
}


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


def instance(name: str, value: Any, kind: type, hint: str = "") -> None:
    """``value`` is None or a ``kind``."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}{hint and ' '}{hint}, not {value!r}")


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
    """``values`` (a tensor on any real device, an array, a list) as ``length`` new float64 on the CPU.

    Finite and not negative, or an error. O(length).
    """
    array, bad = copied_vector(name, values, length)
    if bad >= 0:
        raise ValueError(f"{name}[{bad}] is {array[bad]}: every entry must be finite and not negative")
    return array


def copied_vector(
    name: str, values: Any, length: int, into: NDArray[np.float64] | None = None
) -> tuple[NDArray[np.float64], int]:
    """As :func:`vector`, and the first position of an entry that is not finite or is negative, or -1.

    ``into`` is an array of this length to fill in the place of a new one.
    """
    copy = np.empty(length) if into is None else into
    if isinstance(values, torch.Tensor):
        usual = type(values) is torch.Tensor and values.is_cpu and values.dtype in _PLAIN
        if usual and values.shape == (length,) and values.is_contiguous() and not values.is_neg():
            return copy, _copy_from(values.data_ptr(), values.dtype is torch.float64, copy)
        if values.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values: give a real tensor")
        if values.dtype.is_complex:
            raise TypeError(f"{name} must be real numbers, not {values.dtype}")
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy(force=True)
    elif type(values) is np.ndarray and values.dtype == np.float64 and values.shape == (length,):
        return copy, _copy(values, copy)
    try:
        array = np.asarray(values)
    except ValueError:
        raise TypeError(f"{name} must be {length} numbers, not {values!r}") from None
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{name} must be {length} numbers, not {values!r}")
    if array.shape != (length,):
        raise ValueError(f"{name} must have shape ({length},), one number an example, not {array.shape}")
    return copy, _copy(array.astype(np.float64), copy)


def positive_somewhere(name: str, values: Any, length: int) -> NDArray[np.float64]:
    """A :func:`vector` that is not all zero."""
    array = vector(name, values, length)
    if not array.any():
        raise ValueError(f"{name} are all zero: give some example a positive weight")
    return array


def indices(name: str, values: Any, n: int) -> NDArray[np.int64]:
    """``values`` as a new array of examples 0 .. n-1."""
    array = np.asarray(values)
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise TypeError(f"{name} must be a list of whole numbers, not {values!r}")
    array = array.astype(np.int64)
    outside = array[(array < 0) | (array >= n)]
    if outside.size:
        raise ValueError(f"{name} must lie in 0..{n - 1}, not {outside[0]}")
    return array


@kernel
def _copy(array: NDArray[Any], copy: NDArray[np.float64]) -> int:
    """Fill ``copy``; the first position of an entry that is not finite or is negative, or -1."""
    bad = -1
    for k in range(array.shape[0]):
        copy[k] = array[k]
        if bad < 0 and not (0.0 <= copy[k] < np.inf):
            bad = k
    return bad


@kernel
def _copy_from(at: int, double: bool, copy: NDArray[np.float64]) -> int:
    """:func:`_copy` of float64 or float32 at this address."""
    if double:
        return _copy(carray(pointer(at), copy.shape, np.float64), copy)
    return _copy(carray(pointer(at), copy.shape, np.float32), copy)


def losses(losses: Any, K: int) -> None:
    """One floating-point loss for each of K examples, or an error that says how to get there."""
    if not isinstance(losses, torch.Tensor):
        raise TypeError(f"losses must be a tensor, not {type(losses).__name__}")
    if losses.shape != (K,):
        reason = (
            'it looks reduced already; compute it with reduction="none"'
            if losses.ndim == 0
            else "add each example's losses up first, e.g. losses.flatten(1).sum(1) / T with a constant T "
            "(a mean over padding would change with the longest row of the batch)"
        )
        raise ValueError(
            f"losses must have shape ({K},), one loss for each drawn example, not {tuple(losses.shape)}: "
            f"{reason}"
        )
    if not losses.is_floating_point():
        raise TypeError(f"losses must be floating point, not {losses.dtype}")


# ------------------------------------------------------------------------------------------------
# Entries of a saved state.
# ------------------------------------------------------------------------------------------------


def entry(state: Any, name: str, path: str = "state") -> Any:
    """``state[name]``, whatever it is. ``path`` is what messages call the mapping."""
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} must be a dict from state_dict(), not {type(state).__name__}")
    if name not in state:
        raise ValueError(f"{path} has no {name!r}: it was damaged or saved by something else")
    return state[name]


def mapping(state: Any, name: str, path: str = "state") -> Mapping[str, Any]:
    """``state[name]``, a state within a state."""
    value = entry(state, name, path)
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}[{name!r}] must be a dict, not {type(value).__name__}")
    return value


def number(
    state: Any,
    name: str,
    least: float = 0.0,
    most: float = sys.float_info.max,
    *,
    normal: bool = False,
    path: str = "state",
) -> float:
    """``state[name]`` as a float in [``least``, ``most``], finite unless a bound is infinite.

    ``normal`` refuses subnormal numbers as well; zero is fine if the bounds allow it.
    """
    value = entry(state, name, path)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{path}[{name!r}] must be a number, not {_described(value)}")
    try:
        converted = float(value)
    except OverflowError:
        converted = math.inf
    if not least <= converted <= most or (normal and 0 < abs(converted) < SMALLEST_NORMAL):
        raise ValueError(
            f"{path}[{name!r}] must be a number {_range(least, most, normal)}, not {converted!r}"
        )
    return converted


def count(state: Any, name: str, least: int = 0, most: int = 2**53, *, path: str = "state") -> int:
    """``state[name]`` as a whole number in ``least`` ... ``most``: no run counts beyond 2^53."""
    value = entry(state, name, path)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(
            f"{path}[{name!r}] must be a whole number from {least} to {most}, not {_described(value)}"
        )
    return value


def numbers(
    state: Any, name: str, *, length: int | None = None, most: int = 2**63 - 1, path: str = "state"
) -> list[float]:
    """``state[name]`` as a list of ``length`` numbers (of at most ``most``), finite and not negative."""
    values = entry(state, name, path)
    kinds = (int, float)
    if not isinstance(values, list) or not all(type(v) in kinds and 0 <= v < math.inf for v in values):
        raise ValueError(f"{path}[{name!r}] must be a list of numbers, finite and not negative")
    if len(values) > most or (length is not None and len(values) != length):
        raise ValueError(
            f"{path}[{name!r}] must hold {most if length is None else length} numbers, not {len(values)}"
        )
    return [float(value) for value in values]


def flag(state: Any, name: str, *, path: str = "state") -> bool:
    """``state[name]``, which is True or False."""
    value = entry(state, name, path)
    if not isinstance(value, bool):
        raise ValueError(f"{path}[{name!r}] must be True or False, not {_described(value)}")
    return value


def array(
    state: Any,
    name: str,
    shape: tuple[int, ...],
    kind: str = "float64",
    least: float | None = None,
    most: float | None = None,
    *,
    normal: bool = False,
    path: str = "state",
) -> NDArray[Any]:
    """``state[name]``, a tensor of this shape and ``kind`` of entries, as a contiguous array on the CPU.

    It may share memory with the tensor: read it, or copy it. ``kind`` is "float64", "float32", "int64",
    "int32", "uint8" or "bool". Those of float64 lie in [``least``, ``most``], which are 0 and the largest
    float if not given; whole numbers only if bounds are given. ``normal`` refuses subnormal floats as well.
    """
    value = entry(state, name, path)
    dtype, words = _DTYPES[kind]
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type == "meta":
        raise ValueError(f"{path}[{name!r}] must be a tensor, not {_described(value)}")
    if value.dtype != dtype or tuple(value.shape) != shape:
        raise ValueError(
            f"{path}[{name!r}] must be a tensor of shape {shape} of {words}, "
            f"not of shape {tuple(value.shape)} and {value.dtype}"
        )
    found: NDArray[Any] = np.ascontiguousarray(value.detach().cpu().numpy())
    if kind == "float64":
        low = 0.0 if least is None else float(least)
        high = sys.float_info.max if most is None else float(most)
        smallest = SMALLEST_NORMAL if normal else 0.0
        bad = _first_outside(found.reshape(-1), low, high, smallest)
        if bad >= 0:
            raise ValueError(
                f"{path}[{name!r}] must hold numbers {_range(low, high, normal)}, not {found.flat[bad]}"
            )
    elif least is not None or most is not None:
        low, high = (-math.inf if least is None else least), (math.inf if most is None else most)
        if found.size and not (low <= found.min() and found.max() <= high):
            raise ValueError(
                f"{path}[{name!r}] must hold numbers {_range(low, high, False)}, "
                f"not {found.min()} to {found.max()}"
            )
    return found


def _range(least: float, most: float, normal: bool) -> str:
    if most == sys.float_info.max:
        words = "that is finite" if least == -most else f"of at least {least:g}, finite"
    else:
        words = f"from {least:g} to {most:g}"
    return f"{words} and not subnormal" if normal else words


def _described(value: Any) -> str:
    """The type of ``value`` and, if it is short, the value itself."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}, {value.layout}, on {value.device}"
    words = repr(value)
    return f"{words} ({type(value).__name__})" if len(words) <= 60 else type(value).__name__


@kernel
def _first_outside(values: NDArray[np.float64], least: float, most: float, smallest: float) -> int:
    """The first position of a value that is not in [least, most], or is between zero and ``smallest``."""
    for k in range(values.shape[0]):
        if not least <= values[k] <= most or 0.0 < abs(values[k]) < smallest:
            return k
    return -1
