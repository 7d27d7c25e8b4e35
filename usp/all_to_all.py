"""The Ulysses exchange: sequence shards become head shards and back (DeepSpeed-Ulysses, Jacobs et al. 2023).

One function in two directions, each the gradient of the other: every rank sends each peer the part of its tensors that
the peer holds in the other sharding. q, k and v travel in one message a peer, heads and sequence may be cut unevenly,
and a kv head that several ranks use is sent to each of them; on the way back their gradients are summed.

B batch, S sequence, H heads, D head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from usp import transports
from usp.heads import share
from usp.transports.base import Group, Transport, during, flatten, span, unflatten, waiting
from usp.transports.p2p import P2P, resolve

Index = tuple[slice, slice, slice]

_share = lru_cache(maxsize=4096)(share)
"""Asked for every part of every message; `share` itself is traced by torch.compile, which cannot look into a cache."""


@dataclass(frozen=True)
class Deal:
    """How heads and sequence are cut between the ranks of a Ulysses group.

    Attributes:
        heads: number of query heads, over all ranks.
        totals: number of heads of each tensor, over all ranks: `heads`, or the kv heads.
        lengths: tokens of every rank's sequence shard.
    """

    heads: int
    totals: tuple[int, ...]
    lengths: tuple[int, ...]

    def share(self, tensor: int, rank: int) -> range:
        """The heads of a tensor that a rank holds when heads are sharded."""
        return _share(self.heads, self.totals[tensor], len(self.lengths), rank)

    def by_heads(self, tensor: int, rank: int) -> Index:
        """Where, in a sequence shard, the part lies that `rank` holds when heads are sharded."""
        share = self.share(tensor, rank)
        return slice(None), slice(None), slice(share.start, share.stop)

    def by_rows(self, tensor: int, rank: int) -> Index:
        """Where, in a head shard, the part lies that `rank` holds when the sequence is sharded."""
        start = sum(self.lengths[:rank])
        return slice(None), slice(start, start + self.lengths[rank]), slice(None)

    def shape(self, tensor: int, rank: int, to_heads: bool, like: Tensor) -> tuple[int, int, int, int]:
        """Shape (B, S, H, D) of a tensor after the exchange."""
        batch, _, _, head_dim = like.shape
        if to_heads:
            return batch, sum(self.lengths), len(self.share(tensor, rank)), head_dim
        return batch, self.lengths[rank], self.totals[tensor], head_dim

    def replicated(self, tensor: int) -> bool:
        """Whether some heads are held by several ranks."""
        ranks = range(len(self.lengths))
        return sum(len(self.share(tensor, rank)) for rank in ranks) > self.totals[tensor]


def exchange(tensors: Sequence[Tensor], deal: Deal, to_heads: bool, transport: Transport) -> list[Tensor]:
    """Swaps the sharding of (B, S, H, D) tensors of one dtype.

    Args:
        tensors: sequence shards (all heads) if `to_heads`, else head shards (all rows).
        deal: how heads and sequence are cut.
        to_heads: the direction.
        transport: this rank's end of the Ulysses axis.

    Returns:
        Tensors in the other sharding, contiguous but for head shards on a CPU; heads that arrive from several ranks are
        summed.
    """
    here, there = (deal.by_heads, deal.by_rows) if to_heads else (deal.by_rows, deal.by_heads)
    me, peers = transport.rank, [peer for peer in range(transport.size) if peer != transport.rank]
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    results = [
        t.new_zeros(deal.shape(i, me, to_heads, t), dtype=wide)
        if not to_heads and deal.replicated(i)
        else _empty(t, deal, i, me, to_heads)
        for i, t in enumerate(tensors)
    ]
    places = {rank: [result[there(i, rank)] for i, result in enumerate(results)] for rank in range(transport.size)}
    with span("usp::all_to_all: pack"):
        sends = {peer: flatten([t[here(i, peer)] for i, t in enumerate(tensors)]) for peer in peers}
        receives = {peer: tensors[0].new_empty(sum(part.numel() for part in places[peer])) for peer in peers}
    with during("all_to_all"):
        flight = transport.exchange(sends, receives)
    with span("usp::all_to_all: own part"):
        _deliver(places[me], [t[here(i, me)] for i, t in enumerate(tensors)], deal, to_heads)
    with waiting("all_to_all"):
        flight.wait()
    with span("usp::all_to_all: unpack"):
        for peer, message in receives.items():
            _deliver(places[peer], unflatten(message, [part.shape for part in places[peer]]), deal, to_heads)
    return [result.to(tensors[0].dtype) for result in results]


def _empty(like: Tensor, deal: Deal, tensor: int, rank: int, to_heads: bool) -> Tensor:
    """A tensor after the exchange. On a CPU heads lie one after the other: kernels there read a head at a time."""
    batch, rows, heads, head_dim = deal.shape(tensor, rank, to_heads, like)
    if to_heads and like.device.type == "cpu":
        return like.new_empty(batch, heads, rows, head_dim).transpose(1, 2)
    return like.new_empty(batch, rows, heads, head_dim)


def _deliver(places: Sequence[Tensor], parts: Sequence[Tensor], deal: Deal, to_heads: bool) -> None:
    for i, (target, part) in enumerate(zip(places, parts, strict=True)):
        if not to_heads and deal.replicated(i):
            target += part
        else:
            target.copy_(part)


def all_to_all(tensors: Sequence[Tensor], deal: Deal, to_heads: bool, group: Group) -> list[Tensor]:
    """`exchange` with gradients, over a torch process group or a local one.

    Args:
        tensors: sequence shards if `to_heads`, else head shards.
        deal: how heads and sequence are cut.
        to_heads: the direction.
        group: the group of the Ulysses axis; with None, an axis of one rank, the tensors are returned as they are.
    """
    if group is None:
        return list(tensors)
    if isinstance(group, torch.distributed.ProcessGroup):
        plain = (list(deal.totals), deal.heads, list(deal.lengths), to_heads, group.group_name)
        return list(torch.ops.usp.all_to_all(list(tensors), *plain))
    return list(_Exchange.apply(deal, to_heads, transports.load("auto", group), *tensors))


@torch.library.custom_op("usp::all_to_all", mutates_args=())
def _op(
    tensors: Sequence[Tensor], totals: Sequence[int], heads: int, lengths: Sequence[int], to_heads: bool, group: str
) -> list[Tensor]:
    return exchange(tensors, Deal(heads, tuple(totals), tuple(lengths)), to_heads, P2P(resolve(group)))


@_op.register_fake
def _(tensors, totals, heads, lengths, to_heads, group):
    deal, rank = Deal(heads, tuple(totals), tuple(lengths)), P2P(resolve(group)).rank
    return [_empty(t, deal, i, rank, to_heads) for i, t in enumerate(tensors)]


def _setup_context(ctx, inputs, output) -> None:
    _, *ctx.plain = inputs


def _backward(ctx, grads):
    totals, heads, lengths, to_heads, group = ctx.plain
    return _op([grad.contiguous() for grad in grads], totals, heads, lengths, not to_heads, group), *(None,) * 5


_op.register_autograd(_backward, setup_context=_setup_context)


class _Exchange(torch.autograd.Function):
    """The same for groups that have no name to pass to an op: threads of one process."""

    @staticmethod
    def forward(ctx, deal, to_heads, transport, *tensors):
        ctx.plain = deal, to_heads, transport
        return tuple(exchange(tensors, deal, to_heads, transport))

    @staticmethod
    def backward(ctx, *grads):
        deal, to_heads, transport = ctx.plain
        return None, None, None, *exchange(grads, deal, not to_heads, transport)
