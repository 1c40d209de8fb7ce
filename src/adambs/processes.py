"""Several processes, one distribution: each trains on its part of every draw, and all learn from all scores.

Every process makes the same draws from the same p, without a word to the others, and trains on its part.
The scores of the parts are gathered, in the order of the ranks, and every process learns from all of them: p
stays the same everywhere, bit for bit. What is exchanged says which draw it belongs to and what was drawn
until then, so that processes which are out of step are told so.

This module and :mod:`adambs.gathering` are the only ones that use ``torch.distributed``.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from adambs import _check
from adambs._types import Floats, Indices
from adambs.draw import Draw
from adambs.fingerprints import hashed
from adambs.gathering import HEADER, Gathering, Message, Parts, digested, on_cpu, ranks_in_words

# Messages are kept for so many different lengths: those of updates and looks, and of a refresh.
_MOST_LENGTHS = 8

_CPU = torch.device("cpu")
_AVAILABLE = dist.is_available()


class Group:
    """A process group of ``torch.distributed``, and what the processes of it share."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.rank, self.size = dist.get_rank(handle), dist.get_world_size(handle)
        if self.rank < 0:
            raise ValueError("group does not have this process in it: give the one that it belongs to")
        self._on_cpu = on_cpu(handle)
        config = str(dist.get_backend_config(handle))  # such as cpu:gloo,cuda:nccl
        self._backends = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
        self._parts: dict[int, Parts] = {}
        self._free: dict[int, list[Message]] = {}
        self.digest = 0
        """Of all draws since the processes have last agreed."""
        self.room = 1
        """For how many numbers there is room in messages of one number: as long as those of an update as soon
        as all know how long these are. A rank that compares while others update is told then."""

    def part(self, K: int, rank: int | None = None) -> tuple[int, int]:
        """Where the part of a rank, this one's if none is given, begins and ends among K."""
        rank = self.rank if rank is None else rank
        return rank * K // self.size, (rank + 1) * K // self.size

    def parts(self, K: int) -> Parts:
        """How many of K each rank has."""
        if K not in self._parts:
            cuts = (self.part(K, rank) for rank in range(self.size))
            self._parts[K] = Parts.of([stop - start for start, stop in cuts])
        return self._parts[K]

    def gather(
        self,
        kind: str,
        values: Any,
        parts: Parts,
        *,
        number: Any = 0,
        draws: int = 0,
        skipped: torch.Tensor | None = None,
        beside: NDArray[np.uint8] | None = None,
    ) -> Gathering:
        """Start to gather numbers of which ``values`` are this process's part. Does not wait for others.

        Args:
            kind: which of the exchanges this is.
            values: a tensor on any device, an array or a list.
            parts: how many numbers each process has.
            number: of the draw, as an int or as a tensor.
            draws: how many draws were made.
            skipped: whether the numbers are to be dropped, on any device.
            beside: some bytes that go with each number, a row for each.
        """
        own, width = parts.sizes[self.rank], 0 if beside is None else beside.shape[1]
        device = self._device(values)
        on_device = device is not _CPU and isinstance(values, torch.Tensor) and not values.is_cpu
        if on_device and values.shape != (own,):
            raise ValueError(
                f"scores must have shape ({own},), one number an example, not {tuple(values.shape)}"
            )
        message, free = self._message(HEADER + parts.most - (-parts.most * width // 8))
        late = isinstance(number, torch.Tensor)
        numbers = message.begin(kind, 0 if late else number, draws, self.digest)
        if not on_device:
            _check.copied_vector("scores", values, own, numbers[:own])
        if beside is not None:
            numbers[parts.most :].view(np.uint8)[: beside.size] = beside.reshape(-1)
        ours = message.inputs[0] if device is _CPU else message.inputs[0].to(device, non_blocking=True)
        if on_device:
            ours[HEADER : HEADER + own] = values.detach()
        if late:
            ours[1:2] = number.reshape(-1)[:1]
        if skipped is not None:
            ours[4:5] = skipped.detach().reshape(-1)[:1]
        if device is _CPU:
            return Gathering(self._on_cpu, parts, width, message, free)
        return Gathering(self.handle, parts, width, message, free, ours)

    def _message(self, length: int) -> tuple[Message, list[Message]]:
        """One of this length that nobody uses, and where it belongs when it is free again."""
        free = self._free.get(length)
        if free is None:
            if len(self._free) >= _MOST_LENGTHS:
                self._free.clear()
            free = self._free[length] = []
        try:
            return free.pop(), free  # at once: other threads may gather, too
        except IndexError:
            return Message(self.size, length), free

    def first(self, value: float) -> float:
        """The number that rank 0 has."""
        return float(self.gather("a number of rank 0", [value], self._one_each()).wait()[0])

    def _one_each(self) -> Parts:
        return Parts.of([1] * self.size, self.room)

    def agree(self, entries: Mapping[str, str]) -> None:
        """Raise the same ``ValueError`` on all ranks if ``entries`` differ between them."""
        digest = float(int.from_bytes(hashed(dict(entries)).digest()[:6], "big"))
        digests = self.gather("a comparison of samplers", [digest], self._one_each()).wait()
        if (digests == digests[0]).all():
            return
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, dict(entries), group=self.handle)
        for name in told[0]:
            ranks: dict[str, list[int]] = {}
            for rank, theirs in enumerate(told):
                ranks.setdefault(theirs.get(name, "nothing"), []).append(rank)
            if len(ranks) > 1:
                values = ", ".join(f"{value} on {ranks_in_words(having)}" for value, having in ranks.items())
                raise ValueError(
                    f"the samplers of the processes differ in {name}: {values}. Build the sampler with the "
                    "same arguments on all ranks, and load the same state on all of them or on none"
                )
        raise ValueError("the samplers of the processes differ: build them alike on all ranks")

    def _device(self, values: Any) -> torch.device:
        """Where numbers are gathered: next to ``values`` if the backend can do that, else on the CPU."""
        near = values.device if isinstance(values, torch.Tensor) and not values.is_cpu else _CPU
        if self._backends.get(near.type, "gloo") != "gloo":  # gloo would copy to the CPU anyway
            return near
        if self._backends and "cpu" not in self._backends:
            kind = next(iter(self._backends))
            return torch.device(kind, torch.get_device_module(kind).current_device())
        return _CPU


class Processes:
    """Finds the group and hands out parts. With one process it does nothing.

    Args:
        wanted: a group (a ``ProcessGroup`` or a ``DeviceMesh`` of one dimension), False for none, or None
            for the default group, if there is one at the time of the first draw.
    """

    def __init__(self, wanted: Any = None) -> None:
        if hasattr(wanted, "get_group"):
            wanted = wanted.get_group()
        kinds = (dist.ProcessGroup,) if dist.is_available() else ()
        if wanted not in (None, False) and not isinstance(wanted, kinds):
            raise TypeError(
                f"group must be a torch.distributed.ProcessGroup, False or nothing, not {wanted!r}: leave it "
                "out for the default group"
            )
        self._wanted = wanted
        self._lost = False  # whether a group was given that did not travel with a pickle
        self._world: Any = None  # the default group that there was when one was looked for
        self.group: Group | None = None
        self._settled = wanted is False

    @property
    def settled(self) -> bool:
        """Whether the group was looked for, and its processes have agreed. Asked at every draw.

        A default group that has come since then is to be looked at.
        """
        if self._settled and self.group is None and self._wanted is None and _AVAILABLE:
            return dist.group.WORLD is self._world
        return self._settled

    def unsettle(self, *, loaded: bool) -> None:
        """Look for a group again, at an epoch's begin; or compare again, after a state was ``loaded``."""
        if self._wanted is not False and (loaded or self.group is None):
            self._settled = False

    def found(self) -> Group | None:
        """The group of several processes that there is now."""
        if self._wanted is False or _default_group() is None:
            return None
        if self._lost:
            raise RuntimeError(
                "the sampler was built with group=... and then pickled, and groups do not travel: build it "
                "here with its group, and load its state"
            )
        group = Group(dist.group.WORLD if self._wanted is None else self._wanted)
        return group if group.size > 1 else None

    def settle(self, batch_size: int, entries: Callable[[], Mapping[str, str]]) -> None:
        """Find the group, and make sure that all of it are alike. Errors are the same on all ranks."""
        if self.group is None:
            self._world = _default_group()
            group = self.found()
            refuse_empty_parts(batch_size, 1 if group is None else group.size)
            self.group = group
        if self.group is not None:
            self.group.digest = 0
            self.group.agree(entries())
        self._settled = True

    def left_alone(self) -> int:
        """How many processes were started that have no group to share draws through; 0 if all is well."""
        size = os.environ.get("WORLD_SIZE", "")
        lonely = self._wanted is None and _default_group() is None
        return int(size) if lonely and size.isdecimal() and int(size) > 1 else 0

    def handed_out(self, draw: Draw) -> Draw:
        """This process's part of a new draw."""
        if self.group is not None:
            ratios = np.ascontiguousarray(draw._ratios)
            settings = draw.correction, draw.limit
            self.group.digest = digested(self.group.digest, draw._indices, ratios, *settings)
        return self.part(draw)

    def part(self, draw: Draw) -> Draw:
        """This process's part of a draw."""
        if self.group is None:
            return draw
        return draw.part(*self.group.part(len(draw)), self.group.size)

    def scores_of_all(self, candidates: Draw, scores: Any) -> Any:
        """The scores of all candidates, of which ``scores`` are for this process's part. Waits."""
        if self.group is None:
            return scores
        number = candidates.number
        parts = self.group.parts(len(candidates))
        gathering = self.group.gather("a look at candidates", scores, parts, number=number, draws=number)
        return gathering.wait()

    def refreshed(self, indices: Indices, score: Callable[[torch.Tensor], Any]) -> Floats:
        """The scores of the examples ``indices``, of which every process computes its part."""
        # Where there is not one for each process all score all: who has nothing has no device to gather on.
        alone = self.group is None or len(indices) < self.group.size
        start, stop = (0, len(indices)) if alone else self.group.part(len(indices))  # type: ignore[union-attr]
        scores = score(torch.from_numpy(indices[start:stop].copy()))
        if self.group is not None and not alone:
            scores = self.group.gather("a refresh", scores, self.group.parts(len(indices))).wait()
        return _check.vector("scores", scores, len(indices))

    def first(self, value: float) -> float:
        """The number that rank 0 has."""
        return value if self.group is None else self.group.first(value)

    def __getstate__(self) -> dict[str, Any]:
        """A copy finds its group anew. One that was given does not travel, and that is told."""
        given = self._wanted not in (None, False)
        wanted = None if given else self._wanted
        kept = {"_wanted": wanted, "_lost": given or self._lost, "_world": None, "group": None}
        return {**kept, "_settled": wanted is False}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Processes":
        """In the same process a group that was given is the copy's, too."""
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__getstate__() | {"_wanted": self._wanted, "_lost": self._lost})
        return new


def _default_group() -> Any:
    """That of ``torch.distributed``, if there is one now."""
    return dist.group.WORLD if _AVAILABLE else None


def refuse_empty_parts(batch_size: int, processes: int) -> None:
    """Raise if a batch has fewer examples than there are processes."""
    if processes > batch_size:
        raise ValueError(
            f"batch_size is {batch_size} and there are {processes} processes: batch_size counts the examples "
            f"of all processes together, so give at least {processes}"
        )
