"""Attention from its definition, in blocks: exact, any floating dtype and device, every change of scores.

A block of scores is a product of matrices (FlashAttention, Dao et al. 2022, algorithms 1 and 4), in which the H/G query
heads of a kv head lie side by side as rows. Beyond inputs and outputs, memory is that of a few heads and of a few
blocks. Half precision is computed in float32.

N kv heads at once, M rows: Q queries by H/G heads.
"""

from collections.abc import Iterable, Iterator
from math import e, log2

import torch
from torch import Tensor
from typing_extensions import override

from usp.kernels.base import Call, Kernel, Result, Scores, hidden_by
from usp.mask import FULL, Band
from usp.merge import accumulation_dtype
from usp.tiles import Tile, blocks

Heads = tuple[int, slice]
"""A batch row, and kv heads of it."""

Block = tuple[Tile, slice, Scores]
"""Queries and keys, the rows of a matrix that the queries are, and how scores come."""


class Reference(Kernel):
    """Softmax by the online rule, a block of scores at a time.

    Args:
        block: rows and columns of scores at once; 0 for all (the dense form). What a core's cache holds is fastest.
    """

    def __init__(self, block: int = 384) -> None:
        self.block = block

    @override
    def refuses(self, call: Call) -> str | None:
        """Takes every device, and every floating dtype of two bytes or more: torch has no arithmetic for float8."""
        if not call.dtype.is_floating_point:
            return f"attention needs a floating dtype, not {call.dtype}"
        return f"torch has no arithmetic for {call.dtype}" if call.dtype.itemsize < 2 else None

    @override
    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scores: Scores) -> tuple[Tensor, Tensor]:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=accumulation_dtype(q.dtype))
        lse = out.new_empty(out.shape[:-1])
        given, results = _by_kv_head(k, q, k, v), _by_kv_head(k, out, lse)
        for heads, blocks_of_scores in self._parts(q, k, band, scores):
            qs, ks, vs = (_matrix(t[heads]) for t in given)
            qs = qs * _factor(scores)
            outs, totals = qs.new_zeros((*qs.shape[:-1], vs.shape[-1])), qs.new_zeros((*qs.shape[:-1], 1))
            largest = torch.full_like(totals, -torch.inf)
            for tile, rows, block_scores in blocks_of_scores:
                _, logits = _logits(qs[:, rows], ks[:, tile.k], tile, block_scores)
                before, now = largest[:, rows], torch.maximum(largest[:, rows], logits.amax(-1, keepdim=True))
                weights, fading = _exp_(logits.sub_(now)), torch.exp(before - now)
                outs[:, rows].mul_(fading).baddbmm_(weights, vs[:, tile.k])
                totals[:, rows].mul_(fading).add_(weights.sum(-1, keepdim=True))
                before.copy_(now)
            _put((outs.div_(totals), totals.log_().add_(largest)), results, heads)
        return out, lse

    @override
    def tile_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, band: Band, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (t.new_empty(t.shape, dtype=accumulation_dtype(t.dtype)) for t in (q, k, v))
        given, results = _by_kv_head(k, dout, q, k, v, *result), _by_kv_head(k, dq, dk, dv)
        for heads, blocks_of_scores in self._parts(q, k, band, scores):
            douts, qs, ks, vs, outs, lses = (_matrix(t[heads]) for t in given)
            qs = qs * _factor(scores)
            dqs, dks, dvs = grads = [torch.zeros_like(t) for t in (qs, ks, vs)]
            delta = (douts * outs).sum(-1, keepdim=True)  # sum_k p dp, FlashAttention eq. 4
            for tile, rows, block_scores in blocks_of_scores:
                tanh, logits = _logits(qs[:, rows], ks[:, tile.k], tile, block_scores)
                weights = _exp_(logits.sub_(lses[:, rows].unsqueeze(-1)))
                dvs[:, tile.k].baddbmm_(weights.mT, douts[:, rows])
                dlogits = torch.bmm(douts[:, rows], vs[:, tile.k].mT).sub_(delta[:, rows]).mul_(weights)
                if tanh is not None:
                    torch.ops.aten.tanh_backward.grad_input(dlogits, tanh, grad_input=dlogits)
                dqs[:, rows].baddbmm_(dlogits, ks[:, tile.k], alpha=scores.scale)
                dks[:, tile.k].baddbmm_(dlogits.mT, qs[:, rows], alpha=scores.softcap or 1.0)
            _put(grads, results, heads)
        return dq, dk, dv

    def _parts(self, q: Tensor, k: Tensor, band: Band, scores: Scores) -> Iterator[tuple[Heads, list[Block]]]:
        """What is computed at once: some kv heads, and their blocks.

        On a CPU as many heads as make one block of scores; elsewhere all, as launches cost more than a cache saves.
        """
        (batch, queries, heads, _), (_, keys, kv_heads, _) = q.shape, k.shape
        group = heads // kv_heads
        side = self.block or max(queries * group, keys)
        rows, columns = min(queries, max(1, side // group)), min(keys, side)
        at_once = max(1, side**2 // (rows * group * columns)) if q.device.type == "cpu" else kv_heads
        tiles = list(blocks(Tile(slice(0, queries), slice(0, keys), band), rows, columns))
        for row in range(batch):
            for start in range(0, kv_heads, at_once):
                stop = min(start + at_once, kv_heads)
                q_heads = slice(start * group, stop * group)
                yield (
                    (row, slice(start, stop)),
                    [(t, slice(t.q.start * group, t.q.stop * group), scores.cut(t.q, t.k, q_heads)) for t in tiles],
                )


def _factor(scores: Scores) -> float:
    """What q is multiplied by before the product with k."""
    return scores.scale / (scores.softcap or 1.0)


def _exp_(x: Tensor) -> Tensor:
    """exp, in place: torch's own exp2, as its exp may be MKL's, many times slower where a result is 0 or nearly so."""
    return x.mul_(log2(e)).exp2_()


def _logits(q: Tensor, k: Tensor, tile: Tile, scores: Scores) -> tuple[Tensor | None, Tensor]:
    """(N, M, K) each: the tanh under a softcap, and scores as the softmax takes them."""
    tanh, logits = None, torch.bmm(q, k.mT)
    if scores.softcap:
        tanh = logits.tanh_()
        logits = tanh * scores.softcap
    queries, keys = tile.q.stop - tile.q.start, tile.k.stop - tile.k.start
    by_query = logits.unflatten(1, (queries, -1))
    if scores.alibi is not None:
        by_query += scores.alibi.bias().unflatten(0, (by_query.shape[0], -1)).movedim(1, 2)
    if tile.band != FULL:
        by_query.masked_fill_(hidden_by(tile.band, queries, keys, q.device).unsqueeze(1), -torch.inf)
    return tanh, logits


def _by_kv_head(k: Tensor, *tensors: Tensor) -> list[Tensor]:
    """(B, S, H, ...) -> views (B, G, S, H/G, ...)."""
    return [t.unflatten(2, (k.shape[2], -1)).movedim(2, 1) for t in tensors]


def _matrix(x: Tensor) -> Tensor:
    """(N, S, H/G, ...) -> (N, S * H/G, ...), in the dtype that is computed in."""
    return x.flatten(1, 2).to(accumulation_dtype(x.dtype)).contiguous()


def _put(parts: Iterable[Tensor], results: list[Tensor], heads: Heads) -> None:
    for part, result in zip(parts, results, strict=True):
        result[heads] = part.view_as(result[heads])
