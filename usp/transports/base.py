"""What a transport is, and the ring as it follows from one primitive: an exchange of messages with peers."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

Group = Any
"""What a transport runs over: a torch ProcessGroup, None for an axis of size 1, or a local group of threads."""


class Flight(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Blocks (on CUDA: the current stream) until they have arrived and what was sent may be reused."""


class Transport(ABC):
    """One rank's end of an axis of `size` ranks.

    Attributes:
        rank: this rank's index on the axis.
        size: number of ranks on it.
    """

    group_types: ClassVar[tuple[type, ...]]
    rank: int
    size: int

    @abstractmethod
    def __init__(self, group: Group) -> None:
        """Takes this rank's end of `group`."""

    @abstractmethod
    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Flight:
        """Starts to send contiguous tensors to peers and to receive into others, by peer rank.

        Both ends know every size; nothing is sent for an empty tensor. Messages between two ranks arrive in the order
        in which the exchanges were started.
        """

    def circulate(
        self, block: Tensor, numels: Sequence[int], hops: int, gradient: Tensor | None = None
    ) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Passes every rank's flat `block` round the ring, `hops` times from each rank to the next.

        The next block is under way while the present one is used. With `gradient`, a partial gradient of the block is
        handed out beside it: what the caller adds there follows the block one hop behind, collects every rank's share,
        and the last message brings it home to its owner.

        Args:
            block: this rank's own block, flat and contiguous.
            numels: number of elements of every rank's block.
            hops: how often blocks move; 0 to size - 1.
            gradient: flat tensor of zeros like `block`, in the dtype that gradients accumulate in. Holds the sum over
            all
                ranks when the iteration has ended.

        Yields:
            (owner, block, gradient share): the owner's rank, its block, and zeros to add this rank's share to, or None.
        """
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        collected: Move | None = None
        for hop in range(hops + 1):
            owner = (self.rank - hop) % self.size
            following = numels[(owner - 1) % self.size]
            ahead = self._move(block, after, before, following) if hop < hops else None
            share = None if gradient is None else gradient.new_zeros(numels[owner])
            yield owner, block, share
            if gradient is not None and share is not None:
                if collected is not None:
                    share += collected.wait()
                if hop < hops:
                    collected = self._move(share, after, before, following)
                else:
                    source = (self.rank + hops) % self.size
                    gradient.copy_(self._move(share, owner, source, len(gradient)).wait())
            if ahead is not None:
                block = ahead.wait()

    def _move(self, tensor: Tensor, target: int, source: int, numel: int) -> "Move":
        """Sends `tensor` to `target` and receives `numel` elements from `source`, which may both be this rank."""
        if target == self.rank:
            return Move(None, tensor)
        received = tensor.new_empty(numel)
        return Move(self.exchange({target: tensor}, {source: received}), received)


class Move:
    """A tensor on its way here."""

    def __init__(self, flight: Flight | None, tensor: Tensor) -> None:
        self._flight, self._tensor = flight, tensor

    def wait(self) -> Tensor:
        """The tensor, once it is here."""
        if self._flight is not None:
            self._flight.wait()
        return self._tensor


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """One flat message of several tensors of one dtype."""
    message = tensors[0].new_empty(sum(t.numel() for t in tensors))
    for part, tensor in zip(unflatten(message, [t.shape for t in tensors]), tensors, strict=True):
        part.copy_(tensor)
    return message


def unflatten(message: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors of a flat message, as views of it."""
    parts = message.split([math.prod(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]
