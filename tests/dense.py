"""The independent oracle: dense attention from its definition, in float64, and the error reported against it."""

from bisect import bisect_right

import torch
from torch import Tensor

from usp.mask import Band, Mask


def visible(mask: Mask, seq_len: int) -> Tensor:
    """Boolean (S, S): whether query i sees key j, pair by pair from the definition of a mask."""
    position = torch.arange(seq_len)
    offset = position - position.unsqueeze(-1)
    seen = torch.zeros(seq_len, seq_len, dtype=torch.bool)
    for region in mask.regions:
        here = torch.zeros_like(seen)
        for band in region.bands:
            here |= _inside(offset, band)
        if region.boundaries:
            document = torch.tensor([bisect_right(region.boundaries, i) for i in range(seq_len)])
            here &= document == document.unsqueeze(-1)
        seen |= here & _inside(position.unsqueeze(-1), region.queries) & _inside(position, region.keys)
    return seen


def _inside(x: Tensor, band: Band) -> Tensor:
    inside = torch.ones_like(x, dtype=torch.bool)
    if band.lo is not None:
        inside &= x >= band.lo
    if band.hi is not None:
        inside &= x <= band.hi
    return inside


def dense_attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seen: Tensor, scale: float | None = None, **more):
    """(out, lse, dq, dk, dv) of dense softmax attention in float64; (B, S, H, D) tensors, lse (B, S, H).

    `seen` is (S, K) or (B, S, K). `more` may have softcap, slopes (H,) with the distance of positions (S, K), and sinks
    (H,), whose gradient then is the last result.
    """
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    group, seen = q.shape[2] // k.shape[2], seen if seen.ndim == 2 else seen.unsqueeze(1)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(group, 2)) * (scale or q.shape[-1] ** -0.5)
    if more.get("softcap"):
        scores = more["softcap"] * torch.tanh(scores / more["softcap"])
    if more.get("slopes") is not None:
        scores = scores - more["slopes"].double().view(-1, 1, 1) * more["distance"].abs()
    scores, inputs = scores.masked_fill(~seen, -torch.inf), [q, k, v]
    if more.get("sinks") is not None:  # one more key that every query sees, of value 0
        sinks = more["sinks"].detach().double().requires_grad_()
        inputs.append(sinks)
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :1])], 1)
    lse = scores.logsumexp(-1)
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(group, 2))
    grads = torch.autograd.grad(out, inputs, dout.double())
    return out.detach(), lse.detach().transpose(1, 2), *grads


def relative_error(x: Tensor, reference: Tensor) -> float:
    """norm(x - ref) / norm(ref). Where the reference is zero but for rounding (queries that see one key have
    dq = dk = 0), the root mean square of x: a gradient there is rounding of products of inputs of size 1."""
    reference, size = reference.double(), reference.numel() ** 0.5
    norm = reference.norm().item()
    return ((x.double() - reference).norm().item() / (norm if norm > 1e-9 * size else size)) if x.numel() else 0.0
