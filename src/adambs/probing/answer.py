"""What a probe has found: measures, an expected speedup as a range, and a verdict in a sentence."""

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adambs.candidates import worth
from adambs.probing import measures

# The logarithm of the expected speedup in steps is EXPONENT times the mean over the training of that of what
# p lowers the second moment by, plus an offset that a race of two copies may show. The exponent is fitted to
# recorded runs by adambs.lab.insight.probe_evidence, see docs/data-insight.md; SCATTER is how much it differs
# among them. OWN is how far an offset may be from 0, and DOUBT how far a speedup that was seen once may be
# off, both in the logarithm. The range is what is expected over and times WIDTH.
EXPONENT = 0.27
SCATTER = 0.25
OWN = 0.3
DOUBT = 0.1
WIDTH = math.sqrt(1.45)

# At so many steps, evenly spread over the training, it is asked what p would have.
_ASKED = 100

# Of so many steps, or of a twentieth of the training, something can be said.
_ENOUGH = 100
# Below this the noise of a batch is less than its mean: no p helps much.
_NOISY = 1.0
# What is expected must be above this to be worth a change of the training loop; and so many times what is
# expected without a look or a context to be worth that.
_WORTHWHILE = 1.05
# How many times more than what p learns by itself a context must lower the second moment, on the mean over
# the training, before a training with it is taken for another one.
_BETTER = 1.2

USE, LOOK, CONTEXT, PLAIN, UNKNOWN = "use it", "look before drawing", "give it a context", "plain", "unknown"


@dataclass
class Answer:
    """The findings of :func:`adambs.probe`. ``print(answer)`` tells them in words."""

    n: int
    batch_size: int
    lr: float
    epochs: float = 10.0
    """How long the training would be."""
    seconds: float = 0.0
    """How long the probe took."""
    steps: int = 0
    """How many steps it trained."""
    interrupted: bool = False
    potential: list[tuple[int, float]] = field(default_factory=list)
    """Step -> uniform over best p: how many times the best p would lower the gradient's second moment."""
    learned: list[tuple[int, float]] = field(default_factory=list)
    """Step -> what the p of the default rule lowered it by, at that step of the probe."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    """Step -> the mean loss, trained with bandit sampling."""
    plain_losses: list[tuple[int, float]] = field(default_factory=list)
    """Step -> the mean loss, trained without."""
    more_races: list[float] = field(default_factory=list)
    """Speedups in steps when the whole training was run again, with other draws."""
    memory: list[tuple[int, float]] = field(default_factory=list)
    """Age in steps -> what scores of that age would have lowered it by, at the probe's end."""
    noise: list[tuple[int, float]] = field(default_factory=list)
    """Step -> the noise of a batch's gradient over its mean, both squared."""
    contexts: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Name -> step -> what knowing only this of each example would have lowered it by."""
    step_seconds: float = math.nan
    """A plain training step."""
    overhead: float = math.nan
    """What a step with bandit sampling takes beyond a plain one, in plain steps."""
    look: float = math.nan
    """Scoring one batch by a forward pass, in plain steps."""

    @property
    def measured(self) -> bool:
        """Whether there is enough for a verdict: at the start of a training all scores are alike."""
        seen = self.steps >= min(_ENOUGH, self.planned / 20)
        return seen and bool(self.potential and self.noise) and math.isfinite(self.step_seconds)

    @property
    def possible(self) -> float:
        """The potential at the probe's end."""
        return self.potential[-1][1] if self.potential else math.nan

    @property
    def kept(self) -> float:
        """What a memory keeps of it: the worth of scores that are one pass old, or what p had."""
        if not self.potential:
            return math.nan
        old = measures.at_age(self.memory, self.n / self.batch_size)
        return max(old, self.learned[-1][1] if self.learned else 1.0, 1.0)

    @property
    def noise_now(self) -> float:
        """The largest that was measured after the start: noise grows as training goes on."""
        return max((value for _, value in self.noise[1:] or self.noise), default=math.nan)

    @property
    def planned(self) -> float:
        """How many steps the training would have."""
        return self.epochs * self.n / self.batch_size

    @property
    def foreseen(self) -> float:
        """The potential half way through the training: as measured, or continued from what was measured."""
        return measures.ahead(self.potential, self.planned / 2) if self.potential else math.nan

    def course(
        self, *, look: bool = False, context: str | None = None, until: float | None = None
    ) -> list[float]:
        """By how much p would lower the second moment, over the training.

        At steps that are evenly spread over it, or over its first ``until`` steps. With the defaults the
        first pass is a plain one, unless there is a context; then p has what the default rule had learned in
        the probe (beyond its end, continued), or what the context tells if that is more. A look counts as its
        gain over its cost, where :class:`adambs.Candidates` would make one.
        """
        found, cost = [], measures.look_cost(self.look)
        for k in range(_ASKED):
            step = (k + 0.5) / _ASKED * (self.planned if until is None else until)
            best = measures.ahead(self.potential, step)
            ours = measures.ahead(self.learned, step) if step >= self.n / self.batch_size else 1.0
            if context is not None:
                ours = max(ours, measures.ahead(self.contexts[context], step))
            ours = min(ours, best)
            gain = measures.look_gain(best, ours)
            looks = look and worth(gain, self.batch_size) > cost
            found.append(ours * gain / cost if looks else ours)
        return found

    @property
    def race(self) -> tuple[int, float] | None:
        """Until which step the two copies were compared, and the speedup in steps of the bandit's.

        Of several races the geometric mean.
        """
        ours, theirs = (
            [(step, value) for step, value in each if step <= math.ceil(self.planned)]
            for each in (self.losses, self.plain_losses)
        )
        if len(theirs) < 2 or len(ours) != len(theirs):
            return None
        return theirs[-1][0], measures.geometric_mean([measures.race(theirs, ours), *self.more_races])

    def shown(self, usual: float = EXPONENT) -> tuple[float, float]:
        """The exponent and the offset of this problem: usual ones, and what the race has shown."""
        if self.race is None:
            return usual, 0.0
        until, speedup = self.race
        x = self._mean_log(self.course(until=until))
        doubt = DOUBT / math.sqrt(1 + len(self.more_races))
        return measures.updated(usual, SCATTER, OWN, x, math.log(speedup), doubt)

    def _mean_log(self, course: list[float]) -> float:
        """Of what p lowers; where batches are hardly noisy, of what that does to the whole second moment."""
        noise = self.noise_now if self.noise_now < _NOISY else math.inf
        return sum(math.log(measures.of_a_batch(value, noise)) for value in course) / len(course)

    def expects(self, *, look: bool = False, context: str | None = None, usual: float = EXPONENT) -> float:
        """The speedup by the clock that is to be expected, with or without a look and a context.

        ``usual`` is the exponent of recorded runs.
        """
        if not self.measured:
            return math.nan
        alone, chosen = (
            self._mean_log(course) for course in (self.course(), self.course(look=look, context=context))
        )
        if context is not None and chosen - alone > math.log(_BETTER):
            # p is another from the first step on: the race tells nothing of it.
            return math.exp(usual * chosen) / (1 + self.overhead)
        exponent, offset = self.shown(usual)
        raced = 0.0 if self.race is None else min(self.race[0] / self.planned, 1.0)
        return math.exp(exponent * alone + raced * offset + usual * (chosen - alone)) / (1 + self.overhead)

    @property
    def expected(self) -> float:
        """The speedup by the clock that is to be expected of what the verdict says to do."""
        kind, context = self.kind, self.best_context
        return self.expects(look=kind == LOOK, context=context if kind == CONTEXT else None)

    @property
    def speedup(self) -> tuple[float, float]:
        """The range in which the speedup is to be expected."""
        return self.expected / WIDTH, self.expected * WIDTH

    @property
    def best_context(self) -> str | None:
        """The context of which most is to be expected."""
        return max(self.contexts, key=lambda name: self.expects(context=name)) if self.contexts else None

    @property
    def kind(self) -> str:
        """Which of the verdicts it is: of what is to be won the most, and of what is alike the simplest."""
        if not self.measured:
            return UNKNOWN
        alone, looking = self.expects(), self.expects(look=True)
        told = self.expects(context=self.best_context)
        best = max(alone, looking, told)
        if best <= _WORTHWHILE:
            return PLAIN
        if best <= _WORTHWHILE * alone:
            return USE
        return CONTEXT if told >= looking else LOOK

    @property
    def verdict(self) -> str:
        """What to do, in a sentence."""
        K = self.batch_size
        sampler = f"adambs.BanditSampler({self.n}, batch_size={K})"
        match self.kind:
            case "unknown":
                return (
                    f"Nothing can be said yet: {self.steps} step{'s' * (self.steps != 1)} of "
                    f"{self.planned:,.0f} are too few. Give it more seconds."
                )
            case "look before drawing":
                return f"Look before drawing: {sampler}, and BanditLoader(..., score=...); see its docs."
            case "give it a context":
                return (
                    f"Give it a context: {self.best_context} tells scores apart before memory can; "
                    f"{sampler[:-1]}, context=...)."
                )
            case "use it":
                return f"Use it with these settings: {sampler} and AdamBS(..., lr={self.lr:g})."
        if self.noise_now < _NOISY:
            smaller = max(1, round(K * max(self.noise_now, 1 / K)))
            return (
                f"Use a plain DataLoader: batches of {K} are hardly noisy, so no p can help. Try batches of "
                f"{smaller} with lr {self.lr:g}, or lr {2 * self.lr:g} with batches of {K}, first."
            )
        steps = self.expects() * (1 + self.overhead)
        if steps > _WORTHWHILE:
            return (
                f"Use a plain DataLoader: p would win {steps:.2f} times in steps, and a step would take "
                f"{1 + self.overhead:.2f} times as long."
            )
        return (
            "Use a plain DataLoader: gradient norms are too alike, or change too fast, for any p to pay here."
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; what is not known is None."""
        names = ("n", "batch_size", "lr", "epochs", "seconds", "steps", "interrupted")
        found: dict[str, Any] = {name: getattr(self, name) for name in names}
        found["contexts"] = {
            name: [[step, _plain(value)] for step, value in told] for name, told in self.contexts.items()
        }
        for name in ("potential", "learned", "losses", "plain_losses", "memory", "noise"):
            found[name] = [[step, _plain(value)] for step, value in getattr(self, name)]
        found["more_races"] = self.more_races
        for name in ("step_seconds", "overhead", "look", "possible", "foreseen", "kept", "noise_now"):
            found[name] = _plain(getattr(self, name))
        found["expected"] = _plain(self.expected)
        found["without_look_or_context"] = _plain(self.expects())
        found["race"], found["shown"] = self.race, [_plain(value) for value in self.shown()]
        found["speedup"] = [_plain(value) for value in self.speedup]
        found["kind"], found["verdict"] = self.kind, self.verdict
        return found

    def lines(self) -> list[tuple[str, str]]:
        """The findings in words: what, and how much."""
        rows = []
        if self.potential:
            first, last = self.potential[0][1], self.potential[-1][1]
            rows.append(
                (
                    "to win",
                    f"the best p divides the second moment by {first:.2f} at first, {last:.2f} at the end",
                )
            )
            half = self.planned / 2
            how = "as measured" if half <= self.steps else f"continued from {self.steps:,}"
            rows.append(
                ("half way", f"{self.foreseen:.2f} times at step {half:,.0f} of {self.planned:,.0f}, {how}")
            )
            rows.append(("of it kept", f"a memory of one pass keeps {self.kept:.2f} of {self.possible:.2f}"))
            usual = measures.ahead(self.learned, half)
            rows.append(("learned", f"half way p would have {min(usual, self.foreseen):.2f} of it"))
        if self.race is not None:
            until, seen = self.race
            times = f", the mean of {1 + len(self.more_races)} races" if self.more_races else ""
            rows.append(("seen", f"{seen:.2f} times as fast in steps, in the first {until:,}{times}"))
        if self.noise:
            much = "drowns the mean gradient"
            if math.isfinite(self.noise_now):
                much = f"squared, {self.noise_now:.3g} times the mean gradient's square"
            rows.append(("noise", f"{much}, in batches of {self.batch_size}"))
        for name, told in sorted(self.contexts.items()):
            rows.append(
                ("context", f"{name} alone would divide the second moment by {told[-1][1]:.2f} at the end")
            )
        if math.isfinite(self.step_seconds):
            costs = f"{1000 * self.step_seconds:.2f} ms; the bandit adds {100 * self.overhead:.1f} %"
            rows.append(("a step", f"{costs}, a look at a batch takes {100 * self.look:.0f} %"))
        return rows

    def __str__(self) -> str:
        stopped = ", interrupted" if self.interrupted else ""
        head = f"adambs probe: {self.steps} steps in {self.seconds:.0f} s{stopped}"
        rows = [f"  {name:<12}{text}" for name, text in self.lines()]
        if self.measured:
            low, high = self.speedup
            over = f"over {self.epochs:g} epoch{'s' * (self.epochs != 1)}"
            rows.append(f"  {'expected':<12}{low:.2f} to {high:.2f} times as fast by the clock, {over}")
        return "\n".join([head, *rows, f"  {'verdict':<12}{self.verdict}"])

    def _chart(self) -> dict[str, Any] | None:
        if len(self.potential) < 2 or self.steps == 0:
            return None
        top = max(1.1, *(value for _, value in self.potential + self.learned))
        lines = {"best": self.potential, "learned": self.learned}
        return {"top": top, "steps": self.steps} | {
            name: _points(values, self.steps, top) for name, values in lines.items()
        }

    def report(self, path: str | Path) -> Path:
        """Write the findings as one HTML page that loads nothing; the path of it."""
        from adambs import pages

        target = Path(path)
        data = json.dumps(self.to_dict(), indent=1)
        text = pages.render("probe.html", answer=self, chart=self._chart(), data=data)
        partial = target.with_name(target.name + ".partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, target)
        return target


def _points(values: list[tuple[int, float]], steps: int, top: float) -> str:
    """The corners of a line in a chart of 590 by 180, straight in steps and logarithmic in values."""
    height = 180 / math.log(top)
    return " ".join(
        f"{40 + 590 * step / steps:.1f},{200 - height * math.log(max(value, 1.0)):.1f}"
        for step, value in values
    )


def _plain(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
