"""Is there anything to win on my data? A copy of the model is trained for a little while, and measured."""

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from adambs import _check
from adambs._types import Floats, Indices
from adambs.fetching import seeded
from adambs.probing import measures
from adambs.probing.answer import Answer
from adambs.probing.problem import Problem
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
    contexts: Mapping[str, Any] | None = None,
    seconds: float = 60.0,
    collate_fn: Callable[[Any], Any] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Answer:
    """Find out what bandit sampling would win on this model and these data, and what it would cost.

    A copy of the model is trained for a little while; the model, its optimizer and the global random streams
    stay as they were. Stopped with Ctrl-C, it returns what it has.

    Args:
        model: as it is, trained or not.
        train: the training set, with ``len()`` and ``train[i]``.
        loss: ``F.cross_entropy``, ``F.binary_cross_entropy_with_logits`` or ``F.mse_loss`` for batches
            ``(x, y)``; or any ``loss(model, batch)`` that returns one loss for each example of the batch, or
            a pair of losses and scores. Without scores they are taken from the gradient at the model's
            output.
        batch_size: K, as you would train.
        epochs: how long you would train. What there is to win grows as training goes on, so the expected
            speedup depends on it; the probe itself takes the time that ``seconds`` says.
        lr: of the Adam that trains the copy, if no optimizer is given.
        optimizer: of the model; a copy of it, with its state, trains the copy.
        contexts: what is known of each example beforehand, by name: arrays of n whole numbers (class, source,
            length in steps of ten). Labels that are whole numbers are found without being told.
        seconds: time limit. Ten steps are taken in any case.
        collate_fn: as a DataLoader's.
        seed: of everything random here.
        progress: called now and then; a bar on a terminal if nothing is given.
    """
    limit, planned = _check.positive("seconds", seconds), _check.positive("epochs", epochs)
    _check.whole("seed", seed, least=0)
    problem = Problem(
        model, train, loss, batch_size, lr=lr, optimizer=optimizer, collate_fn=collate_fn, seed=seed
    )
    known = {name: _context(name, values, problem.n) for name, values in (contexts or {}).items()}
    devices = [problem.device] if problem.device.type == "cuda" else []
    with seeded(seed, 1), torch.random.fork_rng(devices=devices):
        bar = _bar if progress is None else progress
        return _Probe(problem, known, planned, limit, seed, bar).run()


class _Probe:
    """One probe under way."""

    def __init__(
        self,
        problem: Problem,
        contexts: dict[str, Indices],
        epochs: float,
        limit: float,
        seed: int,
        progress: Progress,
    ) -> None:
        self.problem, self.contexts, self.limit, self.progress = problem, contexts, limit, progress
        self.answer = Answer(problem.n, problem.batch_size, problem.lr, epochs)
        self.random = np.random.default_rng([seed, 2])
        self.panel = np.sort(self.random.choice(problem.n, min(_PANEL, problem.n), replace=False))
        self.sampler = BanditSampler(problem.n, problem.batch_size, seed=seed, group=False)
        self.seen: list[tuple[int, Floats]] = []
        self.plain: list[float] = []
        self.added: list[float] = []
        self.looks: list[float] = []
        self.started = time.perf_counter()

    def run(self) -> Answer:
        """Train and measure until the time is over, or somebody stops it."""
        try:
            self._go_on()
        except KeyboardInterrupt:
            self.answer.interrupted = True
        self.problem.optimizer.zero_grad()
        self.answer.seconds = self._passed
        self._sum_up()
        self.progress(1.0, "done")
        return self.answer

    @property
    def _passed(self) -> float:
        return time.perf_counter() - self.started

    def _go_on(self) -> None:
        self.problem.model.train()
        self._score_panel()
        self._ask_for_noise()
        spent, following, asked = 0.0, 1, 1
        while self._passed < self.limit or self.answer.steps < _FEWEST:
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
        """One step of training as the default sampler does it, with its parts timed apart."""
        problem, clock = self.problem, time.perf_counter
        start = clock()
        draw = self.sampler.draw()
        drawn = clock()
        losses, scores = problem.losses_and_scores(problem.batch(draw._indices), len(draw))
        mean = draw.mean(losses)
        if not torch.isfinite(mean):
            raise ValueError(
                f"the loss is {mean.item()} after {self.answer.steps} steps: lower lr (it is {problem.lr:g})"
            )
        problem.optimizer.zero_grad()
        mean.backward()  # type: ignore[no-untyped-call]
        problem.optimizer.step()
        trained = clock()
        self.sampler.update(draw, scores)
        self.answer.steps += 1
        if self.answer.steps > _WARM_UP:
            self.plain.append(trained - drawn)
            self.added.append(clock() - trained + drawn - start)

    def _score_panel(self) -> None:
        before = time.perf_counter()
        losses, scores = self.problem.evaluated(self.panel, _SCORED_AT_ONCE)
        if not np.isfinite(scores).all() or (scores < 0).any():
            raise ValueError("scores must be finite and not negative: lower lr, or return other scores")
        if self.seen:  # the first one warms up
            each = (time.perf_counter() - before) / len(self.panel)
            self.looks.append(each * self.problem.batch_size)
        self.seen.append((self.answer.steps, scores))
        ratios = self.sampler.rule.ratios(self.panel)
        self.answer.potential.append((self.answer.steps, measures.potential(scores)))
        self.answer.learned.append((self.answer.steps, measures.reduction(scores, ratios)))
        self.answer.losses.append((self.answer.steps, float(losses.mean())))

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
            labels = None if "label" in self.contexts else self.problem.labels(self.panel)
            contexts = {name: values[self.panel] for name, values in self.contexts.items()}
            if labels is not None:
                contexts["label"] = labels
            for name, values in contexts.items():
                self.answer.contexts[name] = measures.told_apart(values, scores)
        if self.plain and self.looks:
            step = statistics.median(self.plain)
            self.answer.step_seconds = step
            self.answer.overhead = statistics.median(self.added) / step
            self.answer.look = statistics.median(self.looks) / step


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
