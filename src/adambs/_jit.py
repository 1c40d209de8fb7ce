"""One way to compile a kernel: once, cached on disk, without reordering floating-point sums."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile ``function`` in nopython mode on first use and keep the machine code on disk.

    No fastmath: the order of every sum is the one that is written, so a tree that is rebuilt from its
    leaves is bit for bit the tree that was updated step by step.

    The cache notices a change of the function's own file only, so a kernel calls no kernel of another.
    """
    return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))
