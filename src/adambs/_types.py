"""The kinds of values that the core passes around."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
State = Mapping[str, Any]
"""What a ``state_dict`` returns: tensors and plain numbers, by name."""

# numpy makes an array of a dtype sooner than one of a type.
INT64 = np.dtype(np.int64)
