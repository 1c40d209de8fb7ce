"""How scores come home: at once, late from a device, or from all processes; and which draws still wait."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from adambs import _check
from adambs._types import Floats, State
from adambs.carried import tells_of_weights, was_capped
from adambs.draw import Draw
from adambs.processes import Group

# A draw may never come back. So many are remembered at most, and so many examples in all of them.
# But as many as many workers may have fetched ahead.
_MOST_DRAWS, _MOST_EXAMPLES, _LEAST_DRAWS = 1024, 1 << 22, 256


DrawOrNumber = Draw | int | torch.Tensor
"""A draw, its number, or the tensor of it that a batch carries."""


Observer = Callable[[Draw, Floats], None]
"""Called with each draw that has come back and its scores, after p has learned. Must not change them."""


class Awaited:
    """The draws that have had no feedback, by number. The oldest are forgotten when there are very many."""

    def __init__(self, batch_size: int, following: int = 0, names: Sequence[str] | None = None) -> None:
        self._batch_size = batch_size
        self.names = names
        """Of the sources that are drawn, if it is not the examples of a data set."""
        self.following = following
        """The number of the next draw."""
        self._draws: dict[int, Draw] = {}
        self.most = max(_LEAST_DRAWS, min(_MOST_DRAWS, _MOST_EXAMPLES // batch_size))

    def add(self, draw: Draw) -> None:
        """Wait for this one, too."""
        draws = self._draws
        draws[draw.number] = draw
        if draw.number >= self.following:
            self.following = draw.number + 1
        if len(draws) > self.most:
            del draws[next(iter(draws))]

    def expect(self, ahead: Iterable[Draw]) -> None:
        """Wait for the draws that a loaded state has on their way."""
        for draw in ahead:
            if draw.number >= self.following:
                raise ValueError(f"state['epochs'] is damaged: draw {draw.number} was not made yet")
            self.add(draw)

    def find(self, draw: Any) -> Draw:
        """The draw that is meant, by itself or by its number; or an error."""
        if type(draw) is Draw and self._draws.get(draw.number) is draw:
            return draw
        number = draw.number if isinstance(draw, Draw) else _number(draw)
        found = self._draws.get(number)
        if found is None:
            if number >= self.following:
                raise ValueError(
                    f"draw {number} was drawn by another sampler: this one has drawn {self.following}"
                )
            raise ValueError(
                f"draw {number} is not awaited: it has had its feedback already (one draw teaches once), was "
                f"drawn by another sampler, or is older than the last {self.most} draws without feedback"
            )
        if isinstance(draw, Draw) and not found.same_as(draw):
            raise ValueError(f"draw {draw!r} was drawn by another sampler: give it back to that one")
        return found

    def close(self, draw: Draw) -> None:
        """It has had its feedback: one draw teaches once."""
        if self._draws.get(draw.number) is not draw:
            self.find(draw)  # a copy of it, or an error
        del self._draws[draw.number]

    def state_dict(self) -> dict[str, Any]:
        """The next number. The draws on their way are the loader's to save; nobody can bring the others."""
        return {"following": self.following}

    def with_state(self, state: State) -> "Awaited":
        """One like this, in a state from :meth:`state_dict`; or an error."""
        return Awaited(self._batch_size, _check.count(state, "following"), self.names)


def _number(value: Any) -> int:
    """A draw's number, as an int or as the tensor that a batch carries."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.numel() == 0:
            raise TypeError(f"draw must be a Draw or its number, not a tensor of {value.dtype}")
        numbers = value.reshape(-1).tolist()
        if numbers.count(numbers[0]) != len(numbers):
            raise ValueError(
                f"draw holds the numbers of several draws, {sorted(set(numbers))}: update each by itself"
            )
        value = numbers[0]
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"draw must be a Draw or its number, not {type(value).__name__}: see sampler.draw()")
    return int(value)


Arrived = tuple[Draw, Floats, Draw | torch.Tensor | None]
"""A draw, its scores, and who knows whether its weights were used; see :class:`Report`."""


class Report:
    """The scores of one draw on their way home."""

    __slots__ = ("capped", "draw", "fetch", "scores", "skipped", "witness")

    def __init__(
        self,
        draw: Draw | None,
        scores: Floats | None = None,
        fetch: Callable[[], tuple[Any, Any]] | None = None,
        skipped: Callable[[], Any] | None = None,
    ) -> None:
        self.draw = draw
        """None if its number is still on a device."""
        self.scores = scores
        """Checked, if they have arrived."""
        self.fetch = fetch
        """Waits for them: the draw or its number, and the scores."""
        self.skipped = skipped
        """Waits for whether the optimizer's step was skipped, and the scores are to be dropped."""
        self.witness: Draw | torch.Tensor | None = draw
        """Knows whether the weights were used: the draw, or the number of it that a batch carries. None if
        the caller had a plain number, or a copy of the draw."""
        self.capped = False
        """Whether that number says that the cap was applied."""


class Policy(ABC):
    """Brings scores home. Whatever the way, a draw is learned from before the next one is made."""

    @abstractmethod
    def begin(self, draw: Any, scores: Any, awaited: Awaited, skipped: torch.Tensor | None) -> Report:
        """Check what can be checked without waiting, and start the rest. Changes nothing of the sampler."""


class AtOnce(Policy):
    """Read the scores now. Bad ones raise now.

    Args:
        elsewhere: brings home the scores that are on a device; if there is none, they are waited for.
    """

    def __init__(self, elsewhere: Policy | None = None) -> None:
        self._elsewhere = elsewhere

    def begin(self, draw: Any, scores: Any, awaited: Awaited, skipped: torch.Tensor | None) -> Report:
        """Everything is known at once."""
        elsewhere = self._elsewhere if isinstance(scores, torch.Tensor) else None
        if elsewhere is not None and not (scores.is_cpu or scores.is_meta):
            return elsewhere.begin(draw, scores, awaited, skipped)
        found = awaited.find(draw)
        if skipped is not None and bool(skipped.item()):
            return Report(found, skipped=lambda: True)
        return Report(found, checked(found, scores, awaited.names))


class Late(Policy):
    """Copy the scores from their device without waiting; they are learned at the next draw.

    Bad ones raise there, with the number of their draw, and are dropped. p learns the same as at once.
    """

    def begin(self, draw: Any, scores: Any, awaited: Awaited, skipped: torch.Tensor | None) -> Report:
        """The copies are started; shapes are checked."""
        if not isinstance(scores, torch.Tensor):
            return _AT_ONCE.begin(draw, scores, awaited, skipped)
        on_device = isinstance(draw, torch.Tensor) and draw.device.type != "cpu"
        found = None if on_device else awaited.find(draw)
        K = len(draw) if found is None else len(found)
        if scores.shape != (K,):
            raise ValueError(
                f"scores must have shape ({K},), one number an example, not {tuple(scores.shape)}"
            )
        whose, values = (_copied(draw) if on_device else lambda: found), _copied(scores)
        return Report(
            found,
            fetch=lambda: (whose(), values()),
            skipped=None if skipped is None else _copied(skipped),
        )


class Gathered(Policy):
    """Gather the scores of all processes without waiting; they are learned at the next draw, by all alike.

    Bad scores of any process raise there, the same error on all. A step that was skipped on one is dropped
    on all.
    """

    def __init__(self, group: Group, batch_size: int) -> None:
        self._group, self._parts = group, group.parts(batch_size)
        group.room = self._parts.most

    def begin(self, draw: Any, scores: Any, awaited: Awaited, skipped: torch.Tensor | None) -> Report:
        """The gathering is started; the shape of this process's part is checked."""
        on_device = isinstance(draw, torch.Tensor) and draw.device.type != "cpu"
        found = None if on_device else awaited.find(draw)
        gathering = self._group.gather(
            "an update",
            scores,
            self._parts,
            number=draw if found is None else found.number,
            draws=awaited.following,
            skipped=skipped,
        )

        def fetch() -> tuple[Any, Any]:
            values = gathering.wait()
            return (gathering.number if found is None else found), values

        return Report(found, fetch=fetch, skipped=lambda: gathering.skipped)


_AT_ONCE, _LATE = AtOnce(), Late()

POLICIES: dict[str, Policy] = {"automatic": AtOnce(_LATE), "at once": _AT_ONCE, "late": _LATE}


class Feedback:
    """Takes reports in and hands out what can be learned: at once, or before the next draw."""

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"feedback must be one of {', '.join(map(repr, POLICIES))}, not {policy!r}")
        self._policy = self._own = POLICIES[policy]
        self.late: deque[Report] = deque()
        """What is on its way."""

    def gather(self, group: Group, batch_size: int) -> None:
        """From now on scores are gathered from all processes of the group."""
        self.use(Gathered(group, batch_size))

    def use(self, policy: Policy) -> None:
        """From now on scores come home in this way."""
        self._policy = policy

    def __getstate__(self) -> dict[str, Any]:
        """Without the group, which a copy finds anew."""
        return {**self.__dict__, "_policy": self._own}

    def begin(self, draw: Any, scores: Any, awaited: Awaited, skipped: torch.Tensor | None) -> Report:
        """Check what can be checked now, and start the rest. Changes nothing."""
        report = self._policy.begin(draw, scores, awaited, skipped)
        if draw is not report.draw:
            if not isinstance(draw, Draw) or draw.whole is not report.draw:
                report.witness = draw if tells_of_weights(draw) else None
            report.capped = draw.capped if isinstance(draw, Draw) else was_capped(draw)
        return report

    def accept(self, report: Report, awaited: Awaited) -> Arrived | None:
        """What can be learned now: nothing if the report says that a step was skipped, or is on its way."""
        draw, scores = report.draw, report.scores
        if draw is not None and scores is not None:
            awaited.close(draw)
            draw.capped |= report.capped
            return draw, scores, report.witness
        if report.fetch is not None:
            if draw is not None:
                awaited.close(draw)
            self.late.append(report)
        return None

    def collect(self, awaited: Awaited) -> Iterator[Arrived]:
        """Wait for what is on its way. Bad scores raise, and have taught nothing."""
        while self.late:
            report = self.late.popleft()
            assert report.fetch is not None
            whose, scores = report.fetch()
            draw = report.draw
            if draw is None:
                draw = awaited.find(whose)
                awaited.close(draw)
            draw.capped |= report.capped
            if report.skipped is not None and bool(report.skipped()):
                continue
            try:
                values = checked(draw, scores, awaited.names)
            except ValueError as error:
                raise ValueError(f"{error}. It came late: draw {draw.number} has taught nothing") from None
            yield draw, values, report.witness

    def drop(self) -> None:
        """Forget what is on its way."""
        self.late.clear()


def _copied(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start a copy to the CPU; what is returned waits for it."""
    if tensor.device.type == "cpu":
        copy = tensor.detach().clone()
        return lambda: copy
    # Apple's devices would let us read before the copy has arrived (pytorch issue 189690): there it waits.
    home = tensor.detach().to("cpu", non_blocking=tensor.device.type != "mps")
    if tensor.device.type not in ("cuda", "xpu"):  # devices without events that we know of
        return lambda: home
    arrived = torch.Event(tensor.device)
    arrived.record()

    def wait() -> torch.Tensor:
        arrived.synchronize()
        return home

    return wait


def checked(draw: Draw, scores: Any, names: Sequence[str] | None = None) -> Floats:
    """The scores as float64 on the CPU, finite and not negative; or an error that names the example."""
    values, bad = _check.copied_vector("scores", scores, len(draw._indices))
    if bad >= 0:
        index = draw._indices[bad]
        where = f"example {index} of the data set" if names is None else f"from source {names[index]!r}"
        raise ValueError(
            f"scores[{bad}] is {values[bad]} (draw {draw.number}, {where}): every score must be finite and "
            "not negative"
        )
    return values
