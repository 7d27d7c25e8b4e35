"""The optional packages flash-attn (FlashAttention-2) and, on Hopper GPUs, flash-attn-3 (FlashAttention-3).

FlashAttention-2: the private functions of flash_attn.flash_attn_interface, which take and return the lse that a ring
needs; their arguments are the same from 2.7 on. FlashAttention-3: the ops of flash_attn_3._C, which kept the order of
their arguments, where the Python functions above them changed names, defaults and results between releases.

FlashAttention-3 takes some unequal head_dims of q and v, but which differs by direction and release: they are padded.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from typing_extensions import override

from usp.kernels._windows import Gradients, Launch, Window, WindowKernel
from usp.kernels.base import Call, Result


class FlashAttn(WindowKernel):
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
        if call.alibi:
            return "a ring's tiles are not the diagonal that FlashAttention counts its linear biases from"
        if max(call.head_dim, call.v_head_dim) > 256:
            return "FlashAttention takes head_dim up to 256"
        if not self._flash2 and not self._use_flash3():
            return (
                "neither flash-attn 2.7 or newer nor, for a Hopper GPU, flash-attn-3 can be imported: "
                'run `pip install flash-attn --no-build-isolation`, or use kernel="sdpa", which needs neither'
            )
        return None

    @override
    def window_forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch) -> Result:
        (left, right), scores = _minus_one(launch.window), launch.scores
        if self._use_flash3(q.device):
            cu_q, cu_k, max_q, max_k = launch.sequences or [None] * 4
            # What is None: keys that are appended, paged, rotated or quantised, and an output to write to.
            out, lse, *_ = torch.ops.flash_attn_3.fwd(
                q, k, v, *[None] * 4, cu_q, cu_k, *[None] * 3, max_q, max_k, *[None] * 9, scores.scale, False, left,
                right, softcap=scores.softcap, num_splits=1,
            )  # fmt: skip
        else:
            out, lse, *_ = _flash2("forward", launch)(
                q, k, v, *(launch.sequences or ()), dropout_p=0.0, softmax_scale=scores.scale, causal=False,
                window_size_left=left, window_size_right=right, softcap=scores.softcap, alibi_slopes=None,
                return_softmax=False,
            )  # fmt: skip
        return out, lse

    @override
    def window_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, launch: Launch
    ) -> Gradients:
        (out, lse), (left, right), scores = result, _minus_one(launch.window), launch.scores
        dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
        given = (dout, q, k, v, out, lse, dq, dk, dv)
        deterministic = torch.are_deterministic_algorithms_enabled()
        if self._use_flash3(q.device):
            cu_q, cu_k, max_q, max_k = launch.sequences or [None] * 4
            torch.ops.flash_attn_3.bwd(
                *given, cu_q, cu_k, None, None, max_q, max_k, scores.scale, False, left, right, scores.softcap,
                deterministic=deterministic,
            )  # fmt: skip
        else:
            _flash2("backward", launch)(
                *given, *(launch.sequences or ()), dropout_p=0.0, softmax_scale=scores.scale, causal=False,
                window_size_left=left, window_size_right=right, softcap=scores.softcap, alibi_slopes=None,
                deterministic=deterministic,
            )  # fmt: skip
        return dq, dk, dv

    def _use_flash3(self, device: torch.device | None = None) -> bool:
        return self._flash3 and torch.cuda.get_device_capability(device)[0] == 9


def _package(name: str) -> Any:
    """An optional module, or None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _flash2(direction: str, launch: Launch) -> Callable[..., Any]:
    """FlashAttention-2's function: with sequences their four values follow the tensors."""
    varlen = "varlen_" if launch.sequences else ""
    return getattr(_package("flash_attn.flash_attn_interface"), f"_flash_attn_{varlen}{direction}")


def _minus_one(window: Window) -> tuple[int, int]:
    """A window with -1 for "no bound"."""
    left, right = window
    return -1 if left is None else left, -1 if right is None else right
