"""One way to compile a kernel: once, cached on disk, without reordering floating-point sums."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba import carray as carray  # type: ignore[attr-defined]  # beside pointer, for kernels
from numba.core import types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile ``function`` in nopython mode on first use and keep the machine code on disk.

    No fastmath: the order of every sum is the one that is written, so a tree that is rebuilt from its
    leaves is bit for bit the tree that was updated step by step.

    The cache notices a change of the function's own file only, so a kernel calls no kernel of another.
    """
    return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy")(function))


def reordering_kernel(function: F) -> F:
    """As :func:`kernel`, but sums may be taken several at a time, as the processor likes it.

    The same numbers give the same sum again, on the same processor. NaN and infinity are what they are.
    """
    sums = {"reassoc", "contract"}
    return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=sums)(function))


def _pointer(typing_context: Any, address: Any) -> Any:
    """For kernels: memory at ``tensor.data_ptr()``, for ``numba.carray``.

    A tensor's address costs a tenth of what an array of it does. The caller keeps the tensor alive, and has
    made sure that it is contiguous, on the CPU and of the type that is read.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), code


pointer: Any = intrinsic(_pointer)  # of no type that a checker could follow
