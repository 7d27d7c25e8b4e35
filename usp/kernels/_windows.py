"""What FlashAttention's kernels have in common, in torch and in the packages.

They count a window (left, right) from the diagonal that ends in the bottom right corner, return lse as (B, H, Q), sum
dk and dv over the query heads of a kv head, want one head_dim for q, k and v, and are given no linear biases. They
take sequences of any lengths that lie end to end, N rows of queries and M of keys in all: blocks that differ in nothing
else, as those of packed documents, are one launch.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from usp.kernels.base import Backward, Forward, Kernel, Result, Scores, weightless
from usp.mask import Band
from usp.merge import accumulation_dtype
from usp.tiles import Tile, trim

Window = tuple[int | None, int | None]

Sequences = tuple[Tensor, Tensor, int, int]
"""Where sequences of queries and of keys begin and end, int32 (sequences + 1,) on the device, and the longest ones."""

Gradients = tuple[Tensor, Tensor, Tensor]
Block = TypeVar("Block", Forward, Backward)
Computed = TypeVar("Computed", Result, Gradients)

LAUNCH_ROWS = 2**20
"""Queries and keys, each head's own, of blocks that are computed together: 16,384 of both with 32 heads. That is
thousands of thread blocks, so that more would save little time, and it bounds the copies that lie end to end."""
BLANK_ROWS = 128
"""What a sequence counts beyond its length: FlashAttention-2's backward holds so many more rows of dq for each."""


@dataclass(frozen=True)
class Launch:
    """How a kernel computes.

    Attributes:
        window: keys that a query sees to the left and to the right, None for no bound.
        scores: how scores come from q and k.
        sequences: those that lie end to end, or None for a batch of equal ones.
    """

    window: Window
    scores: Scores
    sequences: Sequences | None = None


class WindowKernel(Kernel):
    """A kernel whose bands are windows from the bottom right corner."""

    @abstractmethod
    def window_forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch) -> Result:
        """Output (B, Q, H, D) and lse (B, H, Q); of sequences (N, H, D) and (H, N).

        q, k and v have one head_dim, a multiple of 8.
        """

    @abstractmethod
    def window_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, launch: Launch
    ) -> Gradients:
        """dq, dk and dv; the lse of the result is (B, H, Q), of sequences (H, N), and contiguous."""

    @override
    def forward_many(self, blocks: Iterable[Forward]) -> Iterator[Result]:
        return _in_launches(blocks, self.forward, self._forward_together)

    @override
    def backward_many(self, blocks: Iterable[Backward]) -> Iterator[Gradients]:
        return _in_launches(blocks, self.backward, self._backward_together)

    @override
    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scores: Scores) -> tuple[Tensor, Tensor]:
        rows = _parts(q, k, band)
        if len(rows) > 1:
            parts = [self.forward(q[:, r], k, v, band.shift(r.start), scores) for r in rows]
            return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)
        return self._forward(q, k, v, Launch(_window(q, k, band), scores))

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
        return self._backward(dout, q, k, v, result, Launch(_window(q, k, band), scores))

    def _forward_together(self, blocks: Sequence[Forward]) -> Iterable[Result]:
        q, k, v = (_end_to_end(tensors) for tensors in zip(*(block[:3] for block in blocks), strict=True))
        queries = [block.q for block in blocks]
        out, lse = self._forward(q, k, v, _launch(blocks))
        return zip(_apart(out, queries), _apart(lse, queries), strict=True)

    def _backward_together(self, blocks: Sequence[Backward]) -> Iterable[Gradients]:
        given = [(*block[:4], *block.result) for block in blocks]
        dout, q, k, v, out, lse = (_end_to_end(tensors) for tensors in zip(*given, strict=True))
        dq, dk, dv = self._backward(dout, q, k, v, (out, weightless(lse)), _launch(blocks))
        queries, keys = [block.q for block in blocks], [block.k for block in blocks]
        return zip(_apart(dq, queries), _apart(dk, keys), _apart(dv, keys), strict=True)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch) -> Result:
        v_head_dim = v.shape[-1]
        q, k, v = same_head_dim(q, k, v, multiple=8)
        out, lse = self.window_forward(q, k, v, launch)
        return out[..., :v_head_dim], lse.transpose(-1, -2)

    def _backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, launch: Launch) -> Gradients:
        (out, lse), head_dim, v_head_dim = result, q.shape[-1], v.shape[-1]
        dout, q, k, v, out = same_head_dim(dout, q, k, v, out, multiple=8)
        result = out, lse.transpose(-1, -2).contiguous()
        dq, dk, dv = self.window_backward(dout, q, k, v, result, launch)
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


def _in_launches(
    blocks: Iterable[Block],
    alone: Callable[..., Computed],
    together: Callable[[Sequence[Block]], Iterable[Computed]],
) -> Iterator[Computed]:
    """What `alone` computes of each block, in order; of some that are alike `together`, when the first is asked for."""
    for some in _bounded(blocks):
        keys, computed = list(map(_key, some)), {}
        for n, key in enumerate(keys):
            if n not in computed:
                alike = [m for m in range(n, len(keys)) if keys[m] == key]
                found = together([some[m] for m in alike]) if len(alike) > 1 else [alone(*some[n])]
                computed.update(zip(alike, found, strict=True))
                del found  # the caller decides how long a result lives
            yield computed.pop(n)


def _bounded(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Neighbouring blocks, of `LAUNCH_ROWS` at most or one alone."""
    some, total = [], 0
    for block in blocks:
        batch, queries, heads, _ = block.q.shape
        rows = batch * (queries + block.k.shape[1] + BLANK_ROWS) * heads
        if some and total + rows > LAUNCH_ROWS:
            yield some
            some, total = [], 0
        some.append(block)
        total += rows
    if some:
        yield some


def _key(block: Forward | Backward) -> Hashable:
    """Equal for blocks that can be one launch: trimmed, not to be cut, and alike but for their lengths.

    Where C++ compares a window with a sequence's length, or puts that for no bound, it takes that of the longest
    sequence of the launch: what does not bind in the sequence itself then does not either.
    """
    q, k, v, band = block.q, block.k, block.v, block.band
    whole = Tile(slice(0, q.shape[1]), slice(0, k.shape[1]), band)
    if trim(whole) != whole or len(_parts(q, k, band)) > 1:
        return object()  # like no other
    return _window(q, k, band), block.scores, q.shape[2:], k.shape[2:], v.shape[2:]


def _launch(blocks: Sequence[Forward | Backward]) -> Launch:
    """Of blocks that have one key: each row of their batches is a sequence."""
    q, k, band, scores = blocks[0].q, blocks[0].k, blocks[0].band, blocks[0].scores
    lengths = [(block.q.shape[1], block.k.shape[1]) for block in blocks for _ in range(block.q.shape[0])]
    queries, keys = zip(*lengths, strict=True)
    ends = torch.tensor([list(accumulate(side, initial=0)) for side in (queries, keys)], dtype=torch.int32)
    # From pageable memory this returns once the few bytes are staged; a blocking copy would wait for all kernels.
    of_queries, of_keys = ends.to(q.device, non_blocking=True).unbind()
    return Launch(_window(q, k, band), scores, (of_queries, of_keys, max(queries), max(keys)))


def _end_to_end(tensors: Iterable[Tensor]) -> Tensor:
    """(B, S, ...) each -> (sum of B * S, ...), a copy."""
    return torch.cat([row for tensor in tensors for row in tensor.unbind()])


def _apart(joined: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of what `_end_to_end` made of tensors with as many rows as those of `like`."""
    parts = joined.split([t.shape[0] * t.shape[1] for t in like])
    return [part.unflatten(0, t.shape[:2]) for part, t in zip(parts, like, strict=True)]
