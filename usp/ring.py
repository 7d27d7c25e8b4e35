"""Ring Attention: key/value blocks travel round the ring while each rank computes with the block it has.

Forward merges the tiles' outputs by their log-sum-exp; backward walks the same tiles, and the gradients of a block
follow it one hop behind and come home with the last message (Ring Attention, Liu et al. 2023). The walk knows nothing
of layouts or masks: it reads tiles from the schedule.

B batch, S this rank's sequence, H query heads, G kv heads, D head_dim of q and k, E head_dim of v.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from usp import kernels, transports
from usp.heads import HeadRun, runs
from usp.kernels.base import Kernel
from usp.mask import Mask
from usp.merge import Accumulator, Sum, accumulation_dtype
from usp.schedule import Schedule
from usp.tiles import Tile
from usp.transports.base import Group, Stop, Transport
from usp.transports.p2p import resolve


@dataclass(frozen=True)
class Ring:
    """One rank's end of a ring of attention.

    Attributes:
        schedule: which tiles each rank computes with each block.
        transport: how blocks move.
        kernel: how a tile is computed.
        groups: number of query heads for each of this rank's kv heads.
        scale: factor on the scores.
    """

    schedule: Schedule
    transport: Transport
    kernel: Kernel
    groups: tuple[int, ...]
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of this rank's queries to every rank's keys.

        Args:
            q: (B, S, H, D), in the order of `schedule.positions`.
            k: (B, S, G, D).
            v: (B, S, G, E).

        Returns:
            Output (B, S, H, E) in q's dtype and lse (B, S, H), float32 (float64 for float64), both contiguous.
        """
        total = Accumulator(q, v.shape[-1])
        for stop in self._walk(k, v):
            self._block_forward(q, stop, total)
        return total.result()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of `forward`'s inputs, given its outputs and the gradient of its output.

        Every rank's share of dk and dv is summed in float32 (float64 for float64).
        """
        row_side, dq, own = (dout, q, out, lse), Sum(q), None
        for stop in self._walk(k, v):
            own = own or stop
            stop.gradients = self._block_backward(row_side, stop, dq)
        assert own is not None and own.gradients is not None  # a walk begins at this rank's own block
        dq, dk, dv = (t.to(q.dtype).contiguous() for t in (dq.result(), *own.gradients))
        return dq, dk, dv

    def _block_forward(self, q: Tensor, stop: Stop, total: Accumulator) -> None:
        """Merges one block's attention into the total. A function, so nothing of a block outlives it."""
        k, v = stop.tensors
        for tile, heads in self._pieces(stop.owner):
            block = q[:, tile.q, heads.q], k[:, tile.k, heads.kv], v[:, tile.k, heads.kv]
            total.add(tile.q, heads.q, *self.kernel.forward(*block, tile.band, self.scale))

    def _block_backward(self, row_side: tuple[Tensor, ...], stop: Stop, dq: Sum) -> list[Tensor]:
        """One block's dk and dv from this rank, whose dq is added to. A function, so no tile outlives its block."""
        dout, q, out, lse = row_side
        k, v = stop.tensors
        dk, dv = Sum(k), Sum(v)
        for tile, heads in self._pieces(stop.owner):
            rows, columns = (slice(None), tile.q, heads.q), (slice(None), tile.k, heads.kv)
            block = dout[rows], q[rows], k[columns], v[columns], (out[rows], lse[rows])
            q_share, k_share, v_share = self.kernel.backward(*block, tile.band, self.scale)
            dq.add(tile.q, heads.q, q_share)
            dk.add(tile.k, heads.kv, k_share)
            dv.add(tile.k, heads.kv, v_share)
        return [dk.result(), dv.result()]

    def _walk(self, k: Tensor, v: Tensor) -> Iterator[Stop]:
        """Every rank's keys and values as they come by, as far as any rank needs them; this rank's own first."""
        shapes = [[(t.shape[0], length, *t.shape[2:]) for t in (k, v)] for length in self.schedule.lengths]
        return self.transport.circulate([k, v], shapes, self.schedule.hops)

    def _pieces(self, owner: int) -> Iterator[tuple[Tile, HeadRun]]:
        """The kernel calls for one block."""
        for tile in self.schedule.tiles(self.transport.rank, owner):
            for heads in runs(self.groups):
                yield tile, heads


@dataclass(frozen=True)
class Recipe:
    """What a ring is made of, as plain values, so that it can be the argument of an op.

    Attributes:
        mask: `str(Mask)`.
        layout: name of the layout.
        ring_degree: size of the ring.
        transport: name of the transport.
        kernel: name of the kernel.
        groups: number of query heads for each of this rank's kv heads.
        scale: factor on the scores.
    """

    mask: str
    layout: str
    ring_degree: int
    transport: str
    kernel: str
    groups: tuple[int, ...]
    scale: float

    def __str__(self) -> str:
        """The canonical text, which `parse` reads back."""
        groups = ",".join([str(size) for size in self.groups])
        fields = self.mask, self.layout, str(self.ring_degree), self.transport, self.kernel, groups, repr(self.scale)
        return " ".join(fields)

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, text: str) -> "Recipe":
        """Reads `str(recipe)` back."""
        mask, layout, ring_degree, transport, kernel, groups, scale = text.split(" ")
        sizes = tuple(map(int, groups.split(",")))
        return cls(mask, layout, int(ring_degree), transport, kernel, sizes, float(scale))

    def ring(self, seq_len: int, group: Group, cu_seqlens: Tensor | None = None) -> Ring:
        """The ring for a sequence of `seq_len` tokens over a group, of documents between `cu_seqlens` if given."""
        mask = Mask.parse(self.mask)
        if cu_seqlens is not None:
            mask &= Mask.cu_seqlens(cu_seqlens.tolist())
        schedule = Schedule(mask, self.layout, seq_len, self.ring_degree)
        transport = transports.load(self.transport, group)
        return Ring(schedule, transport, kernels.load(self.kernel), self.groups, self.scale)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    recipe: Recipe,
    seq_len: int,
    group: Group,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`Ring.forward` with gradients, over a torch process group, a local one, or (None) one rank alone.

    Documents are in the recipe's mask, or in `cu_seqlens`: a compiled program reads that anew in every run.

    Returns:
        Output and lse, both differentiable.
    """
    if group is None or isinstance(group, torch.distributed.ProcessGroup):
        name = "" if group is None else group.group_name
        return torch.ops.usp.attention(query, key, value, str(recipe), name, seq_len, cu_seqlens)
    return _Attention.apply(recipe.ring(seq_len, group, cu_seqlens), query, key, value)  # pyright: ignore[reportReturnType]


@torch.library.custom_op("usp::attention", mutates_args=())
def attention_op(
    q: Tensor, k: Tensor, v: Tensor, recipe: str, group: str, seq_len: int, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The forward op: its handle `torch.ops.usp.attention.default` is what selective checkpointing can save."""
    return Recipe.parse(recipe).ring(seq_len, resolve(group), cu_seqlens).forward(q, k, v)


@attention_op.register_fake
def _(q, k, v, recipe, group, seq_len, cu_seqlens=None):
    lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse


@torch.library.custom_op("usp::attention_backward", mutates_args=())
def attention_backward_op(
    tensors: list[Tensor], recipe: str, group: str, seq_len: int, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward op; `tensors` are dout, q, k, v, out, lse."""
    dout, q, k, v, out, lse = tensors
    return Recipe.parse(recipe).ring(seq_len, resolve(group), cu_seqlens).backward(dout, q, k, v, out, lse)


@attention_backward_op.register_fake
def _(tensors, recipe, group, seq_len, cu_seqlens=None):
    return tuple(t.new_empty(t.shape) for t in tensors[1:4])


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, *ctx.plain, cu_seqlens = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):
    *saved, cu_seqlens = ctx.saved_tensors  # once: checkpointing may unpack a tensor only once
    dq, dk, dv = attention_backward_op(_with_gradient(saved, dout, dlse), *ctx.plain, cu_seqlens)
    return dq, dk, dv[..., : saved[2].shape[-1]], None, None, None, None


attention_op.register_autograd(_backward, setup_context=_setup_context)


class _Attention(torch.autograd.Function):
    """The same for rings that have no name to pass to an op: threads of one process."""

    @staticmethod
    def forward(ctx, ring: Ring, q, k, v):
        output = ring.forward(q, k, v)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, *output)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx, dout, dlse):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors
        dq, dk, dv = ctx.ring.backward(*_with_gradient(saved, dout, dlse))
        return None, dq, dk, dv[..., : saved[2].shape[-1]]


def _with_gradient(saved: Sequence[Tensor], dout: Tensor | None, dlse: Tensor | None) -> list[Tensor]:
    """dout, q, k, v, out and lse for a backward pass.

    A gradient of lse adds p * dlse to that of the scores, where kernels compute p * (dout v - dout out). A column of 1
    in dout, 0 in v and -dlse in out makes the one the other, exactly. Columns come in eights, as CUDA kernels want.
    """
    q, k, v, out, lse = saved
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    if dlse is not None:
        ones, minus = torch.ones_like(dlse), torch.where(lse == -torch.inf, 0.0, -dlse)
        dout, v, out = (
            torch.cat([t, F.pad(column.unsqueeze(-1), (0, 7)).to(t.dtype)], -1)
            for t, column in ((dout, ones), (v, v.new_zeros(v.shape[:-1])), (out, minus))
        )
    return [dout, q, k, v, out, lse]
