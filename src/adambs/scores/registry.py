"""Which formula each module has, and which modules have no per-example gradient."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from . import generic, layers, recurrent
from .gradients import Gradients
from .recorded import RecordedCall

Formula = Callable[[RecordedCall], dict[str, Gradients]]

# The formula of each kind of layer. A subclass has it too unless it has a forward of its own.
FORMULAS: dict[type[nn.Module], Formula] = {
    nn.Linear: layers.linear,
    nn.Embedding: layers.embedding,
    nn.Conv1d: layers.convolution,
    nn.Conv2d: layers.convolution,
    nn.Conv3d: layers.convolution,
    nn.LayerNorm: layers.layer_norm,
    nn.RMSNorm: layers.layer_norm,
    nn.GroupNorm: layers.group_norm,
    _InstanceNorm: layers.channel_norm,
    _BatchNorm: layers.channel_norm,
    nn.SyncBatchNorm: layers.channel_norm,
    nn.LSTM: recurrent.layers,
    nn.GRU: recurrent.layers,
    nn.RNN: recurrent.layers,
    nn.LSTMCell: recurrent.cell,
    nn.GRUCell: recurrent.cell,
    nn.RNNCell: recurrent.cell,
    nn.MultiheadAttention: generic.attention,
}

# Layers of libraries that need not be installed, by their names. Without a formula they would be run again.
FORMULAS_BY_NAME: dict[str, Formula] = {"transformers.pytorch_utils.Conv1D": layers.transposed_linear}


@dataclass(frozen=True)
class TrackedModule:
    """A module whose forward is recorded, for the sake of these parameters."""

    label: str
    module: nn.Module
    formula: Formula
    parameters: dict[str, nn.Parameter]

    @property
    def rerun(self) -> bool:
        """Whether the module itself is called again."""
        return self.formula in (generic.per_example, generic.attention)

    def check(self, inputs: Iterable[Any], names: list[str]) -> None:
        """Refuse, in the forward pass, what has no per-example gradient or cannot be run again."""
        module = self.module
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise ValueError(
                f"{self.label} normalises by the batch: every example's loss depends on all "
                "examples, so no per-example gradient exists. Put it in eval mode, use GroupNorm "
                "or LayerNorm instead, or take the output bound (adambs.scores.cross_entropy, "
                "output_norms)"
            )
        if not names:
            return
        if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
            raise ValueError(
                f"{self.label} has scale_grad_by_freq=True, which divides gradients by counts over "
                "the batch, so no per-example gradient exists: set it to False"
            )
        if self.formula in (recurrent.layers, recurrent.cell):
            recurrent.check(self.label, module, inputs)
        if self.rerun:
            generic.check(self.label, module, names)


def tracked_modules(model: nn.Module) -> Iterator[TrackedModule]:
    """Find the modules that hold parameters, each with its formula."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        # These use their children's parameters without calling the children: tracked as one.
        whole = isinstance(module, nn.MultiheadAttention) or is_parametrized(module)
        if whole:
            inside.update(module.modules())
        # A parameter may have two names in one module: each name is a use.
        parameters = dict(module.named_parameters(recurse=whole, remove_duplicate=False))
        label = f"{name or 'the model'} ({type(module).__name__})"
        if any(isinstance(p, UninitializedParameter) for p in parameters.values()):
            raise ValueError(f"{label} is not initialised yet: run the model once before")
        if parameters or isinstance(module, _BatchNorm):
            yield TrackedModule(label, module, _formula(module), parameters)


def _formula(module: nn.Module) -> Formula:
    if not is_parametrized(module):
        for kind, formula in FORMULAS.items():
            if isinstance(module, kind) and type(module).forward is kind.forward:
                return formula
        kind = type(module)
        return FORMULAS_BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}", generic.per_example)
    return generic.per_example
