"""Token losses and their scores against torch's own losses and autograd."""

import pytest
import torch
import torch.nn.functional as F
from helpers import a_draw
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from adambs import scores
from adambs.scores import text

seeds = st.integers(0, 2**31)


def by_autograd(logits: Tensor, labels: Tensor, shift: bool, ignored: int, smoothing: float, constant: float):
    """The oracle: torch's token losses, added up by a loop, and the norm of each example's own gradient."""
    losses, norms, total = [], [], torch.zeros_like(logits)
    for k in range(len(logits)):
        z = logits[k].detach().requires_grad_()
        inputs, targets = (z[:-1], labels[k, 1:]) if shift else (z, labels[k])
        options = {"ignore_index": ignored, "label_smoothing": smoothing, "reduction": "sum"}
        loss = F.cross_entropy(inputs, targets, **options) / constant if len(targets) else z.sum() * 0
        (total[k],) = torch.autograd.grad(loss, z)
        losses.append(loss.detach())
        norms.append(total[k].norm())
    return torch.stack(losses), torch.stack(norms), total


@given(
    seeds, st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.booleans(),
    st.sampled_from([-100, 0]), st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([1, 30]), st.booleans(),
)  # fmt: skip
def test_losses_scores_and_gradients(seed, K, T, V, shift, ignored, smoothing, spread, strided):
    torch.manual_seed(seed)
    wider = torch.randn(K, T + strided, V, dtype=torch.float64) * spread
    labels = torch.randint(V, (K, T))
    labels[torch.rand(K, T) < 0.3] = ignored
    logits = wider[:, :T].detach().requires_grad_()  # with gaps between the examples, if it is wider
    options = {"shift": shift, "ignore_index": ignored, "label_smoothing": smoothing}
    losses, found = scores.causal_lm(logits, labels, constant=7.0, **options)
    expected, norms, gradient = by_autograd(logits, labels, shift, ignored, smoothing, 7.0)
    torch.testing.assert_close(losses.detach(), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found, norms, rtol=1e-9, atol=1e-12)
    assert not found.requires_grad
    weights = torch.rand(K, dtype=torch.float64)
    (got,) = torch.autograd.grad((losses * weights).sum(), logits)
    torch.testing.assert_close(got, gradient * weights.view(-1, 1, 1), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_blocks_change_nothing(monkeypatch, smoothing, strided):
    torch.manual_seed(0)
    logits = torch.randn(3, 9, 11)[:, : 8 if strided else 9].requires_grad_()
    labels = torch.randint(11, logits.shape[:2])
    whole = scores.causal_lm(logits, labels, label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad(whole.losses.sum(), logits)
    monkeypatch.setattr(text, "_LEAST", 1)
    monkeypatch.setattr(text, "_MOST", 2 * 11 * 4)  # two rows at a time
    parts = scores.causal_lm(logits, labels, label_smoothing=smoothing)
    assert len(list(text._pieces(logits))) > 10
    assert torch.equal(whole.losses, parts.losses)
    assert torch.equal(whole.scores, parts.scores)
    assert torch.equal(gradient, torch.autograd.grad(parts.losses.sum(), logits)[0])


def test_confident_tokens_keep_their_digits():
    """1 - p_y is far below float32's resolution around 1; neither loss nor score may become zero."""
    for gap in (20.0, 60.0):
        logits = torch.tensor([[[gap, 0.0, 0.0]]])
        losses, found = scores.causal_lm(logits, torch.tensor([[0]]), shift=False)
        rest = 2 * torch.exp(torch.tensor(-gap, dtype=torch.float64))
        torch.testing.assert_close(losses, torch.log1p(rest).float().view(1), rtol=1e-5, atol=0)
        q = rest / (1 + rest)
        torch.testing.assert_close(found, (q * 1.5**0.5).float().view(1), rtol=1e-5, atol=0)
    huge = torch.tensor([[[3e38, -3e38, 0.0]]], requires_grad=True)
    losses, found = scores.causal_lm(huge, torch.tensor([[1]]), shift=False)
    losses.sum().backward()
    assert found.item() == pytest.approx(2**0.5)
    assert huge.grad.isfinite().all()


def test_masked_vocabulary_and_unfinished_positions():
    """Logits of minus infinity have no part in it; what stands at an ignored position is never seen."""
    logits = torch.tensor([[[1.0, -torch.inf, 0.5], [torch.nan] * 3, [2.0, -torch.inf, -torch.inf]]])
    logits.requires_grad_()
    labels = torch.tensor([[2, -100, 0]])
    losses, found = scores.causal_lm(logits, labels, shift=False)
    two = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    expected = F.cross_entropy(two, torch.tensor([1]))
    assert losses.item() == pytest.approx(expected.item(), rel=1e-6)
    losses.sum().backward()
    assert found.item() == pytest.approx(logits.grad.norm().item(), rel=1e-6)
    assert not logits.grad[0, 1:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened(dtype):
    torch.manual_seed(0)
    logits = (5 * torch.randn(4, 6, 50)).to(dtype).requires_grad_()
    labels = torch.randint(50, (4, 6))
    losses, found = scores.causal_lm(logits, labels)
    wide = logits.detach().float().requires_grad_()
    expected = scores.causal_lm(wide, labels)
    assert losses.dtype == found.dtype == torch.float32
    torch.testing.assert_close(losses, expected.losses)
    torch.testing.assert_close(found, expected.scores)
    losses.sum().backward()
    expected.losses.sum().backward()
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad, wide.grad.to(dtype))


def peak_memory(run) -> int:
    """The most bytes that ``run`` held at once beyond what was there before, by torch's own count."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = run()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    assert kept is not None
    return most


@pytest.mark.parametrize(
    ("dtype", "smoothing", "shape"),
    [
        (torch.float32, 0.1, (4, 32, 16000)),
        (torch.bfloat16, 0.0, (4, 33, 16000)),
        (torch.float32, 0.0, (8, 128, 1024)),
        (torch.bfloat16, 0.1, (16, 128, 1024)),
    ],
)
def test_it_takes_a_tenth_of_the_logits(dtype, smoothing, shape):
    torch.manual_seed(0)
    logits = torch.randn(shape).to(dtype).requires_grad_()
    size = logits.numel() * logits.element_size()
    assert size >= 2**22
    labels = torch.randint(shape[2], shape[:2])
    plain = peak_memory(lambda: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none"))
    assert plain > 0.9 * size  # the ruler measures
    found = []
    forward = peak_memory(
        lambda: found.append(scores.causal_lm(logits, labels, label_smoothing=smoothing)) or found
    )
    assert 0 < forward <= 0.1 * size
    backward = peak_memory(lambda: torch.autograd.grad(found[0].losses.sum(), logits))
    assert backward <= 1.1 * size  # the gradient of the logits, which must be, and a tenth


def test_packed_documents_are_scored_each_by_itself():
    """Rows of several documents give what the documents give alone."""
    torch.manual_seed(0)
    lengths, V = [3, 5, 4, 1, 6], 7
    rows = [[0, 1], [2, 3, 4]]  # which documents share a row of 12
    alone = [torch.randn(1, n, V, dtype=torch.float64) for n in lengths]
    words = [torch.randint(V, (1, n)) for n in lengths]
    words[1][0, 2] = -100
    logits = torch.zeros(2, 12, V, dtype=torch.float64)
    labels, documents = torch.zeros(2, 12, dtype=torch.long), torch.full((2, 12), -1)
    for r, row in enumerate(rows):
        start = 0
        for d in row:
            place = slice(start, start + lengths[d])
            logits[r, place], labels[r, place], documents[r, place] = alone[d], words[d], d
            start += lengths[d]
    logits.requires_grad_()
    losses, found = scores.causal_lm(logits, labels, documents=documents, count=5, constant=2.0)
    for d in range(5):
        expected = scores.causal_lm(alone[d], words[d], constant=2.0)
        torch.testing.assert_close(losses[d : d + 1], expected.losses)
        torch.testing.assert_close(found[d : d + 1], expected.scores)
    (gradient,) = torch.autograd.grad(losses[1], logits)
    assert gradient.norm().item() == pytest.approx(found[1].item())
    assert not gradient[documents != 1].any()


def test_documents_from_position_ids():
    """As docs/text.md has it: the positions of one long row begin anew with each document."""
    torch.manual_seed(0)
    positions = torch.tensor([[0, 1, 2, 0, 0, 1]])
    documents = (positions == 0).cumsum(1) - 1
    logits, labels = torch.randn(1, 6, 5), torch.randint(5, (1, 6))
    found = scores.causal_lm(logits, labels, documents=documents, count=3)
    for d, rows in enumerate((slice(0, 3), slice(3, 4), slice(4, 6))):
        expected = scores.causal_lm(logits[:, rows], labels[:, rows])
        torch.testing.assert_close(found.losses[d], expected.losses[0])
        torch.testing.assert_close(found.scores[d], expected.scores[0])


def test_output_norms_at_the_last_hidden_state():
    """For losses that never form logits: the gradient that training leaves at the hidden state."""
    torch.manual_seed(0)
    head, draw = nn.Linear(5, 9).double(), a_draw(4)
    hidden = torch.randn(4, 6, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(9, (4, 6))
    losses, _ = scores.causal_lm(head(hidden), labels)
    draw.mean(losses).backward()
    found = scores.output_norms(draw, hidden)
    for k in range(4):
        one = hidden[k : k + 1].detach().requires_grad_()
        loss, _ = scores.causal_lm(head(one), labels[k : k + 1])
        (gradient,) = torch.autograd.grad(loss.sum(), one)
        assert found[k].item() == pytest.approx(gradient.norm().item(), rel=1e-9)


BAD = [
    (lambda z, y: (z[0], y), "logits must have shape"),
    (lambda z, y: (z, y[:, :-1]), "labels .K, T., not"),
    (lambda z, y: (z, y.float()), "labels must be token ids"),
    (lambda z, y: (z, y + 5), "target holds class"),
]


@pytest.mark.parametrize(("make", "words"), BAD)
def test_bad_tensors(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        scores.causal_lm(*make(torch.randn(2, 3, 5), torch.ones(2, 3, dtype=torch.long)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"constant": 0.0}, "constant must be positive, not 0"),
        ({"label_smoothing": 1.5}, "label_smoothing must be in"),
        ({"count": 2}, "documents and count belong together"),
        ({"documents": torch.zeros(2, 2, dtype=torch.long), "count": 1}, "documents must have the labels'"),
        ({"documents": torch.full((2, 3), 4), "count": 2}, "documents holds 4, and count is 2"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        scores.causal_lm(torch.randn(2, 3, 5), torch.ones(2, 3, dtype=torch.long), **options)
