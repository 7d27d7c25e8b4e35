"""Rings inside nodes and one across: a block crosses during a whole round inside (LoongTrain, Gu et al. 2024).

"double_ring:W" is for rings with W neighbours in each node. Every rank sends across, where in a plain ring the last of
a node does, and R/W - 1 blocks cross instead of R - 1.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from usp import transports
from usp.errors import InputError
from usp.transports.base import Flight, Shape, Stop, Transport, add_
from usp.transports.local import LocalGroup


class DoubleRing(Transport):
    """A ring of rings, each a plain one: the inner one walks the ranks of a node, the outer one the nodes.

    Args:
        group: of the whole ring.
        width: ranks of the ring in each node, neighbours on it.
    """

    group_types = (dist.ProcessGroup, LocalGroup)

    def __init__(self, group: dist.ProcessGroup | LocalGroup, width: int = 0) -> None:
        self._whole = transports.load("auto", group)
        self.rank, self.size, self._width = self._whole.rank, self._whole.size, width
        if not 1 < width < self.size or self.size % width:
            fits = ", ".join(str(w) for w in range(2, self.size) if self.size % w == 0) or "none"
            raise InputError(
                f"double_ring:{width or ''} over a ring of {self.size}: the number of its ranks in each node must "
                f"divide it and be neither 1 nor all; {fits} would"
            )
        node, place = divmod(self.rank, width)
        self._inside = Part(self._whole, range(node * width, (node + 1) * width))
        self._across = Part(self._whole, range(place, self.size, width))

    @override
    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Flight:
        return self._whole.exchange(sends, receives)

    @override
    def name(self, rank: int) -> str:
        return self._whole.name(rank)

    @override
    def circulate(self, own: Sequence[Tensor], shapes: Sequence[Sequence[Shape]], hops: int) -> Iterator[Stop]:
        """As in a plain ring, but in another order, and all blocks come by however many are needed."""
        if not hops:
            yield from super().circulate(own, shapes, 0)
            return
        first: Stop | None = None
        for turn in self._across.circulate(own, shapes[self._inside.rank :: self._width], self._across.size - 1):
            if first is not None and turn.owner == self._across.rank:  # the last message across is under way
                first.comes_again = False
                yield first
                if first.gradients is not None and turn.gradients is not None:
                    add_(first.gradients, turn.gradients)
                turn.gradients = first.gradients
                continue
            begin = turn.owner * self._width
            head: Stop | None = None  # of the round; it comes again inside the node, but the first one across nodes
            start: Stop | None = None
            for inner in self._inside.circulate(turn.tensors, shapes[begin : begin + self._width], self._width - 1):
                if head is None or inner is not start:
                    stop = Stop(begin + inner.owner, inner.tensors, comes_again=inner.comes_again)
                    start, head, first = start or inner, head or stop, first or stop
                elif head is first:
                    continue
                else:
                    stop, head.comes_again = head, False
                yield stop
                if stop is first:  # its gradients are this rank's own, and not yet all of them
                    stop.tensors = list(own)
                else:
                    inner.gradients = stop.gradients
            assert start is not None  # a ring has at least one stop
            turn.gradients = start.gradients


class Part(Transport):
    """Some ranks of a transport as an axis of their own."""

    def __init__(self, whole: Transport, ranks: Sequence[int]) -> None:
        self._whole, self._ranks = whole, ranks
        self.rank, self.size = ranks.index(whole.rank), len(ranks)

    @override
    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Flight:
        sides = ({self._ranks[peer]: t for peer, t in side.items()} for side in (sends, receives))
        return self._whole.exchange(*sides)

    @override
    def name(self, rank: int) -> str:
        return self._whole.name(self._ranks[rank])
