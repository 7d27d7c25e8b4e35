"""The optional packages flash-attn (FlashAttention-2) and, on Hopper GPUs, flash-attn-3 (FlashAttention-3).

FlashAttention-2: the private functions of flash_attn.flash_attn_interface, which take and return the lse that a ring
needs; their arguments are the same from 2.7 on. FlashAttention-3: the ops of flash_attn_3._C, which kept the order of
their arguments, where the Python functions above them changed names, defaults and results between releases.

Both count a window from the diagonal that ends in the bottom right corner (-1: no bound), return lse as (B, H, Q), sum
dk and dv over the heads of a kv head, and want one head_dim in multiples of 8 (padded: the unequal pairs that
FlashAttention-3 takes differ by direction and release).
"""

import importlib
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion
from typing_extensions import override

from usp.kernels.base import Call, Kernel
from usp.mask import Band
from usp.merge import accumulation_dtype


class FlashAttn(Kernel):
    """FlashAttention-3 where it is installed and the GPU is a Hopper, else FlashAttention-2.

    The packages are imported when a kernel is made, not with this module.
    """

    def __init__(self) -> None:
        flash2 = _package("flash_attn")
        self._flash2 = flash2 is not None and TorchVersion(flash2.__version__) >= "2.7"
        self._flash3 = _package("flash_attn_3._C") is not None

    @override
    def refuses(self, call: Call) -> str | None:
        """Reasons: device, dtype, head_dim, no package that serves the GPU."""
        if call.device != "cuda":
            return f'FlashAttention runs on cuda, not {call.device}; kernel="sdpa" runs on cpu and cuda'
        if call.dtype not in (torch.bfloat16, torch.float16):
            return f"FlashAttention takes bfloat16 and float16, not {call.dtype}"
        if max(call.head_dim, call.v_head_dim) > 256:
            return "FlashAttention takes head_dim up to 256"
        if not self._flash2 and not self._use_flash3():
            return (
                "neither flash-attn 2.7 or newer nor, for a Hopper GPU, flash-attn-3 can be imported: "
                'run `pip install flash-attn --no-build-isolation`, or use kernel="sdpa", which needs neither'
            )
        return None

    @override
    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
        cuts = _cuts(q, k, band)
        if len(cuts) > 2:
            parts = [self.forward(q[:, a:b], k, v, band.shift(a), scale) for a, b in pairwise(cuts)]
            return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)
        left, right = _window(q, k, band)
        v_head_dim = v.shape[-1]
        q, k, v = _same_head_dim(q, k, v)
        if self._use_flash3(q.device):
            absent = [None] * 20  # keys that are appended, packed, paged, rotated or quantised
            out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, *absent, scale, False, left, right, num_splits=1)
        else:
            out, lse, *_ = _package("flash_attn.flash_attn_interface")._flash_attn_forward(
                q, k, v, dropout_p=0.0, softmax_scale=scale, causal=False, window_size_left=left,
                window_size_right=right, softcap=0.0, alibi_slopes=None, return_softmax=False,
            )  # fmt: skip
        return out[..., :v_head_dim], lse.transpose(1, 2)

    @override
    def tile_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        cuts = _cuts(q, k, band)
        if len(cuts) > 2:
            rows = [slice(a, b) for a, b in pairwise(cuts)]
            shares = [
                self.backward(dout[:, r], q[:, r], k, v, out[:, r], lse[:, r], band.shift(r.start), scale) for r in rows
            ]
            dq, *dkv = zip(*shares, strict=True)
            dk, dv = (torch.stack(share).sum(0, dtype=accumulation_dtype(q.dtype)) for share in dkv)
            return torch.cat(dq, 1), dk, dv
        left, right = _window(q, k, band)
        head_dim, v_head_dim = q.shape[-1], v.shape[-1]
        dout, q, k, v, out = _same_head_dim(dout, q, k, v, out)
        grads = dq, dk, dv = [t.new_empty(t.shape) for t in (q, k, v)]
        given = (dout, q, k, v, out, lse.transpose(1, 2).contiguous(), *grads)
        deterministic = torch.are_deterministic_algorithms_enabled()
        if self._use_flash3(q.device):
            absent = [None] * 6  # packed sequences
            torch.ops.flash_attn_3.bwd(*given, *absent, scale, False, left, right, deterministic=deterministic)
        else:
            _package("flash_attn.flash_attn_interface")._flash_attn_backward(
                *given, dropout_p=0.0, softmax_scale=scale, causal=False, window_size_left=left,
                window_size_right=right, softcap=0.0, alibi_slopes=None, deterministic=deterministic,
            )  # fmt: skip
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :v_head_dim]

    def _use_flash3(self, device: torch.device | None = None) -> bool:
        return self._flash3 and torch.cuda.get_device_capability(device)[0] == 9


def _package(name: str) -> Any:
    """An optional module, or None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _window(q: Tensor, k: Tensor, band: Band) -> tuple[int, int]:
    """The band as a window (left, right). Both are >= 0 where there is a bound: the band is trimmed."""
    shift = k.shape[1] - q.shape[1]
    return -1 if band.lo is None else shift - band.lo, -1 if band.hi is None else band.hi - shift


def _cuts(q: Tensor, k: Tensor, band: Band) -> list[int]:
    """Where to cut the rows, so that FlashAttention-2 keeps the window (its issue 895, open in 2.8.3).

    It takes a right window of `columns` or more for none, and none for `columns`: wrong where rows outnumber columns by
    enough. Cut where the upper bound ceases to bind and where the lower one begins to, every part is full or has no
    more rows than columns.
    """
    rows, columns = q.shape[1], k.shape[1]
    right = rows - 1 if band.hi is None else band.hi + rows - columns
    if right < columns:
        return [0, rows]
    upper = 0 if band.hi is None else columns - 1 - band.hi
    lower = rows if band.lo is None else 1 - band.lo
    return sorted({0, upper, lower, rows})


def _same_head_dim(*tensors: Tensor) -> list[Tensor]:
    """Zero-pads to the largest head_dim, rounded up to 8: zeros add nothing to a score, and come out as zeros."""
    wanted = -(-max(t.shape[-1] for t in tensors) // 8) * 8
    return [t if t.shape[-1] == wanted else F.pad(t, (0, wanted - t.shape[-1])) for t in tensors]
