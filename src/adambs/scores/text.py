"""Token losses of language models, and their scores, from one pass over the logits, a few rows at a time.

With z the logits of one position, y its label, and over all c ≠ y:  A = logsumexp(z_c), e_c = exp(z_c - max),

    1 - p_y = q = σ(A - z_y)                             does not cancel where p_y is nearly 1
    loss    = log(1 + exp(A - z_y))
    ‖∂loss/∂z‖ = q sqrt(1 + (‖e‖ / Σ e)²)                because g_c = q e_c / Σ e and g_y = -q

The logits are read in place: what is formed beside them is one block of rows in float32.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import on_cpu
from .output import _norms
from .weighting import wide

# A block takes at most this part of the logits' bytes, and at most so many; but never less than the last.
_PART, _MOST, _LEAST = 16, 1 << 25, 1 << 18


class TokenLosses(NamedTuple):
    """What `causal_lm` returns, one entry for each example, or document."""

    losses: Tensor
    """(K,) sums of token losses over the constant, for `draw.mean(losses, scores).backward()`."""
    scores: Tensor
    """(K,) norms of their gradients at the logits, detached, for `sampler.update(draw, scores)`."""


def causal_lm(
    logits: Tensor,
    labels: Tensor,
    *,
    constant: float = 1.0,
    shift: bool = True,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    documents: Tensor | None = None,
    count: int | None = None,
) -> TokenLosses:
    """Return each example's sum of token losses over a constant, and ‖∂loss_k/∂logits_k‖.

    ::

        losses, scores = adambs.scores.causal_lm(model(tokens), labels, constant=256)
        draw.mean(losses, scores).backward()
        sampler.update(draw, scores)

    A mean over the positions of a padded batch would depend on the longest row that happens to be in it, and
    a mean over each example's own tokens would count the tokens of short examples more. So it is a sum, over
    a number that is the same throughout the run. Memory beside the logits (and, in the backward pass, beside
    their gradient): a sixteenth of them, or 256 KiB or one position if that is more, and under 60 bytes a
    position. That is less than a tenth for logits of 4 MiB and more and vocabularies of a thousand and more.

    Args:
        logits: (K, T, V), in any precision; computed with in float32 or wider.
        labels: (K, T) token ids.
        constant: What each sum is divided by: for instance the block size, or the mean number of tokens.
        shift: Whether position t predicts label t + 1, as where labels are the input itself. If not,
            position t predicts label t.
        ignore_index: Labels of this value have loss and score 0: padding, prompts.
        label_smoothing: In [0, 1]: the share of the target that is spread evenly over the vocabulary.
        documents: (K, T), for rows in which several documents are packed: which document, 0 to count - 1,
            each position belongs to; negative for none. The result has one entry a document, in the order of
            the draw. No document's first token is predicted from another document.
        count: How many documents.
    """
    _check(logits, labels, constant, label_smoothing, documents, count)
    if shift:
        ignored = labels.new_full((len(labels), 1), ignore_index)
        if documents is not None:
            begins = documents[:, 1:] != documents[:, :-1]
            labels = torch.cat([labels[:, 1:].masked_fill(begins, ignore_index), ignored], 1)
            documents = torch.cat([documents[:, 1:], documents[:, -1:]], 1)
        else:
            labels = torch.cat([labels[:, 1:], ignored], 1)
    if documents is not None:
        labels = labels.masked_fill(documents < 0, ignore_index)
    known = on_cpu.readable(logits, labels)
    if known:
        on_cpu.check_classes(labels, ignore_index, logits.shape[2])
    token_losses, norms = _TokenLosses.apply(logits, labels, ignore_index, label_smoothing)  # type: ignore[no-untyped-call]
    if not known:  # a NaN is refused when it reaches the sampler; looking now would be a wait
        wrong = (labels != ignore_index) & ((labels < 0) | (labels >= logits.shape[2]))
        norms = norms.masked_fill(wrong, torch.nan)
    if documents is None:
        losses, total = token_losses.sum(1), _norms(norms)
    else:
        assert count is not None
        where = documents.clamp(0, count - 1).reshape(-1)
        losses = token_losses.new_zeros(count).index_add(0, where, token_losses.reshape(-1))
        # in units of the largest, so that squares do not underflow
        unit = norms.amax().clamp_min(torch.finfo(norms.dtype).tiny) if norms.numel() else norms.sum()
        squares = (norms / unit).square().reshape(-1)
        total = unit * norms.new_zeros(count).index_add_(0, where, squares).sqrt()
    return TokenLosses(losses / constant, total / constant)


def _check(
    logits: Tensor,
    labels: Tensor,
    constant: float,
    smoothing: float,
    documents: Tensor | None,
    count: int | None,
) -> None:
    if logits.dim() != 3 or labels.shape != logits.shape[:2]:
        raise ValueError(
            f"logits must have shape (K, T, V) and labels (K, T), not {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}; for losses that never form logits take output_norms on the last hidden "
            "state"
        )
    if labels.is_floating_point():
        raise TypeError(f"labels must be token ids (whole numbers), not {labels.dtype}")
    if not constant > 0:
        raise ValueError(f"constant must be positive, not {constant}: for instance the block size")
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {smoothing}")
    if (documents is None) != (count is None):
        raise TypeError("documents and count belong together: which document, and of how many")
    if documents is not None and count is not None:
        if documents.shape != labels.shape:
            raise ValueError(
                f"documents must have the labels' shape {tuple(labels.shape)}, not {tuple(documents.shape)}"
            )
        if on_cpu.readable(documents) and documents.numel() and int(documents.max()) >= count:
            raise ValueError(f"documents holds {int(documents.max())}, and count is {count}")


class _TokenLosses(torch.autograd.Function):
    """(K, T) token losses and gradient norms; the gradient is computed anew from the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignored: int, smoothing: float) -> Any:
        K, T, V = logits.shape
        kept = (labels != ignored).reshape(-1)
        index = labels.long().clamp(0, V - 1).reshape(-1, 1)
        vectors = wide(logits.new_empty(0)).new_empty(4, K * T)
        losses, norms, log_sum, rest = vectors
        tiny = torch.finfo(losses.dtype).tiny
        block = losses.new_empty(min(_rows_at_once(logits), K * T), V)  # one, for all pieces
        for rows, piece in _pieces(logits.detach()):
            y = index[rows]
            z = block[: len(piece)].copy_(piece)
            of_y = z.gather(1, y)
            mean = z.mean(1) if smoothing else None
            z.scatter_(1, y, -torch.inf)
            top = z.amax(1, keepdim=True).clamp_min(torch.finfo(z.dtype).min)  # all but y may be masked
            total = z.sub_(top).exp_().sum(1)
            others = top.squeeze(1) + total.log()
            margin = others - of_y.squeeze(1)
            q = margin.sigmoid()
            loss = torch.logaddexp(margin, torch.zeros_like(margin))
            log_sum[rows] = torch.logaddexp(others, of_y.squeeze(1))
            if mean is not None:
                loss = (1 - smoothing) * loss + smoothing * (log_sum[rows] - mean)
                z.mul_((q / total.clamp_min(tiny)).unsqueeze(1)).sub_(smoothing / V)
                q = q - smoothing * (V - 1) / V
                z.scatter_(1, y, q.unsqueeze(1))
                norms[rows] = torch.linalg.vector_norm(z, dim=1)
            else:
                ratio = torch.linalg.vector_norm(z, dim=1) / total.clamp_min(tiny)
                norms[rows] = q * (1 + ratio.square()).sqrt()
            losses[rows], rest[rows] = loss, q
        losses.masked_fill_(~kept, 0.0)
        norms.masked_fill_(~kept, 0.0)
        ctx.save_for_backward(logits, index, kept, log_sum, rest)
        ctx.smoothing = smoothing
        found = losses.reshape(K, T), norms.reshape(K, T)
        ctx.mark_non_differentiable(found[1])
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        logits, index, kept, log_sum, rest = ctx.saved_tensors
        weight = (grad.reshape(-1) * kept).to(log_sum).unsqueeze(1)
        found = torch.empty_like(logits, memory_format=torch.contiguous_format)
        flat = found.view(-1, logits.shape[2])
        narrow = found.dtype != log_sum.dtype
        block = log_sum.new_empty(min(_rows_at_once(logits), len(flat)) if narrow else 0, logits.shape[2])
        for rows, piece in _pieces(logits):
            g = block[: len(piece)] if narrow else flat[rows]
            g.copy_(piece).sub_(log_sum[rows].unsqueeze(1)).exp_()
            if ctx.smoothing:
                g.sub_(ctx.smoothing / logits.shape[2])
            g.scatter_(1, index[rows], -rest[rows].unsqueeze(1)).mul_(weight[rows])
            if narrow:
                flat[rows].copy_(g)
        flat.masked_fill_(~kept.unsqueeze(1), 0.0)  # also where logits of ignored positions are not finite
        return found, None, None, None


def _pieces(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows, (rows, V), with their place among all K T rows. Views, whatever the strides."""
    K, T, V = logits.shape
    size, whole = _rows_at_once(logits), logits.is_contiguous()
    for k in range(1 if whole else K):
        rows = logits.view(-1, V) if whole else logits[k]
        for start in range(0, len(rows), size):
            piece = rows[start : start + size]
            yield slice(k * T + start, k * T + start + len(piece)), piece


def _rows_at_once(logits: Tensor) -> int:
    most = min(max(logits.numel() * logits.element_size() // _PART, _LEAST), _MOST)
    return max(1, most // (max(logits.shape[2], 1) * max(4, logits.element_size())))
