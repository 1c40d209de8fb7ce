"""Is there anything to win on my data? A copy of the model is trained for a little while, and measured."""

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from adambs import _check
from adambs._types import Floats, Indices
from adambs.clipping import GradientClip
from adambs.fetching import seeded
from adambs.optim import BanditOptimizer, with_bandit
from adambs.probing import measures
from adambs.probing.answer import Answer
from adambs.probing.problem import Problem
from adambs.proposals import Passes
from adambs.sampler import BanditSampler

__all__ = ["Answer", "probe"]

# How many examples are scored again and again, and how many at once.
_PANEL, _SCORED_AT_ONCE = 1000, 200
# How many batches' gradients tell the noise, and how often that is asked.
_SPLIT, _ASKED = 6, 3
# Steps before anything is timed: kernels compile, caches fill.
_WARM_UP = 3
# However short the time is, so many steps are taken: less would say nothing.
_FEWEST = 10
# Of the probe's time, what scoring the panel may take.
_SHARE = 0.25

Progress = Callable[[float, str], None]
"""Called with the share of the time that has passed, and what is going on."""


def probe(
    model: nn.Module,
    train: Any,
    loss: Any,
    *,
    batch_size: int,
    epochs: float = 10.0,
    lr: float = 1e-3,
    optimizer: torch.optim.Optimizer | None = None,
    schedule: Callable[[float], float] | None = None,
    contexts: Mapping[str, Any] | None = None,
    seconds: float = 60.0,
    collate_fn: Callable[[Any], Any] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Answer:
    """Find out what bandit sampling would win on this model and these data, and what it would cost.

    Two copies of the model are trained for a little while, in turns, one with bandit sampling and one
    without; the model, its optimizer and the global random streams stay as they were. Stopped with Ctrl-C, it
    returns what it has.

    Args:
        model: as it is, trained or not.
        train: the training set, with ``len()`` and ``train[i]``.
        loss: ``F.cross_entropy``, ``F.binary_cross_entropy_with_logits`` or ``F.mse_loss`` for batches
            ``(x, y)``; or any ``loss(model, batch)`` that returns one loss for each example of the batch, or
            a pair of losses and scores (or a function of no arguments that returns the scores, so that their
            cost can be told apart). Without scores they are taken from the gradient at the model's output.
        batch_size: K, as you would train.
        epochs: how long you would train. What there is to win grows as training goes on, so the expected
            speedup depends on it; the probe itself takes the time that ``seconds`` says.
        lr: of the Adam that trains the copy, if no optimizer is given.
        optimizer: of the model; a copy of it, with its state, trains the copy.
        schedule: what the learning rate is multiplied by when a share of the training, from 0 to 1, is done.
            Constant if nothing is given. The probe follows it from the beginning.
        contexts: what is known of each example beforehand, by name: arrays of n whole numbers (class, source,
            length in steps of ten). Labels that are whole numbers are found without being told.
        seconds: time limit. Ten steps are taken in any case, and what compiles once is compiled before. A
            training that is over before is seen whole.
        collate_fn: as a DataLoader's.
        seed: of everything random here.
        progress: called now and then; a bar on a terminal if nothing is given.
    """
    limit, planned = _check.positive("seconds", seconds), _check.positive("epochs", epochs)
    _check.whole("seed", seed, least=0)
    if schedule is not None and not callable(schedule):
        raise TypeError(f"schedule must be a function from the share that is done, not {schedule!r}")
    if contexts is not None and not isinstance(contexts, Mapping):
        raise TypeError(
            f"contexts must be a dict from names to arrays of n whole numbers, not {type(contexts).__name__}"
        )
    problem, plain = (
        Problem(model, train, loss, batch_size, lr=lr, optimizer=optimizer, collate_fn=collate_fn, seed=seed)
        for _ in range(2)
    )
    known = {name: _context(name, values, problem.n) for name, values in (contexts or {}).items()}
    devices = [problem.device] if problem.device.type == "cuda" else []
    with seeded(seed, 1), torch.random.fork_rng(devices=devices):
        bar = _bar if progress is None else progress
        return _Probe(problem, plain, known, planned, limit, seed, schedule, bar).run()


class _Probe:
    """One probe under way."""

    def __init__(
        self,
        problem: Problem,
        rival: Problem,
        contexts: dict[str, Indices],
        epochs: float,
        limit: float,
        seed: int,
        schedule: Callable[[float], float] | None,
        progress: Progress,
    ) -> None:
        self.problem, self.rival, self.contexts = problem, rival, contexts
        self.limit, self.progress = limit, progress
        self.schedule, self.rates = schedule, [group["lr"] for group in problem.optimizer.param_groups]
        self.clip = _clip_of(problem.optimizer)
        self.answer = Answer(problem.n, problem.batch_size, problem.lr, epochs)
        self.random = np.random.default_rng([seed, 2])
        self.panel = np.sort(self.random.choice(problem.n, min(_PANEL, problem.n), replace=False))
        self.sampler = BanditSampler(problem.n, problem.batch_size, seed=seed, group=False)
        # The very passes of the sampler: while its gate is closed the two copies are trained alike.
        self.passes = Passes(problem.n, self.sampler.seed)
        self.seen: list[tuple[int, Floats]] = []
        self._known_of_panel: dict[str, Indices] | None = None
        self.plain: list[float] = []
        self.bandit: list[float] = []
        self.looks: list[float] = []
        self.started = time.perf_counter()

    def run(self) -> Answer:
        """Train and measure until the time or the training is over, or somebody stops it."""
        try:
            _compile()
            self.started = time.perf_counter()
            self._go_on()
        except KeyboardInterrupt:
            self.answer.interrupted = True
        self.answer.seconds = self._passed
        self._sum_up()
        self.progress(1.0, "done")
        return self.answer

    @property
    def _passed(self) -> float:
        return time.perf_counter() - self.started

    def _go_on(self) -> None:
        self.problem.model.train()
        self.rival.model.train()
        self._score_panel()
        self._ask_for_noise()
        spent, following, asked = 0.0, 1, 1
        planned = max(_FEWEST, math.ceil(self.answer.planned))
        while self.answer.steps < planned and (self._passed < self.limit or self.answer.steps < _FEWEST):
            self._step()
            self.progress(min(self._passed / self.limit, 1.0), f"{self.answer.steps} steps")
            # Ever more steps lie between two scorings, and they take no more than their share of the time.
            if self.answer.steps >= following and spent <= _SHARE * self._passed:
                before = self._passed
                self._score_panel()
                spent += self._passed - before
                following = math.ceil(1.5 * self.answer.steps)
            if asked < _ASKED and self._passed > self.limit * asked / _ASKED:
                asked += 1
                self._ask_for_noise()
        if self.seen[-1][0] < self.answer.steps:
            self._score_panel()

    def _step(self) -> None:
        """A step of each: the README's loop, and the loop that it is compared with."""
        self._set_rate()
        start = time.perf_counter()
        self._bandit_step()
        between = time.perf_counter()
        self._plain_step()
        end = time.perf_counter()
        self.answer.steps += 1
        if self.answer.steps > _WARM_UP:
            self.bandit.append(between - start)
            self.plain.append(end - between)

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
            self.clip.apply(optimizer, shorten=not draw.even)
        optimizer.step()
        self.sampler.update(draw, scores)

    def _plain_step(self) -> None:
        rival, optimizer = self.rival, self.rival.optimizer
        indices = self.passes.take(rival.batch_size)
        losses, _ = rival.losses(rival.batch(indices), len(indices))
        mean = losses.mean()
        self._check(mean)
        optimizer.zero_grad()
        mean.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def _check(self, mean: torch.Tensor) -> None:
        if not torch.isfinite(mean):
            raise ValueError(
                f"the loss is {mean.item()} after {self.answer.steps} steps: lower lr "
                f"(it is {self.problem.lr:g})"
            )

    def _set_rate(self) -> None:
        """As the schedule says, at the middle of the step; beyond the planned training, as at its end."""
        if self.schedule is None:
            return
        factor = float(self.schedule(min((self.answer.steps + 0.5) / self.answer.planned, 1.0)))
        if not (math.isfinite(factor) and factor >= 0):
            raise ValueError(f"schedule must return a finite number that is not negative, not {factor}")
        for each in (self.problem, self.rival):
            for group, rate in zip(each.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * factor

    def _score_panel(self) -> None:
        losses, scores, seconds = self.problem.evaluated(self.panel, _SCORED_AT_ONCE)
        if not np.isfinite(scores).all() or (scores < 0).any():
            raise ValueError("scores must be finite and not negative: lower lr, or return other scores")
        if self.seen:  # the first one warms up
            self.looks += [each * self.problem.batch_size for each in seconds]
        self.seen.append((self.answer.steps, scores))
        ratios = self.sampler.rule.ratios(self.panel)
        self.answer.potential.append((self.answer.steps, measures.potential(scores)))
        self.answer.learned.append((self.answer.steps, measures.reduction(scores, ratios)))
        self.answer.losses.append((self.answer.steps, float(losses.mean())))
        theirs, _, _ = self.rival.evaluated(self.panel, _SCORED_AT_ONCE)
        self.answer.plain_losses.append((self.answer.steps, float(theirs.mean())))
        for name, values in self._panel_contexts().items():
            told = self.answer.contexts.setdefault(name, [])
            told.append((self.answer.steps, measures.told_apart(values, scores)))

    def _panel_contexts(self) -> dict[str, Indices]:
        """What is known of the panel beforehand, by name; labels are fetched once."""
        if self._known_of_panel is None:
            found = {name: values[self.panel] for name, values in self.contexts.items()}
            labels = None if "label" in found else self.problem.labels(self.panel)
            self._known_of_panel = found if labels is None else {**found, "label": labels}
        return self._known_of_panel

    def _ask_for_noise(self) -> None:
        K, n = self.problem.batch_size, self.problem.n
        gradients = [self.problem.gradient(self.random.integers(0, n, K)) for _ in range(_SPLIT)]
        self.answer.noise.append((self.answer.steps, measures.noise_to_signal(gradients)))

    def _sum_up(self) -> None:
        """What follows from everything that was seen."""
        if self.seen:
            last, scores = self.seen[-1]
            # Scores of the very beginning tell nothing, whatever their age: training was another then.
            old = [(last - step, old) for step, old in self.seen[:-1] if step >= max(last / 4, 1)]
            self.answer.memory = sorted((age, measures.remembered(then, scores)) for age, then in old)
        if self.plain and self.looks:
            step = _undisturbed(self.plain)
            self.answer.step_seconds = step
            self.answer.overhead = max(_undisturbed(self.bandit) / step - 1, 0.0)
            self.answer.look = _undisturbed(self.looks) / step


def _compile() -> None:
    """Kernels compile when they are first used, once for an installation: it shall not take from the time."""
    parameter = nn.Parameter(torch.ones(2))
    sampler = BanditSampler(4, 2, gate=0, group=False)
    optimizer = with_bandit(torch.optim.Adam)([parameter], sampler, lr=1e-3)
    for _ in range(3):
        draw = sampler.draw()
        draw.mean(parameter.square(), torch.ones(2)).backward()  # type: ignore[no-untyped-call]
        optimizer.step(draw, torch.ones(2))
    sampler.rule.ratios(np.arange(4))


def _undisturbed(seconds: list[float]) -> float:
    """The lower decile: on a busy machine what is long is interrupted more often than what is short, and the
    ratio of two medians would depend on what else runs."""
    return float(np.quantile(seconds, 0.1))


def _clip_of(optimizer: torch.optim.Optimizer) -> GradientClip | None:
    """What AdamBS would clip with in its place; its own, if it is one of ours, which then leaves it to us."""
    if isinstance(optimizer, BanditOptimizer):
        clip, optimizer.clip = optimizer.clip, None
        return clip
    factor = with_bandit(type(optimizer)).usual_clip
    return None if factor == math.inf else GradientClip(factor)


def _context(name: str, values: Any, n: int) -> Indices:
    if isinstance(values, torch.Tensor):
        values = values.numpy(force=True)
    array = np.asarray(values)
    if array.shape != (n,) or array.dtype.kind not in "iub":
        raise ValueError(
            f"contexts[{name!r}] must be {n} whole numbers, one an example, not {array.dtype} of "
            f"shape {array.shape}"
        )
    return array.astype(np.int64)


def _bar(share: float, words: str) -> None:
    """A line on a terminal; nothing anywhere else."""
    if sys.stderr.isatty():
        done = round(30 * share)
        end = "\n" if words == "done" else ""
        sys.stderr.write(f"\rprobe [{'#' * done}{'.' * (30 - done)}] {words:<20}{end}")
        sys.stderr.flush()
