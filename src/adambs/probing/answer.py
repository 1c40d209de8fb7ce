"""What a probe has found: measures, an expected speedup as a range, and a verdict in a sentence."""

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adambs.probing import measures

# The logarithm of the expected speedup is RISE x / (1 + BEND x), with x the logarithm of the potential
# variance reduction half way through the training, minus that of what the bandit's own steps cost. The range
# is that over and times WIDTH. Fitted to recorded runs by adambs.lab.insight.probe_evidence, see
# docs/data-insight.md.
RISE = 0.30
BEND = 0.50
WIDTH = math.sqrt(1.45)

# Below this the noise of a batch is less than its mean: no p helps much.
_NOISY = 1.0
# What is expected must be above this to be worth a change of the training loop.
_WORTHWHILE = 1.05
# How many times more than memory a context must promise before it is recommended.
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
    """Step -> the mean loss."""
    memory: list[tuple[int, float]] = field(default_factory=list)
    """Age in steps -> what scores of that age would have lowered it by, at the probe's end."""
    noise: list[tuple[int, float]] = field(default_factory=list)
    """Step -> the noise of a batch's gradient over its mean, both squared."""
    contexts: dict[str, float] = field(default_factory=dict)
    """Name -> what knowing only this of each example would have lowered it by, at the probe's end."""
    step_seconds: float = math.nan
    """A plain training step."""
    overhead: float = math.nan
    """Draw, scores and update, in plain steps."""
    look: float = math.nan
    """Scoring one batch by a forward pass, in plain steps."""

    @property
    def measured(self) -> bool:
        """Whether there is enough for a verdict."""
        return bool(self.potential and self.noise) and math.isfinite(self.step_seconds)

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

    @property
    def expected(self) -> float:
        """The speedup by the clock that the recorded runs suggest for the library's default."""
        if not self.measured:
            return math.nan
        value = self.foreseen
        if self.noise_now < _NOISY:
            value = measures.of_a_batch(value, self.noise_now)
        return measures.expected_gain(value, RISE, BEND) / (1 + self.overhead)

    @property
    def _look_pays(self) -> bool:
        """As :class:`adambs.Candidates` decides, with what p had learned if it has had a pass to do so."""
        learned = self.learned[-1][1] if self.steps >= self.n / self.batch_size else self.kept
        gain = measures.look_gain(self.possible, min(max(learned, 1.0), self.possible))
        return gain > measures.look_cost(self.look)

    @property
    def speedup(self) -> tuple[float, float]:
        """The range in which the speedup is to be expected."""
        return self.expected / WIDTH, self.expected * WIDTH

    @property
    def best_context(self) -> tuple[str, float] | None:
        """The context that tells scores apart best."""
        return max(self.contexts.items(), key=lambda item: item[1]) if self.contexts else None

    @property
    def kind(self) -> str:
        """Which of the verdicts it is."""
        if not self.measured:
            return UNKNOWN
        if self.noise_now < _NOISY:
            return PLAIN
        if self._look_pays:
            return LOOK
        context = self.best_context
        if context is not None and context[1] > max(self.kept, _WORTHWHILE) * _BETTER:
            return CONTEXT
        return USE if self.expected > _WORTHWHILE else PLAIN

    @property
    def verdict(self) -> str:
        """What to do, in a sentence."""
        K = self.batch_size
        sampler = f"adambs.BanditSampler({self.n}, batch_size={K})"
        match self.kind:
            case "unknown":
                return "Nothing can be said: the probe was stopped before it had measured enough."
            case "look before drawing":
                return f"Look before drawing: {sampler}, and BanditLoader(..., score=...) as in the README."
            case "give it a context":
                assert self.best_context is not None
                name = self.best_context[0]
                return (
                    f"Give it a context: {name} tells scores apart better than memory can; "
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
        return (
            "Use a plain DataLoader: gradient norms are too alike, or change too fast, for any p to pay here."
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; what is not known is None."""
        names = ("n", "batch_size", "lr", "epochs", "seconds", "steps", "interrupted", "contexts")
        found: dict[str, Any] = {name: getattr(self, name) for name in names}
        for name in ("potential", "learned", "losses", "memory", "noise"):
            found[name] = [[step, _plain(value)] for step, value in getattr(self, name)]
        for name in ("step_seconds", "overhead", "look", "possible", "foreseen", "kept", "noise_now"):
            found[name] = _plain(getattr(self, name))
        found["expected"] = _plain(self.expected)
        found["speedup"] = [_plain(value) for value in self.speedup]
        found["kind"], found["verdict"] = self.kind, self.verdict
        return found

    def lines(self) -> list[tuple[str, str]]:
        """The findings in words: what, and how much."""
        rows = []
        if self.potential:
            first, last = self.potential[0][1], self.potential[-1][1]
            rows.append(
                ("to win", f"the best p lowers the noise {first:.2f} times at first, {last:.2f} at the end")
            )
            half = self.planned / 2
            how = "as measured" if half <= self.steps else f"continued from {self.steps:,}"
            rows.append(
                ("half way", f"{self.foreseen:.2f} times at step {half:,.0f} of {self.planned:,.0f}, {how}")
            )
            rows.append(("of it kept", f"a memory of one pass keeps {self.kept:.2f} of {self.possible:.2f}"))
        if self.noise:
            known = math.isfinite(self.noise_now)
            much = f"{self.noise_now:.3g} times the mean gradient" if known else "drowns the mean gradient"
            rows.append(("noise", f"{much}, in batches of {self.batch_size}"))
        for name, value in sorted(self.contexts.items()):
            rows.append(("context", f"{name} alone would lower the noise {value:.2f} times"))
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
