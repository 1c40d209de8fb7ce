"""A device that is not there: tensors that are on no CPU, and a record of every wait for them.

```python
with Device() as device:
    model = device.put(model)
    losses = model(device.put(x))
    ...
assert device.waits == []
```

The values live in CPU tensors inside; torch sees tensors of another device, of the type 'lazy', which
autograd runs in the calling thread. Operations, autograd, factories and copies to the device work inside the
`with` block; `torch.tensor(..., device=...)` does not. As on CUDA, mixing with a CPU tensor that has
dimensions is an error. A copy with `non_blocking=True` is no wait; that it must not be read before it has
arrived is not modelled. Random operations draw from a stream of the device's own; `Device` has the functions
for it that `torch.cuda` has, so that a test can make it `torch.lazy`.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

T = TypeVar("T", Tensor, nn.Module)

# What ends in a number, or a shape, that the host must know before it can go on.
READS = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "bincount",
    "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
}  # fmt: skip

# Here a number of the host is copied to the device first, and the copy waits.
UPLOADS_NUMBERS = {"where", "index_put", "index_put_", "_index_put_impl_"}


class OnDevice(Tensor):
    """A tensor of the device. `device.read(tensor)` shows the values to a test."""

    _values: Tensor
    _home: "Device"
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Tensor, home: "Device") -> "OnDevice":
        tensor = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=home.device,
        )
        tensor._values, tensor._home = values, home
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        home = next(t._home for t in _on_device((args, kwargs)))
        return home._run(func, args, kwargs or {})

    def numpy(self, *, force: bool = False) -> Any:
        self._home.waits.append("copy to the host" if force else "numpy")
        if force:
            return self._values.detach().numpy()
        raise TypeError("can't convert a tensor of this device to numpy: use Tensor.cpu() first")

    def tolist(self) -> Any:
        self._home.waits.append("tolist")
        return self._values.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self._values})"


class Device(TorchDispatchMode):
    """A pretended device; `waits` and `copies` say in order what the host waited for, and what it did not."""

    device = torch.device("lazy", 0)

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.copies: list[str] = []
        self._random = torch.Generator().manual_seed(0).get_state()

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self._random.clone()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self._random = state.clone()

    def manual_seed(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed).get_state()

    def synchronize(self) -> None:
        self.waits.append("synchronize")

    def put(self, value: T) -> T:
        """Return a tensor on the device, or move a module's parameters and buffers there. Not recorded."""
        if isinstance(value, nn.Module):
            moved: dict[Tensor, nn.Parameter] = {}  # one for one: what is tied stays tied
            for module in value.modules():
                for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
                    there = moved.get(p)
                    moved[p] = nn.Parameter(self.put(p), p.requires_grad) if there is None else there
                    setattr(module, name, moved[p])
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, self.put(buffer))
            return value
        if isinstance(value, OnDevice):
            return value
        return OnDevice(value.detach().clone(), self).requires_grad_(value.requires_grad)

    def read(self, tensor: Tensor) -> Tensor:
        """Return the values, for a test to look at. Not recorded; fails for a tensor of the CPU."""
        assert isinstance(tensor, OnDevice), f"{tensor} is not on the device"
        return tensor._values.detach().clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_ours(kwargs.get("device")) or any(True for _ in _on_device((args, kwargs))):
            return self._run(func, args, kwargs)
        return func(*args, **kwargs)

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        device = kwargs.get("device")
        to_host = device is not None and not _is_ours(device)
        if name == "_to_copy":
            self._copied(isinstance(args[0], OnDevice), to_host, bool(kwargs.get("non_blocking")))
        elif name == "copy_":
            late = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            self._copied(isinstance(args[1], OnDevice), not isinstance(args[0], OnDevice), late)
        else:
            self._note(name, func, args, kwargs)
        inner_args, inner_kwargs = tree_map_only(OnDevice, lambda t: t._values, (args, kwargs))
        if device is not None:
            inner_kwargs["device"] = torch.device("cpu")
        out = self._drawn(func, inner_args, inner_kwargs)
        if to_host or (name == "copy_" and not isinstance(args[0], OnDevice)):
            return args[0] if name == "copy_" else out
        out = tree_map_only(Tensor, lambda t: OnDevice(t, self), out)
        return return_and_correct_aliasing(func, args, kwargs, out)

    def _drawn(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation; a random one on the device's stream, which the host's does not move."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        host = torch.get_rng_state()
        torch.set_rng_state(self._random)
        try:
            return func(*args, **kwargs)
        finally:
            self._random = torch.get_rng_state()
            torch.set_rng_state(host)

    def _copied(self, from_device: bool, to_host: bool, late: bool) -> None:
        if from_device == to_host:  # from one to the other
            way = "to the host" if to_host else "to the device"
            (self.copies if late else self.waits).append(f"copy {way}")

    def _note(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Record a wait, and refuse what a device refuses."""
        on_host = [
            t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and not isinstance(t, OnDevice)
        ]
        counts = name == "repeat_interleave" and "Tensor" in func._overloadname
        if name in READS or counts:
            self.waits.append(name)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            places = [t for t in args[1] if t is not None]
            one_value = name != "index" and args[2].numel() == 1  # masked_fill, in fact
            if any(t.dtype in (torch.bool, torch.uint8) for t in places) and not one_value:
                self.waits.append(f"{name} by a mask")
            if any(not isinstance(t, OnDevice) for t in places):
                self.waits.append(f"{name} by indices of the host")
            on_host = [t for t in on_host if not any(t is place for place in places)]
        if name in UPLOADS_NUMBERS and on_host:
            self.waits.append(f"{name} with a number of the host")
        if any(t.dim() > 0 for t in on_host):
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, found {self.device} and cpu"
            )


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == Device.device.type


def _on_device(tree: Any) -> Iterator[OnDevice]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, OnDevice))
