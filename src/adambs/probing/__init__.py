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
from adambs.fetching import seeded
from adambs.optim import with_bandit
from adambs.probing import measures
from adambs.probing.answer import Answer
from adambs.probing.problem import Problem
from adambs.probing.racing import Pair
from adambs.sampler import BanditSampler

__all__ = ["Answer", "probe"]

# How many examples are scored again and again: at least, and at most, for a thousand may miss the few that
# matter. To score them takes both copies about this share of the time.
_PANEL, _LARGE_PANEL = 1000, 10_000
_SCORING = 0.003
# At most this share of the training lies between two scorings, so that one unlucky moment counts little.
_APART = 1 / 40
# How many batches' gradients tell the noise, and how often that is asked.
_SPLIT, _ASKED = 6, 3
# However short the time is, so many steps are taken: less would say nothing.
_FEWEST = 10
# Of the probe's time, what scoring the panel may take.
_SHARE = 0.25
# A training that is over before the time is run so many times at most, each with draws of its own.
_RACES = 5

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
            training that is over before is seen whole, and up to four times more while there is time.
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
    options: Any = {"lr": lr, "optimizer": optimizer, "collate_fn": collate_fn, "seed": seed}

    def pair(own: int) -> Pair:
        problem, rival = (Problem(model, train, loss, batch_size, **options) for _ in range(2))
        return Pair(problem, rival, planned * problem.n / problem.batch_size, schedule, seed + own)

    first = pair(0)
    problem = first.problem
    known = {name: _context(name, values, problem.n) for name, values in (contexts or {}).items()}
    devices = [problem.device] if problem.device.type == "cuda" else []
    with seeded(seed, 1), torch.random.fork_rng(devices=devices):
        bar = _bar if progress is None else progress
        return _Probe(first, pair, known, planned, limit, seed, bar).run()


class _Probe:
    """One probe under way."""

    def __init__(
        self,
        pair: Pair,
        another: Callable[[int], Pair],
        contexts: dict[str, Indices],
        epochs: float,
        limit: float,
        seed: int,
        progress: Progress,
    ) -> None:
        self.pair, self.another, self.contexts = pair, another, contexts
        self.limit, self.progress = limit, progress
        problem = self.problem = pair.problem
        self.answer = Answer(problem.n, problem.batch_size, problem.lr, epochs)
        self.answer.losses, self.answer.plain_losses = pair.losses, pair.plain_losses
        self.planned = max(_FEWEST, math.ceil(self.answer.planned))
        self.random = np.random.default_rng([seed, 2])
        self.panel: Indices = np.empty(0, np.int64)
        self.seen: list[tuple[int, Floats]] = []
        self._known_of_panel: dict[str, Indices] | None = None
        self.looks: list[float] = []
        self.started = time.perf_counter()

    def run(self) -> Answer:
        """Train and measure until the time or the training is over, or somebody stops it."""
        try:
            _compile()
            self.started = time.perf_counter()
            self._go_on()
            self._race_again()
        except KeyboardInterrupt:
            self.answer.interrupted = True
        self.answer.seconds = self._passed
        self._sum_up()
        self.progress(1.0, "done")
        return self.answer

    @property
    def _passed(self) -> float:
        return time.perf_counter() - self.started

    def _choose_panel(self) -> Indices:
        """As many examples as can be scored in time, and not too few; n if there are fewer."""
        some = self.random.choice(self.problem.n, min(_LARGE_PANEL, self.problem.n), replace=False)
        for _ in range(2):  # the first one warms up
            _, _, seconds = self.problem.evaluated(some[:_PANEL])
        fitting = _SCORING * self.limit / (2 * float(np.median(seconds)))
        return np.sort(some[: max(_PANEL, int(fitting))])

    def _go_on(self) -> None:
        self.panel = self._choose_panel()
        self._score_panel()
        self._ask_for_noise()
        asked = 1
        while self.answer.steps < self.planned and (self._passed < self.limit or self.answer.steps < _FEWEST):
            self.pair.step()
            self.answer.steps += 1
            self.progress(min(self._passed / self.limit, 1.0), f"{self.answer.steps} steps")
            if self._due(self.pair):
                self._score_panel()
            done = max(self._passed / self.limit, self.answer.steps / self.planned)
            if asked < _ASKED and done > asked / _ASKED:
                asked += 1
                self._ask_for_noise()
        if self.seen[-1][0] < self.answer.steps:
            self._score_panel()

    def _due(self, pair: Pair) -> bool:
        """Whether it is time to score the panel again.

        Ever more steps lie between two scorings, up to a share of the training. They take no more than their
        share of the time; on a slow model fewer are made.
        """
        last = pair.losses[-1][0]
        return (
            pair.steps >= min(math.ceil(1.5 * last), last + math.ceil(_APART * self.planned))
            and pair.steps > last
            and pair.evaluating <= _SHARE * (pair.evaluating + pair.training)
        )

    def _race_again(self) -> None:
        """While there is time for a whole training, train two other copies, with other draws, and compare."""
        took = self._passed
        while (
            self.answer.steps == self.planned
            and len(self.answer.more_races) < _RACES - 1
            and self._passed + took <= self.limit
        ):
            pair = self.another(1 + len(self.answer.more_races))
            pair.evaluate(self.panel)
            while pair.steps < self.planned:
                pair.step()
                if self._due(pair):
                    pair.evaluate(self.panel)
                self.progress(min(self._passed / self.limit, 1.0), f"race {2 + len(self.answer.more_races)}")
            if pair.losses[-1][0] < pair.steps:
                pair.evaluate(self.panel)
            self.answer.more_races.append(pair.speedup())

    def _score_panel(self) -> None:
        scores, seconds = self.pair.evaluate(self.panel)
        if not np.isfinite(scores).all() or (scores < 0).any():
            raise ValueError("scores must be finite and not negative: lower lr, or return other scores")
        if self.seen:  # the first one warms up
            self.looks += [each * self.problem.batch_size for each in seconds]
        self.seen.append((self.answer.steps, scores))
        ratios = self.pair.sampler.rule.ratios(self.panel)
        self.answer.potential.append((self.answer.steps, measures.potential(scores)))
        self.answer.learned.append((self.answer.steps, measures.reduction(scores, ratios)))
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
        """From batches that p draws: six uniform ones may miss the rare examples that make the noise."""
        K, rule, gradients = self.problem.batch_size, self.pair.sampler.rule, []
        for _ in range(_SPLIT):
            indices, ratios = rule.draw(self.random.random(K))
            gradients.append(self.problem.gradient(indices, 1 / ratios))
        noise, lowered = measures.noise_to_signal(gradients), self.answer.learned[-1][1]
        self.answer.noise.append((self.answer.steps, measures.under_uniform(noise, lowered, K)))

    def _sum_up(self) -> None:
        """What follows from everything that was seen."""
        if self.seen:
            last, scores = self.seen[-1]
            # Scores of the very beginning tell nothing, whatever their age: training was another then.
            old = [(last - step, old) for step, old in self.seen[:-1] if step >= max(last / 4, 1)]
            self.answer.memory = sorted((age, measures.remembered(then, scores)) for age, then in old)
        if self.pair.plain_seconds and self.looks:
            step = _undisturbed(self.pair.plain_seconds)
            self.answer.step_seconds = step
            self.answer.overhead = max(_undisturbed(self.pair.bandit_seconds) / step - 1, 0.0)
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
