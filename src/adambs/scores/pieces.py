"""Per-example gradients of one parameter, held in the form in which their norm is cheapest.

A layer's use of a parameter θ gives every example k a gradient g_k, shaped as θ. Three forms:

    Dense   g_k itself
    Outer   g_k = Σ_t left_kt ⊗ right_kt      matrices: Linear, convolutions, recurrent weights
    Rows    row index_kt of g_k gets right_kt  lookup tables: Embedding

`squares` returns ‖Σ_uses g_k‖² for all k: a parameter that is used more than once (tied weights, a
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
class Outer:
    """Block c of g_k is Σ_t left[k, c, :, t] ⊗ right[k, c, :, t], a matrix of o rows, i columns.

    Trailing dimensions of `right` may be split ((i1, i2, ..., t1, t2, ...), a view of sliding
    windows): they are only flattened, and thereby copied, a block of examples at a time.
    """

    left: Tensor  # (K, c, o, T)
    right: Tensor  # (K, c, i, T)


@dataclass(frozen=True)
class Rows:
    """Row index[k, t] of g_k gets right[k, t]; the other rows are zero."""

    index: Tensor  # (K, T)
    right: Tensor  # (K, T, i)
    rows: int


Piece = Dense | Outer | Rows


def examples(piece: Piece) -> int:
    """Return K."""
    return len(piece.value if isinstance(piece, Dense) else piece.right)


def squares(pieces: Sequence[Piece]) -> Tensor:
    """Return the (K,) squared norms of the sum of one parameter's pieces."""
    if len(pieces) > 1 and any(isinstance(p, Dense) for p in pieces):
        return _square(sum((_materialise(p) for p in pieces[1:]), _materialise(pieces[0])))
    # Sums of outer products, and of rows, are longer ones: join them along t.
    outer = _join([p for p in pieces if isinstance(p, Outer)])
    rows = _join_rows([p for p in pieces if isinstance(p, Rows)])
    if outer and rows:
        total = _outer(outer) + _rows(rows) + 2 * _inner(outer, rows)
        return total.clamp_min(0)  # rounding, where the two uses cancel
    if outer:
        return _outer(outer)
    if rows:
        return _rows(rows)
    [dense] = pieces
    return _square(_materialise(dense))


def _square(value: Tensor) -> Tensor:
    return value.reshape(len(value), -1).square().sum(1)


def _outer(piece: Outer) -> Tensor:
    """Squared norms by the cheapest of three ways.

        T = 1   ‖l ⊗ r‖² = ‖l‖² ‖r‖²
        Gram    ‖Σ_t l_t ⊗ r_t‖² = Σ_ts (l_t·l_s)(r_t·r_s)     T² (o + i) multiplications
        matrix  form Σ_t l_t ⊗ r_t, sum its squares             T o i

    Gram where T (o + i) <= o i.
    """
    left, right = piece.left, piece.right
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


def _rows(piece: Rows) -> Tensor:
    """Add up what goes to the same row of the same example, then square: O(K T i), whatever the
    number of rows."""
    K, T, i = piece.right.shape
    example = torch.arange(K, device=piece.index.device).unsqueeze(1)
    key, slot = torch.unique(example * piece.rows + piece.index, return_inverse=True)
    sums = piece.right.new_zeros(len(key), i).index_add_(0, slot.reshape(-1), piece.right.reshape(K * T, i))
    return sums.new_zeros(K).index_add_(0, key // piece.rows, sums.square().sum(1))


def _inner(outer: Outer, rows: Rows) -> Tensor:
    """Inner products of the two gradients: row index_t of Σ_s l_s ⊗ r_s is Σ_s l_s[index_t] r_s, so
    Σ_ts l_s[index_t] (r_s · right_t)."""
    left = outer.left.squeeze(1).mT  # (K, S, rows)
    picked = left.gather(2, rows.index.unsqueeze(1).expand(-1, left.shape[1], -1))
    return (picked * (outer.right.squeeze(1).mT @ rows.right.mT)).sum((1, 2))


def _join(pieces: Sequence[Outer]) -> Outer | None:
    if len(pieces) < 2:
        return pieces[0] if pieces else None
    left = torch.cat([p.left for p in pieces], 3)
    right = torch.cat([_flat(p) for p in pieces], 3)
    return Outer(left, right)


def _flat(piece: Outer) -> Tensor:
    K, c, _, T = piece.left.shape
    return piece.right.reshape(K, c, piece.right[0, 0].numel() // T, T)


def _join_rows(pieces: Sequence[Rows]) -> Rows | None:
    if len(pieces) < 2:
        return pieces[0] if pieces else None
    index = torch.cat([p.index for p in pieces], 1)
    return Rows(index, torch.cat([p.right for p in pieces], 1), pieces[0].rows)


def _materialise(piece: Piece) -> Tensor:
    """Return (K, numel): every g_k, flat."""
    if isinstance(piece, Dense):
        return piece.value.reshape(len(piece.value), -1)
    if isinstance(piece, Outer):
        return (piece.left @ _flat(piece).mT).flatten(1)
    K, T, i = piece.right.shape
    value = piece.right.new_zeros(K, piece.rows, i)
    return value.scatter_add_(1, piece.index.unsqueeze(2).expand(K, T, i), piece.right).flatten(1)
