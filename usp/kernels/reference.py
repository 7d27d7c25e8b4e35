"""The definition of attention, in blocks: exact, any dtype and device, slow. The oracle beside the fast kernels.

Memory is O(block x block) beyond the inputs and outputs. Half precision is computed in float32.
"""

import torch
from torch import Tensor
from typing_extensions import override

from usp.kernels.base import Call, Kernel, Result, Scores, hidden_by
from usp.mask import Band
from usp.merge import accumulation_dtype, merge_
from usp.tiles import Tile, blocks


class Reference(Kernel):
    """Scores by einsum, softmax by the online rule, one (block, block) square at a time.

    Args:
        block: rows and columns computed at once; 0 for all (the dense form).
    """

    def __init__(self, block: int = 512) -> None:
        self.block = block

    @override
    def refuses(self, call: Call) -> str | None:
        """Takes every device, and every floating dtype of two bytes or more: torch has no arithmetic for float8."""
        if not call.dtype.is_floating_point:
            return f"attention needs a floating dtype, not {call.dtype}"
        return f"torch has no arithmetic for {call.dtype}" if call.dtype.itemsize < 2 else None

    @override
    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scores: Scores) -> tuple[Tensor, Tensor]:
        q, k, v = (t.to(accumulation_dtype(q.dtype)) for t in (q, k, v))
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        lse = q.new_full(q.shape[:-1], -torch.inf)
        for tile in self._blocks(q, k, band):
            _, logits = _logits(q[:, tile.q], k[:, tile.k], tile.band, scores.cut(tile.q, tile.k))
            block_lse = logits.logsumexp(-1)
            weights = torch.exp(logits - block_lse.unsqueeze(-1))
            block_out = torch.einsum("bgrqk,bkge->bqgre", weights, v[:, tile.k]).flatten(2, 3)
            merge_(out[:, tile.q], lse[:, tile.q], block_out, _rows_first(block_lse))
        return out, lse

    @override
    def tile_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, band: Band, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = result
        dout, q, k, v, out = (t.to(accumulation_dtype(q.dtype)) for t in (dout, q, k, v, out))
        dq, dk, dv = (t.new_zeros(t.shape) for t in (q, k, v))
        delta = (dout * out).sum(-1)  # sum_k p dp, FlashAttention eq. 4
        for tile in self._blocks(q, k, band):
            rows, columns = tile.q, tile.k
            kv_heads = k.shape[2]
            capped, logits = _logits(q[:, rows], k[:, columns], tile.band, scores.cut(rows, columns))
            weights = torch.exp(logits - _heads_first(lse[:, rows], kv_heads).unsqueeze(-1))
            douts = dout[:, rows].unflatten(2, (kv_heads, -1))
            dweights = torch.einsum("bqgre,bkge->bgrqk", douts, v[:, columns])
            dscores = weights * (dweights - _heads_first(delta[:, rows], kv_heads).unsqueeze(-1)) * scores.scale
            if scores.softcap:
                dscores *= 1 - (capped / scores.softcap).square()
            dq[:, rows] += torch.einsum("bgrqk,bkgd->bqgrd", dscores, k[:, columns]).flatten(2, 3)
            dk[:, columns] += torch.einsum("bgrqk,bqgrd->bkgd", dscores, q[:, rows].unflatten(2, (kv_heads, -1)))
            dv[:, columns] += torch.einsum("bgrqk,bqgre->bkge", weights, douts)
        return dq, dk, dv

    def _blocks(self, q: Tensor, k: Tensor, band: Band):
        rows, columns = q.shape[1], k.shape[1]
        whole = Tile(slice(0, rows), slice(0, columns), band)
        return blocks(whole, self.block or rows, self.block or columns)


def _logits(q: Tensor, k: Tensor, band: Band, scores: Scores) -> tuple[Tensor, Tensor]:
    """(B, G, H/G, Q, K) each: the scores before any bias, and as the softmax takes them."""
    capped = torch.einsum("bqgrd,bkgd->bgrqk", q.unflatten(2, (k.shape[2], -1)), k) * scores.scale
    if scores.softcap:
        capped = torch.tanh(capped / scores.softcap) * scores.softcap
    biased = capped if scores.alibi is None else capped + scores.alibi.bias().unflatten(0, (k.shape[2], -1))
    return capped, biased.masked_fill(hidden_by(band, q.shape[1], k.shape[1], q.device), -torch.inf)


def _rows_first(x: Tensor) -> Tensor:
    """(B, G, H/G, Q) -> (B, Q, H)."""
    return x.flatten(1, 2).transpose(1, 2)


def _heads_first(x: Tensor, kv_heads: int) -> Tensor:
    """(B, Q, H) -> (B, G, H/G, Q)."""
    return x.transpose(1, 2).unflatten(1, (kv_heads, -1))
