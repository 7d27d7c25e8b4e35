"""torch's own flash attention ops, called below scaled_dot_product_attention because a ring needs their lse.

CPU: aten::_scaled_dot_product_flash_attention_for_cpu. Its traps: causal only from the top left and no window (a band
is cut into row blocks under an additive mask), no change of scores (biases would be a mask of all heads by all keys,
and no faster than the reference), one head_dim for q, k and v (padded), half-precision backward many times
slower than float32 on a CPU without matrix units for it.
CUDA: aten::_flash_attention_forward (FlashAttention-2), whose windows count from the bottom right.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor
from typing_extensions import override

from usp.kernels._windows import Gradients, Launch, WindowKernel, same_head_dim
from usp.kernels.base import Backward, Call, Forward, Kernel, Result, Scores, hidden_by
from usp.mask import CAUSAL, FULL, Band
from usp.merge import accumulation_dtype
from usp.tiles import Tile, blocks

aten = torch.ops.aten


class Sdpa(Kernel):
    """torch's flash attention on CPU and CUDA."""

    def __init__(self) -> None:
        self._by_device = {"cpu": Cpu(), "cuda": Cuda()}

    @override
    def refuses(self, call: Call) -> str | None:
        """Reasons: device, softcap or alibi, dtype, head_dim."""
        if call.device not in self._by_device:
            return f"torch has flash attention for cpu and cuda, not {call.device}"
        if call.softcap or call.alibi:
            return f"torch's {call.device.upper()} flash attention has no {'softcap' if call.softcap else 'alibi'}"
        return self._by_device[call.device].refuses(call)

    @override
    def arrange(self, x: Tensor) -> Tensor:
        return self._by_device[x.device.type].arrange(x)

    @override
    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scores: Scores) -> tuple[Tensor, Tensor]:
        return self._by_device[q.device.type].tile_forward(q, k, v, band, scores)

    @override
    def tile_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, band: Band, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._by_device[q.device.type].tile_backward(dout, q, k, v, result, band, scores)

    @override
    def forward_many(self, blocks: Iterable[Forward]) -> Iterator[Result]:
        for device, there in groupby(blocks, lambda block: block.q.device.type):
            yield from self._by_device[device].forward_many(there)

    @override
    def backward_many(self, blocks: Iterable[Backward]) -> Iterator[Gradients]:
        for device, there in groupby(blocks, lambda block: block.q.device.type):
            yield from self._by_device[device].backward_many(there)


# ---- CPU -------------------------------------------------------------------------------------------------------------


class Cpu(Kernel):
    """torch's flash attention on CPU."""

    @override
    def refuses(self, call: Call) -> str | None:
        known = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        return None if call.dtype in known else f"torch's CPU flash attention takes {known}, not {call.dtype}"

    @override
    def arrange(self, x: Tensor) -> Tensor:
        """Heads first: the op reads a head at a time, and rows that lie far apart share few lines of the cache."""
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    @override
    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scores: Scores) -> tuple[Tensor, Tensor]:
        v_head_dim = v.shape[-1]
        q, k, v = same_head_dim(q, k, v)
        out, lse = _cpu_forward(q, k, v, band, scores.scale)
        return out[..., :v_head_dim], lse

    @override
    def tile_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, band: Band, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        (out, lse), head_dim, v_head_dim = result, q.shape[-1], v.shape[-1]
        dout, q, k, v, out = same_head_dim(dout, q, k, v, out)
        backward = _cpu_backward if q.dtype.itemsize > 2 or _fast_half(q.dtype) else _cpu_backward_in_float32
        dq, dk, dv = backward(dout, q, k, v, out, lse, band, scores.scale)
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :v_head_dim]


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    def op(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            *heads_first, 0.0, causal, attn_mask=bias, scale=scale
        )
        return out.transpose(1, 2), lse.transpose(1, 2)

    if band in (FULL, CAUSAL):
        return op(q, k, v, band == CAUSAL, None)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
    for tile, bias in _row_blocks(q, k, band):
        out[:, tile.q], lse[:, tile.q] = op(q[:, tile.q], k[:, tile.k], v[:, tile.k], False, bias)
    return out, lse


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    def op(rows: slice, columns: slice, causal: bool, bias: Tensor | None) -> list[Tensor]:
        heads_first = (t.transpose(1, 2) for t in (dout[:, rows], q[:, rows], k[:, columns], v[:, columns]))
        row = (out[:, rows].transpose(1, 2), lse[:, rows].transpose(1, 2))
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads_first, *row, 0.0, causal, attn_mask=bias, scale=scale
        )
        return [grad.transpose(1, 2) for grad in grads]

    if band in (FULL, CAUSAL):
        dq, dk, dv = op(slice(None), slice(None), band == CAUSAL, None)
        return dq, dk, dv
    dq = torch.empty_like(q)
    dk, dv = (t.new_zeros(t.shape, dtype=accumulation_dtype(t.dtype)) for t in (k, v))
    for tile, bias in _row_blocks(q, k, band):
        dq[:, tile.q], block_dk, block_dv = op(tile.q, tile.k, False, bias)
        dk[:, tile.k] += block_dk
        dv[:, tile.k] += block_dv
    return dq, dk, dv


def _cpu_backward_in_float32(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`_cpu_backward` of half precision, a kv head for each thread at once: no more than those are held in float32."""
    group, at_once = q.shape[2] // k.shape[2], torch.get_num_threads()
    dq, dk, dv = (t.new_empty(t.shape, dtype=torch.float32) for t in (q, k, v))
    for start in range(0, k.shape[2], at_once):
        kv = slice(start, start + at_once)
        heads = slice(kv.start * group, kv.stop * group)
        some_dout, some_q, some_out = (t[:, :, heads].float() for t in (dout, q, out))
        some_k, some_v = (t[:, :, kv].float() for t in (k, v))
        dq[:, :, heads], dk[:, :, kv], dv[:, :, kv] = _cpu_backward(
            some_dout, some_q, some_k, some_v, some_out, lse[:, :, heads], band, scale
        )
    return dq, dk, dv


def _row_blocks(q: Tensor, k: Tensor, band: Band) -> Iterator[tuple[Tile, Tensor]]:
    """The band cut into row blocks, each with the columns its rows see and the additive mask of its corners.

    A block of b rows under a band of width w computes (w + b) / w of what is visible, and the op likes long blocks.
    """
    wide = band.lo is None or band.hi is None or band.hi - band.lo >= 1024
    rows, columns = q.shape[1], k.shape[1]
    whole = Tile(slice(0, rows), slice(0, columns), band)

    @lru_cache(maxsize=1)  # interior blocks are alike
    def bias(rows: int, columns: int, band: Band) -> Tensor:
        hidden = hidden_by(band, rows, columns, q.device)
        return q.new_zeros(rows, columns).masked_fill_(hidden, -torch.inf)

    for tile in blocks(whole, 768 if wide else 256):
        yield tile, bias(tile.q.stop - tile.q.start, tile.k.stop - tile.k.start, tile.band)


def _fast_half(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of `dtype` faster than float32 ones: bfloat16 with AMX tiles."""
    return (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported() and torch.cpu._is_amx_tile_supported()
    )


# ---- CUDA ------------------------------------------------------------------------------------------------------------


class Cuda(WindowKernel):
    """torch's build of FlashAttention-2."""

    @override
    def refuses(self, call: Call) -> str | None:
        if call.dtype not in (torch.bfloat16, torch.float16):
            return f"torch's CUDA flash attention takes bfloat16 and float16, not {call.dtype}"
        if max(call.head_dim, call.v_head_dim) > 256:
            return "torch's CUDA flash attention takes head_dim up to 256"
        return None

    @override
    def window_forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch) -> Result:
        left, right = launch.window
        sequences = launch.sequences or (None, None, q.shape[1], k.shape[1])
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, *sequences, 0.0, False, False,
            scale=launch.scores.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return out, lse

    @override
    def window_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, launch: Launch
    ) -> Gradients:
        (out, lse), (left, right) = result, launch.window
        sequences = launch.sequences or (None, None, q.shape[1], k.shape[1])
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)  # a random state, read only with dropout
        return aten._flash_attention_backward(
            dout, q, k, v, out, lse, *sequences, 0.0, False, no_dropout, no_dropout,
            scale=launch.scores.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
