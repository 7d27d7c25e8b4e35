"""Ring Attention: key/value blocks travel round the ring while each rank computes with the block it has.

Forward merges the tiles' outputs by their log-sum-exp; backward walks the same tiles, and the gradients of a block
follow it one hop behind and come home with the last message (Ring Attention, Liu et al. 2023). The walk knows nothing
of layouts or masks: it reads tiles from the schedule.

B batch, S this rank's queries, K this rank's keys (S of them, but in cross attention), H query heads, G kv heads, D
head_dim of q and k, E head_dim of v.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from usp import kernels, transports
from usp.finite import check_finite
from usp.heads import HeadRun, halves, runs
from usp.kernels.base import Alibi, Backward, Forward, Kernel, Scores
from usp.mask import Mask
from usp.merge import Accumulator, Sum, Where, accumulation_dtype
from usp.positions import Positions
from usp.schedule import Schedule
from usp.shard import as_tensor
from usp.tiles import Tile
from usp.transports.base import Group, Stop, Transport
from usp.transports.p2p import resolve


@dataclass(frozen=True)
class Ring:
    """One rank's end of a ring of attention.

    Attributes:
        schedules: which tiles each rank computes with each block: one for the whole batch, or one for every row of it.
            All deal tokens alike.
        transport: how blocks move.
        kernel: how a tile is computed.
        groups: number of query heads for each of this rank's kv heads.
        scores: how scores come from q and k, without linear biases.
        sinks: (H,) a logit for each query head that joins every softmax and has no value (gpt-oss, 2025), or None.
        slopes: (H,) of linear biases (ALiBi), or None.
        finite: whether a value that is not finite is an error: the rank, the hop and the tile are named.
    """

    schedules: tuple[Schedule, ...]
    transport: Transport
    kernel: Kernel
    groups: tuple[int, ...]
    scores: Scores
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    finite: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of this rank's queries to every rank's keys.

        Args:
            q: (B, S, H, D), in the order of the schedules' positions.
            k: (B, K, G, D).
            v: (B, K, G, E).

        Returns:
            Output (B, S, H, E) in q's dtype and lse (B, S, H), float32 (float64 for float64), both contiguous. The lse
            is that of all that joined the softmax, sinks among it.
        """
        self._check("forward", q=q)
        q = self.kernel.arrange(q)
        total = Accumulator(q, v.shape[-1])
        for stop in self._walk(k, v):
            self._block_forward(q, stop, total)
        if self.sinks is not None:
            total.add_sinks(self.sinks)
        return total.result()

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
        """Gradients of `forward`'s inputs, given its outputs and the gradient of its output.

        Every rank's share of dk and dv is summed in float32 (float64 for float64).

        Returns:
            dq, dk and dv, and with sinks their gradient, that of this rank's rows.
        """
        self._check("backward", dout=dout, q=q, out=out, lse=lse)
        q = self.kernel.arrange(q)  # dout stays as it is: torch's CPU kernel wants rows of it
        row_side, dq, heads = (dout, q, out, lse), Sum(q), runs(self.groups)
        # Of a block that comes again half of the heads are kept, for the time of the last message.
        now, later = halves(heads)
        first, early = None, {}
        for stop in self._walk(k, v):
            first, block = first or stop, _rows_first(stop.tensors)
            if stop.comes_again:
                early[stop.owner] = [Sum(t[:, :, : now[-1].kv.stop]) for t in block]
                self._block_backward(row_side, stop, now, dq, early[stop.owner])
                continue
            if stop.owner in early:
                sums = [part.of_more_heads(t) for part, t in zip(early.pop(stop.owner), block, strict=True)]
                self._block_backward(row_side, stop, later, dq, sums)
            else:
                sums = list(map(Sum, block))
                self._block_backward(row_side, stop, heads, dq, sums)
            stop.gradients = _heads_first([total.result() for total in sums])
            del block, sums  # or the gradients would outlive the message that is made of them
        assert first is not None and first.gradients is not None  # a walk begins at this rank's own block
        gradients = [t.to(q.dtype).contiguous() for t in (dq.result(), *_rows_first(first.gradients))]
        if self.sinks is not None:
            # A sink's value is 0, so its score has the gradient p (0 - delta), summed over rows. exp(x - inf) is 0.
            delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            weights = torch.exp(self.sinks.to(lse.dtype) - lse.masked_fill(lse == -torch.inf, torch.inf))
            gradients.append(-(weights * delta).sum((0, 1)).to(self.sinks.dtype))
        return gradients

    def _block_forward(self, q: Tensor, stop: Stop, total: Accumulator) -> None:
        """Merges one block's attention into the total. A function, so nothing of a block outlives it."""
        k, v = map(self.kernel.arrange, _rows_first(stop.tensors))
        pieces = list(self._pieces(stop.owner, q, runs(self.groups)))
        results = self.kernel.forward_many(
            Forward(q[rows], k[columns], v[columns], tile.band, scores) for rows, columns, tile, scores in pieces
        )
        for rows, _, tile, _ in pieces:
            out, lse = next(results)
            self._check_tile(stop, tile, out=out, lse=lse)
            total.add(rows, out, lse)

    def _block_backward(
        self, row_side: tuple[Tensor, ...], stop: Stop, heads: Sequence[HeadRun], dq: Sum, sums: Sequence[Sum]
    ) -> None:
        """Adds one block's share of the gradients, by some heads. A function, so no tile outlives its block."""
        (dout, q, out, lse), (dk, dv) = row_side, sums
        k, v = map(self.kernel.arrange, _rows_first(stop.tensors))
        pieces = list(self._pieces(stop.owner, q, heads))
        results = self.kernel.backward_many(
            Backward(dout[rows], q[rows], k[columns], v[columns], (out[rows], lse[rows]), tile.band, scores)
            for rows, columns, tile, scores in pieces
        )
        for rows, columns, tile, _ in pieces:
            shares = dict(zip(("dq", "dk", "dv"), next(results), strict=True))
            self._check_tile(stop, tile, **shares)
            dq.add(rows, shares.pop("dq"))  # each is given up before the next sum may want memory
            dk.add(columns, shares.pop("dk"))
            dv.add(columns, shares.pop("dv"))

    @property
    def _hops(self) -> int:
        """How often blocks move on, as far as any rank needs them."""
        return max(schedule.hops for schedule in self.schedules)

    def _walk(self, k: Tensor, v: Tensor) -> Iterator[Stop]:
        """Every rank's keys and values as they come by, heads first; this rank's own first."""
        own = _heads_first([k, v])
        lengths = self.schedules[0].of_keys.lengths
        shapes = [
            [(batch, kv_heads, length, dim) for batch, kv_heads, _, dim in (t.shape for t in own)] for length in lengths
        ]
        for stop in self.transport.circulate(own, shapes, self._hops):
            if self.finite:
                k_block, v_block = stop.tensors
                self._check(self._block_name(stop), k=k_block, v=v_block)
            yield stop

    def _check(self, what: str, **tensors: Tensor) -> None:
        """Raises NumericsError, where it is asked for, if a value is not finite."""
        if self.finite:
            check_finite(f"{self.transport.name(self.transport.rank)}, {what}", tensors)

    def _check_tile(self, stop: Stop, tile: Tile, **results: Tensor) -> None:
        if self.finite:
            self._check(f"{self._block_name(stop)}, {tile}", **results)

    def _block_name(self, stop: Stop) -> str:
        hop = (self.transport.rank - stop.owner) % self.transport.size
        return f"hop {hop}, the block of {self.transport.name(stop.owner)}"

    def _pieces(self, owner: int, q: Tensor, heads: Sequence[HeadRun]) -> Iterator[tuple[Where, Where, Tile, Scores]]:
        """The kernel calls for some heads of a block: where rows and columns lie, the tile, and how scores are made."""
        scores = self._scores(owner, q)
        for batch, schedule in self._batches():
            for tile in schedule.tiles(self.transport.rank, owner):
                for run in heads:
                    yield (batch, tile.q, run.q), (batch, tile.k, run.kv), tile, scores.cut(tile.q, tile.k, run.q)

    def _batches(self) -> Iterator[tuple[slice, Schedule]]:
        """Neighbouring rows of the batch that share a schedule."""
        if len(self.schedules) == 1:
            yield slice(None), self.schedules[0]
            return
        start = 0
        for schedule, rows in groupby(self.schedules):
            stop = start + len(list(rows))
            yield slice(start, stop), schedule
            start = stop

    def _scores(self, owner: int, q: Tensor) -> Scores:
        """How the scores of a whole block are made."""
        schedule = self.schedules[0]
        rows, columns = schedule.positions(self.transport.rank), schedule.of_keys.positions(owner)
        return with_biases(self.scores, self.slopes, q, rows, columns)


def _heads_first(tensors: Sequence[Tensor]) -> list[Tensor]:
    """(B, S, H, D) -> (B, H, S, D), as blocks travel: each head of one is a matrix, which kernels read fastest."""
    return [t.transpose(1, 2) for t in tensors]


_rows_first = _heads_first
"""The way back."""


def with_biases(scores: Scores, slopes: Tensor | None, q: Tensor, rows: Positions, columns: Positions) -> Scores:
    """Scores with the linear biases, if there are any, between queries at `rows` and keys at `columns`."""
    if slopes is None:
        return scores
    dtype = accumulation_dtype(q.dtype)
    return replace(
        scores, alibi=Alibi(slopes.to(dtype), *(as_tensor(side, q.device, dtype) for side in (rows, columns)))
    )


@dataclass(frozen=True)
class Recipe:
    """What a ring is made of, as plain values, so that it can be the argument of an op.

    Attributes:
        masks: `str(Mask)`, one for the batch or one for every row of it.
        layouts: name of the layout; in cross attention two, of the queries and of the keys.
        ring_degree: size of the ring.
        transport: name of the transport.
        kernel: name of the kernel.
        groups: number of query heads for each of this rank's kv heads.
        scores: scale and softcap.
        more: which tensors follow q, k and v: "sinks", "slopes".
        finite: whether a value that is not finite is an error.
    """

    masks: tuple[str, ...]
    layouts: tuple[str, ...]
    ring_degree: int
    transport: str
    kernel: str
    groups: tuple[int, ...]
    scores: tuple[float, float]
    more: tuple[str, ...] = ()
    finite: bool = False

    def __str__(self) -> str:
        """The canonical text, which `parse` reads back."""
        lists = ";".join(self.masks), ";".join(self.layouts), ";".join([str(size) for size in self.groups])
        plain = str(self.ring_degree), self.transport, self.kernel, str(int(self.finite))
        return " ".join((*lists, *plain, ";".join([repr(x) for x in self.scores]), ";".join(self.more)))

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, text: str) -> "Recipe":
        """Reads `str(recipe)` back."""
        masks, layouts, groups, ring_degree, transport, kernel, finite, scores, more = text.split(" ")
        scale, softcap = map(float, scores.split(";"))
        return cls(
            masks=tuple(masks.split(";")),
            layouts=tuple(layouts.split(";")),
            ring_degree=int(ring_degree),
            transport=transport,
            kernel=kernel,
            groups=tuple(map(int, groups.split(";"))),
            scores=(scale, softcap),
            more=tuple(filter(None, more.split(";"))),
            finite=finite == "1",
        )

    def ring(
        self, seq_lens: Sequence[int], group: Group, more: Sequence[Tensor] = (), cu_seqlens: Tensor | None = None
    ) -> Ring:
        """The ring of a call over a group.

        Args:
            seq_lens: global number of tokens; in cross attention two, of queries and of keys.
            group: what the transport runs over.
            more: the tensors that `self.more` names.
            cu_seqlens: boundaries of documents that are in no mask.
        """
        documents = None if cu_seqlens is None else tuple(cu_seqlens.tolist())
        schedules = _schedules(self, tuple(seq_lens), documents)
        transport, kernel = transports.load(self.transport, group), kernels.load(self.kernel)
        named = dict(zip(self.more, more, strict=True))
        return Ring(schedules, transport, kernel, self.groups, Scores(*self.scores), **named, finite=self.finite)


@lru_cache(maxsize=256)
def _schedules(recipe: Recipe, seq_lens: tuple[int, ...], boundaries: tuple[int, ...] | None) -> tuple[Schedule, ...]:
    """One schedule for the batch, or one for every row of it, with the boundaries of documents that are in no mask."""
    masks = map(Mask.parse, recipe.masks)
    if boundaries is not None:
        documents = Mask.cu_seqlens(boundaries)
        masks = (mask & documents for mask in masks)
    (layout, *kv_layout), (seq_len, *kv_seq_len) = recipe.layouts, seq_lens
    keys = (kv_layout[0], kv_seq_len[0]) if kv_layout else None
    return tuple(Schedule(mask, layout, seq_len, recipe.ring_degree, keys) for mask in masks)


def ring_attention(
    tensors: Sequence[Tensor],
    recipe: Recipe,
    seq_lens: Sequence[int],
    group: Group,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`Ring.forward` with gradients, over a torch process group, a local one, or (None) one rank alone.

    Args:
        tensors: q, k, v, and those that `recipe.more` names.
        recipe: what the ring is made of.
        seq_lens: global number of tokens; in cross attention two, of queries and of keys.
        group: the group of the ring axis.
        cu_seqlens: boundaries of documents that are not in the recipe's mask: a compiled program reads them anew in
            every run.

    Returns:
        Output and lse, both differentiable.
    """
    if group is None or isinstance(group, torch.distributed.ProcessGroup):
        name = "" if group is None else group.group_name
        return torch.ops.usp.attention(list(tensors), str(recipe), name, list(seq_lens), cu_seqlens)
    ring = recipe.ring(seq_lens, group, [t.detach() for t in tensors[3:]], cu_seqlens)
    return _Attention.apply(ring, *tensors)  # pyright: ignore[reportReturnType]


@torch.library.custom_op("usp::attention", mutates_args=())
def attention_op(
    tensors: Sequence[Tensor], recipe: str, group: str, seq_lens: Sequence[int], cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The forward op: its handle `torch.ops.usp.attention.default` is what selective checkpointing can save.

    `tensors` are q, k and v, and what the recipe has more.
    """
    q, k, v, *more = tensors
    return Recipe.parse(recipe).ring(seq_lens, resolve(group), more, cu_seqlens).forward(q, k, v)


@attention_op.register_fake
def _(tensors, recipe, group, seq_lens, cu_seqlens):
    q, _, v, *_ = tensors
    lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse


@torch.library.custom_op("usp::attention_backward", mutates_args=())
def attention_backward_op(
    tensors: Sequence[Tensor], recipe: str, group: str, seq_lens: Sequence[int], cu_seqlens: Tensor | None
) -> list[Tensor]:
    """The backward op; `tensors` are dout, q, k, v, out and lse, and what the recipe has more."""
    dout, q, k, v, out, lse, *more = tensors
    return Recipe.parse(recipe).ring(seq_lens, resolve(group), more, cu_seqlens).backward(dout, q, k, v, out, lse)


@attention_backward_op.register_fake
def _(tensors, recipe, group, seq_lens, cu_seqlens):
    _, q, k, v, _, _, *more = tensors
    sinks = [t for name, t in zip(Recipe.parse(recipe).more, more, strict=True) if name == "sinks"]
    return [t.new_empty(t.shape) for t in (q, k, v, *sinks)]


def _setup_context(ctx, inputs, output) -> None:
    tensors, *ctx.plain, cu_seqlens = inputs
    ctx.save_for_backward(*tensors, *output, cu_seqlens)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):
    *tensors, out, lse, cu_seqlens = ctx.saved_tensors  # once: checkpointing may unpack a tensor only once
    given = _with_gradient((*tensors[:3], out, lse), dout, dlse)
    gradients = attention_backward_op([*given, *tensors[3:]], *ctx.plain, cu_seqlens)
    return _as_inputs(gradients, tensors), None, None, None, None


attention_op.register_autograd(_backward, setup_context=_setup_context)


class _Attention(torch.autograd.Function):
    """The same for rings that have no name to pass to an op: threads of one process."""

    @staticmethod
    def forward(ctx, ring: Ring, *tensors):
        output = ring.forward(*tensors[:3])
        ctx.ring = ring
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx, dout, dlse):  # pyright: ignore[reportIncompatibleMethodOverride]
        *tensors, out, lse = ctx.saved_tensors
        gradients = ctx.ring.backward(*_with_gradient((*tensors[:3], out, lse), dout, dlse))
        return None, *_as_inputs(gradients, tensors)


def _as_inputs(gradients: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """A gradient for each input: dv without the columns of `_with_gradient`, and none for slopes."""
    dq, dk, dv, *more = gradients
    found = [dq, dk, dv[..., : tensors[2].shape[-1]], *more]
    return [*found, *[None] * (len(tensors) - len(found))]


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
