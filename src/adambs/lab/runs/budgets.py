"""How long each method trains: a number of steps, or a time. The runner asks a budget and nothing else."""

from dataclasses import dataclass
from typing import Any, Protocol

# How long a turn is before the next method has its own.
TURN = 20
_TURN_SECONDS = 0.5


class Budget(Protocol):
    """What the runner wants to know; ``target`` is a point of the budget, from :meth:`at`."""

    def at(self, share: float) -> float:
        """The point at which this share of the budget is used."""

    def turn(self, step: int, seconds: float, target: float) -> int:
        """How many steps the next turn has; 0 if the target is reached."""

    def charged(self, step: int, seconds: float, target: float) -> tuple[int, float]:
        """Step and seconds at the target of a method that trains no more, as if it went on at its pace."""

    def config(self) -> dict[str, Any]:
        """For the record."""

    def most_slices(self) -> int:
        """No more points than these can be told apart."""


@dataclass(frozen=True)
class Steps:
    """So many steps for each method, which take the time that they take."""

    steps: int

    def at(self, share: float) -> float:
        """A whole number."""
        return round(self.steps * share)

    def turn(self, step: int, seconds: float, target: float) -> int:
        """Always as many, so that all methods stand at the same step."""
        return max(0, min(TURN, int(target) - step))

    def charged(self, step: int, seconds: float, target: float) -> tuple[int, float]:
        """A clock that stood still would flatter a short run."""
        return int(target), seconds * target / max(step, 1)

    def config(self) -> dict[str, Any]:
        """The number of steps."""
        return {"steps": self.steps}

    def most_slices(self) -> int:
        """A slice has a step at least."""
        return self.steps


@dataclass(frozen=True)
class Seconds:
    """So much training time for each method, overhead included, in which it takes the steps that it can."""

    seconds: float

    def at(self, share: float) -> float:
        """A time."""
        return self.seconds * share

    def turn(self, step: int, seconds: float, target: float) -> int:
        """As many as take half a second at the method's own pace, and one while that is not known."""
        if seconds >= target:
            return 0
        if step == 0:
            return 1
        return max(1, round(min(_TURN_SECONDS, target - seconds) * step / seconds))

    def charged(self, step: int, seconds: float, target: float) -> tuple[int, float]:
        """It takes no more steps."""
        return step, max(seconds, target)

    def config(self) -> dict[str, Any]:
        """The time; ``steps`` is 0, since nobody knows."""
        return {"steps": 0, "seconds": self.seconds}

    def most_slices(self) -> int:
        """Any number."""
        return 1_000_000
