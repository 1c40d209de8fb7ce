"""History: what was seen of each example while a sampler trained. An observer, never on the way.

32 bytes an example, see ``visits.py``. A step touches the K records of its draw and no others.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from adambs import _check
from adambs._types import Floats, Indices
from adambs.draw import Draw
from adambs.feedback import _copied as start_copy
from adambs.gathering import Gathering
from adambs.sampler import BanditSampler
from adambs.suspects import Suspect, checked_final, easiest, ranked
from adambs.visits import RECORD, observe

# The form of a state.
_FORMAT = 2

# Beyond this a score or a loss counts as this: squares of it, and their sums, are finite as float32.
_LARGEST = 1e15

# A sum of weighted losses, or of weights, is below this.
_HUGE = 1e40

# Losses wait here for the scores of their draw. A draw may never come back: so many wait at most.
_MOST_WAITING = 1024

# What is usual is a mean over all examples, in which each step counts this much less than the next.
_FADING = 0.95

Table = dict[str, NDArray[Any]]
_Waiting = Floats | Gathering | Callable[[], torch.Tensor]


class History:
    """Keeps, for each of n examples, what its visits have shown.

    ::

        history = adambs.History(len(train)).watch(sampler)
        ...
        history.suspects(labels=labels, k=100)  # hard, rare or mislabelled: look at these first

    Off unless asked for: a sampler without a history does nothing for it. Each of several
    processes keeps the same history, of all examples. Its state is to be saved beside the sampler's.

    Args:
        n: number of training examples.
        learned: an example is learned while its last score is below this. The default, one half, means for
            softmax and sigmoid losses that the model gives the label more than half of the probability.
        with_losses: whether losses are kept too. Then ``history.losses(draw, losses)`` must be called for
            each draw, before its scores are given to the sampler or to the optimizer.
    """

    def __init__(self, n: int, *, learned: float = 0.5, with_losses: bool = False) -> None:
        self.n = _check.whole("n", n, least=1)
        self.learned = _check.positive("learned", learned)
        self.with_losses = bool(with_losses)
        self._records = np.zeros(self.n, RECORD)  # the system hands out zeros as they are first written
        self._usual = (0.0, 0.0)  # weighted sums of the last steps: of the losses (or scores), and of ones
        self._losses: dict[int, _Waiting] = {}
        self._sampler: BanditSampler | None = None

    def watch(self, sampler: BanditSampler) -> Self:
        """Observe this sampler from now on, and no other."""
        if not isinstance(sampler, BanditSampler):
            raise TypeError(f"sampler must be a BanditSampler, not {type(sampler).__name__}")
        if sampler.n != self.n:
            raise ValueError(
                f"history is of {self.n} examples and the sampler of {sampler.n}: use History({sampler.n})"
            )
        if self.with_losses and sampler.in_parts:
            raise ValueError(
                "a history with losses cannot watch a ShardedSampler of several processes, each of which has "
                "its own part of a batch: build it without with_losses, for the examples of this process"
            )
        if self._sampler is not None:
            raise ValueError("history watches a sampler already: build a History for each")
        self._sampler = sampler
        sampler.observers.append(self)
        return self

    def losses(self, draw: Draw, losses: torch.Tensor) -> None:
        """Note the losses of a draw, one for each of its examples. Its scores are to follow.

        With several processes, those of this process's part; they are gathered without waiting.
        """
        if not self.with_losses:
            raise ValueError("history keeps no losses: build it with History(n, with_losses=True)")
        if not isinstance(draw, Draw):
            raise TypeError(f"draw must be a Draw, not {type(draw).__name__}")
        _check.losses(losses, len(draw))
        group = None if self._sampler is None else self._sampler.processes.group
        if group is not None:
            whole = draw.whole
            waiting: _Waiting = group.gather(
                "losses for a history",
                losses.detach(),
                group.parts(len(whole)),
                number=whole.number,
                draws=whole.number,
            )
        elif draw.whole is not draw:
            raise ValueError(f"{draw!r} is shared by several processes: call history.watch(sampler) first")
        elif losses.is_cpu:
            waiting = _finite(losses.detach().double().numpy(), draw)
        else:
            waiting = start_copy(losses)  # read when the scores come: no device is waited for here
        self._losses[draw.number] = waiting
        if len(self._losses) > _MOST_WAITING:
            del self._losses[next(iter(self._losses))]

    def __call__(self, draw: Draw, scores: Floats) -> None:
        """Observe the scores of a draw; ``sampler.observers`` calls this. O(K)."""
        if draw.n != self.n:
            raise ValueError(
                f"history is of {self.n} examples and the draw of {draw.n}: use History({draw.n})"
            )
        if not self.with_losses:
            self._observe(draw, scores, scores)
            return
        waiting = self._losses.pop(draw.number, None)
        if waiting is None:
            raise ValueError(
                f"draw {draw.number} came back without losses: call history.losses(draw, losses) before "
                "its scores are given, or build the history without with_losses"
            )
        if isinstance(waiting, Gathering):
            waiting = _finite(waiting.wait(), draw)
        elif callable(waiting):
            waiting = _finite(waiting().double().numpy(), draw)
        self._observe(draw, scores, waiting)

    def _observe(self, draw: Draw, scores: Floats, losses: Floats) -> None:
        """What was usual at this step, and the visits."""
        values = np.clip(losses, -_LARGEST, _LARGEST)
        weights = np.minimum(1 / draw._ratios, _LARGEST)  # of an unbiased mean over all examples
        total, count = self._usual
        total = _FADING * total + float(weights @ values)
        count = _FADING * count + float(weights.sum())
        self._usual = total, count
        kept = np.minimum(scores, _LARGEST).astype(np.float32)
        last = ((kept.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
        observe(
            self._records,
            draw._indices,
            kept,
            last,
            values,
            total / count,
            self.with_losses,
            self.learned,
        )

    def table(self) -> Table:
        """Everything that is known, by name: arrays with an entry for each example. New arrays, O(n).

        ``visits``; of the scores ``last_score`` (to 0.4 %), ``mean_score``, their ``scatter`` (standard
        deviation) and ``trend`` (slope of the straight line through them, per visit; NaN before the second);
        ``learned_at``, the visit at which it was first learned, 0 if never; ``forgotten``, how often it was
        learned at one visit and not at the next; ``excess``, the mean over its visits of the loss (of the
        score, if losses are not kept) minus what was usual among all examples at that step; ``last_loss``
        and ``mean_loss`` if losses are kept. What is not known of an example that was never visited is NaN.
        """
        self._settle()
        r = self._records
        visits = r["visits"].astype(np.int64)
        k = visits.astype(np.float64)
        seen = visits > 0
        last = ((r["last"].astype(np.uint32) & 0x7FFF) << 16).view(np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            table: Table = {
                "visits": visits,
                "last_score": np.where(seen, last, np.nan),
                "mean_score": np.where(seen, r["mean"], np.nan),
                "scatter": np.sqrt(np.where(seen, r["squares"], np.nan) / k),
                "trend": np.where(visits > 1, r["slope"] / (k * (k * k - 1) / 12), np.nan),
                "learned_at": r["learned_at"].astype(np.int64),
                "forgotten": r["forgotten"].astype(np.int64),
                "excess": np.where(seen, r["excess"], np.nan),
            }
        if self.with_losses:
            table["last_loss"] = np.where(seen, r["last_loss"], np.nan)
            table["mean_loss"] = np.where(seen, r["mean_loss"], np.nan)
        return table

    def to_csv(self, path: str | Path) -> None:
        """Write the table, with the example's index as the first column."""
        table = self.table()
        names = ["index", *table]
        columns = [np.arange(self.n).tolist(), *(column.tolist() for column in table.values())]
        with Path(path).open("w", encoding="ascii", newline="\n") as file:
            file.write(",".join(names) + "\n")
            for row in zip(*columns, strict=True):
                file.write(",".join("" if value != value else repr(value) for value in row) + "\n")

    def to_parquet(self, path: str | Path) -> None:
        """Write the table; needs pyarrow, or pandas with an engine of its own."""
        columns = {"index": np.arange(self.n), **self.table()}
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError:
            try:
                import pandas
            except ModuleNotFoundError:
                raise ModuleNotFoundError(
                    "to_parquet needs pyarrow or pandas: pip install pyarrow, or use to_csv"
                ) from None
            pandas.DataFrame(columns).to_parquet(path, index=False)
            return
        pyarrow.parquet.write_table(pyarrow.table(columns), path)

    def suspects(self, *, labels: Any = None, k: int = 100, final: Any = None) -> list[Suspect]:
        """The k examples whose labels are most worth a second look, each with a reason. O(n log n).

        They are hard, rare or mislabelled: which of these, only a look can tell.

        Args:
            labels: the class of each example, n whole numbers or words: each is then compared with its own
                class, so that a rare class is not accused as such. Without them all are one class.
            k: how many; fewer come back if fewer were visited.
            final: the losses of all examples (the scores, if the history keeps no losses) under the trained
                model, from one forward pass over the data, if you have made one.
        """
        if final is not None:
            final = checked_final(final, self.n)
        return ranked(self.table(), labels, _check.whole("k", k, least=1), final)

    def easy(self, k: int) -> Indices:
        """The k that taught least: learned, never forgotten, of the smallest mean score. O(n log n)."""
        return easiest(self.table(), _check.whole("k", k, least=1))

    def _settle(self) -> None:
        """Scores that are on their way belong to the past."""
        if self._sampler is not None:
            self._sampler.diagnostics()

    def state_dict(self) -> dict[str, Any]:
        """All records, 32 bytes each, as tensors. Loads with ``weights_only=True``."""
        self._settle()
        fields = {name: _as_tensor(self._records[name]) for name in self._fields()}
        settings = {"learned": self.learned, "with_losses": self.with_losses}
        usual = dict(zip(("usual_sum", "usual_count"), self._usual, strict=True))
        return {"format": _FORMAT, "n": self.n, **settings, **usual, "records": fields}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state from :meth:`state_dict`, or raise ``ValueError`` and keep the old one."""
        if _check.count(state, "format") != _FORMAT:
            raise ValueError(f"state has format {state['format']}, this version reads {_FORMAT}")
        if _check.count(state, "n") != self.n:
            raise ValueError(f"state is of a history of {state['n']} examples, this one has {self.n}")
        for name, ours in (("learned", self.learned), ("with_losses", self.with_losses)):
            if _check.entry(state, name) != ours:
                raise ValueError(f"state has {name} = {state[name]!r}, this history {ours!r}: build it alike")
        usual = (
            _check.number(state, "usual_sum", -_HUGE, _HUGE),
            _check.number(state, "usual_count", 0, _HUGE),
        )
        fields, records = _check.mapping(state, "records"), np.zeros(self.n, RECORD)
        for name in self._fields():
            whole = RECORD[name].kind == "u"
            bounds = (0, 256 ** RECORD[name].itemsize - 1) if whole else (None, None)
            kind = "int64" if whole else "float32"
            records[name] = _check.array(fields, name, (self.n,), kind, *bounds, path="state['records']")
        bad = ~(np.isfinite(records["mean"]) & (records["squares"] >= 0) & np.isfinite(records["squares"]))
        bad |= ~(
            np.isfinite(records["slope"]) & np.isfinite(records["excess"]) & np.isfinite(records["mean_loss"])
        )
        bad |= records["learned_at"] > records["visits"]
        if bad.any():
            raise ValueError(f"state['records'] is damaged: example {int(bad.argmax())} cannot be like that")
        self._records, self._usual = records, usual
        self._losses.clear()

    def _fields(self) -> tuple[str, ...]:
        names = tuple(RECORD.names or ())
        return names if self.with_losses else names[:-2]

    @property
    def nbytes(self) -> int:
        """The memory of the records."""
        return self._records.nbytes

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        seen = int(np.count_nonzero(self._records["visits"]))
        return f"History({self.n}: {seen} visited, {int(self._records['visits'].sum())} visits)"


def _as_tensor(column: NDArray[Any]) -> torch.Tensor:
    """A copy; whole numbers as int64, which every version of torch can save and compute with."""
    return torch.from_numpy(column.astype(np.int64 if column.dtype.kind == "u" else np.float32))


def _finite(losses: Floats, draw: Draw) -> Floats:
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        raise ValueError(
            f"losses[{bad[0]}] is {losses[bad[0]]} (draw {draw.number}): every loss must be finite"
        )
    return losses
