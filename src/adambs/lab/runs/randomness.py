"""torch's random streams: the CPU's, and the device's, from which dropout draws there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Streams:
    """The random streams of one method. They advance in its turns, and nobody else's draws move them."""

    def __init__(self, device: torch.device | str, seed: int) -> None:
        """Begin at ``seed``; torch's own streams stay where they are."""
        device = torch.device(device)
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        # MPS is one device, and its functions take none.
        self._which = () if device.type == "mps" else (device,)
        self._states: list[Tensor] = []
        outside = self._read()
        torch.manual_seed(seed)
        if self._module is not None:
            self._module.manual_seed(seed)
        self._states = self._read()
        self._write(outside)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Draw from these streams inside, and go on from there the next time."""
        outside = self._read()
        self._write(self._states)
        try:
            yield
        finally:
            self._states = self._read()
            self._write(outside)

    def wait(self) -> None:
        """Let the device finish what it was given: before a clock is read."""
        if self._module is not None:
            self._module.synchronize()

    def _read(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._module is not None:
            states.append(self._module.get_rng_state(*self._which))
        return states

    def _write(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._module is not None:
            self._module.set_rng_state(states[1], *self._which)


def usable(name: str) -> torch.device:
    """The device of that name; one that torch does not know or cannot compute on here is a ValueError."""
    try:
        device = torch.device(name)
        if torch.ones(2, device=device).sum().item() != 2:
            raise RuntimeError("it computes wrongly")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (
            str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        )
        raise ValueError(
            f"device {name!r} cannot be used here ({reason}): leave --device out to run on the CPU"
        ) from error
    return device
