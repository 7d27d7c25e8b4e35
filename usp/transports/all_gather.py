"""Every block to every rank at once: fewer, larger messages for memory of the whole sequence's keys and values.

Worth it when kv is small beside q (GQA with few kv heads, short sequences); the first block is used while the others
arrive. Gradient shares go straight to their owners, as a reduce-scatter does.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from usp.transports.base import Flight, Shape, Stop, add_home, flatten, span, unflatten, waiting
from usp.transports.p2p import P2P, Works


class AllGather(P2P):
    """One all-gather in place of the hops; the same blocks in the same order."""

    @override
    def circulate(self, own: Sequence[Tensor], shapes: Sequence[Sequence[Shape]], hops: int) -> Iterator[Stop]:
        flight, gathered = self._gather(own, shapes) if hops else (None, [])
        first, others = Stop(self.rank, list(own), comes_again=hops > 0), []
        with span("usp::ring hop 0: compute"):
            yield first
        with waiting("ring hop 0"):
            if flight is not None:
                flight.wait()
        for hop in range(1, hops + 1):
            owner = (self.rank - hop) % self.size
            numel = sum(map(math.prod, shapes[owner]))
            others.append(Stop(owner, unflatten(gathered[owner][:numel], shapes[owner])))
            with span(f"usp::ring hop {hop}: compute"):
                yield others[-1]
        if not others or others[-1].gradients is None:
            return
        sends = {stop.owner: flatten(stop.gradients) for stop in others if stop.gradients is not None}
        numel, like = sum(map(math.prod, shapes[self.rank])), sends[others[-1].owner]
        receives = {(self.rank + hop) % self.size: like.new_empty(numel) for hop in range(1, hops + 1)}
        flight = self.exchange(sends, receives)
        first.comes_again = False
        with span("usp::ring home: compute"):
            yield first
        with waiting("ring home"):
            flight.wait()
        add_home(first, receives.values(), shapes[self.rank])

    def _gather(self, own: Sequence[Tensor], shapes: Sequence[Sequence[Shape]]) -> tuple[Flight, list[Tensor]]:
        """Starts the collective, which wants equal sizes: blocks are padded to the longest."""
        longest = max(sum(map(math.prod, block)) for block in shapes)
        mine = flatten(own)
        padded = torch.cat([mine, mine.new_zeros(longest - len(mine))])
        gathered = list(padded.new_empty(self.size, longest))
        work = dist.all_gather(gathered, padded, group=self.group, async_op=True)
        assert work is not None  # async_op
        peers = [(True, peer) for peer in range(self.size) if peer != self.rank]
        return Works(self.group, [work], peers, [padded]), gathered
