"""What a kernel is.

B batch, Q query rows, K key rows, H query heads, G kv heads (H a multiple of G), D head_dim of q and k, E head_dim of
v.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import starmap
from typing import NamedTuple

import torch
from torch import Tensor

from usp.mask import Band
from usp.merge import accumulation_dtype
from usp.tiles import Tile, trim

Result = tuple[Tensor, Tensor]
"""What attention returns: output and lse."""


@dataclass(frozen=True)
class Call:
    """What a kernel decides by whether it can take a call."""

    device: str
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    softcap: bool = False
    alibi: bool = False

    def __str__(self) -> str:
        changes = "".join(f", {name}" for name in ("softcap", "alibi") if getattr(self, name))
        return f"{self.dtype} on {self.device} with head_dim {self.head_dim} (v: {self.v_head_dim}){changes}"


@dataclass(frozen=True)
class Alibi:
    """Attention with linear biases: `-slope * |i - j|` is added to a score (Press et al. 2022).

    Attributes:
        slopes: (H,), one for each query head, in the dtype that scores are computed in.
        rows: (Q,) positions of the queries, in the same dtype.
        columns: (K,) positions of the keys.
    """

    slopes: Tensor
    rows: Tensor
    columns: Tensor

    def bias(self) -> Tensor:
        """(H, Q, K)."""
        distance = (self.rows.unsqueeze(-1) - self.columns).abs_()
        return self.slopes.neg().view(-1, 1, 1) * distance


@dataclass(frozen=True)
class Scores:
    """How scores come from products of queries and keys: `softcap(scale * q k) - slope * |i - j|`.

    Attributes:
        scale: factor on the products.
        softcap: c of `c tanh(x / c)` (Gemma 2, 2024), which keeps scores between -c and c; 0 for none.
        alibi: linear biases, if there are any.
    """

    scale: float
    softcap: float = 0.0
    alibi: Alibi | None = None

    def cut(self, rows: slice, columns: slice, heads: slice = slice(None)) -> "Scores":
        """The same for some rows, columns and query heads."""
        if self.alibi is None:
            return self
        alibi = Alibi(self.alibi.slopes[heads], self.alibi.rows[rows], self.alibi.columns[columns])
        return replace(self, alibi=alibi)


class Forward(NamedTuple):
    """One of the calls of `Kernel.forward_many`: the arguments of `Kernel.forward`."""

    q: Tensor
    k: Tensor
    v: Tensor
    band: Band
    scores: Scores


class Backward(NamedTuple):
    """One of the calls of `Kernel.backward_many`: the arguments of `Kernel.backward`."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    result: Result
    band: Band
    scores: Scores


class Kernel(ABC):
    """Attention of one tile, and its gradients.

    `forward` and `backward` hold every kernel to one convention: lse is (B, Q, H) in float32 (float64 for float64),
    natural log, -inf for a row that sees nothing, and such a row's output and gradients are 0. Subclasses compute
    `tile_forward` and `tile_backward`, which are only ever given a trimmed band: no empty side, no row or column
    without a visible pair, last dimensions of stride 1.
    """

    @abstractmethod
    def refuses(self, call: Call) -> str | None:
        """Why this kernel cannot take the call, in words, or None if it can."""

    def arrange(self, x: Tensor) -> Tensor:
        """(B, S, H, D) with the same values, in the memory order that this kernel reads fastest; `x` if it is."""
        return x

    @abstractmethod
    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scores: Scores) -> tuple[Tensor, Tensor]:
        """Output (B, Q, H, E) and lse (B, Q, H) of a trimmed tile."""

    @abstractmethod
    def tile_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, band: Band, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of a trimmed tile, given the output and lse of the whole rows."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scores: Scores) -> tuple[Tensor, Tensor]:
        """Attention of q (B, Q, H, D) to k (B, K, G, D) and v (B, K, G, E) under a band on their indices.

        Returns:
            Output (B, Q, H, E), in q's dtype or wider, and lse (B, Q, H).
        """
        tile = _visible(q, k, band)
        if tile and _whole(tile, q, k):
            return self.tile_forward(_dense(q), _dense(k), _dense(v), tile.band, scores)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        lse = q.new_full(q.shape[:-1], -torch.inf, dtype=accumulation_dtype(q.dtype))
        if tile:
            q, k, v = _dense(q[:, tile.q]), _dense(k[:, tile.k]), _dense(v[:, tile.k])
            cut = scores.cut(tile.q, tile.k)
            out[:, tile.q], lse[:, tile.q] = self.tile_forward(q, k, v, tile.band, cut)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, band: Band, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This tile's share of the gradients (FlashAttention, Dao et al. 2022, algorithm 4).

        Args:
            dout: gradient of the whole row's output (B, Q, H, E).
            q: queries (B, Q, H, D).
            k: keys (B, K, G, D).
            v: values (B, K, G, E).
            result: output (B, Q, H, E) and lse (B, Q, H) of the WHOLE rows, merged over all tiles: with them, the
                shares of all tiles add up to the exact gradients.
            band: which keys a query sees.
            scores: how scores come from q and k.

        Returns:
            dq, dk and dv, in q's dtype or wider.
        """
        out, lse = result[0], weightless(result[1])
        tile = _visible(q, k, band)
        if tile and _whole(tile, q, k):
            dout, q, k, v, out = map(_dense, (dout, q, k, v, out))
            return self.tile_backward(dout, q, k, v, (out, lse), tile.band, scores)
        dq, dk, dv = (t.new_zeros(t.shape) for t in (q, k, v))
        if tile:
            dout, q, out = (_dense(t[:, tile.q]) for t in (dout, q, out))
            k, v = (_dense(t[:, tile.k]) for t in (k, v))
            dq[:, tile.q], dk[:, tile.k], dv[:, tile.k] = self.tile_backward(
                dout, q, k, v, (out, lse[:, tile.q]), tile.band, scores.cut(tile.q, tile.k)
            )
        return dq, dk, dv

    def forward_many(self, blocks: Iterable[Forward]) -> Iterator[Result]:
        """`forward` of each block, in order, computed as it is asked for: what is not kept is not held.

        Kernels that can compute several blocks in one launch override it; what they hold is then theirs to bound.
        """
        return starmap(self.forward, blocks)

    def backward_many(self, blocks: Iterable[Backward]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """`backward` of each block, as `forward_many` is for `forward`."""
        return starmap(self.backward, blocks)


def weightless(lse: Tensor) -> Tensor:
    """+inf for -inf. A row that saw nothing has no weights: exp(score - inf) is 0, where exp(score + inf) is NaN."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def hidden_by(band: Band, rows: int, columns: int, device: torch.device) -> Tensor:
    """Boolean (rows, columns), true where the band hides the pair."""
    hidden = torch.zeros(rows, columns, dtype=torch.bool, device=device)
    if band.lo is not None:
        hidden |= torch.ones_like(hidden).tril_(band.lo - 1)
    if band.hi is not None:
        hidden |= torch.ones_like(hidden).triu_(band.hi + 1)
    return hidden


def _visible(q: Tensor, k: Tensor, band: Band) -> Tile | None:
    return trim(Tile(slice(0, q.shape[1]), slice(0, k.shape[1]), band))


def _whole(tile: Tile, q: Tensor, k: Tensor) -> bool:
    return (tile.q, tile.k) == (slice(0, q.shape[1]), slice(0, k.shape[1]))


def _dense(x: Tensor) -> Tensor:
    """Flash kernels read the last dimension as stride 1 without asking (torch's CPU op: silent garbage)."""
    return x if x.stride(-1) == 1 else x.contiguous()
