"""The formulas of recurrent layers: LSTM, GRU, RNN and their cells.

The native kernels show no gradient inside the recurrence. So it is run once more, step by step,

    a_t = W_ih x_t + b_ih + ε_t        b_t = W_hh h_{t-1} + b_hh + η_t        h_t = cell(a_t, b_t)

and the output gradients are pulled back to ε and η, which are zero: those are the gradients α_t and
β_t at the gates, for all examples in one backward pass over the batch. The rest is a Linear's:

    W_ih: Σ_t α_t ⊗ x_t    b_ih: Σ_t α_t    W_hh: Σ_t β_t ⊗ h_{t-1}    b_hh: Σ_t β_t

and with `proj_size`, where h_t = W_hr m_t + ζ_t, likewise W_hr: Σ_t γ_t ⊗ m_t. Only the GRU needs
a_t and b_t apart; the others take their sum, so that β = α and η is not needed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .gradients import Dense, Gradients, OuterProducts
from .recorded import RecordedCall
from .weighting import wide

# a_t, b_t (a_t + b_t but for the GRU), h, c -> what h is made of, c.
Cell = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _lstm(a: Tensor, both: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    # One sigmoid over all four gates is faster than three of the gates that need it.
    i, f, _, o = both.sigmoid().chunk(4, 1)
    g = both.chunk(4, 1)[2].tanh()
    c = f * c + i * g
    return o * c.tanh(), c


def _gru(a: Tensor, b: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    ar, az, an = a.chunk(3, 1)
    br, bz, bn = b.chunk(3, 1)
    n = (an + (ar + br).sigmoid() * bn).tanh()
    z = (az + bz).sigmoid()
    return n + z * (h - n), c


def _tanh(a: Tensor, both: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return both.tanh(), c


def _relu(a: Tensor, both: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return both.relu(), c


CELLS: dict[str, Cell] = {"LSTM": _lstm, "GRU": _gru, "RNN_TANH": _tanh, "RNN_RELU": _relu}


@dataclass(frozen=True)
class _Linears:
    """One affine map of a layer at all steps: its inputs, and the zeros added to its outputs."""

    weight: str
    bias: str | None
    inputs: Tensor  # (K, T, i)
    zeros: Tensor  # (K, T, o)


class _Unrolled:
    """A recurrent module's layers, run step by step; `linears` is what it leaves behind."""

    def __init__(self, module: nn.Module, cell: Cell) -> None:
        self.parameters = {name: wide(p) for name, p in module.named_parameters(remove_duplicate=False)}
        self.cell = cell
        self.linears: list[_Linears] = []

    def layer(self, x: Tensor, h: Tensor, c: Tensor, suffix: str) -> tuple[Tensor, Tensor, Tensor]:
        """Run steps x (K, T, i) from h, c; return all h (K, T, o), the last h, the last c."""
        W_hh = self.parameters["weight_hh" + suffix]
        b_hh = self.parameters.get("bias_hh" + suffix)
        W_hr = self.parameters.get("weight_hr" + suffix)
        W_ih = self.parameters["weight_ih" + suffix]
        b_ih = self.parameters.get("bias_ih" + suffix)
        K, T, _ = x.shape
        apart = self.cell is _gru
        eps = x.new_zeros(K, T, len(W_ih)).requires_grad_()
        eta = x.new_zeros(K, T, len(W_hh)).requires_grad_() if apart else eps
        zeta = x.new_zeros(K, T, 0 if W_hr is None else len(W_hr)).requires_grad_()
        before, made, after = [], [], []
        gates = F.linear(x, W_ih, b_ih) + eps
        if b_hh is not None and not apart:
            gates = gates + b_hh
        steps = zip(gates.unbind(1), eta.unbind(1), zeta.unbind(1), strict=True)
        for a, eta_t, zeta_t in steps:
            before.append(h)
            b = F.linear(h, W_hh, b_hh) + eta_t if apart else torch.addmm(a, h, W_hh.mT)
            m, c = self.cell(a, b, h, c)
            h = m if W_hr is None else F.linear(m, W_hr) + zeta_t
            made.append(m)
            after.append(h)
        self._note("weight_ih" + suffix, "bias_ih" + suffix, x, eps)
        self._note("weight_hh" + suffix, "bias_hh" + suffix, torch.stack(before, 1), eta)
        if W_hr is not None:
            self._note("weight_hr" + suffix, None, torch.stack(made, 1), zeta)
        return torch.stack(after, 1), h, c

    def _note(self, weight: str, bias: str | None, inputs: Tensor, zeros: Tensor) -> None:
        bias = bias if bias in self.parameters else None
        self.linears.append(_Linears(weight, bias, inputs.detach(), zeros))

    def gradients(self, outputs: list[Tensor], grads: tuple[Tensor | None, ...]) -> dict[str, Gradients]:
        """Pull the outputs' gradients back to the gates."""
        used = [(y, wide(g)) for y, g in zip(outputs, grads, strict=True) if g is not None]
        deltas = torch.autograd.grad(
            [y for y, _ in used],
            [linear.zeros for linear in self.linears],
            [g for _, g in used],
            allow_unused=True,
            materialize_grads=True,
        )
        found: dict[str, Gradients] = {}
        for linear, delta in zip(self.linears, deltas, strict=True):
            x = linear.inputs
            found[linear.weight] = OuterProducts(delta.mT.unsqueeze(1), x.mT.unsqueeze(1))
            if linear.bias is not None:
                found[linear.bias] = Dense(delta.sum(1))
        return found


def layers(call: RecordedCall) -> dict[str, Gradients]:
    """nn.LSTM, nn.GRU and nn.RNN."""
    module = call.module
    assert isinstance(module, nn.RNNBase)
    x, hx = _inputs(call)
    x = call.batched(x, 3)
    x = x if module.batch_first else x.transpose(0, 1)
    directions = 2 if module.bidirectional else 1
    count = module.num_layers * directions
    H = module.hidden_size
    h0, c0 = _states(hx, x.new_zeros(count, len(x), module.proj_size or H), H)
    with torch.enable_grad():
        run = _Unrolled(module, CELLS[module.mode])
        h_n, c_n = [], []
        for layer in range(module.num_layers):
            ways = []
            for way in range(directions):
                at = layer * directions + way
                suffix = f"_l{layer}" + "_reverse" * way
                y, h, c = run.layer(x.flip(1) if way else x, h0[at], c0[at], suffix)
                ways.append(y.flip(1) if way else y)
                h_n.append(h)
                c_n.append(c)
            x = torch.cat(ways, 2)
        y = x if module.batch_first else x.transpose(0, 1)
        outputs = [y, torch.stack(h_n), torch.stack(c_n)][: 3 if module.mode == "LSTM" else 2]
        return run.gradients(outputs, call.grads)


def cell(call: RecordedCall) -> dict[str, Gradients]:
    """nn.LSTMCell, nn.GRUCell and nn.RNNCell: one step of one layer."""
    module = call.module
    assert isinstance(module, nn.RNNCellBase)
    mode = type(module).__name__.removesuffix("Cell")
    if isinstance(module, nn.RNNCell):
        mode += "_" + module.nonlinearity.upper()
    x, hx = _inputs(call)
    x = call.batched(x, 2)
    h, c = _states(hx, x.new_zeros(len(x), module.hidden_size), module.hidden_size)
    with torch.enable_grad():
        run = _Unrolled(module, CELLS[mode])
        _, h, c = run.layer(x.unsqueeze(1), h, c, "")
        return run.gradients([h, c][: 2 if mode == "LSTM" else 1], call.grads)


def _inputs(call: RecordedCall) -> tuple[Tensor, object]:
    named = dict(zip(("input", "hx"), call.args, strict=False)) | call.kwargs
    return wide(named["input"]), named.get("hx")


def _states(hx: object, zeros: Tensor, hidden: int) -> tuple[Tensor, Tensor]:
    """Return h and c, from what was passed: nothing, h, or (h, c)."""
    c = zeros.new_zeros(*zeros.shape[:-1], hidden)
    if hx is None:
        return zeros, c
    if isinstance(hx, Tensor):
        return wide(hx), c
    assert isinstance(hx, tuple | list)
    return wide(hx[0]), wide(hx[1])


def check(label: str, module: nn.Module, inputs: Iterable[object]) -> None:
    """Refuse what cannot be run again: a dropout mask that is gone, sequences of unequal length."""
    if isinstance(module, nn.RNNBase):
        if module.training and module.dropout > 0 and module.num_layers > 1:
            raise ValueError(
                f"{label} has dropout={module.dropout} between its layers: its mask cannot be "
                "known afterwards; use one module per layer with nn.Dropout between them, "
                "dropout=0, or the output bound"
            )
        if any(isinstance(value, PackedSequence) for value in inputs):
            raise ValueError(
                f"{label} got a PackedSequence, which has no batch dimension: pass padded "
                "sequences, or use the output bound"
            )
