"""Exact per-example gradient norms, from the backward pass that trains the model.

A forward hook keeps each layer's input. When the gradient of the layer's output arrives in
backward(), the layer's formula (`registry.FORMULAS`) turns the two into the squared norm of every
example's gradient, and the input is let go. No second backward pass, no loop over examples.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .broadcast import batch_size, for_each_example
from .gradients import Gradients, examples, squared_norms
from .recorded import RecordedCall
from .registry import TrackedModule, tracked_modules
from .weighting import HasWeights, beside, coefficients


@dataclass
class _Pass:
    """What one forward pass, and the backward pass through it, leave behind."""

    uses: Counter[nn.Parameter] = field(default_factory=Counter)  # gone back through, or still may
    backwards: set[int] = field(default_factory=set)  # by `_backward_id`
    done: dict[nn.Parameter, tuple[str, Tensor]] = field(default_factory=dict)
    shared: dict[nn.Parameter, list[tuple[str, Gradients]]] = field(default_factory=dict)
    twice: str | None = None  # the module that was gone back through a second time

    def add(self, label: str, parameter: nn.Parameter, gradients: Gradients) -> None:
        """Take the norm at once, unless the parameter was used elsewhere too."""
        if parameter in self.done:
            self.twice = label
        elif self.uses[parameter] > 1:
            self.shared.setdefault(parameter, []).append((label, gradients))
        else:
            self.done[parameter] = (label, squared_norms([gradients]))

    def drain(self) -> "_Pass":
        """Hand over what came back, and be ready for another backward pass."""
        taken = _Pass(self.uses, self.backwards, self.done, self.shared, self.twice)
        self.backwards, self.done, self.shared, self.twice = set(), {}, {}, None
        return taken


class _PendingCall:
    """The forward of a tracked module, waiting for the gradient of its outputs."""

    def __init__(
        self, owner: "ExactNorms", tracked: TrackedModule, names: list[str], args: Any, kwargs: Any
    ) -> None:
        self.owner, self.tracked, self.names = owner, tracked, frozenset(names)
        self.record = owner._recording
        leaves, self.spec = tree_flatten((args, kwargs))
        leaves = [v.detach() if isinstance(v, Tensor) else v for v in leaves]
        self.versions = _versions(leaves)
        self.leaves: list[Any] | None = leaves
        self.record.uses.update(tracked.parameters[name] for name in names)

    def __del__(self) -> None:
        if getattr(self, "leaves", None) is not None:  # nobody will go back through it: no use
            self.record.uses.subtract(self.tracked.parameters[name] for name in self.names)

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        """Gradients have arrived: take the norms, let the inputs go."""
        self.owner._returned = self.record
        self.record.backwards.add(_backward_id())
        leaves, self.leaves = self.leaves, None
        if leaves is None:
            self.record.twice = self.tracked.label
            return
        try:
            self._take(leaves, grads)
        except BaseException:
            self.owner._forget()
            raise

    def _take(self, leaves: list[Any], grads: tuple[Tensor | None, ...]) -> None:
        tracked = self.tracked
        needed = tracked.rerun or self.names != {"bias"}
        if needed and _versions(leaves) != self.versions:
            raise RuntimeError(
                f"an input of {tracked.label} was changed in place after its forward: its gradient "
                "cannot be known; use the operation that is not in place"
            )
        args, kwargs = tree_unflatten(leaves, self.spec)
        device = next(g.device.type for g in grads if g is not None)
        with torch.no_grad(), _full_precision(device), self.owner._paused():
            call = RecordedCall(tracked.label, tracked.module, self.names, args, kwargs, grads)
            for name, gradients in tracked.formula(call).items():
                if name in self.names:
                    self.record.add(tracked.label, tracked.parameters[name], gradients)


class _Tap(torch.autograd.Function):
    """The identity on several tensors, with one backward for all of them.

    Copies, so that the results can be changed in place: a hook on a view would be lost then.
    """

    @staticmethod
    def forward(ctx: Any, call: Callable[[tuple[Tensor | None, ...]], None], *outputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.call(grads)
        return (None, *grads)


class ExactNorms:
    """The norm of each example's own gradient, over all trainable parameters of `model`.

    ::

        norms = ExactNorms(model)
        ...
        draw.mean(losses).backward()
        optimizer.step(draw, norms(draw))

    What must hold: the backpropagated loss is `draw.mean(losses)`, losses[k] depends on example k
    alone, and every layer has the examples as its first dimension (recurrent layers and attention:
    as their `batch_first` says). Parameters that do not require gradients are left out. Shared ones
    have their gradients added up before the norm is taken.

    `norms(draw)` answers for the last backward pass, once. A forward pass after a backward pass
    begins anew: with gradient accumulation, call it after every backward(). Forward passes without
    gradients are not recorded. `remove()`, or leaving a `with` block, takes the hooks off.
    """

    def __init__(self, model: nn.Module) -> None:
        self._quiet = False
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._touched: dict[str, int] = {}  # parameter -> the last backward that gave it a gradient
        self._recording = _Pass()  # what the running forward pass belongs to
        self._returned: _Pass | None = None  # what the last backward pass went through
        self._entered: dict[nn.Module, list[int]] = {}  # a module to re-run -> its inputs' versions
        self._K: int | None = None  # of the running forward pass of the model
        found = list(tracked_modules(model))
        self._handles = [model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        self._handles += [
            tracked.module.register_forward_hook(partial(self._forward, tracked), with_kwargs=True)
            for tracked in found
        ]
        self._handles += [
            tracked.module.register_forward_pre_hook(self._enter, with_kwargs=True)
            for tracked in found
            if tracked.rerun
        ]
        self._handles += [
            parameter.register_hook(partial(self._touch, name))  # type: ignore[no-untyped-call]
            for parameter, name in self._names.items()
            if parameter.requires_grad
        ]

    def __call__(self, draw: HasWeights, *, scale: float = 1.0) -> Tensor:
        """Return the (K,) gradient norms of the last backward pass, and forget it.

        Args:
            draw: The draw whose `mean` of the losses was backpropagated.
            scale: What the loss was multiplied by besides: `scaler.get_scale()` of a GradScaler.
        """
        c = coefficients(draw, scale)
        record = self._returned
        if record is None:
            raise RuntimeError(
                "no backward pass was recorded since the last call: call norms(draw) once, after "
                "backward() through a forward pass that ran while the hooks were on"
            )
        self._forget()
        taken = record.drain()
        self._refuse(taken, len(c))
        parts = [square for _, square in taken.done.values()]
        parts += [squared_norms([gradients for _, gradients in uses]) for uses in taken.shared.values()]
        total = sum(part.to(parts[0].device) for part in parts)
        assert isinstance(total, Tensor)
        # backward() brought c_k times example k's own gradient
        return total.sqrt() / beside(c, total)

    def remove(self) -> None:
        """Take the hooks off the model, and forget what they recorded."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model, or a pickle, has copies of its hooks: let them do nothing.
        return _quiet, ()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        self._K = batch_size((args, kwargs))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        if not self._quiet and torch.is_grad_enabled():
            self._entered[module] = _versions([*tree_leaves((args, kwargs)), *module.buffers()])

    def _forward(
        self, tracked: TrackedModule, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any
    ) -> Any:
        """Keep the inputs of a tracked module, and wait for the gradients of its outputs."""
        if self._quiet or not torch.is_grad_enabled():
            return None
        leaves, spec = tree_flatten(output)
        live = [n for n, v in enumerate(leaves) if isinstance(v, Tensor) and v.requires_grad]
        names = [name for name, p in tracked.parameters.items() if p.requires_grad]
        if not live:
            return None
        tracked.check((*args, *kwargs.values()), names)
        if not names:
            return None
        args, leaves = for_each_example(module, self._K, args, leaves)
        if self._recording.backwards and _backward_id() < 0:
            self._recording = _Pass()
        if tracked.rerun:
            self._unchanged(tracked, names, [*tree_leaves((args, kwargs)), *module.buffers()])
        call = _PendingCall(self, tracked, names, args, kwargs)
        only = leaves[0] if len(leaves) == 1 else None
        if only is not None and not (only.is_leaf or only._is_view()):
            only.register_hook(lambda grad: call((grad,)))
            return None
        spread = partial(_spread, call, live, len(leaves))
        tapped = _Tap.apply(spread, *[leaves[n] for n in live])  # type: ignore[no-untyped-call]
        for n, output in zip(live, tapped, strict=True):
            leaves[n] = output
        return tree_unflatten(leaves, spec)

    def _unchanged(self, tracked: TrackedModule, names: list[str], leaves: list[Any]) -> None:
        """Refuse a module that would not compute the same when run again."""
        now = _versions(leaves)
        if self._entered.pop(tracked.module, now) != now:
            raise ValueError(
                f"{tracked.label} must be run again for the gradients of {', '.join(names)}, but it "
                "changes its input, or a buffer, in place: keep that out of it, or use the output "
                "bound"
            )

    def _touch(self, name: str, grad: Tensor) -> None:
        self._touched[name] = _backward_id()

    def _refuse(self, taken: _Pass, K: int) -> None:
        """Raise where the norms of this pass would be wrong."""
        if taken.twice:
            raise RuntimeError(
                f"backward() went through {taken.twice} again before its norms were taken: call "
                "norms(draw) after one backward pass through one forward pass"
            )
        lengths = [(label, len(square)) for label, square in taken.done.values()]
        lengths += [(label, examples(g)) for uses in taken.shared.values() for label, g in uses]
        for label, length in lengths:
            if length != K:
                raise ValueError(
                    f"{label} saw a first dimension of {length}, the draw has K = {K} examples: "
                    "the first dimension must be the batch everywhere (give position embeddings ids of "
                    "shape (K, T)), and norms(draw) must follow the backward pass of that draw"
                )
        for parameter, name in self._names.items():
            known = parameter in taken.done or parameter in taken.shared
            if not known and self._touched.get(name) in taken.backwards:
                raise RuntimeError(
                    f"parameter {name!r} got a gradient outside the forward of the module that "
                    "holds it (as in F.linear(x, layer.weight)): call the module, freeze the "
                    "parameter, or use the output bound"
                )

    def _forget(self) -> None:
        self._recording = _Pass()
        self._returned = None

    @contextmanager
    def _paused(self) -> Iterator[None]:
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before


def _quiet() -> ExactNorms:
    norms = ExactNorms(nn.Module())
    norms._quiet = True
    return norms


def _full_precision(device: str) -> AbstractContextManager[object]:
    """Switch autocast off, where the device has one."""
    known = torch.amp.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if known else nullcontext()


def _spread(call: _PendingCall, live: list[int], count: int, grads: tuple[Tensor | None, ...]) -> None:
    """Put the gradients of the live outputs in their places among all outputs."""
    spread: list[Tensor | None] = [None] * count
    for n, grad in zip(live, grads, strict=True):
        spread[n] = grad
    call(tuple(spread))


def _versions(leaves: list[Any]) -> list[int]:
    """Return how often each tensor was changed in place."""
    return [v._version for v in leaves if isinstance(v, Tensor) and not v.is_inference()]


def _backward_id() -> int:
    """Return the number of the backward pass that is running, -1 if none is."""
    return int(torch._C._current_graph_task_id())
