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

from usp.transports.base import Shape, Stop, add_, flatten, unflatten
from usp.transports.p2p import P2P


class AllGather(P2P):
    """One all-gather in place of the hops; the same blocks in the same order."""

    @override
    def circulate(self, own: Sequence[Tensor], shapes: Sequence[Sequence[Shape]], hops: int) -> Iterator[Stop]:
        stops = [Stop(self.rank, list(own))]
        work, gathered = self._gather(own, shapes) if hops else (None, [])
        yield stops[0]
        if work is not None:
            work.wait()
        for hop in range(1, hops + 1):
            owner = (self.rank - hop) % self.size
            numel = sum(map(math.prod, shapes[owner]))
            stops.append(Stop(owner, unflatten(gathered[owner][:numel], shapes[owner])))
            yield stops[-1]
        total = stops[0].gradients
        if total is None or not hops:
            return
        sends = {stop.owner: flatten(stop.gradients) for stop in stops[1:] if stop.gradients is not None}
        numel = sum(t.numel() for t in total)
        receives = {(self.rank + hop) % self.size: total[0].new_empty(numel) for hop in range(1, hops + 1)}
        self.exchange(sends, receives).wait()
        for shares in receives.values():
            add_(total, unflatten(shares, shapes[self.rank]))

    def _gather(self, own: Sequence[Tensor], shapes: Sequence[Sequence[Shape]]) -> tuple[dist.Work, list[Tensor]]:
        """Starts the collective, which wants equal sizes: blocks are padded to the longest."""
        longest = max(sum(map(math.prod, block)) for block in shapes)
        mine = flatten(own)
        padded = torch.cat([mine, mine.new_zeros(longest - len(mine))])
        gathered = list(padded.new_empty(self.size, longest))
        work = dist.all_gather(gathered, padded, group=self.group, async_op=True)
        assert work is not None  # async_op
        return work, gathered
