"""A clip of the gradient relative to its running norm, in the optimizer's own metric."""

import math
from array import array
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, float32

from adambs import _check
from adambs._jit import carray, pointer, reordering_kernel
from adambs._types import Floats, Indices, State
from adambs.carried import HALF

# The mean runs over so many steps.
_MEMORY = 100

# The least that is added to v: without a gradient there may be no v.
_TINY = float(np.finfo(np.float32).tiny)

# Squares that are added up in float32 before they go into a sum of float64.
_BLOCK = 128


class GradientClip:
    """Shortens a gradient that is more than ``factor`` times as long as gradients have been.

    With m the running mean of the (clipped) norms of the last hundred steps, the gradient is multiplied by
    min(1, factor m / norm). No gradient is clipped before a first norm is known, and one that is not finite
    is left as it is.

    The norm is that of all parameters together, measured as the optimizer measures: where it keeps a running
    mean v of squared gradients, as Adam does, that of g / sqrt(v + eps^2). Adam's step is long where a
    parameter that has had hardly any gradient for a thousand steps gets one; the plain norm does not see it.

    On a device nothing waits for it; on the CPU gradients are touched only if they are too long. What is
    taken away biases the step towards the usual; :attr:`clipped` and :attr:`taken` say how often, how much.
    """

    def __init__(self, factor: float) -> None:
        self.factor = _check.at_least("clip", factor, 1.0)
        # Numbers on the CPU, tensors on a device.
        self._steps: Any = 0  # with a finite gradient
        self._mean: Any = 0.0
        self._clipped: Any = 0
        self._taken: Any = 0.0
        self._all: Any = 0.0
        self._memory = _Memory()

    def __getstate__(self) -> dict[str, Any]:
        """Without addresses, which another process finds anew."""
        return {**self.__dict__, "_memory": _Memory()}

    def attach(self, optimizer: torch.optim.Optimizer) -> "GradientClip":
        """Clip before each step of any torch optimizer, such as the one that is compared with."""
        optimizer.register_step_pre_hook(lambda found, *_: self.apply(found))
        return self

    def apply(self, optimizer: torch.optim.Optimizer, *, shorten: bool = True) -> None:
        """Clip the gradients that the optimizer is about to use, in place; or only measure them."""
        if not self._memory.is_of(optimizer):
            self._memory = _Memory(optimizer)
        norm: Any = self._memory.norm()
        if norm is None and (norm := _norm_by_torch(optimizer)) is None:
            return
        scale = getattr(optimizer, "grad_scale", None)  # of a GradScaler whose fused step unscales
        norm = norm if scale is None else norm / scale
        if type(norm) is not float and norm.is_cpu:
            norm = norm.item()
        known = type(norm) is float
        shrink = self._shrink_known(norm, shorten) if known else self._shrink_on_device(norm, shorten)
        if shrink is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for kind in _by_kind((p.grad, None, None) for p in parameters if p.grad is not None):
                gradients = [gradient for gradient, _, _ in kind]
                here = shrink.to(gradients[0].device) if isinstance(shrink, torch.Tensor) else shrink
                torch._foreach_mul_(gradients, here)

    def around(self, step: Callable[..., Any], *, shorten: bool = True) -> Callable[..., Any]:
        """An optimizer's step, on clipped gradients; a closure's are clipped when it has made them."""

        def clipped(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if closure is None:
                self.apply(optimizer, shorten=shorten)
                return step(optimizer)

            def evaluate() -> Any:
                loss = closure()
                self.apply(optimizer, shorten=shorten)
                return loss

            return step(optimizer, evaluate)

        return clipped

    def _shrink_known(self, norm: float, shorten: bool = True) -> float | None:
        """What to multiply the gradient by; None if nothing."""
        if not math.isfinite(norm):
            return None
        steps, mean = self._steps + 1, self._mean
        kept = min(norm, self.factor * mean) if mean > 0 else norm
        self._steps, self._all = steps, self._all + norm
        self._mean = mean + (kept - mean) / min(steps, _MEMORY) if mean > 0 else norm
        if kept == norm or not shorten:
            return None
        self._clipped += 1
        self._taken += norm - kept
        return kept / norm

    def _shrink_on_device(self, norm: torch.Tensor, shorten: bool = True) -> torch.Tensor | None:
        """The same in tensors, without a look at any of them."""
        mean = self._mean if isinstance(self._mean, torch.Tensor) else torch.full_like(norm, self._mean)
        finite, known = norm.isfinite(), mean > 0
        self._steps = self._steps + finite
        kept = torch.where(known, torch.minimum(norm, self.factor * mean), norm)
        moved = torch.where(known, mean + (kept - mean) / self._steps.clamp(max=_MEMORY), norm)
        self._mean = torch.where(finite, moved, mean)
        self._all = self._all + torch.where(finite, norm, 0.0)
        if not shorten:
            return None
        self._clipped = self._clipped + (finite & (kept < norm))
        self._taken = self._taken + torch.where(finite, norm - kept, 0.0)
        return torch.where(finite & (kept < norm), kept / norm, 1.0)

    @property
    def clipped(self) -> int:
        """How many gradients were shortened. Waits for the device."""
        return int(self._clipped)

    @property
    def taken(self) -> float:
        """What was taken away, as a share of the sum of all norms. Waits for the device."""
        total = float(self._all)
        return float(self._taken) / total if total > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "steps": int(self._steps),
            "mean": float(self._mean),
            "clipped": int(self._clipped),
            "taken": float(self._taken),
            "all": float(self._all),
        }

    def with_state(self, state: State) -> "GradientClip":
        """One like this, in a state from :meth:`state_dict`; or an error."""
        new = GradientClip(self.factor)
        new._steps = _check.count(state, "steps")
        new._mean = _check.number(state, "mean")
        new._clipped = _check.count(state, "clipped")
        new._taken, new._all = _check.number(state, "taken"), _check.number(state, "all")
        return new

    def __repr__(self) -> str:
        return f"GradientClip({self.factor:g})"


def _norm_by_torch(optimizer: torch.optim.Optimizer) -> Any:
    """The norm of all g / sqrt(v + eps^2) if each has its v, else of all g; None if it cannot be told yet."""
    rows: list[tuple[torch.Tensor, torch.Tensor | None, float]] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None:
                continue
            state = optimizer.state.get(p)
            if not state and "betas" in group:
                return None  # one of Adam's family before its first step: there is no v to measure with
            v = state.get("max_exp_avg_sq", state.get("exp_avg_sq")) if state else None
            rows.append((p.grad, v, group.get("eps", 0.0)))
    if not rows:
        return None
    by_v = all(v is not None and not g.is_sparse for g, v, _ in rows)
    norms = []
    for kind in _by_kind(rows):
        gradients, squares, eps = (list(column) for column in zip(*kind, strict=True))
        if by_v:
            if squares[0].dtype in HALF:  # which have no room for eps^2
                gradients, squares = ([each.float() for each in some] for some in (gradients, squares))
            roots = torch._foreach_add(squares, [max(small * small, _TINY) for small in eps])
            torch._foreach_sqrt_(roots)
            gradients = list(torch._foreach_div(gradients, roots))
        norm: Any = torch.nn.utils.get_total_norm(
            [g.coalesce().values() if g.is_sparse else g for g in gradients]
        )
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]))


def _by_kind(rows: Iterable[tuple[torch.Tensor, Any, Any]]) -> list[list[tuple[torch.Tensor, Any, Any]]]:
    """Rows that begin with a gradient, in lists that torch takes together: of one device, class and mesh.

    A model may lie on several devices, and some of its parameters may be in shards.
    """
    kinds: dict[Any, list[tuple[torch.Tensor, Any, Any]]] = {}
    for row in rows:
        g = row[0]
        kinds.setdefault((type(g), g.device, getattr(g, "device_mesh", None), g.is_sparse), []).append(row)
    return list(kinds.values())


class _Memory:
    """Where the v of an optimizer on the CPU lie, so that a norm is one call of compiled code.

    Found out once, and again whenever the optimizer has other states or groups. At a step only the gradients
    are asked where they are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._groups: list[tuple[dict[str, Any], list[torch.Tensor], Any]] = []
        self._state: Any = None
        self._states: list[dict[str, Any]] = []
        # Each parameter, its state, the name of its v in there, v itself, where that lies in memory, how many
        # entries it has, and whether its channels are last.
        self._rows: list[tuple[torch.Tensor, dict[str, Any], str, torch.Tensor | None, int, int, bool]] = []
        if optimizer is None:
            return
        self._state, self._states = optimizer.state, list(optimizer.state.values())
        self._groups = [(group, [*group["params"]], group.get("eps")) for group in optimizer.param_groups]
        rows, eps, squares = [], [], []
        for group in optimizer.param_groups:
            for p in group["params"]:
                state = optimizer.state.get(p, {})
                name = "max_exp_avg_sq" if "max_exp_avg_sq" in state else "exp_avg_sq"
                v = state.get(name)
                channels_last = v is not None and not v.is_contiguous()
                if v is not None and not _lies(v, channels_last):
                    return
                place, size = (0, 0) if v is None else (v.data_ptr(), v.numel())
                rows.append((p, state, name, v, place, size, channels_last))
                eps.append(group.get("eps", 0.0))
                squares.append((place, size))
        self._rows, self._eps, self._squares = rows, np.array(eps), np.array(squares)
        # Written one by one as an array of Python's, read by compiled code as one of NumPy's.
        self._gradients = array("q", bytes(8 * len(rows)))
        self._gradients_read = np.frombuffer(self._gradients, np.int64)

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is this optimizer's as it is now."""
        groups = optimizer.param_groups
        if (
            optimizer.state is not self._state
            or len(self._state) != len(self._states)
            or len(groups) != len(self._groups)
        ):
            return False
        for group, (known, parameters, eps) in zip(groups, self._groups, strict=True):
            now = group["params"]
            if group is not known or len(now) != len(parameters) or group.get("eps") != eps:
                return False
            if not all(map(is_, now, parameters)):
                return False
        # Not by parameter: to look one up runs its __hash__, which is not compiled.
        return all(map(is_, self._state.values(), self._states))

    def norm(self) -> float | None:
        """The norm of all g / sqrt(v + eps^2); None if torch has to measure it."""
        if not self._rows:
            return None
        gradients, i = self._gradients, -1
        for p, state, name, v, place, size, channels_last in self._rows:
            g, i = p.grad, i + 1
            if g is None:
                gradients[i] = 0
                continue
            if v is None or v.data_ptr() != place or state.get(name) is not v:
                if state.get(name) is not None:
                    self._state = None  # to be found out again: another v, or the same with other memory
                return None
            # What _lies asks, here without a call of it for each parameter.
            usual = type(g) is Tensor and g.dtype is float32 and g.is_cpu and not channels_last
            if g.numel() != size or not (g.is_contiguous() if usual else _lies(g, channels_last)):
                return None
            gradients[i] = g.data_ptr()
        return _norm_at(self._gradients_read, self._squares, self._eps) if any(gradients) else None


def _lies(tensor: torch.Tensor, channels_last: bool) -> bool:
    """Whether its entries are float32 here, in that order. Asked of each gradient at each step."""
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype is torch.float32
        and tensor.is_cpu
        and (
            tensor.is_contiguous(memory_format=torch.channels_last)
            if channels_last
            else tensor.is_contiguous()  # without the argument it takes a quarter of the time
        )
    )


@reordering_kernel
def _norm_at(gradients: Indices, squares: Indices, eps: Floats) -> float:
    """The norm of g / sqrt(v + eps^2) over all parameters, without a root for each. O(d).

    ``gradients`` says where each g lies, or 0 if there is none, and ``squares`` where its v lies, and the
    length of both. One pass without temporary arrays. Sums are float32 over blocks, float64 over these.
    Blocks have one length, known to the compiler, which makes them five times as fast; those without a
    gradient, as most rows of an embedding are, are passed over.
    """
    total = 0.0
    for i in range(len(gradients)):
        size = squares[i, 1] if gradients[i] != 0 else 0
        g = carray(pointer(gradients[i]), (size,), np.float32)
        v = carray(pointer(squares[i, 0]), (size,), np.float32)
        small = np.float32(max(eps[i] * eps[i], _TINY))
        whole = size - size % _BLOCK
        for start in range(0, whole, _BLOCK):
            if g[start] == 0.0:
                any_there: Any = np.float32(0.0)
                for j in range(_BLOCK):
                    any_there += abs(g[start + j])
                if any_there == 0.0:  # not if there is a NaN
                    continue
            block: Any = np.float32(0.0)
            for j in range(_BLOCK):
                block += g[start + j] * g[start + j] / (v[start + j] + small)
            total += block
        for j in range(whole, size):
            total += g[j] * g[j] / (v[j] + small)
    return float(np.sqrt(total))
