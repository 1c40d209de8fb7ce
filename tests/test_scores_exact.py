"""Exact per-example gradient norms against the loop that cannot be wrong in the same way: one
example at a time through ordinary autograd."""

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import a_draw, weighted_draw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import adambs
from adambs.scores import ExactNorms

few = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
seeds = st.integers(0, 2**31)


def losses_of(output: Any) -> Tensor:
    """A loss per example that depends on every entry of every output: Σ c tanh(output)."""
    tensors = [output] if isinstance(output, Tensor) else [t for t in output if t is not None]
    total = torch.zeros(len(tensors[0]), dtype=tensors[0].dtype)
    for t in tensors:
        flat = t.reshape(len(t), -1)
        c = torch.linspace(-1, 1.5, flat.shape[1], dtype=flat.dtype)
        total = total + (flat.tanh() * c).sum(1) + (flat * c.flip(0)).square().sum(1) / 7
    return total


def one_at_a_time(model: nn.Module, x: Tensor, loss: Callable[[Any], Tensor] = losses_of) -> Tensor:
    """The oracle: K forward and backward passes of one example each."""
    norms = []
    for k in range(len(x)):
        model.zero_grad()
        loss(model(x[k : k + 1])).sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(sum(g.to_dense().square().sum() for g in grads) ** 0.5)
    return torch.as_tensor(norms, dtype=torch.float64)


def assert_exact(model: nn.Module, x: Tensor, loss: Callable[[Any], Tensor] = losses_of) -> None:
    model = model.double()
    expected = one_at_a_time(copy.deepcopy(model), x, loss)
    plain = copy.deepcopy(model)
    draw = a_draw(len(x))
    draw.mean(loss(plain(x))).backward()
    with ExactNorms(model) as norms:
        for _ in range(2):  # the second round finds nothing left over from the first
            model.zero_grad()
            draw.mean(loss(model(x))).backward()
            found = norms(draw)
            assert found.shape == (len(x),)
            assert found.dtype == torch.float64
            assert not found.requires_grad
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:  # training itself is not disturbed
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Fn(nn.Module):
    """A parameterless step of a Sequential."""

    def __init__(self, f: Callable[[Any], Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Any) -> Any:
        return self.f(x)


# Layers, one by one ------------------------------------------------------------------------------


@few
@given(
    seeds, st.integers(1, 4), st.lists(st.integers(1, 6), max_size=2), st.integers(1, 5),
    st.integers(1, 5), st.booleans(),
)  # fmt: skip
def test_linear(seed: int, K: int, middle: list[int], i: int, o: int, bias: bool) -> None:
    torch.manual_seed(seed)
    assert_exact(nn.Linear(i, o, bias=bias), normal(K, *middle, i))


@pytest.mark.parametrize(("T", "i", "o"), [(1, 9, 8), (2, 9, 8), (4, 9, 8), (5, 9, 8), (50, 9, 8)])
@pytest.mark.parametrize("block", [1, 300, 1 << 20])
def test_every_way_to_the_norm_of_a_matrix(
    T: int, i: int, o: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Gram from T = 2 to 4, the matrix from 5; blocks of one, of some, of all examples.
    torch.manual_seed(0)
    monkeypatch.setattr("adambs.scores.gradients.BLOCK", block)
    assert_exact(nn.Linear(i, o), normal(7, T, i))
    assert_exact(nn.Conv1d(i // 3, o, 3), normal(7, i // 3, T + 2))


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    n = draw(st.sampled_from([1, 1, 2, 2, 2, 3]))
    groups = draw(st.integers(1, 2))
    several = st.tuples(*[st.integers(1, 3 if n < 3 else 2)] * n)
    kernel, dilation = draw(several), draw(several)
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    padding = draw(st.sampled_from(["same", "valid", "numbers"]))
    stride: tuple[int, ...] = (1,) * n
    if padding != "same":
        stride = draw(several)
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    size = tuple(draw(st.integers(max(s, 4), s + 4)) for s in spans)
    conv = [nn.Conv1d, nn.Conv2d, nn.Conv3d][n - 1](
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 3)),
        kernel,  # type: ignore[arg-type]
        stride=stride,  # type: ignore[arg-type]
        padding=draw(several) if padding == "numbers" else padding,  # type: ignore[arg-type]
        dilation=dilation,  # type: ignore[arg-type]
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=mode,  # type: ignore[arg-type]
    )
    return conv, (conv.in_channels, *size)


@settings(few, max_examples=60)
@given(seeds, st.integers(1, 3), convolutions())
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
def test_convolution(seed: int, K: int, layer: tuple[nn.Module, tuple[int, ...]]) -> None:
    torch.manual_seed(seed)
    conv, shape = layer
    assert_exact(conv, normal(K, *shape))


@few
@given(
    seeds, st.integers(1, 4), st.lists(st.integers(1, 5), max_size=2), st.integers(1, 4),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_embedding(seed: int, K: int, middle: list[int], dim: int, padding: bool, sparse: bool) -> None:
    torch.manual_seed(seed)
    layer = nn.Embedding(5, dim, padding_idx=1 if padding else None, sparse=sparse)
    x = torch.randint(5, (K, *middle))
    layer = layer.double()
    expected = one_at_a_time(layer, x)
    layer.zero_grad()
    draw = a_draw(K)
    with ExactNorms(layer) as norms:
        draw.mean(losses_of(layer(x))).backward()
        torch.testing.assert_close(norms(draw), expected, rtol=1e-9, atol=1e-12)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": lambda c: nn.LayerNorm((c, 3)),
    "layer, last": lambda c: nn.LayerNorm(3),
    "layer, no bias": lambda c: nn.LayerNorm(3, bias=False),
    "rms": lambda c: nn.RMSNorm(3),
    "group": lambda c: nn.GroupNorm(2, c),
    "instance": lambda c: nn.InstanceNorm1d(c, affine=True),
    "instance, running": lambda c: nn.InstanceNorm1d(c, affine=True, track_running_stats=True),
    "instance, eval": lambda c: nn.InstanceNorm1d(c, affine=True, track_running_stats=True).eval(),
    "batch, eval": lambda c: nn.BatchNorm1d(c).eval(),
    "sync batch, eval": lambda c: nn.SyncBatchNorm(c).eval(),
}


@pytest.mark.parametrize("kind", NORMS)
@settings(few, max_examples=6)
@given(seeds, st.integers(1, 4), st.integers(1, 3))
def test_normalisation(kind: str, seed: int, K: int, pairs: int) -> None:
    torch.manual_seed(seed)
    layer = NORMS[kind](2 * pairs)
    with torch.no_grad():
        for name, t in (*layer.named_parameters(), *layer.named_buffers()):
            if t.is_floating_point():
                t.copy_(torch.rand_like(t) + 0.5 if name != "bias" else torch.randn_like(t))
    assert_exact(layer, normal(K, 2 * pairs, 3))


@settings(few, max_examples=40)
@given(
    seeds, st.sampled_from(["LSTM", "GRU", "tanh", "relu"]), st.integers(1, 3), st.integers(1, 4),
    st.integers(1, 2), st.booleans(), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from(["none", "given"]), st.sampled_from(["all", "output", "state"]),
)  # fmt: skip
def test_recurrent(
    seed: int, kind: str, K: int, T: int, num_layers: int, bidirectional: bool, first: bool,
    bias: bool, project: bool, start: str, used: str,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    options = {
        "num_layers": num_layers,
        "bidirectional": bidirectional,
        "batch_first": first,
        "bias": bias,
    }
    lstm = kind == "LSTM"
    layer: nn.RNNBase
    if lstm:
        layer = nn.LSTM(3, 4, **options, proj_size=2 if project else 0)
    elif kind == "GRU":
        layer = nn.GRU(3, 4, **options)
    else:
        layer = nn.RNN(3, 4, nonlinearity=kind, **options)
    count = num_layers * (2 if bidirectional else 1)
    h = normal(1, count, 1, 2 if lstm and project else 4)
    c = normal(1, count, 1, 4)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Any:
            K = len(x)
            # A start of each example's own, made from its input.
            own = x[:, 0, 0].view(1, K, 1)
            hx = (h[0] * own, c[0] + own) if lstm else h[0] * own
            if not first:
                x = x.transpose(0, 1)
            y, state = self.layer(x) if start == "none" else self.layer(x, hx)
            y = y if first else y.transpose(0, 1)
            states = [s.transpose(0, 1) for s in (state if lstm else (state,))]
            return {"all": [y, *states], "output": [y], "state": states}[used]

    assert_exact(Model(), normal(K, T, 3))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda b: nn.LSTMCell(3, 4, bias=b),
        lambda b: nn.GRUCell(3, 4, bias=b),
        lambda b: nn.RNNCell(3, 4, bias=b),
        lambda b: nn.RNNCell(3, 4, bias=b, nonlinearity="relu"),
    ],
)
def test_recurrent_cells_called_step_by_step(make: Callable[[bool], nn.Module], bias: bool) -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = make(bias)

        def forward(self, x: Tensor) -> Any:
            state: Any = None
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
            return state

    assert_exact(Model(), normal(3, 5, 3))


class Scale(nn.Module):
    """A leaf of the user's own."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(n))
        self.table = nn.Parameter(torch.randn(2, n))

    def forward(self, x: Tensor, factor: Tensor | float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        return x * self.scale * factor, {"more": (x @ self.table.T).sigmoid()}


class UsesScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scale(4)
        self.constant = normal(4)

    def forward(self, x: Tensor) -> Any:
        y, more = self.inner(x, factor=self.constant)
        return [y, more["more"]]


class Attends(nn.Module):
    """MultiheadAttention in the ways in which it is called."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.need, self.mask = options.pop("need", True), options.pop("mask", False)
        self.attention = nn.MultiheadAttention(6, 2, **options)

    def forward(self, x: Tensor) -> Any:
        pad = x[:, :, 0] > 1.2
        pad[:, 0] = False
        T = x.shape[1]
        mask = torch.ones(T, T, dtype=torch.bool).triu(1) if self.mask else None
        if self.mask == 3:
            mask = mask.expand(2 * len(x), T, T)
        x = x if self.attention.batch_first else x.transpose(0, 1)
        y, weights = self.attention(
            x, x * 2, x.sin(), key_padding_mask=pad, attn_mask=mask, need_weights=self.need
        )  # fmt: skip
        return [y if self.attention.batch_first else y.transpose(0, 1), weights]


class WithToken(nn.Module):
    """Parameters held beside children."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 3))
        self.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(torch.cat([self.token.expand(len(x), 1, 3), x], 1))


class Crosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 3, kdim=4, vdim=5, add_bias_kv=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x[:, 1:, :4], x[:, 1:, 1:], average_attn_weights=False)
        return y


GENERIC: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "own leaf": (UsesScale, (4,)),
    "own leaf, K = its size": (UsesScale, (3, 4)),
    "prelu": (lambda: nn.PReLU(3), (3, 2)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 2), (2, 3, 3)),
    "beside children": (WithToken, (2, 3)),
    "attention": (lambda: Attends(batch_first=True), (5, 6)),
    "attention, K = T": (lambda: Attends(batch_first=True, mask=True), (3, 6)),
    "attention, T first": (lambda: Attends(), (5, 6)),
    "attention, T first, masked": (lambda: Attends(mask=True, need=False), (3, 6)),
    "attention, no weights": (lambda: Attends(batch_first=True, need=False), (5, 6)),
    "attention, no bias": (lambda: Attends(bias=False, batch_first=True), (5, 6)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), (4, 3)),
    "attention, own sizes": (Crosses, (5, 6)),
    "spectral norm, eval": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)).eval(), (4, 3),
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True, norm_first=True),
            2, enable_nested_tensor=False,
        ),
        (4, 6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", GENERIC)
def test_other_modules(kind: str) -> None:
    torch.manual_seed(1)
    make, shape = GENERIC[kind]
    assert_exact(make(), normal(3, *shape))


# Whole networks ----------------------------------------------------------------------------------


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten(),
        nn.Linear(16, 5), nn.ReLU(inplace=True), nn.Linear(5, 3),
    )  # fmt: skip


def rcnn() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(7, 4), Fn(lambda x: x.transpose(1, 2)), nn.Conv1d(4, 3, 3), nn.ReLU(),
        nn.MaxPool1d(2), Fn(lambda x: x.transpose(1, 2)), nn.LSTM(3, 4, batch_first=True),
        Fn(lambda y: y[0][:, -1]), nn.Linear(4, 1),
    )  # fmt: skip


def test_cnn_with_in_place_activations() -> None:
    torch.manual_seed(0)
    assert_exact(cnn(), normal(4, 1, 10, 10))


def test_channels_last() -> None:
    torch.manual_seed(0)
    model = cnn().to(memory_format=torch.channels_last)
    assert_exact(model, normal(4, 1, 10, 10).to(memory_format=torch.channels_last))


def test_in_place_activation_on_a_sequence() -> None:
    # The output of Linear on a sequence is a view: a plain hook on it is lost by the in-place ReLU.
    torch.manual_seed(0)
    assert_exact(nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), normal(3, 5, 3))


def test_rcnn() -> None:
    torch.manual_seed(0)
    assert_exact(rcnn(), torch.randint(7, (4, 10)))


def test_inputs_that_require_gradients_and_keyword_inputs() -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.lstm = nn.Linear(3, 2), nn.LSTM(2, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y, _ = self.lstm(input=self.linear(input=x), hx=None)
            return y

    assert_exact(Model(), normal(3, 4, 3).requires_grad_())


@few
@given(seeds, st.integers(0, 2**8 - 1))
def test_frozen_parameters_are_left_out(seed: int, trainable: int) -> None:
    torch.manual_seed(seed)
    model = cnn()
    for n, p in enumerate(model.parameters()):
        p.requires_grad_(n == 9 or bool(trainable >> n & 1))
    assert_exact(model, normal(3, 1, 10, 10))


def test_freezing_and_thawing_later() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    x, draw = normal(3, 3), a_draw(3)
    model[0].requires_grad_(False)
    norms = ExactNorms(model)
    changes = [(model[1].bias, False), (model[0].weight, True), (model[1].weight, False)]
    for parameter, trainable in changes:
        parameter.requires_grad_(trainable)
        model.zero_grad()
        expected = one_at_a_time(copy.deepcopy(model), x)
        draw.mean(losses_of(model(x))).backward()
        torch.testing.assert_close(norms(draw), expected, rtol=1e-9, atol=0)


# Shared parameters: gradients are added before the norm ------------------------------------------


class Tied(nn.Module):
    """A language model: the lookup table is also the last layer's weight."""

    def __init__(self, padding: int | None = None, extra: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, padding_idx=padding)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 6)
        self.out.weight = self.embed.weight
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(self.embed(x)).tanh()
        if self.extra:
            h = self.mix(h + self.embed(x.flip(1)))
        return self.out(h)


class Held(nn.Module):
    """A Linear's weight, as a leaf of another kind holds it too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.held = weight

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.held.T).sigmoid()


class TiedOtherwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 6)
        self.linear = nn.Linear(6, 6)
        self.linear.weight = self.embed.weight
        self.held = Held(self.embed.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.held(self.linear(self.embed(x)))


class TiedToItsChild(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.own = self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x).tanh() @ self.own).sigmoid()


def tied_layers() -> nn.Module:
    lstm = nn.LSTM(3, 3, num_layers=2, batch_first=True)
    lstm.weight_hh_l1, lstm.weight_ih_l1 = lstm.weight_hh_l0, lstm.weight_ih_l0
    return nn.Sequential(lstm, Fn(lambda y: y[0]))


def tied_attention() -> nn.Module:
    model = Attends(batch_first=True)
    model.attention.in_proj_bias = nn.Parameter(torch.randn(18))
    model.after = nn.Linear(6, 6)
    model.attention.out_proj.weight = model.after.weight
    return nn.Sequential(model, Fn(lambda y: y[0]), model.after)


def twice(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer)


SHARED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "embedding and linear": (Tied, lambda: torch.randint(6, (3, 5))),
    "with padding": (lambda: Tied(2), lambda: torch.randint(6, (3, 5))),
    "and each twice": (lambda: Tied(2, True), lambda: torch.randint(6, (3, 5))),
    "with a module of another kind": (TiedOtherwise, lambda: torch.randint(6, (3, 4))),
    "linear": (lambda: twice(nn.Linear(4, 4)), lambda: normal(3, 4)),
    "linear on sequences": (lambda: twice(nn.Linear(4, 4)), lambda: normal(3, 9, 4)),
    "conv": (lambda: twice(nn.Conv2d(4, 4, 3, padding=1, groups=2)), lambda: normal(3, 4, 3, 3)),
    "conv, other sizes": (
        lambda: nn.Sequential(twice(nn.Conv1d(2, 2, 3, stride=2))), lambda: normal(3, 2, 21),
    ),
    "layer norm": (lambda: twice(nn.LayerNorm(4)), lambda: normal(3, 2, 4)),
    "own leaf": (lambda: twice(nn.PReLU(4)), lambda: normal(3, 4)),
    "module and its child": (TiedToItsChild, lambda: normal(4, 3)),
    "layers of one lstm": (tied_layers, lambda: normal(4, 5, 3)),
    "attention and linear": (tied_attention, lambda: normal(4, 5, 6)),
    "lstm": (
        lambda: (lambda m: nn.Sequential(m, Fn(lambda y: y[0]), m, Fn(lambda y: y[0])))(
            nn.LSTM(3, 3, batch_first=True)
        ),
        lambda: normal(3, 4, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SHARED)
def test_shared_parameters(kind: str) -> None:
    torch.manual_seed(2)
    make, data = SHARED[kind]
    assert_exact(make(), data())


def test_a_module_that_returns_what_it_was_given_leaves_no_hook_on_it() -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x

    x, draw = normal(4, 3).requires_grad_(), a_draw(4)
    model = nn.Sequential(Same(), nn.Linear(3, 2)).double()
    norms = ExactNorms(model)
    draw.mean(losses_of(model(x))).backward()
    assert not x._backward_hooks
    torch.testing.assert_close(norms(draw), one_at_a_time(model[1], x.detach()))


def test_layers_that_share_a_bias_only() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].bias = model[0].bias
    assert_exact(model, normal(4, 3))


def test_a_use_that_the_loss_ignores_does_not_count() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            self.layer(x * 5)
            return self.layer(x)

    assert_exact(Model(), normal(4, 3))


# The training loop around it ---------------------------------------------------------------------


def setting() -> tuple[nn.Module, Tensor, adambs.Draw, Tensor]:
    torch.manual_seed(0)
    model = cnn().double()
    x = normal(4, 1, 10, 10)
    return model, x, a_draw(4), one_at_a_time(copy.deepcopy(model), x)


def step(model: nn.Module, x: Tensor, draw: adambs.Draw, scale: float = 1.0) -> None:
    (scale * draw.mean(losses_of(model(x)))).backward()


def test_scale_of_a_gradscaler() -> None:
    model, x, draw, expected = setting()
    norms = ExactNorms(model)
    step(model, x, draw, 1024.0)
    torch.testing.assert_close(norms(draw, scale=1024.0), expected, rtol=1e-9, atol=0)


def test_evaluation_between_steps_changes_nothing() -> None:
    model, x, draw, expected = setting()
    norms = ExactNorms(model)
    losses = draw.mean(losses_of(model(x)))
    with torch.no_grad():
        model(normal(9, 1, 10, 10))
    model(normal(7, 1, 10, 10))  # with gradients, and nobody goes back through it
    losses.backward()
    with torch.no_grad():
        model(normal(9, 1, 10, 10))
    model(normal(7, 1, 10, 10))
    torch.testing.assert_close(norms(draw), expected, rtol=1e-9, atol=0)


def test_a_skipped_call_leaves_nothing_behind() -> None:
    model, x, draw, expected = setting()
    norms = ExactNorms(model)
    step(model, normal(6, 1, 10, 10), a_draw(6))
    step(model, x, draw)
    torch.testing.assert_close(norms(draw), expected, rtol=1e-9, atol=0)


def test_gradient_accumulation_with_a_call_after_every_backward() -> None:
    model, x, draw, expected = setting()
    norms = ExactNorms(model)
    for half in (slice(0, 2), slice(2, 4)):
        part = weighted_draw(draw.weights[half])
        step(model, x[half], part)
        torch.testing.assert_close(norms(part), expected[half], rtol=1e-9, atol=0)


def test_two_forwards_then_two_backwards() -> None:
    model, x, draw, expected = setting()
    norms = ExactNorms(model)
    parts = [weighted_draw(draw.weights[half]) for half in (slice(0, 2), slice(2, 4))]
    means = [d.mean(losses_of(model(v))) for d, v in zip(parts, x.split(2), strict=True)]
    for mean, part, right in zip(means, parts, expected.split(2), strict=True):
        mean.backward()
        torch.testing.assert_close(norms(part), right, rtol=1e-9, atol=0)


def test_activation_checkpointing() -> None:
    torch.manual_seed(0)

    def part() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

    class Model(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.first, self.parts = nn.Linear(3, 3), nn.ModuleList([part(), part()])
            self.reentrant = reentrant

        def forward(self, x: Tensor) -> Any:
            x = self.first(x)
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=self.reentrant)
            return x

    assert_exact(Model(True), normal(4, 3))
    assert_exact(Model(False), normal(4, 3))


def test_float32_and_bfloat16_autocast() -> None:
    torch.manual_seed(0)
    for model, x in ((cnn(), torch.randn(4, 1, 10, 10)), (rcnn(), torch.randint(7, (4, 10)))):
        exact = copy.deepcopy(model).double()
        expected = one_at_a_time(exact, x.double() if x.is_floating_point() else x).float()
        draw = a_draw(4)
        norms = ExactNorms(model)
        draw.mean(losses_of(model(x))).backward()
        found = norms(draw)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        with torch.autocast("cpu", torch.bfloat16):
            mean = draw.mean(losses_of(model(x).float()))
        mean.backward()
        mixed = norms(draw)
        assert mixed.dtype == torch.float32
        torch.testing.assert_close(mixed, expected, rtol=0.1, atol=1e-3)


def test_backward_inside_autocast_is_squared_in_float32() -> None:
    torch.manual_seed(0)
    layer, x, draw = nn.Linear(40, 30), torch.randn(4, 50, 40), a_draw(4)
    norms = ExactNorms(layer)
    found = []
    for inside in (False, True):
        y = layer(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            draw.mean(losses_of(y)).backward()
        found.append(norms(draw))
    torch.testing.assert_close(*found, rtol=1e-6, atol=0)


def test_bfloat16_model_is_summed_in_float32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 300), nn.Tanh(), Scale(300), Fn(lambda y: y[0])).bfloat16()
    x, draw = torch.randn(4, 3).bfloat16(), a_draw(4)
    expected = one_at_a_time(copy.deepcopy(model).double(), x.double()).float()
    norms = ExactNorms(model)
    draw.mean(losses_of(model(x))).backward()
    torch.testing.assert_close(norms(draw), expected, rtol=0.1, atol=1e-2)


def test_inputs_are_freed_in_backward_and_without_it() -> None:
    model, x, draw, _ = setting()
    norms = ExactNorms(model)
    seen: list[StorageWeakRef] = []
    for layer in (model[3], model[7]):
        layer.register_forward_pre_hook(
            lambda m, args: seen.append(StorageWeakRef(args[0].untyped_storage()))
        )
    gc.collect()
    gc.disable()  # by counting alone, not by the collector
    try:
        losses = losses_of(model(x))
        assert not any(storage.expired() for storage in seen)
        del losses
        assert all(storage.expired() for storage in seen)
        losses = losses_of(model(x))
        draw.mean(losses).backward()  # frees what autograd kept, though the losses live on
        assert len(seen) == 4
        assert all(storage.expired() for storage in seen)
    finally:
        gc.enable()
    norms(draw)


def test_remove_takes_the_hooks_off() -> None:
    model, x, draw, _ = setting()
    with ExactNorms(model) as norms:
        pass
    assert not any(m._forward_hooks for m in model.modules())
    assert not any(p._backward_hooks for p in model.parameters())
    step(model, x, draw)
    with pytest.raises(RuntimeError, match="no backward pass was recorded"):
        norms(draw)


def test_a_copy_of_the_model_does_not_record() -> None:
    model, x, draw, expected = setting()
    norms = ExactNorms(model)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    step(model, x, draw)
    step(twin, normal(9, 1, 10, 10), a_draw(9))
    torch.testing.assert_close(norms(draw), expected, rtol=1e-9, atol=0)


# Refusals: what, where, and the way out; and unharmed afterwards ---------------------------------


def assert_refused(
    model: nn.Module, x: Tensor, *words: str, loss: Callable[[Any], Tensor] = losses_of
) -> None:
    model = model.double()
    draw = a_draw(len(x))
    norms = ExactNorms(model)

    def attempt() -> None:
        draw.mean(loss(model(x))).backward()
        norms(draw)

    with pytest.raises((ValueError, RuntimeError)) as caught:
        attempt()
    for word in words:
        assert word in str(caught.value)
    with pytest.raises(RuntimeError, match="no backward pass was recorded"):
        norms(draw)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_batchnorm_in_training_mode(norm: Callable[[int], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), norm(4), nn.Linear(4, 2)).double()
    if norm is nn.BatchNorm1d:
        words = ["1 (BatchNorm1d)", "no per-example gradient", "eval mode", "GroupNorm", "output"]
        assert_refused(model, normal(4, 3), *words)
    model[1].eval()
    assert_exact(model, normal(4, 3))


def test_batchnorm_without_parameters_or_statistics_mixes_examples_too() -> None:
    for norm in (
        nn.BatchNorm1d(4, affine=False),
        nn.BatchNorm1d(4, track_running_stats=False).eval(),
    ):
        assert_refused(nn.Sequential(nn.Linear(3, 4), norm), normal(4, 3), "1 (BatchNorm1d)")


def test_batchnorm_below_everything_trainable_is_harmless() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    model[:2].requires_grad_(False)
    draw, x = a_draw(4), normal(4, 3)
    norms = ExactNorms(model)
    draw.mean(losses_of(model(x))).backward()
    features = model[:2](x)
    torch.testing.assert_close(norms(draw), one_at_a_time(copy.deepcopy(model[2]), features))


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x), self.layer.weight, self.layer.bias)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) * self.w


class DropsToken(WithToken):
    def __init__(self) -> None:
        super().__init__()
        self.body.append(nn.Dropout(0.1))


class Changes(nn.Module):
    """Changes an input in place that autograd itself did not need to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = Leaf()

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        y = self.leaf(x)
        x += 1
        return y


class ChangesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1) * self.w


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x.cos() * self.w


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([nn.Parameter(torch.ones(3))])
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.list[0])


class Starts(nn.Module):
    """A learned initial state, held beside a native kernel that torch.func cannot vectorise."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 1, 2))
        self.lstm = nn.LSTM(3, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.start.repeat(1, len(x), 1)
        y, _ = self.lstm(x, (h, h))
        return y


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places, self.linear = nn.Embedding(5, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.places(torch.arange(5)))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], list[str]]] = {
    "functional use": (Functional, lambda: normal(4, 3), ["'layer.weight'", "call the module"]),
    "dropout in lstm": (
        lambda: nn.Sequential(nn.LSTM(3, 2, 2, dropout=0.5), Fn(lambda y: y[0])),
        lambda: normal(4, 5, 3), ["0 (LSTM)", "dropout=0.5", "nn.Dropout between"],
    ),
    "packed": (
        lambda: nn.Sequential(
            Fn(lambda x: nn.utils.rnn.pack_padded_sequence(x, [2] * len(x), batch_first=True)),
            nn.GRU(3, 2), Fn(lambda y: y[1][0]),
        ),
        lambda: normal(4, 5, 3), ["1 (GRU)", "PackedSequence", "padded"],
    ),
    "batch not first": (
        lambda: nn.Sequential(Fn(lambda x: x.transpose(0, 1)), nn.Linear(3, 2),
                              Fn(lambda x: x.transpose(0, 1))),
        lambda: normal(4, 5, 3), ["1 (Linear)", "5", "K = 4"],
    ),
    "positions shared by the batch": (
        Positions, lambda: normal(4, 5, 3), ["places (Embedding)", "5", "K = 4"],
    ),
    "frequencies": (
        lambda: nn.Embedding(5, 2, scale_grad_by_freq=True), lambda: torch.randint(5, (3, 4)),
        ["(Embedding)", "scale_grad_by_freq"],
    ),
    "functional dropout": (Noisy, lambda: normal(4, 3), ["(Noisy)", "w", "output bound"]),
    "dropout beside": (DropsToken, lambda: normal(4, 2, 3), ["DropsToken", "token", "body.3"]),
    "attention dropout": (
        lambda: Attends(batch_first=True, dropout=0.1), lambda: normal(3, 5, 6),
        ["attention (MultiheadAttention)", "dropout"],
    ),
    "changed in place": (Changes, lambda: normal(4, 3), ["leaf (Leaf)", "in place"]),
    "changes its input": (
        lambda: nn.Sequential(Fn(lambda x: x * 2), ChangesItself()), lambda: normal(4, 3),
        ["1 (ChangesItself)", "in place"],
    ),
    "changes a buffer": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)), lambda: normal(4, 3),
        ["(ParametrizedLinear)", "buffer"],
    ),
    "parameters in a list": (Listed, lambda: normal(4, 3), ["'list.0'", "output bound"]),
    "start beside an lstm": (
        Starts, lambda: normal(4, 5, 3), ["the model (Starts)", "start", "freeze"],
    ),
    "mask of each example": (
        lambda: Attends(batch_first=True, mask=3), lambda: normal(3, 5, 6),
        ["attention (MultiheadAttention)", "key_padding_mask"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals(kind: str) -> None:
    torch.manual_seed(0)
    make, data, words = REFUSED[kind]
    assert_refused(make(), data(), *words)


def test_unbatched_input() -> None:
    for layer, x in ((nn.Linear(3, 2), normal(3)), (nn.LSTM(3, 2), normal(4, 3))):
        norms = ExactNorms(layer.double())
        output = layer(x)
        with pytest.raises(ValueError, match="without a batch dimension"):
            (output if isinstance(output, Tensor) else output[0]).sum().backward()
        with pytest.raises(RuntimeError, match="no backward pass was recorded"):
            norms(a_draw(2))


def test_two_backwards_through_one_forward() -> None:
    model, x, draw, expected = setting()
    norms = ExactNorms(model)
    mean = draw.mean(losses_of(model(x)))
    mean.backward(retain_graph=True)
    mean.backward()
    with pytest.raises(RuntimeError, match=r"9 \(Linear\)|0 \(Conv2d\)"):
        norms(draw)
    step(model, x, draw)
    torch.testing.assert_close(norms(draw), expected, rtol=1e-9, atol=0)


def test_call_without_a_backward_and_twice() -> None:
    model, x, draw, _ = setting()
    norms = ExactNorms(model)
    model(x)
    with pytest.raises(RuntimeError, match="after backward"):
        norms(draw)
    step(model, x, draw)
    norms(draw)
    with pytest.raises(RuntimeError, match="no backward pass was recorded"):
        norms(draw)


def test_a_draw_of_another_size() -> None:
    model, x, draw, expected = setting()
    norms = ExactNorms(model)
    step(model, x, draw)
    with pytest.raises(ValueError, match=r"first dimension of 4, the draw has K = 6"):
        norms(a_draw(6))
    step(model, x, draw)
    torch.testing.assert_close(norms(draw), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_scale_must_be_positive(scale: float) -> None:
    model, x, draw, _ = setting()
    norms = ExactNorms(model)
    step(model, x, draw)
    with pytest.raises(ValueError, match="scale must be positive"):
        norms(draw, scale=scale)
    norms(draw)  # still there


def test_lazy_modules_must_be_initialised() -> None:
    with pytest.raises(ValueError, match=r"0 \(LazyLinear\) is not initialised"):
        ExactNorms(nn.Sequential(nn.LazyLinear(3)))


def test_norms_of_a_part_of_a_batch_are_those_of_the_whole() -> None:
    """Of unequal parts, too, and with weights to a power."""
    model, x = nn.Linear(3, 2).double(), normal(10, 3).double()
    ratios = np.random.default_rng(0).uniform(0.2, 2.0, 10)
    for correction in (1.0, 0.5):
        draw = adambs.Draw(0, np.arange(10), ratios, 10, correction=correction)
        for start, stop in ((0, 3), (3, 6), (6, 10)):
            part = draw.part(start, stop, 3)
            norms = ExactNorms(model)
            part.mean(model(x[start:stop]).square().sum(1)).backward()
            found = norms(part)
            norms.remove()
            model.zero_grad()
            expected = one_at_a_time(model, x[start:stop], lambda z: z.square().sum(1))
            torch.testing.assert_close(found, expected)


def test_norms_do_not_hide_that_nobody_weights_the_losses() -> None:
    sampler = adambs.BanditSampler(40, 4, initial_weights=np.arange(1, 41), gate=0)
    model, x = nn.Linear(3, 2), normal(40, 3).float()
    norms = ExactNorms(model)

    def train() -> None:
        for _ in range(20):
            draw = sampler.draw()
            model(x[draw.indices]).square().sum(1).mean().backward()
            sampler.update(draw, norms(draw))

    with pytest.warns(RuntimeWarning, match="nobody asked for their weights"):
        train()


def test_norms_after_a_cap_are_refused() -> None:
    model, x = nn.Linear(3, 2), normal(4, 3).float()
    draw = adambs.Draw(0, np.arange(4), np.full(4, 0.5), 4, limit=1.0)
    norms = ExactNorms(model)
    draw.mean(model(x).square().sum(1), torch.ones(4)).backward()
    with pytest.raises(ValueError, match="cap may have lowered weights"):
        norms(draw)
