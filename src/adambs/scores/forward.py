"""A forward pass that only scores examples: without gradients, without dropout, in half precision."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

_FAST_IN_FLOAT32 = (nn.TransformerEncoderLayer, nn.MultiheadAttention)


@contextmanager
def forward_only(model: nn.Module, *, half: bool | None = None) -> Iterator[None]:
    """Within it ``model`` is in eval mode and makes no gradients; afterwards it is as it was.

    For the ``score`` that a :class:`BanditLoader` or ``sampler.draw`` looks with. A look may be rough: it
    decides which examples are trained on, and whatever it says, the weights make up for the choice. So it may
    be made in bfloat16, where that is faster; the training step is not touched.

    Args:
        model: What is called within.
        half: Whether to use bfloat16, by ``torch.autocast``; False also switches off an autocast around it.
            If nothing is given, it is used for models of float32 on processors and CUDA devices that compute
            with it, but not for those with torch's own transformer layers: these have a way of their own in
            float32, faster on a processor, which autocast would close.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad(), _precision(model, half):
            yield
    finally:
        model.train(modes[0][1])  # some layers do more in it than to set a flag
        for module, training in modes:
            module.training = training


def _precision(model: nn.Module, half: bool | None) -> Any:
    first = next(model.parameters(), None)
    device = "cpu" if first is None else first.device.type
    if (
        half is None
        and first is not None
        and first.dtype is torch.float32
        and _computes_in_bfloat16(device)
        and not any(isinstance(module, _FAST_IN_FLOAT32) for module in model.modules())
    ):
        half = True
    if half is None or not torch.amp.is_autocast_available(device):
        return nullcontext()
    # Within an autocast of the user, weights that were cast for one are not for the other.
    alone = not torch.is_autocast_enabled(device)
    return torch.autocast(device, torch.bfloat16, enabled=half, cache_enabled=alone)


def _computes_in_bfloat16(device: str) -> bool:
    """Whether it has instructions for that; what it can only imitate is slow."""
    if device == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
