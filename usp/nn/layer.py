"""A transformer layer that keeps for the backward pass its input, and what attention keeps.

B batch, S_local this rank's tokens, H query heads, G kv heads, D head_dim.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from usp.errors import InputError
from usp.nn.blockwise import blockwise


class TransformerLayer(nn.Module):
    """A decoder layer of the Llama shape: pre-norm, grouped-query attention with RoPE, SwiGLU, no biases.

    What comes before and after attention is token-wise and runs `blockwise`. This is the layer of the Blockwise
    Parallel Transformer (Liu and Abbeel 2023, arXiv 2305.19370) with attention over a sharded sequence inside.

    Args:
        dim: width of the residual stream.
        heads: query heads.
        kv_heads: key/value heads; `heads` is a multiple of it.
        intermediate: width of the feed-forward network.
        attend: (q (B, S_local, H, D), k (B, S_local, G, D), v (B, S_local, G, D)) -> (B, S_local, H, D): a
            `USPAttention`, or anything that calls one, or torch's own attention in one process. Whatever follows cos
            and sin in `forward` is handed to it.
        head_dim: size of a head; default `dim / heads`.
        chunk: tokens that token-wise work takes at a time.

    Raises:
        InputError: the heads, or the head's size, do not divide.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        intermediate: int,
        attend: Callable[..., Tensor],
        *,
        head_dim: int | None = None,
        chunk: int = 4096,
    ) -> None:
        super().__init__()
        head_dim = dim // heads if head_dim is None else head_dim
        if heads % kv_heads or head_dim % 2 or head_dim < 2:
            raise InputError(
                f"heads must be a multiple of kv_heads and RoPE needs an even head_dim: got dim={dim}, heads={heads}, "
                f"kv_heads={kv_heads}, head_dim={head_dim}"
            )
        self.attend, self.chunk, self.head_dim, self.shares = attend, chunk, head_dim, (heads, kv_heads, kv_heads)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.qkv = nn.Linear(dim, sum(self.shares) * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, dim, bias=False)
        self.gate, self.up = nn.Linear(dim, intermediate, bias=False), nn.Linear(dim, intermediate, bias=False)
        self.down = nn.Linear(intermediate, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Tensor:
        """The layer on this rank's shard.

        Args:
            x: (B, S_local, dim).
            cos: (1 or B, S_local, D / 2), from `rope` at the shard's global positions.
            sin: likewise.
            **options: for `attend`, such as seq_len, is_causal or cu_seqlens.

        Returns:
            (B, S_local, dim).

        Raises:
            InputError: lengths differ; and whatever `attend` raises.
        """
        q_BSHD, k_BSGD, v_BSGD = blockwise(self.before, x, cos, sin, chunk=self.chunk)
        attended_BSHD = self.attend(q_BSHD, k_BSGD, v_BSGD, **options)
        return blockwise(self.after, x, attended_BSHD, chunk=self.chunk)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a chunk."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, self.head_dim))
        q_BSHD, k_BSGD, v_BSGD = qkv.split(self.shares, dim=2)
        return rotate(q_BSHD, cos, sin), rotate(k_BSGD, cos, sin), v_BSGD

    def after(self, x: Tensor, attended_BSHD: Tensor) -> Tensor:
        """The residual stream of a chunk, with attention and the feed-forward network added."""
        x = x + self.out(attended_BSHD.flatten(2))
        hidden = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


def rope(
    positions: Tensor, inverse_frequencies: Sequence[float], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary position embedding (Su et al. 2021, arXiv 2104.09864).

    Angles are computed in float64: at position 10^6 a float32 angle is off by some hundredths.

    Args:
        positions: (S_local,) or (B, S_local), global, as from `usp.positions`.
        inverse_frequencies: D / 2 of them, as from `ContextStage.inverse_frequencies`.
        dtype: of the results.

    Returns:
        cos and sin, (1 or B, S_local, D / 2) each.
    """
    frequencies = torch.tensor(inverse_frequencies, dtype=torch.float64, device=positions.device)
    angles = torch.atleast_2d(positions).unsqueeze(-1) * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_BSHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (d, d + D/2) of every head by the angle of their token, in the wider of both dtypes."""
    a, b = x_BSHD.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BSHD.dtype)
