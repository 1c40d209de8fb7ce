"""A sampler's state is a loop over its parts: how it is put together, read and refused."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self

from adambs import _check
from adambs._types import State

# The form of a state. 0.1 had none.
FORMAT = 2


class Part(Protocol):
    """What each part of a sampler can do."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers, a copy."""
        ...

    def with_state(self, state: State) -> Self:
        """One like this in that state, or ``ValueError``; this one stays as it is."""
        ...


class MadeOfParts(ABC):
    """Something whose state is a loop over its parts, taken whole or not at all."""

    PARTS: ClassVar[tuple[str, ...]]
    """The names of the attributes that are parts."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What a state must share with whom it is loaded into. Plain values."""

    @abstractmethod
    def adopt(self, parts: dict[str, Any]) -> None:
        """Take the parts that :meth:`parse_state` has returned; cannot fail."""

    def state_dict(self) -> dict[str, Any]:
        """What it belongs to, and the state of each part under the part's name. Tensors and plain numbers."""
        parts = {name: getattr(self, name).state_dict() for name in self.PARTS}
        return {"format": FORMAT, **self.identity(), **parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state from :meth:`state_dict`, or raise ``ValueError`` and keep the old one."""
        self.adopt(self.parse_state(state))

    def parse_state(self, state: Any) -> dict[str, Any]:
        """Read and check a state, for :meth:`adopt`; changes nothing."""
        return read(state, self.identity(), {name: getattr(self, name) for name in self.PARTS})


def read(state: Any, identity: dict[str, Any], parts: Mapping[str, Part]) -> dict[str, Any]:
    """New parts in the states that ``state`` has for them, or an error. Changes nothing."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state must be a dict from state_dict(), not {type(state).__name__}")
    if "format" not in state and "rule_state" in state:
        raise ValueError(
            "state is of adambs 0.1, which this version does not read: finish the run with 0.1, or begin "
            "with a fresh distribution by leaving the sampler's state out"
        )
    for name, ours in {"format": FORMAT, **identity}.items():
        if name not in state and ours != {}:  # some checkpoints leave out what is empty
            raise ValueError(f"state has no {name!r}: it is not from BanditSampler.state_dict()")
        if not _equal(state.get(name, {}), ours):
            raise ValueError(
                f"state is of a sampler with {name} = {state.get(name)!r:.200}, this one has {ours!r}: "
                "build the sampler as it was when the state was saved"
            )
    new = {}
    for name, part in parts.items():
        if name not in state and not part.state_dict():
            continue  # some checkpoints leave out what is empty
        try:
            new[name] = part.with_state(_check.mapping(state, name))
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError, ValueError) as error:
            raise ValueError(f"state[{name!r}] is damaged: {error}") from error
    return new


def _equal(saved: Any, ours: Any) -> bool:
    """Whether a saved setting is ours. Tensors and arrays, which compare by entries, never are."""
    if isinstance(ours, dict):
        return (
            isinstance(saved, Mapping)
            and saved.keys() == ours.keys()
            and all(_equal(saved[name], ours[name]) for name in ours)
        )
    return isinstance(saved, bool | int | float | str | None) and bool(saved == ours)
