"""Two copies of a model that are trained in turns, one with bandit sampling and one without."""

import math
import time
from collections.abc import Callable

import torch

from adambs._types import Floats, Indices
from adambs.clipping import GradientClip
from adambs.optim import BanditOptimizer, with_bandit
from adambs.probing import measures
from adambs.probing.problem import Problem
from adambs.proposals import Passes
from adambs.sampler import BanditSampler
from adambs.shares import plain_mean

# Steps before anything is timed: kernels compile, caches fill.
_WARM_UP = 3

Schedule = Callable[[float], float]
"""What the learning rate is multiplied by when a share of the training is done."""


class Pair:
    """The README's loop and the loop that it is compared with, side by side.

    Args:
        problem: trained with bandit sampling.
        rival: the same problem again, trained without.
        planned: steps of the whole training, for the schedule.
        schedule: None is constant.
        seed: of the draws.
    """

    def __init__(
        self, problem: Problem, rival: Problem, planned: float, schedule: Schedule | None, seed: int
    ) -> None:
        self.problem, self.rival = problem, rival
        self.planned, self.schedule = planned, schedule
        self.rates = [group["lr"] for group in problem.optimizer.param_groups]
        self.clip = _clip_of(problem.optimizer)
        self.sampler = BanditSampler(problem.n, problem.batch_size, seed=seed, group=False)
        # The very passes of the sampler: while its gate is closed the two copies are trained alike.
        self.passes = Passes(problem.n, seed)
        self.steps = 0
        self.training = self.evaluating = 0.0  # seconds
        self.bandit_seconds: list[float] = []
        self.plain_seconds: list[float] = []
        self.losses: list[tuple[int, float]] = []
        """Step -> the mean loss of some examples, with bandit sampling; and without."""
        self.plain_losses: list[tuple[int, float]] = []
        problem.model.train()
        rival.model.train()

    def step(self) -> None:
        """A step of each."""
        self._set_rate()
        start = time.perf_counter()
        self._bandit_step()
        between = time.perf_counter()
        self._plain_step()
        end = time.perf_counter()
        self.steps += 1
        self.training += end - start
        if self.steps > _WARM_UP:
            self.bandit_seconds.append(between - start)
            self.plain_seconds.append(end - between)

    def evaluate(self, indices: Indices) -> tuple[Floats, list[float]]:
        """Compare the mean losses of these examples now.

        Their scores in the copy with bandit sampling, and seconds an example.
        """
        start = time.perf_counter()
        losses, scores, seconds = self.problem.evaluated(indices)
        theirs, _, _ = self.rival.evaluated(indices)
        self.losses.append((self.steps, float(losses.mean())))
        self.plain_losses.append((self.steps, float(theirs.mean())))
        self.evaluating += time.perf_counter() - start
        return scores, seconds

    def speedup(self) -> float:
        """In steps, of the one over the other, in all that was compared."""
        return measures.race(self.plain_losses, self.losses)

    def _bandit_step(self) -> None:
        problem, optimizer = self.problem, self.problem.optimizer
        draw = self.sampler.draw()
        losses, scores_of = problem.losses(problem.batch(draw._indices), len(draw))
        scores = scores_of()
        mean = draw.mean(losses, scores)
        self._check(mean)
        optimizer.zero_grad()
        mean.backward()  # type: ignore[no-untyped-call]
        if self.clip is not None:
            self.clip.apply(optimizer, shorten=not draw.plain)
        optimizer.step()
        self.sampler.update(draw, scores)

    def _plain_step(self) -> None:
        rival, optimizer = self.rival, self.rival.optimizer
        indices = self.passes.take(rival.batch_size)
        losses, _ = rival.losses(rival.batch(indices), len(indices))
        mean = plain_mean(losses)
        self._check(mean)
        optimizer.zero_grad()
        mean.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def _check(self, mean: torch.Tensor) -> None:
        value = mean.item()
        if not math.isfinite(value):
            raise ValueError(
                f"the loss is {value} after {self.steps} steps: lower lr (it is {self.problem.lr:g})"
            )

    def _set_rate(self) -> None:
        """As the schedule says, at the middle of the step; beyond the planned training, as at its end."""
        if self.schedule is None:
            return
        factor = float(self.schedule(min((self.steps + 0.5) / self.planned, 1.0)))
        if not (math.isfinite(factor) and factor >= 0):
            raise ValueError(f"schedule must return a finite number that is not negative, not {factor}")
        for each in (self.problem, self.rival):
            for group, rate in zip(each.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * factor


def _clip_of(optimizer: torch.optim.Optimizer) -> GradientClip | None:
    """What AdamBS would clip with in its place; its own, if it is one of ours, which then leaves it to us."""
    if isinstance(optimizer, BanditOptimizer):
        clip, optimizer.clip = optimizer.clip, None
        return clip
    factor = with_bandit(type(optimizer)).usual_clip
    return None if factor == math.inf else GradientClip(factor)
