"""The output bound against autograd through torch.nn.functional's own losses."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import a_draw, weighted_draw
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from adambs import scores
from adambs.scores import on_cpu

some = settings(max_examples=60, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)


def by_autograd(loss: Callable[[Tensor], Tensor], output: Tensor) -> Tensor:
    """The oracle: the gradient of the sum of all losses at the output, row by row."""
    output = output.detach().requires_grad_()
    (grad,) = torch.autograd.grad(loss(output).sum(), output)
    return grad.reshape(len(output), -1).norm(dim=1)


def assert_scores(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert not found.requires_grad
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


# Closed forms ------------------------------------------------------------------------------------


@some
@given(
    seeds, st.integers(1, 6), st.integers(1, 5), st.booleans(),
    st.sampled_from([-100, 0, 255]), st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([1, 30]),
)  # fmt: skip
def test_cross_entropy_of_class_indices(
    seed: int, K: int, C: int, weighted: bool, ignored: int, smoothing: float, spread: int
) -> None:
    torch.manual_seed(seed)
    logits = (torch.randn(K, C, dtype=torch.float64) * spread).requires_grad_()
    target = torch.randint(C, (K,))
    target[torch.rand(K) < 0.3] = ignored
    weight = torch.rand(C, dtype=torch.float64) if weighted else None
    found = scores.cross_entropy(
        logits, target, weight=weight, ignore_index=ignored, label_smoothing=smoothing
    )
    options = {"weight": weight, "ignore_index": ignored, "label_smoothing": smoothing}
    expected = by_autograd(lambda z: F.cross_entropy(z, target, reduction="none", **options), logits)
    assert_scores(found, expected)


@some
@given(seeds, st.integers(1, 6), st.integers(1, 5), st.booleans(), st.sampled_from([0.0, 0.1, 1.0]))
def test_cross_entropy_of_class_probabilities(
    seed: int, K: int, C: int, weighted: bool, smoothing: float
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(K, C, dtype=torch.float64) * 3
    target = torch.rand(K, C, dtype=torch.float64)
    target /= target.sum(1, keepdim=True)
    weight = torch.rand(C, dtype=torch.float64) if weighted else None
    found = scores.cross_entropy(logits, target, weight=weight, label_smoothing=smoothing)
    expected = by_autograd(
        lambda z: F.cross_entropy(z, target, weight=weight, label_smoothing=smoothing, reduction="none"),
        logits,
    )
    assert_scores(found, expected)


@pytest.mark.parametrize("margin", [5.0, 20.0, 40.0, 80.0])
@pytest.mark.parametrize("form", ["indices", "probabilities"])
def test_confident_examples_do_not_cancel(margin: float, form: str) -> None:
    # 1 - p_y is 2 e^-margin here, and 0 in float32 arithmetic from a margin of 17 on.
    logits = torch.tensor([[margin, 0.0, 0.0]])
    target = torch.tensor([0])
    if form == "probabilities":
        target = F.one_hot(target, 3).float()
    e = torch.tensor([margin], dtype=torch.float64).neg().exp()
    exact = 6**0.5 * e / (1 + 2 * e)
    found = scores.cross_entropy(logits, target)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


def test_exponentials_are_exact_to_the_last_bits() -> None:
    x = np.concatenate([-np.random.default_rng(0).random(5000) * 708, [0.0, -1e-300, -708.0]])
    found = np.empty_like(x)
    on_cpu._exponentials(x.copy(), found, len(x))
    np.testing.assert_allclose(found, np.exp(x), rtol=5e-16, atol=0)
    odd = np.array([-708.1, -1e300, -np.inf, np.nan, -np.nan, 0.0])
    odd.view(np.int64)[3] |= 1  # a NaN with a bit in its lowest place
    found = np.ones(6)
    on_cpu._exponentials(odd, found, 5)
    np.testing.assert_array_equal(found, [0, 0, 0, np.nan, np.nan, 1])  # no further than it was told


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (3, 5), (300, 23), (9, 1025), (40, 1000)])
def test_any_number_of_logits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    z, y = torch.randn(shape, dtype=dtype) * 4, torch.randint(shape[1], shape[:1])
    y[-1] = -100
    expected = by_autograd(lambda z: F.cross_entropy(z, y, reduction="none"), z.double()).to(dtype)
    tolerance = 1e-9 if dtype is torch.float64 else 1e-5
    torch.testing.assert_close(scores.cross_entropy(z, y), expected, rtol=tolerance, atol=1e-12)
    masked = torch.cat([z, torch.full((len(z), 1), -torch.inf, dtype=dtype)], dim=1)
    torch.testing.assert_close(scores.cross_entropy(masked, y), expected, rtol=tolerance, atol=1e-12)


@pytest.mark.parametrize("C", [2, 100, 1000, 5000])
@pytest.mark.parametrize("size", [1.0, 29.9, 39.9, 60.0])
@pytest.mark.parametrize("common", [True, False])
def test_logits_of_any_size_and_number_against_float64(C: int, size: float, common: bool) -> None:
    """Moderate logits are scored in float32, whose squares end at 1e38: whatever they have in common."""
    stream = torch.Generator().manual_seed(0)
    z = torch.full((6, C), size) if common else (torch.rand(6, C, generator=stream) * 2 - 1) * size
    z[3:] *= -1
    z[1, 0], z[2, 0] = -size, size
    y = torch.tensor([0, 0, 0, 1, 1, 0])
    found = scores.cross_entropy(z, y)
    expected = scores.cross_entropy(z.double(), y)
    torch.testing.assert_close(found.double(), expected, rtol=3e-6, atol=1e-44)


def test_logits_that_are_views() -> None:
    torch.manual_seed(0)
    z, y = torch.randn(6, 4), torch.randint(4, (6,))
    expected = scores.cross_entropy(z, y)
    for view in (z.t().contiguous().t(), torch._neg_view(-z), z.clone().requires_grad_(), nn.Parameter(z)):
        torch.testing.assert_close(scores.cross_entropy(view, y), expected)
    apart = torch.stack([y, y], dim=1)[:, 0]
    torch.testing.assert_close(scores.cross_entropy(z, apart), expected)


@pytest.mark.parametrize("margin", [300.0, 345.0, 346.0, 400.0, 700.0])
def test_confident_examples_in_float64_do_not_underflow(margin: float) -> None:
    # p_c = e^-margin is a float64 still, its square from a margin of 372 on is not.
    z = torch.tensor([[margin, 0.0, 0.0]], dtype=torch.float64)
    e = torch.tensor([-margin], dtype=torch.float64).exp()
    torch.testing.assert_close(scores.cross_entropy(z, torch.tensor([0])), 6**0.5 * e, rtol=1e-12, atol=0)
    y = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    binary = scores.binary_cross_entropy_with_logits(z[:, :1] * torch.tensor([[1.0, -1.0]]), y)
    torch.testing.assert_close(binary, 2**0.5 * e, rtol=1e-12, atol=0)


def test_an_example_beyond_doubt_has_score_zero_and_a_broken_one_is_not_hidden() -> None:
    logits = torch.tensor([[300.0, 0.0], [torch.nan, 0.0]])
    found = scores.cross_entropy(logits, torch.tensor([0, 0]))
    assert found[0] == 0
    assert found[1].isnan()


def test_softmax_scores_reach_the_square_root_of_two_and_no_more() -> None:
    logits = torch.tensor([[0.0, 200.0, 0.0]], dtype=torch.float64)
    assert scores.cross_entropy(logits, torch.tensor([0])).item() == pytest.approx(2**0.5)


@some
@given(
    seeds, st.integers(1, 6), st.sampled_from([None, 1, 4]), st.booleans(), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_binary_cross_entropy(
    seed: int, K: int, m: int | None, weighted: bool, positives: bool, soft: bool
) -> None:
    torch.manual_seed(seed)
    shape = (K,) if m is None else (K, m)
    logits = torch.randn(shape, dtype=torch.float64) * 5
    target = torch.rand(shape, dtype=torch.float64)
    target = target if soft else target.round()
    weight = torch.rand(shape, dtype=torch.float64) if weighted else None
    pos_weight = torch.rand(shape[1:], dtype=torch.float64) * 4 if positives else None
    options = {"weight": weight, "pos_weight": pos_weight}
    found = scores.binary_cross_entropy_with_logits(logits, target, **options)
    expected = by_autograd(
        lambda z: F.binary_cross_entropy_with_logits(z, target, reduction="none", **options),
        logits,
    )
    assert_scores(found, expected)


def test_confident_sigmoids_do_not_cancel() -> None:
    logits = torch.tensor([60.0, -60.0])
    found = scores.binary_cross_entropy_with_logits(logits, torch.tensor([1.0, 0.0]))
    exact = torch.tensor([-60.0, -60.0], dtype=torch.float64).exp()
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


@some
@given(seeds, st.integers(1, 5), st.lists(st.integers(1, 3), max_size=3))
def test_mse_loss(seed: int, K: int, rest: list[int]) -> None:
    torch.manual_seed(seed)
    output, target = torch.randn(2, K, *rest, dtype=torch.float64)
    expected = by_autograd(lambda y: F.mse_loss(y, target, reduction="none"), output)
    assert_scores(scores.mse_loss(output, target), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_outputs_are_scored_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    z, y = torch.randn(5, 4).to(dtype), torch.randint(4, (5,))
    labels = F.one_hot(y, 4).to(dtype)
    found = [
        scores.cross_entropy(z, y),
        scores.cross_entropy(z, labels),
        scores.binary_cross_entropy_with_logits(z, labels),
        scores.mse_loss(z, labels),
    ]
    wide = [
        scores.cross_entropy(z.float(), y),
        scores.cross_entropy(z.float(), labels.float()),
        scores.binary_cross_entropy_with_logits(z.float(), labels.float()),
        scores.mse_loss(z.float(), labels.float()),
    ]
    for a, b in zip(found, wide, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_under_autocast() -> None:
    torch.manual_seed(0)
    layer, x, y = torch.nn.Linear(6, 4), torch.randn(5, 6), torch.randint(4, (5,))
    exact = scores.cross_entropy(layer(x), y)
    with torch.autocast("cpu", torch.bfloat16):
        z = layer(x)
        assert z.dtype == torch.bfloat16
        found = scores.cross_entropy(z, y)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0.01)


class Plain(Tensor):
    """A subclass that adds nothing: its values might be anywhere."""


ways = st.sampled_from(["plain", "parameter", "transposed", "sliced", "subclass", "vmap"])


@some
@given(seeds, st.integers(1, 6), st.integers(1, 5), ways, st.sampled_from([torch.float32, torch.float64]))
def test_loops_and_torch_operations_agree(seed: int, K: int, C: int, way: str, dtype: torch.dtype) -> None:
    # Plain tensors of the CPU go through compiled loops, the rest through torch.
    torch.manual_seed(seed)
    logits, labels = torch.randn(K, C, dtype=dtype) * 8, torch.rand(K, C, dtype=dtype)
    target = torch.randint(C, (K,))
    expected = [
        by_autograd(lambda z: F.cross_entropy(z, target, reduction="none"), logits),
        by_autograd(lambda z: F.binary_cross_entropy_with_logits(z, labels, reduction="none"), logits),
        by_autograd(lambda z: F.mse_loss(z, labels, reduction="none"), logits),
    ]

    def changed(t: Tensor) -> Tensor:
        if way == "parameter" and t.is_floating_point():
            return torch.nn.Parameter(t)
        if way == "transposed" and t.dim() == 2:
            return t.mT.contiguous().mT
        if way == "sliced":
            return t.repeat_interleave(2, 0)[::2]
        return t.as_subclass(Plain) if way == "subclass" else t

    def found(z: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        return (
            scores.cross_entropy(z, y),
            scores.binary_cross_entropy_with_logits(z, t),
            scores.mse_loss(z, t),
        )

    z, y, t = changed(logits), changed(target), changed(labels)
    if way == "vmap":
        results = torch.func.vmap(found)(z[None], y[None], t[None])
        results = tuple(result[0] for result in results)
    else:
        results = found(z, y, t)
    for a, b in zip(results, expected, strict=True):
        assert a.dtype == dtype
        # The oracle itself cancels where an example is confident.
        rough = 1e-5 if dtype == torch.float32 else 1e-9
        torch.testing.assert_close(a.as_subclass(Tensor), b, rtol=rough, atol=rough / 10)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_class_indices_of_any_integer_type(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    expected = by_autograd(lambda z: F.cross_entropy(z, target, reduction="none"), logits)
    for options in ({}, {"label_smoothing": 1e-9}):
        found = scores.cross_entropy(logits, target.to(dtype), **options)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_an_ignored_example_scores_zero_whatever_its_logits_are() -> None:
    logits, target = torch.tensor([[torch.nan, 0.0], [0.0, 0.0]]), torch.tensor([-100, 0])
    for options in ({}, {"label_smoothing": 0.1}, {"weight": torch.ones(2)}):
        found = scores.cross_entropy(logits, target, **options)
        assert found[0] == 0
        assert found[1] > 0


def test_an_empty_batch_has_no_scores() -> None:
    z, y = torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)
    assert scores.cross_entropy(z, y).shape == (0,)
    assert scores.cross_entropy(z, y, label_smoothing=0.1).shape == (0,)
    assert scores.binary_cross_entropy_with_logits(z, z).shape == (0,)
    assert scores.mse_loss(z, z).shape == (0,)


def test_scores_can_be_compiled_without_a_break() -> None:
    torch.manual_seed(0)
    z, y, t = torch.randn(5, 4), torch.randint(4, (5,)), torch.rand(5, 4)

    def all_of_them(z: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        return (
            scores.cross_entropy(z, y),
            scores.cross_entropy(z, y, label_smoothing=0.1),
            scores.binary_cross_entropy_with_logits(z, t),
            scores.mse_loss(z, t),
        )

    compiled = torch.compile(all_of_them, backend="eager", fullgraph=True)
    for a, b in zip(compiled(z, y, t), all_of_them(z, y, t), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


# From the training step's own backward pass ------------------------------------------------------


@some
@given(
    seeds, st.integers(1, 5), st.lists(st.integers(1, 3), max_size=3),
    st.sampled_from([1.0, 65536.0]),
)  # fmt: skip
def test_output_norms_of_any_loss(seed: int, K: int, rest: list[int], scale: float) -> None:
    torch.manual_seed(seed)

    def losses(y: Tensor) -> Tensor:
        return (y.sin() + y.square()).reshape(K, -1).prod(1)

    x = torch.randn(K, *rest, dtype=torch.float64, requires_grad=True)
    output = x * 2
    output.retain_grad()
    draw = a_draw(K)
    (draw.mean(losses(output)) * scale).backward()
    expected = by_autograd(losses, output)
    assert_scores(scores.output_norms(draw, output, scale=scale), expected)


def test_output_norms_agree_with_the_closed_form() -> None:
    torch.manual_seed(0)
    layer, x, y = torch.nn.Linear(6, 4), torch.randn(5, 6), torch.randint(4, (5,))
    draw = a_draw(5)
    logits = layer(x)
    logits.retain_grad()
    draw.mean(F.cross_entropy(logits, y, reduction="none")).backward()
    found = scores.output_norms(draw, logits)
    torch.testing.assert_close(found, scores.cross_entropy(logits, y), rtol=1e-4, atol=1e-6)


def test_tiny_gradients_keep_their_norm() -> None:
    output = torch.zeros(2, 3, requires_grad=True)
    output.grad = torch.tensor([[3e-30, 4e-30, 0.0], [0.0, 0.0, 0.0]])
    found = scores.output_norms(weighted_draw(torch.full((2,), 2.0)), output)
    torch.testing.assert_close(found, torch.tensor([5e-30, 0.0]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1e-300, 1e-160, 1e-100, 1.0, 1e100, 1e160, 1e300])
@pytest.mark.parametrize("m", range(1, 10))
def test_norms_of_every_length_and_size(size: float, m: int) -> None:
    g = torch.arange(1.0, 3 * m + 1, dtype=torch.float64).view(3, m)
    found = scores.mse_loss(g * (size / 2), torch.zeros_like(g))
    torch.testing.assert_close(found / size, g.norm(dim=1), rtol=1e-12, atol=0)


def test_what_is_broken_is_not_hidden_in_a_norm() -> None:
    for bad in (torch.nan, torch.inf):
        for place in range(6):
            g = torch.ones(2, 6)
            g[0, place] = bad
            found = scores.mse_loss(g, torch.zeros_like(g))
            assert not found[0].isfinite()
            assert found[1] == pytest.approx(2 * 6**0.5)


# Refusals ----------------------------------------------------------------------------------------

z, y = torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)

REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "logits": (lambda: scores.cross_entropy(torch.zeros(3, 4, 5), y), r"\(K, C\).*output_norms"),
    "target": (lambda: scores.cross_entropy(z, y[:2]), r"shape \(3,\), got \(2,\)"),
    "probabilities": (lambda: scores.cross_entropy(z, z[:2]), r"\(3, 4\), got \(2, 4\)"),
    "one number for each": (lambda: scores.cross_entropy(z, z[:, 0]), r"\(3, 4\), got \(3,\)"),
    "class": (lambda: scores.cross_entropy(z, y + 4), "class 4, logits have 4 classes"),
    "negative class": (lambda: scores.cross_entropy(z, y - 1), "class -1"),
    "smoothing": (lambda: scores.cross_entropy(z, y, label_smoothing=2.0), "label_smoothing.*2.0"),
    "binary": (
        lambda: scores.binary_cross_entropy_with_logits(z, z[:, 0]), r"\(3, 4\) and \(3,\)",
    ),
    "binary dims": (
        lambda: scores.binary_cross_entropy_with_logits(z[None], z[None]), r"\(1, 3, 4\)",
    ),
    "mse": (lambda: scores.mse_loss(z, z[:, :1]), r"\(3, 4\) and \(3, 1\)"),
    "no grad": (
        lambda: scores.output_norms(a_draw(3), z.clone().requires_grad_() * 1),
        r"output.retain_grad\(\) before backward",
    ),
    "leaf without grad": (lambda: scores.output_norms(a_draw(3), z), "retain_grad"),
    "first dimension": (lambda: scores.output_norms(a_draw(2), z), r"\(3, 4\).*K = 2"),
    "scale": (lambda: scores.output_norms(a_draw(3), z, scale=0.0), "scale.*0.0"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals(kind: str) -> None:
    call, message = REFUSED[kind]
    with pytest.raises(ValueError, match=message):
        call()
