"""Per-example gradients of one parameter, held in the form in which their norm is cheapest.

A layer's use of a parameter θ gives every example k a gradient g_k, shaped as θ. Three forms:

    Dense           g_k itself
    OuterProducts   g_k = Σ_t left_kt ⊗ right_kt        matrices: Linear, convolutions, recurrent weights
    TableRows       row index_kt of g_k gets right_kt   lookup tables: Embedding

`squared_norms` returns ‖Σ_uses g_k‖² for all k: a parameter that is used more than once (tied weights, a
module called twice) has its gradients added before the norm is taken, as they must be.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Floats that one block of examples may touch in `_outer`: 4 MiB, so that it stays in the cache.
BLOCK = 1 << 20


@dataclass(frozen=True)
class Dense:
    """g_k = value[k]."""

    value: Tensor  # (K, ...)


@dataclass(frozen=True)
class OuterProducts:
    """Block c of g_k is Σ_t left[k, c, :, t] ⊗ right[k, c, :, t], a matrix of o rows, i columns.

    Trailing dimensions of `right` may be split ((i1, i2, ..., t1, t2, ...), a view of sliding
    windows): they are only flattened, and thereby copied, a block of examples at a time.
    """

    left: Tensor  # (K, c, o, T)
    right: Tensor  # (K, c, i, T)


@dataclass(frozen=True)
class TableRows:
    """Row index[k, t] of g_k gets right[k, t]; the other rows are zero."""

    index: Tensor  # (K, T)
    right: Tensor  # (K, T, i)
    rows: int


Gradients = Dense | OuterProducts | TableRows


def examples(grads: Gradients) -> int:
    """Return K."""
    return len(grads.value if isinstance(grads, Dense) else grads.right)


def squared_norms(uses: Sequence[Gradients]) -> Tensor:
    """Return the (K,) squared norms of the sum of one parameter's gradients over its uses."""
    if len(uses) > 1 and any(isinstance(p, Dense) for p in uses):
        return _square(sum((_materialise(p) for p in uses[1:]), _materialise(uses[0])))
    # Sums of outer products, and of rows, are longer ones: join them along t.
    outer = _join([p for p in uses if isinstance(p, OuterProducts)])
    rows = _join_rows([p for p in uses if isinstance(p, TableRows)])
    if outer and rows:
        total = _outer(outer) + _rows(rows) + 2 * _inner(outer, rows)
        return total.clamp_min(0)  # rounding, where the two uses cancel
    if outer:
        return _outer(outer)
    if rows:
        return _rows(rows)
    [dense] = uses
    return _square(_materialise(dense))


def _square(value: Tensor) -> Tensor:
    return value.reshape(len(value), -1).square().sum(1)


def _outer(grads: OuterProducts) -> Tensor:
    """Squared norms by the cheapest of three ways.

        T = 1   ‖l ⊗ r‖² = ‖l‖² ‖r‖²
        Gram    ‖Σ_t l_t ⊗ r_t‖² = Σ_ts (l_t·l_s)(r_t·r_s)     T² (o + i) multiplications
        matrix  form Σ_t l_t ⊗ r_t, sum its squares             T o i

    Gram where T (o + i) <= o i.
    """
    left, right = grads.left, grads.right
    K, c, o, T = left.shape
    i = right[0, 0].numel() // max(T, 1) if K else 0
    if T == 1:
        return (left.square().sum((2, 3)) * right.reshape(K, c, i).square().sum(2)).sum(1)
    way = _by_gram if T * (o + i) <= o * i else _by_matrix
    size = max(1, BLOCK // max(1, c * (T * (o + i) + min(T * T, o * i))))
    blocks = zip(torch.split(left, size), torch.split(right, size), strict=True)
    return torch.cat([way(a, b.reshape(len(b), c, i, T)) for a, b in blocks])


def _by_gram(left: Tensor, right: Tensor) -> Tensor:
    return ((left.mT @ left) * (right.mT @ right)).sum((1, 2, 3)).clamp_min(0)


def _by_matrix(left: Tensor, right: Tensor) -> Tensor:
    return _square(left @ right.mT)


def _rows(grads: TableRows) -> Tensor:
    """Add up what goes to the same row of the same example, then square: O(K T (i + log T)), whatever the
    number of rows.

    Example k has T slots, one for each row that it may use. Its sorted indices number them: a slot begins
    where an index differs from the one before. Unused slots stay zero; how many there are, which
    `torch.unique` would have to tell the host, is never asked.
    """
    K, T, i = grads.right.shape
    if T <= 1:  # nothing to add up
        return grads.right.square().sum((1, 2))
    ordered, order = grads.index.sort(1)
    begins = torch.zeros_like(ordered)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    slots = torch.arange(0, K * T, T, device=begins.device).unsqueeze(1) + begins.cumsum(1)
    slot = torch.empty_like(order).scatter_(1, order, slots)
    sums = grads.right.new_zeros(K * T, i).index_add_(0, slot.reshape(-1), grads.right.reshape(K * T, i))
    return sums.square().reshape(K, T * i).sum(1)


def _inner(outer: OuterProducts, rows: TableRows) -> Tensor:
    """Inner products of the two gradients: row index_t of Σ_s l_s ⊗ r_s is Σ_s l_s[index_t] r_s, so
    Σ_ts l_s[index_t] (r_s · right_t)."""
    left = outer.left.squeeze(1).mT  # (K, S, rows)
    picked = left.gather(2, rows.index.unsqueeze(1).expand(-1, left.shape[1], -1))
    return (picked * (outer.right.squeeze(1).mT @ rows.right.mT)).sum((1, 2))


def _join(uses: Sequence[OuterProducts]) -> OuterProducts | None:
    if len(uses) < 2:
        return uses[0] if uses else None
    left = torch.cat([p.left for p in uses], 3)
    right = torch.cat([_flat(p) for p in uses], 3)
    return OuterProducts(left, right)


def _flat(grads: OuterProducts) -> Tensor:
    K, c, _, T = grads.left.shape
    return grads.right.reshape(K, c, grads.right[0, 0].numel() // T, T)


def _join_rows(uses: Sequence[TableRows]) -> TableRows | None:
    if len(uses) < 2:
        return uses[0] if uses else None
    index = torch.cat([p.index for p in uses], 1)
    return TableRows(index, torch.cat([p.right for p in uses], 1), uses[0].rows)


def _materialise(grads: Gradients) -> Tensor:
    """Return (K, numel): every g_k, flat."""
    if isinstance(grads, Dense):
        return grads.value.reshape(len(grads.value), -1)
    if isinstance(grads, OuterProducts):
        return (grads.left @ _flat(grads).mT).flatten(1)
    K, T, i = grads.right.shape
    value = grads.right.new_zeros(K, grads.rows, i)
    return value.scatter_add_(1, grads.index.unsqueeze(2).expand(K, T, i), grads.right).flatten(1)
