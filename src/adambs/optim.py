"""Algorithm 1: a torch optimizer on the weighted gradient, then feedback to the sampler."""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.autograd import profiler
from torch.compiler import is_compiling
from torch.optim import optimizer as hooks

from adambs.clipping import GradientClip
from adambs.draw import Draw
from adambs.feedback import Report
from adambs.sampler import BanditSampler

Scores = Any  # a tensor, an array or a list of K numbers, or a function without arguments that returns one
Closure = Callable[[], Any]

_TORCHS_ZERO_GRAD = torch.optim.Optimizer.zero_grad

# What torch's optimizers wrap their steps in, known by its code. A torch that does not is left alone.
_TORCHS_MODE = getattr(hooks, "_use_grad_for_differentiable", lambda step: step)(lambda: None).__code__

# How many times as long as usual a gradient of Adam's family may be, unless the user says otherwise.
_CLIP = 1.5


class BanditOptimizer(torch.optim.Optimizer):
    """What bandit sampling adds to an optimizer; :func:`with_bandit` puts it in front of one."""

    sampler: BanditSampler

    usual_clip: ClassVar[float] = math.inf
    """The clip if none was given."""

    clip: GradientClip | None = None
    """Clips the gradient before each step; None if nothing does."""

    def __init__(
        self,
        params: Any,
        sampler: BanditSampler | None = None,
        *args: Any,
        clip: float | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(sampler, BanditSampler):
            given = "nothing" if sampler is None else type(sampler).__name__
            raise TypeError(
                f"sampler must be a BanditSampler, not {given}: {type(self).__name__}(params, sampler, ...) "
                "with sampler = adambs.BanditSampler(len(train), batch_size)"
            )
        factor = self.usual_clip if clip is None else clip
        self.clip = None if factor == math.inf else GradientClip(factor)
        super().__init__(params, *args, **kwargs)
        self.sampler = sampler

    def step(  # type: ignore[override]
        self,
        draw: Draw | int | torch.Tensor | Closure | None = None,
        scores: Scores = None,
        closure: Closure | None = None,
    ) -> Any:
        """``step(draw, scores)`` is Algorithm 1, lines 8 to 11: update the parameters, then the distribution.

        ``step()`` and ``step(closure)`` are the optimizer's own, for frameworks and for loops that give the
        scores to ``sampler.update(draw, scores)`` themselves.

        Args:
            draw: the batch that the gradients were computed on, or its number.
            scores: the gradient norm, or a bound on it, of each of its examples (``adambs.scores``). With
                a ``closure``, which computes them anew, a function that returns them.
            closure: evaluates the model again and returns the loss, as for any torch optimizer.

        Bad scores raise before anything has changed; late feedback raises at the next draw. A step that a
        ``GradScaler`` skips because of infinite gradients leaves the distribution alone too.
        """
        if _watched(self):
            return _step_with_hooks(self, draw, scores, closure)
        return self._step(draw, scores, closure)

    # Or torch would wrap it in what _step_with_hooks is, at each call.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(
        self, draw: Draw | int | torch.Tensor | Closure | None, scores: Scores, closure: Closure | None
    ) -> Any:
        base_step = _base_step(type(self))  # type: ignore[arg-type]  # classes are hashable
        if type(draw) is not Draw and callable(draw) and not isinstance(draw, torch.Tensor):
            draw, closure = None, draw
        if draw is None:
            if scores is not None:
                raise TypeError("step was given scores and no draw: step(draw, scores), or step() alone")
            return (base_step if self.clip is None else self.clip.around(base_step))(self, closure)
        if scores is None:
            raise TypeError(
                "step was given a draw and no scores: step(draw, scores), or step() alone and "
                "sampler.update(draw, scores)"
            )
        # A batch with weights of one is a plain optimizer's batch, and makes a plain optimizer's step.
        shorten = not self._is_plain(draw)
        if closure is None:
            report = self._check(draw, scores)
            if self.clip is not None:
                self.clip.apply(self, shorten=shorten)
            loss = self._base_step_alone(base_step)
        else:
            if self.clip is not None:
                base_step = self.clip.around(base_step, shorten=shorten)
            reports: list[Report] = []

            def evaluate() -> Any:  # an optimizer evaluates its closure before it changes anything
                loss = closure()
                if not reports:
                    reports.append(self._check(draw, scores))
                return loss

            loss = base_step(self, evaluate)
            report = reports[0]
        self.sampler.learn(report)
        return loss

    def _base_step_alone(self, base_step: Callable[..., Any]) -> Any:
        """The base optimizer's step without a closure.

        torch wraps its own in a function that turns gradients off and tells torch.compile where to stop. To
        turn them off and no more takes some microseconds less.
        """
        wrapped = getattr(base_step, "__code__", None) is _TORCHS_MODE
        if not wrapped or self.defaults.get("differentiable") or is_compiling():
            return base_step(self)
        inner = base_step.__wrapped__  # type: ignore[attr-defined]
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            return inner(self)
        finally:
            torch._C._set_grad_enabled(before)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. It tells a profiler of it, which takes longer than to do it, only if one is on."""
        watched = profiler._is_profiler_enabled or is_compiling()
        if not set_to_none or watched or not _zeroes_as_torch_does(type(self)):  # type: ignore[arg-type]
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def _is_plain(self, draw: Draw | int | torch.Tensor) -> bool:
        """Whether this is a plain optimizer's batch. A number on a device would have to be waited for."""
        if isinstance(draw, Draw):
            return draw.plain
        if isinstance(draw, torch.Tensor) and not draw.is_cpu:
            return False
        return self.sampler.awaited.find(draw).plain

    def _check(self, draw: Draw | int | torch.Tensor, scores: Scores) -> Report:
        if not isinstance(scores, torch.Tensor) and callable(scores):
            scores = scores()
        skipped = getattr(self, "found_inf", None)  # of a GradScaler that lets a fused step skip itself
        return self.sampler.check(draw, scores, skipped)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, the sampler's under ``"sampler"``, the clip's in the first group if any.

        What a group says travels through ``torch.distributed.checkpoint``, too.
        """
        state = super().state_dict()
        if self.clip is not None:
            state["param_groups"][0]["clip"] = self.clip.state_dict()
        return {**state, "sampler": self.sampler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state from :meth:`state_dict`, or raise and keep the old one.

        ``torch.distributed.checkpoint`` saves what it knows of an optimizer, which is not the sampler: such a
        state is taken with a warning, unless the sampler's own state was loaded before.
        """
        state_dict, clip = self._without_clip(state_dict)
        if "sampler" not in state_dict:
            super().load_state_dict(state_dict)
            self.clip = clip
            if not self.sampler.loaded:
                warnings.warn(
                    "state_dict has no 'sampler' (a plain optimizer's state, or one from "
                    "torch.distributed.checkpoint), so p is left as it is: save the sampler beside the "
                    "optimizer, {'optimizer': ..., 'sampler': sampler.state_dict()}, and load it first",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return
        parsed = self.sampler.parse_state(state_dict["sampler"])
        super().load_state_dict(state_dict)
        self.sampler.adopt(parsed)
        self.clip = clip

    def _without_clip(self, state_dict: dict[str, Any]) -> tuple[dict[str, Any], GradientClip | None]:
        """A state without the clip's part, and the clip in it; one that is not there begins anew."""
        first, *others = state_dict["param_groups"]
        rest = {name: value for name, value in first.items() if name != "clip"}
        clip = self.clip
        if clip is not None:
            found = first.get("clip")
            clip = GradientClip(clip.factor) if found is None else clip.with_state(found)
        return {**state_dict, "param_groups": [rest, *others]}, clip

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "sampler": self.sampler, "clip": self.clip}


_step_with_hooks = torch.optim.Optimizer.profile_hook_step(BanditOptimizer._step)
"""The step between the optimizer's hooks, and marked for a profiler."""


def _watched(optimizer: BanditOptimizer) -> bool:
    """Whether a step has hooks or a profiler is on. If not, nothing is to be told, and telling takes time."""
    return bool(
        profiler._is_profiler_enabled
        or hooks._global_optimizer_pre_hooks
        or hooks._global_optimizer_post_hooks
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
    )


def with_bandit(optimizer: type[torch.optim.Optimizer]) -> type[BanditOptimizer]:
    """A torch optimizer with bandit sampling: ``with_bandit(torch.optim.SGD)(params, sampler, lr=0.1)``.

    A subclass of ``optimizer`` that takes the sampler as its second argument and whose ``step`` takes the
    draw and the scores, as :class:`AdamBS` does. ``clip`` is that of :class:`AdamBS`: 1.5 unless given for
    Adam and AdamW, none for the others.
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer class, not {optimizer!r}")
    return _bandit_class(optimizer)  # type: ignore[arg-type]  # classes are hashable


@functools.cache  # one class for each optimizer, so that isinstance works
def _bandit_class(optimizer: type[torch.optim.Optimizer]) -> type[BanditOptimizer]:
    def reduce(self: BanditOptimizer) -> tuple[Any, ...]:  # the class has no name to be found by
        found = optimizer if type(self) is kind else type(self)  # a subclass of it has one
        return _blank, (found,), self.__getstate__()

    usual = _CLIP if issubclass(optimizer, torch.optim.Adam) else math.inf
    made = {"__reduce__": reduce, "usual_clip": usual}
    kind = type(f"{optimizer.__name__}BS", (BanditOptimizer, optimizer), made)
    return kind


def _blank(found: type[torch.optim.Optimizer]) -> BanditOptimizer:
    """An instance of a bandit class, or of that of an optimizer, without its state, for unpickling."""
    kind = found if issubclass(found, BanditOptimizer) else _bandit_class(found)  # type: ignore[arg-type]
    return kind.__new__(kind)


class AdamBS(BanditOptimizer, torch.optim.Adam):  # type: ignore[misc]  # step takes a draw
    """Adam with bandit sampling, Algorithm 1.

    ``AdamBS(params, sampler, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, amsgrad=False, ...)``:
    a ``torch.optim.Adam`` in every respect, with every option of it (``amsgrad=True`` is the appendix's
    AMSGrad with bandit sampling), except that ``step(draw, scores)`` also teaches the sampler and that
    ``state_dict()`` carries it; and that a gradient more than ``clip=1.5`` times as long as gradients have
    been, in Adam's own metric, is shortened to that (:class:`adambs.clipping.GradientClip`), so that an
    example that comes with a large weight and has become hard does not throw the model. ``clip=math.inf``
    is none, as in the paper.
    """

    usual_clip = _CLIP


@functools.cache
def _zeroes_as_torch_does(kind: type[BanditOptimizer]) -> bool:
    """Whether the base optimizer has no ``zero_grad`` of its own."""
    return super(BanditOptimizer, kind).zero_grad is _TORCHS_ZERO_GRAD


@functools.cache
def _base_step(kind: type[BanditOptimizer]) -> Callable[..., Any]:
    """The base optimizer's step as a plain function, without the wrapper that runs step hooks.

    torch wraps ``step`` of the class that is instantiated: ours, and the base's too if one of those was
    ever made. Hooks must run once.
    """
    function: Any = super(BanditOptimizer, kind).step
    return function.__wrapped__ if getattr(function, "hooked", False) else function  # type: ignore[no-any-return]
