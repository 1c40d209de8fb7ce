"""What must be the same in all processes, in few words."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def fingerprint(identity: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, str]:
    """What must be the same on all ranks: settings in words, the state of each part as a digest."""
    entries = {name: f"{value!r:.200}" for name, value in identity.items()}
    entries["correction"] = repr(state["correction"])
    entries["the number of the next draw"] = repr(state["awaited"]["following"])
    for name, part in state.items():
        if isinstance(part, Mapping) and name not in identity:
            if name == "candidates":  # clocks differ; how often they were read must not
                part = {key: len(value) if "seconds" in key else value for key, value in part.items()}
            entries[f"state[{name!r}]"] = f"digest {hashed(part).hexdigest()[:12]}"
    return entries


def hashed(value: Any, into: Any = None) -> Any:
    """A digest of nested plain values and tensors."""
    into = hashlib.blake2b() if into is None else into
    if isinstance(value, Mapping):
        for name in sorted(value):
            into.update(repr(name).encode())
            hashed(value[name], into)
    elif isinstance(value, list | tuple):
        into.update(str(len(value)).encode())
        for item in value:
            hashed(item, into)
    elif isinstance(value, torch.Tensor):
        into.update(np.ascontiguousarray(value.numpy(force=True)).data)
    else:
        into.update(repr(value).encode() + b";")
    return into
