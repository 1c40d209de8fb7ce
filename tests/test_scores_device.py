"""Scores on a device: the values of the CPU, and no wait for one of them.

Whatever ends in a number on the host, or in a shape that depends on values, stops the host until the
device has caught up. `device_stub` counts such waits without a device.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from device_stub import Device, OnDevice
from helpers import a_draw
from torch import Tensor, nn

from adambs import scores
from adambs.scores import ExactNorms

# The stub itself ---------------------------------------------------------------------------------

WAITS: dict[str, tuple[Callable[[Tensor, Device], Any], str]] = {
    "item": (lambda t, d: t.sum().item(), "_local_scalar_dense"),
    "int": (lambda t, d: int(t.sum()), "_local_scalar_dense"),
    "if": (lambda t, d: 1 if t.sum() > 0 else 0, "_local_scalar_dense"),
    "aminmax": (lambda t, d: [float(v) for v in t.aminmax()], "_local_scalar_dense"),
    "equal": (lambda t, d: torch.equal(t, t), "equal"),
    "nonzero": (lambda t, d: t.nonzero(), "nonzero"),
    "unique": (lambda t, d: torch.unique(t), "_unique2"),
    "unique with counts": (lambda t, d: t.unique_consecutive(return_counts=True), "unique_consecutive"),
    "mask": (lambda t, d: t[t > 0], "index by a mask"),
    "masked select": (lambda t, d: t.masked_select(t > 0), "masked_select"),
    "indices of the host": (lambda t, d: t[torch.tensor([0, 1])], "index by indices of the host"),
    "cpu": (lambda t, d: t.cpu(), "copy to the host"),
    "to": (lambda t, d: t.to("cpu", torch.float64), "copy to the host"),
    "into": (lambda t, d: torch.zeros(3).copy_(t), "copy to the host"),
    "upload": (lambda t, d: torch.zeros(3).to(t), "copy to the device"),
    "upload into": (lambda t, d: t.copy_(torch.zeros(3)), "copy to the device"),
    "where": (lambda t, d: torch.where(t > 0, t, torch.tensor(1.0)), "where with a number of the host"),
    "tolist": (lambda t, d: t.tolist(), "tolist"),
}

NO_WAITS: dict[str, tuple[Callable[[Tensor, Device], Any], list[str]]] = {
    "arithmetic": (lambda t, d: (t * 2 + torch.tensor(1.0)).softmax(0).sum(), []),
    "in place": (lambda t, d: t.add_(1).mul_(t), []),
    "masked fill": (lambda t, d: t.masked_fill(t > 0, 1.0), []),
    "assignment by a mask": (lambda t, d: t.__setitem__(t > 0, 1.0), []),
    "factory": (lambda t, d: t + torch.arange(3, device=t.device), []),
    "late copy": (lambda t, d: t.to("cpu", non_blocking=True), ["copy to the host"]),
    "late copy into": (lambda t, d: torch.zeros(3).copy_(t, non_blocking=True), ["copy to the host"]),
    "late upload": (lambda t, d: torch.zeros(3).to(t, non_blocking=True), ["copy to the device"]),
}


@pytest.mark.parametrize("kind", WAITS)
def test_the_stub_sees_a_wait(kind: str) -> None:
    act, name = WAITS[kind]
    with Device() as device:
        act(device.put(torch.tensor([1.0, -2.0, 3.0])), device)
    assert name in device.waits
    assert device.copies == []


@pytest.mark.parametrize("kind", NO_WAITS)
def test_the_stub_sees_no_wait(kind: str) -> None:
    act, copies = NO_WAITS[kind]
    with Device() as device:
        act(device.put(torch.tensor([1.0, -2.0, 3.0])), device)
    assert (device.waits, device.copies) == ([], copies)


def test_the_stub_refuses_what_a_device_refuses() -> None:
    with Device() as device:
        t = device.put(torch.ones(3))
        with pytest.raises(RuntimeError, match="same device"):
            t + torch.ones(3)
        with pytest.raises(TypeError, match="numpy"):
            t.numpy()
    assert device.waits == ["numpy"]


def test_the_stub_trains_as_the_cpu_does() -> None:
    def train(put: Callable[[Any], Any]) -> nn.Module:
        torch.manual_seed(0)
        model = put(nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)))
        x, y = put(torch.randn(6, 4)), put(torch.randint(3, (6,)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return model

    expected = train(lambda value: value)
    with Device() as device:
        model = train(device.put)
    assert device.waits == []
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert isinstance(p, OnDevice)
        assert torch.equal(device.read(p), q)


# Closed forms ------------------------------------------------------------------------------------

K, C = 6, 4
Score = Callable[[Callable[[Tensor], Tensor]], Tensor]


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


LABELS = torch.tensor([0, 3, 1, -100, 2, 3])

CLOSED: dict[str, Score] = {
    "classes": lambda put: scores.cross_entropy(put(_numbers(K, C)), put(LABELS.clamp_min(0))),
    "ignored classes": lambda put: scores.cross_entropy(put(_numbers(K, C)), put(LABELS)),
    "half precision": lambda put: scores.cross_entropy(put(_numbers(K, C).bfloat16()), put(LABELS)),
    "smoothed classes": lambda put: scores.cross_entropy(
        put(_numbers(K, C)), put(LABELS), label_smoothing=0.1
    ),
    "weighted classes": lambda put: scores.cross_entropy(
        put(_numbers(K, C)), put(LABELS), weight=put(torch.linspace(0.5, 2, C))
    ),
    "probabilities": lambda put: scores.cross_entropy(
        put(_numbers(K, C)), put(_numbers(K, C, seed=1).softmax(1)), label_smoothing=0.1
    ),
    "binary": lambda put: scores.binary_cross_entropy_with_logits(put(_numbers(K)), put(torch.ones(K))),
    "binary column": lambda put: scores.binary_cross_entropy_with_logits(
        put(_numbers(K, 1)), put(torch.ones(K, 1))
    ),
    "weighted labels": lambda put: scores.binary_cross_entropy_with_logits(
        put(_numbers(K, C)), put(_numbers(K, C, seed=1).sigmoid()),
        weight=put(torch.linspace(0.5, 2, C)), pos_weight=put(torch.linspace(3, 1, C)),
    ),
    "labels": lambda put: scores.binary_cross_entropy_with_logits(
        put(_numbers(K, C)), put(_numbers(K, C, seed=1).sigmoid())
    ),
    "squares": lambda put: scores.mse_loss(put(_numbers(K, C, 2)), put(_numbers(K, C, 2, seed=1))),
    "squares of numbers": lambda put: scores.mse_loss(put(_numbers(K)), put(_numbers(K, seed=1))),
}  # fmt: skip


@pytest.mark.parametrize("kind", CLOSED)
def test_closed_forms_wait_for_nothing(kind: str) -> None:
    expected = CLOSED[kind](lambda value: value)
    with Device() as device:
        found = CLOSED[kind](device.put)
    assert (device.waits, device.copies) == ([], [])
    values = device.read(found)
    assert values.dtype == expected.dtype
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"weight": torch.ones(C)}])
@pytest.mark.parametrize("classes", [1, C])
def test_a_class_that_does_not_exist_scores_nan(options: dict[str, Any], classes: int) -> None:
    # On the CPU it is a ValueError; there is no raising without a wait.
    z, y = _numbers(K, classes), torch.tensor([0, -1, classes, -100, 0, 10**9])
    options = {name: v[:classes] if isinstance(v, Tensor) else v for name, v in options.items()}
    with pytest.raises(ValueError, match=rf"class -1, logits have {classes} classes"):
        scores.cross_entropy(z, y, **options)
    with Device() as device:
        on_device = {n: device.put(v) if isinstance(v, Tensor) else v for n, v in options.items()}
        found = scores.cross_entropy(device.put(z), device.put(y), **on_device)
    assert device.waits == []
    assert device.read(found).isnan().tolist() == [False, True, True, False, False, True]
    assert device.read(found)[3] == 0


def test_tiny_gradients_keep_their_norm_on_a_device() -> None:
    g = torch.tensor([[3e-30, 4e-30], [0.0, 0.0], [3e-41, 4e-41], [3e30, 4e30]])
    with Device() as device:
        found = scores.mse_loss(device.put(g), device.put(torch.zeros_like(g)))
    expected = torch.tensor([1e-29, 0.0, 1e-40, 1e31])
    torch.testing.assert_close(device.read(found), expected, rtol=1e-5, atol=0)


# From the backward pass --------------------------------------------------------------------------


def test_output_norms_wait_for_nothing() -> None:
    torch.manual_seed(0)
    draw, g = a_draw(K), _numbers(K, C)
    output = torch.zeros(K, C, requires_grad=True)
    output.grad = g
    expected = scores.output_norms(draw, output, scale=8.0)
    with Device() as device:
        output = device.put(output)
        output.grad = device.put(g)
        found = scores.output_norms(draw, output, scale=8.0)
    assert device.waits == []
    assert device.copies == ["copy to the device"]  # the weights, which the host has
    torch.testing.assert_close(device.read(found), expected, rtol=1e-6, atol=0)


class Tied(nn.Module):
    """The lookup table is also the last layer's weight, and the padding has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4, padding_idx=2), nn.Linear(4, 7)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x).tanh())


class Last(nn.Module):
    def forward(self, x: Any) -> Tensor:
        return x[0] if isinstance(x, tuple) else x


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.exp()


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x)
        return y


def _words(*shape: int) -> Tensor:
    return torch.randint(7, shape, generator=torch.Generator().manual_seed(0))


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(4, 3), _numbers(K, 4)),
    "linear on positions": (lambda: nn.Linear(4, 3), _numbers(K, 9, 4)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.GroupNorm(2, 2), nn.ReLU(inplace=True),
            nn.Flatten(), nn.Linear(32, 3),
        ),
        _numbers(K, 1, 4, 4),
    ),
    "norms": (
        lambda: nn.Sequential(nn.LayerNorm(3), nn.RMSNorm(3), nn.BatchNorm1d(2).eval()), _numbers(K, 2, 3),
    ),
    "embedding": (lambda: nn.Embedding(7, 3, padding_idx=1), _words(K, 9)),
    "one word": (lambda: nn.Embedding(7, 3), _words(K)),
    "tied": (Tied, _words(K, 5)),
    "lstm": (
        lambda: nn.Sequential(nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True), Last()),
        _numbers(K, 5, 3),
    ),
    "gru": (lambda: nn.Sequential(nn.GRU(3, 4, batch_first=True), Last()), _numbers(K, 5, 3)),
    "own module": (Scale, _numbers(K, 3)),
    "attention": (Attends, _numbers(K, 5, 6)),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_exact_norms_wait_for_nothing(kind: str) -> None:
    make, x = MODELS[kind]
    draw = a_draw(K)
    weights = draw.weights.float()

    def norms_of(model: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
        norms = ExactNorms(model)
        losses = model(x).tanh().flatten(1).square().sum(1)
        (losses * weights).mean().backward()
        return norms(draw)

    torch.manual_seed(0)
    expected = norms_of(make(), x, weights)
    torch.manual_seed(0)
    with Device() as device:
        found = norms_of(device.put(make()), device.put(x), device.put(weights))
    assert device.waits == []
    assert device.copies == ["copy to the device"]  # the weights, which the host has
    torch.testing.assert_close(device.read(found), expected, rtol=1e-4, atol=1e-7)
