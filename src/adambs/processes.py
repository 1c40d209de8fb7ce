"""Several processes, one distribution: each trains on its part of every draw, and all learn from all scores.

Every process makes the same draws from the same p, without a word to the others, and trains on its part.
The scores of the parts are gathered, in the order of the ranks, and every process learns from all of them: p
stays the same everywhere, bit for bit. What is exchanged says which draw it belongs to and what was drawn
until then, so that processes which are out of step are told so.

The only module that uses ``torch.distributed``.
"""

import os
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from adambs import _check
from adambs._jit import kernel
from adambs._types import Floats, Indices
from adambs.draw import Draw
from adambs.fingerprints import hashed

# What stands before the numbers of each process: the kind of exchange, the number of the draw, how many draws
# were made, a digest of them, and whether the optimizer's step was skipped.
_KINDS = (
    "an update",
    "a look at candidates",
    "a refresh",
    "a comparison of samplers",
    "a number of rank 0",
    "losses for a history",
)
_HEADER = 5
_IN_STEP = ("in {kind}", "at draw {:.0f}", "after {:.0f} draws", "with draws of digest {:.0f}")


class Gathering:
    """Numbers of all processes that are on their way here."""

    def __init__(self, group: "Group", sizes: list[int], most: int, width: int, ours: torch.Tensor) -> None:
        self._sizes, self._most, self._width = sizes, most, width
        self._ours = ours  # must live until it was sent
        self._all = ours.new_empty(group.size, len(ours))
        self._work = _all_gather(self._all, ours, group.handle)
        self._arrived: tuple[Floats, Floats] | None = None

    def wait(self) -> tuple[Floats, Floats]:
        """The headers, one row for each rank, and the numbers in the order of the ranks; or an error."""
        if self._arrived is None:
            if self._work is not None:
                self._work.wait()
            rows = self._rows = self._all.cpu().numpy()
            values = np.empty(sum(self._sizes))
            self._in_step, self._skipped = _unpacked(rows, np.array(self._sizes), values)
            self._arrived = rows[:, :_HEADER], values
        if not self._in_step:
            _refuse_out_of_step(self._arrived[0])
        return self._arrived

    def beside(self) -> NDArray[np.uint8]:
        """The bytes that came beside the numbers, a row for each number."""
        self.wait()
        told = self._rows[:, _HEADER + self._most :].copy().view(np.uint8)
        parts = [row[: size * self._width] for row, size in zip(told, self._sizes, strict=True)]
        return np.concatenate(parts).reshape(-1, self._width)

    def skipped(self) -> bool:
        """Whether any process has skipped its step."""
        self.wait()
        return self._skipped


class Group:
    """A process group of ``torch.distributed``, and what the processes of it share."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.rank, self.size = dist.get_rank(handle), dist.get_world_size(handle)
        if self.rank < 0:
            raise ValueError("group does not have this process in it: give the one that it belongs to")
        config = str(dist.get_backend_config(handle))  # such as cpu:gloo,cuda:nccl
        self._backends = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
        self._sizes: dict[int, list[int]] = {}
        self.digest = 0
        """Of all draws since the processes have last agreed."""

    def part(self, K: int, rank: int | None = None) -> tuple[int, int]:
        """Where the part of a rank, this one's if none is given, begins and ends among K."""
        rank = self.rank if rank is None else rank
        return rank * K // self.size, (rank + 1) * K // self.size

    def sizes(self, K: int) -> list[int]:
        """How many of K each rank has."""
        if K not in self._sizes:
            parts = (self.part(K, rank) for rank in range(self.size))
            self._sizes[K] = [stop - start for start, stop in parts]
        return self._sizes[K]

    def gather(
        self,
        kind: str,
        values: Any,
        K: int,
        *,
        number: Any = 0,
        draws: int = 0,
        skipped: torch.Tensor | None = None,
        sizes: list[int] | None = None,
        room: int = 0,
        beside: NDArray[np.uint8] | None = None,
    ) -> Gathering:
        """Start to gather K numbers of which ``values`` are this process's part. Does not wait for others.

        Args:
            kind: which of the exchanges this is.
            values: a tensor on any device, an array or a list.
            K: how many numbers all processes have together.
            number: of the draw, as an int or as a tensor.
            draws: how many draws were made.
            skipped: whether the numbers are to be dropped, on any device.
            sizes: how many each rank has, if these are not equal parts.
            room: for how many there is room in what each rank sends, if for more than the largest part.
            beside: some bytes that go with each number, a row for each.
        """
        sizes = self.sizes(K) if sizes is None else sizes
        own, most = sizes[self.rank], max(room, *sizes)  # all send as many as the largest part has
        width = 0 if beside is None else beside.shape[1]
        length = _HEADER + most - (-most * width // 8)
        device, here = self._device(values), slice(_HEADER, _HEADER + own)
        on_device = device.type != "cpu" and isinstance(values, torch.Tensor) and not values.is_cpu
        numbers = np.zeros(length)
        numbers[0], numbers[2], numbers[3] = _KINDS.index(kind), draws, self.digest
        numbers[1] = 0 if isinstance(number, torch.Tensor) else number
        if not on_device:
            numbers[here], _ = _check.copied_vector("scores", values, own)
        elif values.shape != (own,):
            raise ValueError(
                f"scores must have shape ({own},), one number an example, not {tuple(values.shape)}"
            )
        if beside is not None:
            numbers[_HEADER + most :].view(np.uint8)[: beside.size] = beside.reshape(-1)
        ours = torch.from_numpy(numbers)
        if device.type != "cpu":
            ours = ours.to(device, non_blocking=True)
        if on_device:
            ours[here] = values.detach()
        if isinstance(number, torch.Tensor):
            ours[1:2] = number.reshape(-1)[:1]
        if skipped is not None:
            ours[4:5] = skipped.detach().reshape(-1)[:1]
        return Gathering(self, sizes, most, width, ours)

    def first(self, value: float) -> float:
        """The number that rank 0 has."""
        return float(self.gather("a number of rank 0", [value], self.size).wait()[1][0])

    def agree(self, entries: Mapping[str, str]) -> None:
        """Raise the same ``ValueError`` on all ranks if ``entries`` differ between them."""
        digest = float(int.from_bytes(hashed(dict(entries)).digest()[:6], "big"))
        _, digests = self.gather("a comparison of samplers", [digest], self.size).wait()
        if (digests == digests[0]).all():
            return
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, dict(entries), group=self.handle)
        for name in told[0]:
            ranks: dict[str, list[int]] = {}
            for rank, theirs in enumerate(told):
                ranks.setdefault(theirs.get(name, "nothing"), []).append(rank)
            if len(ranks) > 1:
                values = ", ".join(f"{value} on {_ranks(having)}" for value, having in ranks.items())
                raise ValueError(
                    f"the samplers of the processes differ in {name}: {values}. Build the sampler with the "
                    "same arguments on all ranks, and load the same state on all of them or on none"
                )
        raise ValueError("the samplers of the processes differ: build them alike on all ranks")

    def _device(self, values: Any) -> torch.device:
        """Where numbers are gathered: next to ``values`` if the backend can do that, else on the CPU."""
        near = values.device if isinstance(values, torch.Tensor) else torch.device("cpu")
        if self._backends.get(near.type, "gloo") != "gloo":  # gloo would copy to the CPU anyway
            return torch.device(near)
        if self._backends and "cpu" not in self._backends:
            kind = next(iter(self._backends))
            return torch.device(kind, torch.get_device_module(kind).current_device())
        return torch.device("cpu")


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
        self.group: Group | None = None
        self.settled = wanted is False
        """Whether the group was looked for, and its processes have agreed."""

    def unsettle(self, *, loaded: bool) -> None:
        """Look for a group again, at an epoch's begin; or compare again, after a state was ``loaded``."""
        if self._wanted is not False and (loaded or self.group is None):
            self.settled = False

    def found(self) -> Group | None:
        """The group of several processes that there is now."""
        if self._wanted is False or not (dist.is_available() and dist.is_initialized()):
            return None
        group = Group(dist.group.WORLD if self._wanted is None else self._wanted)
        return group if group.size > 1 else None

    def settle(self, batch_size: int, entries: Callable[[], Mapping[str, str]]) -> None:
        """Find the group, and make sure that all of it are alike. Errors are the same on all ranks."""
        if self.group is None:
            group = self.found()
            refuse_empty_parts(batch_size, 1 if group is None else group.size)
            self.group = group
        if self.group is not None:
            self.group.digest = 0
            self.group.agree(entries())
        self.settled = True

    def left_alone(self) -> int:
        """How many processes were started that have no group to share draws through; 0 if all is well."""
        size = os.environ.get("WORLD_SIZE", "")
        lonely = self._wanted is None and not (dist.is_available() and dist.is_initialized())
        return int(size) if lonely and size.isdecimal() and int(size) > 1 else 0

    def handed_out(self, draw: Draw) -> Draw:
        """This process's part of a new draw."""
        if self.group is not None:
            digest = zlib.crc32(np.ascontiguousarray(draw._indices).data, self.group.digest)
            digest = zlib.crc32(np.ascontiguousarray(draw._ratios).data, digest)
            self.group.digest = zlib.crc32(struct.pack("<d", draw.correction), digest)
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
        gathering = self.group.gather(
            "a look at candidates", scores, len(candidates), number=number, draws=number
        )
        return gathering.wait()[1]

    def refreshed(self, indices: Indices, score: Callable[[torch.Tensor], Any]) -> Floats:
        """The scores of the examples ``indices``, of which every process computes its part."""
        start, stop = (0, len(indices)) if self.group is None else self.group.part(len(indices))
        scores = score(torch.from_numpy(indices[start:stop].copy())) if stop > start else []
        if self.group is not None:
            scores = self.group.gather("a refresh", scores, len(indices)).wait()[1]
        return _check.vector("scores", scores, len(indices))

    def first(self, value: float) -> float:
        """The number that rank 0 has."""
        return value if self.group is None else self.group.first(value)

    def __getstate__(self) -> dict[str, Any]:
        """A copy finds its group anew: groups do not travel."""
        wanted = False if self._wanted is False else None
        return {"_wanted": wanted, "group": None, "settled": wanted is False}


def refuse_empty_parts(batch_size: int, processes: int) -> None:
    """Raise if a batch has fewer examples than there are processes."""
    if processes > batch_size:
        raise ValueError(
            f"batch_size is {batch_size} and there are {processes} processes: batch_size counts the examples "
            f"of all processes together, so give at least {processes}"
        )


def _refuse_out_of_step(headers: Floats) -> None:
    """Raise the same error on all ranks if what they exchange does not belong together."""
    for column, words in enumerate(_IN_STEP):
        theirs = headers[:, column]
        if (theirs == theirs[0]).all():
            continue
        said: dict[str, list[int]] = {}
        for rank, value in enumerate(theirs):
            kind = _KINDS[int(value)] if column == 0 else ""
            said.setdefault(words.format(value, kind=kind), []).append(rank)
        places = ", ".join(f"{place} on {_ranks(ranks)}" for place, ranks in said.items())
        raise RuntimeError(
            f"the processes are out of step: {places}. Every rank must draw, update and refresh in the same "
            "order, with the same num_workers and the same correction, and compute with the same arithmetic"
        )


def _ranks(ranks: list[int]) -> str:
    """In words, the first few of them."""
    shown = ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _all_gather(into: torch.Tensor, ours: torch.Tensor, group: Any) -> Any:
    """Start to fill the rows of ``into``, without waiting.

    On the CPU by the group's own method: the function around it takes a tenth of a millisecond.
    """
    if ours.is_cpu:
        return group.allgather([list(into.unbind(0))], [ours])
    # The name of this collective has changed.
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return function(into.view(-1), ours, group=group, async_op=True)


@kernel
def _unpacked(rows: Floats, sizes: Indices, values: Floats) -> tuple[bool, bool]:
    """Put the numbers of all ranks one after the other.

    Whether the ranks are in step, and whether any has skipped its step.
    """
    in_step, skipped, start = True, False, 0
    for rank in range(rows.shape[0]):
        for column in range(_HEADER - 1):
            in_step &= rows[rank, column] == rows[0, column]
        skipped |= rows[rank, _HEADER - 1] != 0.0
        for k in range(sizes[rank]):
            values[start + k] = rows[rank, _HEADER + k]
        start += sizes[rank]
    return in_step, skipped
