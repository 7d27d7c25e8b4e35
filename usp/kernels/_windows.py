"""What FlashAttention's kernels have in common, in torch and in the packages.

They count a window (left, right) from the diagonal that ends in the bottom right corner, return lse as (B, H, Q), sum
dk and dv over the query heads of a kv head, want one head_dim for q, k and v, and are given no linear biases.
"""

from abc import abstractmethod
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from usp.kernels.base import Kernel, Result, Scores
from usp.mask import Band
from usp.merge import accumulation_dtype

Window = tuple[int | None, int | None]


class WindowKernel(Kernel):
    """A kernel whose bands are windows from the bottom right corner."""

    @abstractmethod
    def window_forward(self, q: Tensor, k: Tensor, v: Tensor, window: Window, scores: Scores) -> tuple[Tensor, Tensor]:
        """Output (B, Q, H, D) and lse (B, H, Q); q, k and v have one head_dim, a multiple of 8."""

    @abstractmethod
    def window_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, window: Window, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv; the lse of the result is (B, H, Q) and contiguous."""

    @override
    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scores: Scores) -> tuple[Tensor, Tensor]:
        rows = _parts(q, k, band)
        if len(rows) > 1:
            parts = [self.forward(q[:, r], k, v, band.shift(r.start), scores) for r in rows]
            return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)
        v_head_dim = v.shape[-1]
        q, k, v = same_head_dim(q, k, v, multiple=8)
        out, lse = self.window_forward(q, k, v, _window(q, k, band), scores)
        return out[..., :v_head_dim], lse.transpose(1, 2)

    @override
    def tile_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, band: Band, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        (out, lse), rows = result, _parts(q, k, band)
        if len(rows) > 1:
            cut = [((dout[:, r], q[:, r], k, v, (out[:, r], lse[:, r])), band.shift(r.start)) for r in rows]
            dq, *dkv = zip(*(self.backward(*part, part_band, scores) for part, part_band in cut), strict=True)
            dk, dv = (torch.stack(share).sum(0, dtype=accumulation_dtype(q.dtype)) for share in dkv)
            return torch.cat(dq, 1), dk, dv
        head_dim, v_head_dim = q.shape[-1], v.shape[-1]
        dout, q, k, v, out = same_head_dim(dout, q, k, v, out, multiple=8)
        result = out, lse.transpose(1, 2).contiguous()
        dq, dk, dv = self.window_backward(dout, q, k, v, result, _window(q, k, band), scores)
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :v_head_dim]


def same_head_dim(*tensors: Tensor, multiple: int = 1) -> list[Tensor]:
    """Zero-pads to the largest head_dim, rounded up: zeros add nothing to a score, and come out as columns of zeros."""
    wanted = -(-max(t.shape[-1] for t in tensors) // multiple) * multiple
    return [t if t.shape[-1] == wanted else F.pad(t, (0, wanted - t.shape[-1])) for t in tensors]


def _window(q: Tensor, k: Tensor, band: Band) -> Window:
    """The band as a window. Both sides are >= 0 where there is a bound: the band is trimmed."""
    shift = k.shape[1] - q.shape[1]
    return None if band.lo is None else shift - band.lo, None if band.hi is None else band.hi - shift


def _parts(q: Tensor, k: Tensor, band: Band) -> list[slice]:
    """The rows, cut where it must be so that FlashAttention-2 keeps the window (its issue 895, open in 2.8.3).

    It takes a right window of `columns` or more for none, and none for `columns`: wrong where rows outnumber columns by
    enough. Cut where the upper bound ceases to bind and where the lower one begins to, every part is full or has no
    more rows than columns.
    """
    rows, columns = q.shape[1], k.shape[1]
    right = rows - 1 if band.hi is None else band.hi + rows - columns
    if right < columns:
        return [slice(0, rows)]
    upper = 0 if band.hi is None else columns - 1 - band.hi
    lower = rows if band.lo is None else 1 - band.lo
    return [slice(a, b) for a, b in pairwise(sorted({0, upper, lower, rows}))]
