"""Which examples are in which group, and what the groups are worth: the compiled half of Calibrated."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from adambs._jit import kernel
from adambs._types import INT64, Floats, Indices

# Groups by last score: three to an octave, from 2^-20 to 2^10 of the first batch's largest score; what is
# below or above goes into the first or the last. The group after them holds the examples not yet seen.
_PER_OCTAVE = 3
_LOWEST = -20 * _PER_OCTAVE
SCORED = 30 * _PER_OCTAVE
GROUPS = SCORED + 1

# The bits of a float's mantissa, and what they are where the second and the last third of an octave begin: of
# the least numbers whose cubes are 2 and 4.
_MANTISSA = (1 << 52) - 1
_ONE_THIRD, _TWO_THIRDS = (
    int(np.float64(least).view(np.int64)) & _MANTISSA for least in (1.2599210498948732, 1.5874010519681996)
)

# The square of the middle of each group, in units.
MIDDLES_SQUARED = np.array([(2.0 ** ((g + _LOWEST + 0.5) / _PER_OCTAVE)) ** 2 for g in range(SCORED)])

# Scores are at most so many units, so that their squares are finite.
LARGEST = 1e50

# A mean below this is zero: its root is beneath notice, and subnormal numbers are slow.
_SMALLEST_MEAN = 1e-300

# A chunk has 2^8 slots at least, and there are at most some thousands of them, so that the list of them stays
# near the processor however many examples there are.
_LEAST_SHIFT, _MOST_CHUNKS_LOG = 8, 12

# So many examples move together: as many as stay in the processor's second cache. Of so many examples in all,
# all stay there.
_TOGETHER, _NEAR = 512, 1 << 16

# Examples are numbered by the smallest integers that can: half the memory, for up to two thousand million.
_MOST_INT32 = 2**31 - 1

Numbers = NDArray[np.int32] | NDArray[np.int64]

# Rows of Members.table.
_SIZE, _RUN, _TAIL = 0, 1, 2

# A group, as shards tell each other of it; LAST marks the last of an example's places in a batch.
GROUP, LAST = 127, 128

# Rows of an array of what groups are worth.
MEANS, DRAWS, RATIOS, SUMS = 0, 1, 2, 3


class Members:
    """Which of n examples are in which group. A move from any group to any other is O(1).

    Each example has a slot, and slots come in chunks. All slots of a chunk belong to one group. The members
    of a group are numbered: first come those in its full chunks, then those in its tail, a chunk of its own
    that has room for more. An example that leaves gives its slot to the last member of the group; one that
    comes is the next member. Chunks that are full are listed group after group, and behind them those that
    nobody needs now::

        full     | chunks of group 0 | chunks of group 1 | ... | free |
                 ^ RUN of group 0    ^ RUN of group 1          ^ RUN of GROUPS

    A chunk changes its place in the list as it is filled or emptied, with one swap for each group between.
    So a step that moves K examples writes some 4 K numbers. At most 8.2 bytes an example and 0.1 MB.
    """

    order: Numbers
    """The example in each slot, as the XOR of both; and ``place``, the slot of each example, likewise: all
    zero means that nothing has moved, and the system hands out zeros, page by page, when they are written."""
    place: Numbers
    full: Numbers
    """The list of chunks, and one entry that nobody uses."""
    owner: NDArray[np.uint8]
    """The group of each chunk."""
    table: Indices
    """For each group: how many members it has, where its full chunks begin, and its tail."""

    shift: int
    """The logarithm of the slots of a chunk."""

    def __init__(self, n: int) -> None:
        """All examples not yet seen. O(chunks)."""
        self.n, self.shift = n, max(_LEAST_SHIFT, (n >> _MOST_CHUNKS_LOG).bit_length())
        chunks = n >> self.shift
        slots = (chunks + GROUPS) << self.shift
        self.order, self.place = _zeros(slots, slots), _zeros(n, slots)
        self.full = _zeros(chunks + 1, slots)
        self.full[:] = np.arange(chunks + 1)
        self.owner = np.full(chunks + GROUPS, SCORED, np.uint8)
        self.table = np.zeros((3, GROUPS + 1), INT64)
        self.table[_SIZE, SCORED] = n
        self.table[_RUN, GROUPS] = chunks
        _take_tails(self.owner, self.table, chunks)

    @property
    def sizes(self) -> Indices:
        """How many members each group has: a view, for reading."""
        return self.table[_SIZE, :GROUPS]

    @property
    def bounds(self) -> Indices:
        """The same added up, with a zero before."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    def listed(self) -> Numbers:
        """All examples, group after group, members in their order. A new array, O(n)."""
        given: Numbers = np.empty_like(self.place)
        _list_all(self.order, self.full, self.table, self.shift, given)
        return given

    @staticmethod
    def of(given: Numbers, sizes: Indices, name: str) -> "Members":
        """Members as :meth:`listed` lists them, from a state that has the list by this name; or an error."""
        new = Members(len(given))
        bad = _take_list(new.order, new.place, new.full, new.owner, new.table, new.shift, given, sizes)
        if bad >= 0:
            raise ValueError(
                f"{name} must hold each of {new.n} examples once, but it has {given[bad]} at {bad}"
            )
        return new

    @staticmethod
    def by_score(scores: Any, unit: float) -> "Members":
        """Each example in the group of its score, in the order of their numbers. O(n)."""
        new = Members(len(scores))
        _group_all(new.order, new.place, new.full, new.owner, new.table, new.shift, scores, unit)
        return new

    def groups(self, indices: Indices | None = None, first: int = 0) -> NDArray[np.uint8]:
        """The group of some examples, or of all; the first of all has number ``first``."""
        chosen = np.arange(first, first + self.n) if indices is None else indices
        return _groups_at(self.place, self.owner, self.shift, chosen, first)

    def draw(self, worth: Floats, u: Floats) -> tuple[Indices, Floats]:
        """The examples at the quantiles u, and their ratios, as the RATIOS and SUMS of the groups have it."""
        indices, ratios = np.empty(len(u), INT64), np.empty(len(u))
        _draw(self.order, self.full, self.table, self.shift, worth, u, indices, ratios)
        return indices, ratios

    def move(self, indices: Indices, first: int, targets: Indices) -> None:
        """Put each example into the group that is told; the first of all has number ``first``."""
        _move_all(
            self.order, self.place, self.full, self.owner, self.table, self.shift, indices, first, targets
        )


def _zeros(length: int, most: int) -> Numbers:
    """For numbers up to ``most``."""
    return np.zeros(length, np.int32) if most <= _MOST_INT32 else np.zeros(length, np.int64)


def nothing_known() -> Floats:
    """What groups are worth at the start: rows MEANS, DRAWS, RATIOS and SUMS."""
    worth = np.zeros((4, GROUPS))
    worth[MEANS, SCORED] = 1.0
    return worth


# ------------------------------------------------------------------------------------------------
# Kernels of the members. Example order[i] ^ i is in slot i, and example j in slot place[j] ^ j.
# ------------------------------------------------------------------------------------------------


@kernel
def _take_tails(owner: NDArray[np.uint8], table: Indices, chunks: int) -> None:
    """The chunks after the full ones are tails; the first is that of the unseen, so that all is in order."""
    table[_TAIL, SCORED] = chunks
    for g in range(SCORED):
        table[_TAIL, g] = chunks + 1 + g
        owner[chunks + 1 + g] = g


@kernel
def _slot(full: Numbers, table: Indices, shift: int, g: int, member: int) -> int:
    """Where a member of a group is."""
    run, tail = table[_RUN, g] + (member >> shift), table[_TAIL, g]
    listed = full[run]  # there is one entry more than chunks, so that there is no branch to be guessed wrong
    chunk = listed if run < table[_RUN, g + 1] else tail
    return int((chunk << shift) + (member & ((1 << shift) - 1)))


@kernel
def _put(order: Numbers, place: Numbers, j: int, slot: int) -> None:
    order[slot] = place[j] = j ^ slot


@kernel
def _take_back(full: Numbers, table: Indices, g: int) -> None:
    """The tail of a group is empty: its last full chunk is the tail now."""
    run = table[_RUN, g + 1] - 1
    full[run], table[_TAIL, g] = table[_TAIL, g], full[run]
    for other in range(g + 1, GROUPS + 1):  # the empty one goes behind all that are full
        table[_RUN, other] -= 1
        end = table[_RUN, other + 1] - 1 if other < GROUPS else table[_RUN, other]
        full[run], full[end], run = full[end], full[run], end


@kernel
def _add_tail(full: Numbers, owner: NDArray[np.uint8], table: Indices, g: int) -> None:
    """The tail of a group is full, and a free chunk is the tail now."""
    run = table[_RUN, GROUPS]
    full[run], table[_TAIL, g] = table[_TAIL, g], full[run]
    owner[table[_TAIL, g]] = g
    for other in range(GROUPS, g, -1):  # the full one goes to the end of its group's
        begin = table[_RUN, other]
        full[run], full[begin], run = full[begin], full[run], begin
        table[_RUN, other] += 1


@kernel
def _touch(
    order: Numbers,
    place: Numbers,
    owner: NDArray[np.uint8],
    table: Indices,
    shift: int,
    indices: Indices,
) -> int:
    """Read what is written if these examples move: their slots, and the places of those who come to them.

    The processor waits for many reads of far memory at once, and for such writes one after the other. What
    is returned says nothing, but without it the compiler would leave the reads out.
    """
    leaving = np.zeros(GROUPS, np.int64)
    touched = 0
    for k in range(len(indices)):
        here = place[indices[k]] ^ indices[k]
        g = owner[here >> shift]
        leaving[g] += 1
        last = (table[_TAIL, g] << shift) + ((table[_SIZE, g] - leaving[g]) & ((1 << shift) - 1))
        coming = order[last] ^ last
        if 0 <= coming < len(place):  # else there is nobody
            touched ^= order[here] ^ place[coming]
    return int(touched)


@kernel
def _move_all(
    order: Numbers,
    place: Numbers,
    full: Numbers,
    owner: NDArray[np.uint8],
    table: Indices,
    shift: int,
    indices: Indices,
    first: int,
    targets: Indices,
) -> None:
    """Move examples to groups; the first of all has number ``first``.

    One loop, and no function for a single move: to be given five arrays, whose owners are counted each time,
    would take it four times as long as the move.
    """
    mask = (1 << shift) - 1
    for k in range(len(indices)):
        j, to = indices[k] - first, targets[k]
        here = place[j] ^ j
        g = int(owner[here >> shift])
        if g == to:
            continue
        if table[_SIZE, g] & mask == 0:
            _take_back(full, table, g)
        table[_SIZE, g] -= 1
        last = (table[_TAIL, g] << shift) + (table[_SIZE, g] & mask)
        if last != here:  # the last member of the group takes its slot
            other = order[last] ^ last
            order[here] = place[other] = other ^ here
        last = (table[_TAIL, to] << shift) + (table[_SIZE, to] & mask)
        order[last] = place[j] = j ^ last
        table[_SIZE, to] += 1
        if table[_SIZE, to] & mask == 0:
            _add_tail(full, owner, table, to)


@kernel
def _groups_at(
    place: Numbers, owner: NDArray[np.uint8], shift: int, indices: Indices, first: int
) -> NDArray[np.uint8]:
    """The groups of examples, of which the first of all has number ``first``."""
    groups = np.empty(len(indices), np.uint8)
    for k in range(len(indices)):
        j = indices[k] - first
        groups[k] = owner[(place[j] ^ j) >> shift]
    return groups


@kernel
def _list_all(order: Numbers, full: Numbers, table: Indices, shift: int, given: Numbers) -> None:
    i = 0
    for g in range(GROUPS):
        for member in range(table[_SIZE, g]):
            slot = _slot(full, table, shift, g, member)
            given[i] = order[slot] ^ slot
            i += 1


@kernel
def _lay_out(owner: NDArray[np.uint8], table: Indices, shift: int, sizes: Indices) -> None:
    """Chunks for groups of these sizes, one group after the other."""
    run = 0
    for g in range(GROUPS):
        table[_SIZE, g], table[_RUN, g] = sizes[g], run
        for _ in range(sizes[g] >> shift):
            owner[run] = g  # the chunks are still listed in the order of their numbers
            run += 1
    table[_RUN, GROUPS] = run


@kernel
def _take_list(
    order: Numbers,
    place: Numbers,
    full: Numbers,
    owner: NDArray[np.uint8],
    table: Indices,
    shift: int,
    given: Numbers,
    sizes: Indices,
) -> int:
    """Take over a list; or return the first position that has no example, or one that came before."""
    _lay_out(owner, table, shift, sizes)
    place[:] = -1  # no XOR of two positions is negative
    i = 0
    for g in range(GROUPS):
        for member in range(sizes[g]):
            j = given[i]
            if not 0 <= j < len(given) or place[j] != -1:
                return i
            _put(order, place, j, _slot(full, table, shift, g, member))
            i += 1
    return -1


@kernel
def _group_all(
    order: Numbers,
    place: Numbers,
    full: Numbers,
    owner: NDArray[np.uint8],
    table: Indices,
    shift: int,
    scores: Floats,
    unit: float,
) -> None:
    sizes = np.zeros(GROUPS, np.int64)
    for j in range(len(scores)):
        sizes[_group_of(_in_units(scores[j], unit))] += 1
    _lay_out(owner, table, shift, sizes)
    sizes[:] = 0
    for j in range(len(scores)):
        g = _group_of(_in_units(scores[j], unit))
        _put(order, place, j, _slot(full, table, shift, g, sizes[g]))
        sizes[g] += 1


@kernel
def _draw(
    order: Numbers,
    full: Numbers,
    table: Indices,
    shift: int,
    worth: Floats,
    u: Floats,
    indices: Indices,
    ratios: Floats,
) -> None:
    """Fill ``indices`` and ``ratios``.

    Group g covers sums[g - 1] ... sums[g] of [0, sums[-1]], each member an equal part of it.
    sums[-1] is n up to rounding, so a position is known to n / 2^53 of a uniform example's part: 1e-8 of it
    for a hundred million. Beyond the last member, by rounding, the last member is meant.
    """
    sums, group_ratios = worth[SUMS], worth[RATIOS]
    last = GROUPS - 1
    while table[_SIZE, last] == 0:  # u = 1, or rounding, means the last member of all
        last -= 1
    for k in range(len(u)):
        wanted = u[k] * sums[-1]
        # The first group whose sum is larger: a binary search over a fixed number of steps, without branches
        # that could be guessed wrong.
        g, length = 0, last + 1
        while length > 1:
            half = length >> 1
            g = g + half if sums[g + half - 1] <= wanted else g
            length -= half
        before = sums[g - 1] if g > 0 else 0.0
        # The minimum is taken of floats: if a ratio is tiny, the quotient may be beyond any integer.
        member = int(min((wanted - before) / group_ratios[g], table[_SIZE, g] - 1.0))
        indices[k] = _slot(full, table, shift, g, member)
        ratios[k] = group_ratios[g]
    for k in range(len(u)):  # a loop of its own: reads of far memory are waited for together
        indices[k] ^= order[indices[k]]


# ------------------------------------------------------------------------------------------------
# Kernels of what groups are worth
# ------------------------------------------------------------------------------------------------


@kernel
def _in_units(score: float, unit: float) -> float:
    """The score as a multiple of the unit; zero while there is none."""
    return min(score / unit, LARGEST) if unit > 0.0 else 0.0


@kernel
def _group_of(known: float) -> int:
    """The group of a score in units: floor(3 log2(score)) - _LOWEST, or the first or the last group.

    From the bits of the number: the exponent tells the octave, the mantissa which third of it.
    """
    bits: Any = np.float64(known).view(np.int64)
    mantissa = bits & _MANTISSA
    thirds = _PER_OCTAVE * ((bits >> 52) - 1023) + (mantissa >= _ONE_THIRD) + (mantissa >= _TWO_THIRDS)
    return int(min(max(int(thirds) - _LOWEST, 0), SCORED - 1))


@kernel
def _blend(worth: Floats, g: int, known: float, memory: float) -> None:
    """Blend a squared score into the mean of the group that its example is in.

    Not a quotient of the difference: the next score of the group waits for the mean, not for its share.
    """
    draws = worth[DRAWS, g] = min(worth[DRAWS, g] + 1.0, memory)
    mean = worth[MEANS, g]
    mean += (known * known - mean) * (1.0 / max(draws, 1.0))
    worth[MEANS, g] = mean if mean >= _SMALLEST_MEAN else 0.0


@kernel
def settle(worth: Floats, sizes: Indices, prior: float, uniform: float) -> None:
    """Fill in r of each group, and the running sum of (members) x r: n in the end.

    A scored group's mean is blended with its middle, which counts for ``prior`` draws. The unseen have no
    middle: their mean, 1 at the start, gives way to the first draw.
    """
    total, n = 0.0, 0
    for g in range(GROUPS):
        value = worth[MEANS, g]
        if g < SCORED:
            value += (MIDDLES_SQUARED[g] - value) * (prior / (worth[DRAWS, g] + prior))
        worth[RATIOS, g] = np.sqrt(value)
        total += worth[RATIOS, g] * sizes[g]
        n += sizes[g]
    scale = (1.0 - uniform) * n / total if total > 0.0 else 0.0
    running = 0.0
    for g in range(GROUPS):
        worth[RATIOS, g] = scale * worth[RATIOS, g] + uniform if total > 0.0 else 1.0
        running += worth[RATIOS, g] * sizes[g]
        worth[SUMS, g] = running


@kernel
def fill_ratios(
    place: Numbers, owner: NDArray[np.uint8], shift: int, worth: Floats, indices: Indices, ratios: Floats
) -> None:
    """The ratio of the group of each example. (An array that a kernel returns costs more than one that it
    fills.)"""
    for k in range(len(indices)):
        ratios[k] = worth[RATIOS, owner[(place[indices[k]] ^ indices[k]) >> shift]]


@kernel
def learn(
    order: Numbers,
    place: Numbers,
    full: Numbers,
    owner: NDArray[np.uint8],
    table: Indices,
    shift: int,
    worth: Floats,
    indices: Indices,
    scores: Floats,
    unit: float,
    memory: float,
    prior: float,
    uniform: float,
) -> int:
    """A whole update in one call, which costs less than three: what scores tell of the groups that their
    examples are in, the examples into the groups of their scores, and the ratios of all groups anew."""
    targets = np.empty(len(indices), np.int64)
    for k in range(len(indices)):
        g = owner[(place[indices[k]] ^ indices[k]) >> shift]
        known = _in_units(scores[k], unit)
        _blend(worth, g, known, memory)
        targets[k] = _group_of(known)
    touched = 0
    for start in range(0, len(indices), _TOGETHER):
        some, where = indices[start : start + _TOGETHER], targets[start : start + _TOGETHER]
        if len(place) > _NEAR:
            touched ^= _touch(order, place, owner, table, shift, some)
        _move_all(order, place, full, owner, table, shift, some, 0, where)
    settle(worth, table[_SIZE], prior, uniform)
    return touched


@kernel
def absorb(
    scores: Floats,
    told: NDArray[np.uint8],
    counts: Indices,
    sizes: Indices,
    worth: Floats,
    unit: float,
    memory: float,
) -> Indices:
    """As :func:`learn`, of scores whose examples may be in other processes: who moves where is only counted.

    Returns the group of each score. ``told`` says the group that its example was in, and whether this is the
    last of its places in the batch, which counts. The scores are those of shard after shard, ``counts`` of
    each; ``sizes`` are [shard, group].
    """
    targets = np.empty(len(scores), np.int64)
    v, end = -1, 0
    for k in range(len(scores)):
        while k >= end:
            v += 1
            end += counts[v]
        g = told[k, 0] & GROUP
        known = _in_units(scores[k], unit)
        _blend(worth, g, known, memory)
        targets[k] = _group_of(known)
        if told[k, 0] & LAST:
            sizes[v, g] -= 1
            sizes[v, targets[k]] += 1
    return targets
