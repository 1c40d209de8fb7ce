"""A random order of many examples that is computed place by place, so that a pass over them starts at once.

The places 0 .. n-1 lie row by row in a table of a rows and b columns, n <= a b < n + b, both about √n. A
round moves every entry within its column, the next one within its row, by a random distance that depends
on that column or row and on a key of the round:

    row    <- (row    + F_1(column)) mod a
    column <- (column + F_2(row))    mod b        and so on, eight rounds

Each round can be undone, so all of them together are a bijection of the table (a Feistel network with
addition in place of exclusive or). An entry that ends in one of the a b - n < b cells beyond n goes through
all rounds again until it ends below n ("cycle walking"); that keeps the map one to one, because each
entry follows its own cycle of the bijection to the next cell below n. About one entry in √n needs it.

Eight rounds, because five can be told from a random order by looking at one whole order, and six by looking
at several (Patarin, Generic attacks on Feistel schemes, 2001). The statistics of the tests reject four
rounds and accept six.
"""

import math

import numpy as np
from numpy.typing import NDArray

from adambs import _check
from adambs._jit import kernel
from adambs._types import Indices

_STORED = 1 << 16  # an order of at most so many places is made whole, in a millisecond and 512 kB
_LARGEST = 1 << 62
_ROUNDS = 8  # even: rows and columns take turns

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ODD_1 = np.uint64(0xBF58476D1CE4E5B9)  # the two factors of SplitMix64
_ODD_2 = np.uint64(0x94D049BB133111EB)


class Permutation:
    """A random order of 0 .. n-1, fixed by ``(n, *key)``: the element at each place is computed.

    Two ways: up to n = 65536 the whole order is shuffled and stored on first use, because a network on a
    small table does not reach all n! orders alike; beyond that it is computed, because a shuffle takes
    many seconds and 800 MB at n = 1e8. Computed, nothing is kept per place, a start costs some 25
    microseconds and an element 15 to 30 nanoseconds, whatever n is. Integers only: the same on every
    platform.

    Different keys of the same length give independent orders, however little they differ; of different
    lengths perhaps not, because zeros at the end of a key do not count. One key with two values of n may
    give two orders that resemble each other.

    Args:
        n: how many places, 1 .. 2**62.
        key: whole numbers of at least 0, such as a seed and the number of a pass.
    """

    def __init__(self, n: int, *key: int) -> None:
        self._n = _check.whole("n", n, least=1)
        if self._n > _LARGEST:
            raise ValueError(f"n must be at most 2**62, not {self._n}: rows and columns are 32-bit numbers")
        self._random = _seed_sequence(
            [_check.whole(f"key[{k}]", part, least=0) for k, part in enumerate(key)]
        )
        self._stored: Indices | None = None  # made when it is needed
        self._network: NDArray[np.uint64] | None = None  # likewise

    def take(self, start: int, stop: int) -> Indices:
        """The elements at the places start .. stop-1, in a new array. O(stop - start)."""
        start = _check.whole("start", start, least=0)
        stop = _check.whole("stop", stop, least=start)
        if stop > self._n:
            raise ValueError(
                f"stop must be at most n = {self._n}, not {stop}: an order ends with its n-th place"
            )
        if self._n > _STORED:
            return self._computed(start, stop)
        if self._stored is None:
            shuffled = np.random.Generator(np.random.PCG64(self._random)).permutation(self._n)
            self._stored = shuffled.astype(np.int64, copy=False)
        return self._stored[start:stop].copy()

    def warm_up(self) -> None:
        """Load the kernel, if one is needed: some ten milliseconds that :meth:`take` would wait for."""
        if self._n > _STORED:
            self._computed(0, 0)

    def _computed(self, start: int, stop: int) -> Indices:
        """The same by the network, whatever n is: the tests try every small n."""
        if self._network is None:
            columns = math.isqrt(self._n - 1) + 1
            shape = np.array([self._n, -(-self._n // columns), columns], dtype=np.uint64)
            self._network = np.concatenate([shape, self._random.generate_state(_ROUNDS, np.uint64)])
        elements = np.empty(stop - start, dtype=np.int64)
        _fill(elements, start, self._network)
        return elements


def _seed_sequence(key: list[int]) -> np.random.SeedSequence:
    """A source of random numbers for this key alone.

    SeedSequence cuts its numbers into words of 32 bits and forgets where one ends: to it (2**32 + 5, 0) is
    (5, 1). So a key with a longer number says how many words each takes.
    """
    words = [max(1, -(-part.bit_length() // 32)) for part in key]
    return np.random.SeedSequence(key, spawn_key=words if max(words, default=1) > 1 else ())


@kernel
def _moved(x: np.uint64, by: np.uint64, key: np.uint64, size: np.uint64) -> np.uint64:
    """x + F(by) mod size, for x < size <= 2**31, in uint64 that wraps around.

    F mixes ``by`` and the key by two multiplications with a fold in between, so that the upper bits depend
    on all bits, and scales the 64 bits z to floor(z size / 2**64): uniform up to size / 2**64, no division.
    """
    z = (by ^ key) * _ODD_1
    z = (z ^ (z >> _HALF)) * _ODD_2
    x += ((z >> _HALF) * size + (((z & _LOW) * size) >> _HALF)) >> _HALF
    return x - size if x >= size else x


@kernel
def _fill(elements: NDArray[np.int64], start: int, network: NDArray[np.uint64]) -> None:
    """The elements at the places from ``start`` on. ``network`` is n, a, b and the keys of the rounds.

    Round by round and not element by element: the entries do not depend on each other, so the processor
    works on several at once, which is twice as fast or more.
    """
    n, a, b, keys = network[0], network[1], network[2], network[3:]
    columns = np.empty(elements.shape[0], np.uint64)
    row = np.uint64(start) // b
    column = np.uint64(start) - row * b
    for k in range(elements.shape[0]):
        elements[k], columns[k] = row, column  # the rows stay in elements until the end
        column += np.uint64(1)
        if column == b:
            row, column = row + np.uint64(1), np.uint64(0)
    for r in range(0, keys.shape[0], 2):
        for k in range(elements.shape[0]):
            row = _moved(np.uint64(elements[k]), columns[k], keys[r], a)
            elements[k] = row
            columns[k] = _moved(columns[k], row, keys[r + 1], b)
    for k in range(elements.shape[0]):
        row, column = np.uint64(elements[k]), columns[k]
        while row * b + column >= n:
            for r in range(0, keys.shape[0], 2):
                row = _moved(row, column, keys[r], a)
                column = _moved(column, row, keys[r + 1], b)
        elements[k] = row * b + column
