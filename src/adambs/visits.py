"""The record of an example in a history, and what a visit does to it.

For each example, in one record of 32 bytes::

    visits   last   learned_at   forgotten   mean   squares   slope   excess   last_loss   mean_loss
    uint32   16     uint8        uint8       f32    f32       f32     f32      f32         f32

``last`` is the upper half of a float32, rounded; a score has no sign, so the first bit says whether it was
below ``learned``. A step touches the K records of its draw and no others: O(K), whatever n is.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from adambs._jit import kernel
from adambs._types import Floats, Indices

RECORD = np.dtype(
    [
        ("visits", np.uint32),
        ("last", np.uint16),
        ("learned_at", np.uint8),
        ("forgotten", np.uint8),
        ("mean", np.float32),
        ("squares", np.float32),
        ("slope", np.float32),
        ("excess", np.float32),
        ("last_loss", np.float32),
        ("mean_loss", np.float32),
    ]
)


@kernel
def observe(
    records: NDArray[Any],
    indices: Indices,
    scores: NDArray[np.float32],
    last: NDArray[np.uint16],
    losses: Floats,
    usual: float,
    with_losses: bool,
    learned: float,
) -> None:
    """A visit to each of ``indices``, one after the other: whoever was drawn twice was visited twice.

    With x = 1, 2, ... the number of the visit and y the score (Welford): the mean m moves by (y - m_old) / k,
    the sum of squares around it grows by (y - m_old)(y - m_new), and that of (x - mean x)(y - mean y) by
    (k - k/2)(y - m_new), for the mean of 1 ... k-1 is k/2. The excess is a mean in which the first visit
    counts 0.3, for the model had hardly been trained then, and the others 1. Arithmetic in float64, rounded
    to float32.
    """
    for i in range(indices.shape[0]):
        j = indices[i]
        y = np.float64(scores[i])
        k = np.int64(records[j].visits) + 1
        old = np.float64(records[j].mean)
        new = old + (y - old) / k
        low = y < learned
        if low:
            if records[j].learned_at == 0:
                records[j].learned_at = min(k, 255)
        elif k > 1 and records[j].last & 0x8000 and records[j].forgotten < 255:
            records[j].forgotten += 1
        records[j].visits = k
        records[j].mean = new
        records[j].squares = np.float64(records[j].squares) + max((y - old) * (y - new), 0.0)
        records[j].slope = np.float64(records[j].slope) + 0.5 * k * (y - new)
        records[j].last = last[i] | 0x8000 if low else last[i]
        counts = 1.0 if k > 1 else 0.3
        before = np.float64(records[j].excess)
        records[j].excess = before + counts / (k - 0.7) * (losses[i] - usual - before)
        if with_losses:
            records[j].last_loss = losses[i]
            before = np.float64(records[j].mean_loss)
            records[j].mean_loss = before + (losses[i] - before) / k
