"""Algorithm 1: a torch optimizer on the weighted gradient, then feedback to the sampler."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from adambs._types import Floats
from adambs.draws import Draw
from adambs.sampler import BanditSampler

Scores = Any  # a tensor, an array or a list of K numbers, or a function without arguments that returns one


class BanditOptimizer(torch.optim.Optimizer):
    """What bandit sampling adds to an optimizer; :func:`with_bandit` puts it in front of one."""

    sampler: BanditSampler

    def __init__(self, params: Any, sampler: BanditSampler, *args: Any, **kwargs: Any) -> None:
        if not isinstance(sampler, BanditSampler):
            raise TypeError(
                f"sampler must be a BanditSampler, not {type(sampler).__name__}: "
                f"{type(self).__name__}(params, sampler, ...)"
            )
        super().__init__(params, *args, **kwargs)
        self.sampler = sampler

    def step(  # type: ignore[override]
        self, draw: Draw, scores: Scores, closure: Callable[[], Any] | None = None
    ) -> Any:
        """Algorithm 1, lines 8 to 11: update the parameters, then the distribution.

        Args:
            draw: the batch that the gradients were computed on.
            scores: the gradient norm, or a bound on it, of each of its examples (``adambs.scores``). With
                a ``closure``, which computes them anew, a function that returns them.
            closure: evaluates the model again and returns the loss, as for any torch optimizer.

        Bad scores raise before anything has changed. A step that a ``GradScaler`` skips because of
        infinite gradients leaves the distribution alone too.
        """
        base_step = _without_hooks(super().step)
        if _overflowed(self):
            return base_step(self)
        checked: list[Floats] = []

        def check() -> None:
            if not checked:
                given = scores() if callable(scores) else scores
                checked.append(self.sampler.check(draw, given))

        if closure is None:
            check()
            loss = base_step(self)
        else:

            def evaluate() -> Any:  # an optimizer evaluates its closure before it changes anything
                loss = closure()
                check()
                return loss

            loss = base_step(self, evaluate)
        self.sampler.learn(draw, checked[0])
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, and the sampler's under ``"sampler"``."""
        return {**super().state_dict(), "sampler": self.sampler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state from :meth:`state_dict`, or raise and keep the old one."""
        if "sampler" not in state_dict:
            raise ValueError(
                f"state_dict has no 'sampler': it is not from {type(self).__name__}. To take over a plain "
                "optimizer's state and begin with a fresh distribution, add "
                "state_dict['sampler'] = optimizer.sampler.state_dict()"
            )
        parsed = self.sampler.parse_state(state_dict["sampler"])
        super().load_state_dict(state_dict)
        self.sampler.adopt(parsed)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "sampler": self.sampler}


def with_bandit(optimizer: type[torch.optim.Optimizer]) -> type[BanditOptimizer]:
    """A torch optimizer with bandit sampling: ``with_bandit(torch.optim.SGD)(params, sampler, lr=0.1)``.

    A subclass of ``optimizer`` that takes the sampler as its second argument and whose ``step`` takes the
    draw and the scores, as :class:`AdamBS` does.
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer class, not {optimizer!r}")
    return _bandit_class(optimizer)  # type: ignore[arg-type]  # classes are hashable


@functools.cache  # one class for each optimizer, so that isinstance works
def _bandit_class(optimizer: type[torch.optim.Optimizer]) -> type[BanditOptimizer]:
    return type(f"{optimizer.__name__}BS", (BanditOptimizer, optimizer), {})


class AdamBS(BanditOptimizer, torch.optim.Adam):  # type: ignore[misc]  # step takes a draw
    """Adam with bandit sampling, Algorithm 1.

    ``AdamBS(params, sampler, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, amsgrad=False, ...)``:
    a ``torch.optim.Adam`` in every respect, with every option of it (``amsgrad=True`` is the appendix's
    AMSGrad with bandit sampling), except that ``step(draw, scores)`` also teaches the sampler and that
    ``state_dict()`` carries it.
    """


def _without_hooks(step: Any) -> Callable[..., Any]:
    """The base optimizer's step as a plain function, without the wrapper that runs step hooks.

    torch wraps ``step`` of the class that is instantiated: ours, and the base's too if one of those was
    ever made. Hooks must run once.
    """
    function = step.__func__
    return function.__wrapped__ if getattr(function, "hooked", False) else function  # type: ignore[no-any-return]


def _overflowed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler has told a fused optimizer to skip this step."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf.item())
