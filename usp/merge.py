"""Joining partial softmax results: out = sum_b exp(lse_b - lse) out_b with lse = log sum_b exp(lse_b).

Online softmax (Milakov and Gimelshein 2018), as used between blocks by FlashAttention and Ring Attention.
B batch, S sequence, H heads, D head_dim; lse is (B, S, H), natural log, -inf where a row has seen nothing.
"""

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partial results of `dtype` inputs accumulate in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merges a block's result into `out` (B, S, H, D) and `lse` (B, S, H), in place.

    Rows with lse -inf on either side, or both, are exact: they weigh nothing.
    """
    total = torch.logaddexp(lse, block_lse)
    # -inf - -inf is NaN; a row that neither side has seen keeps its output with any finite total.
    weight = torch.exp(block_lse - total.masked_fill(total == -torch.inf, 0.0))
    weight = weight.unsqueeze(-1)
    if block_out.dtype == out.dtype:
        out.lerp_(block_out, weight)
    else:  # which lerp_ would want as a copy in the wider dtype
        out.mul_(1 - weight).addcmul_(block_out, weight)
    lse.copy_(total)


Where = tuple[slice, slice, slice]
"""A part of a (B, S, H, ...) tensor: batch rows, sequence, heads."""


class Accumulator:
    """The running output and lse of one rank's queries, a tile at a time.

    A first result that covers everything is kept as it is, in the kernel's dtype, so a call that needs one tile costs
    no pass over the output. Anything more accumulates in float32 (float64 for float64).
    """

    def __init__(self, query: Tensor, v_head_dim: int) -> None:
        self._shape = (*query.shape[:-1], v_head_dim)
        self._like = query.new_empty(0, dtype=accumulation_dtype(query.dtype))
        self._dtype = query.dtype
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, where: Where, out: Tensor, lse: Tensor) -> None:
        """Merges the result for a part of the queries. Takes ownership of `out` and `lse`."""
        if self._out is None and out.shape == self._shape:
            self._out, self._lse = out, lse
            return
        total, self._lse = self._so_far()
        self._out = total.to(self._like.dtype)
        merge_(self._out[where], self._lse[where], out, lse)

    def add_sinks(self, sinks: Tensor) -> None:
        """Lets a logit of each head, (H,), join the softmax of every row, with a value of 0."""
        out, lse = self._so_far()
        total = torch.logaddexp(lse, sinks.to(lse.dtype))
        weight = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))  # -inf - -inf is NaN
        self._out, self._lse = out.to(self._like.dtype) * weight.unsqueeze(-1), total

    def result(self) -> tuple[Tensor, Tensor]:
        """The output in the query's dtype, and the lse; contiguous. Rows that saw nothing are 0 and -inf."""
        out, lse = self._so_far()
        return out.to(self._dtype).contiguous(), lse.contiguous()

    def _so_far(self) -> tuple[Tensor, Tensor]:
        if self._out is not None and self._lse is not None:
            return self._out, self._lse
        return self._like.new_zeros(self._shape), self._like.new_full(self._shape[:-1], -torch.inf)


class Sum:
    """A gradient, added up from the shares of tiles, in float32 (float64 for float64).

    As with `Accumulator`, a first share that covers everything is kept as it is.
    """

    def __init__(self, like: Tensor) -> None:
        self._shape = like.shape
        self._like = like.new_empty(0, dtype=accumulation_dtype(like.dtype))
        self._total: Tensor | None = None

    def add(self, where: Where, share: Tensor) -> None:
        """Adds the gradient of `like[where]`. Takes ownership of it."""
        if self._total is None and share.shape == self._shape:
            self._total = share.to(self._like.dtype)
            return
        self._total = self.result()
        self._total[where] += share

    def of_more_heads(self, like: Tensor) -> "Sum":
        """The same for a tensor (B, S, H, D) with more heads behind these. This one is used no more."""
        if like.shape == self._shape:
            return self
        grown = Sum(like)
        if self._total is not None:
            grown.add((slice(None), slice(None), slice(self._shape[2])), self._total)
        return grown

    def result(self) -> Tensor:
        """The gradient so far."""
        return self._like.new_zeros(self._shape) if self._total is None else self._total
