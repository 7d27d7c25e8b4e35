"""What a transport is, and the ring as it follows from one primitive: an exchange of messages with peers."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor
from torch._C._profiler import _RecordFunctionFast as span  # record_function, at a twentieth of its time

from usp.errors import TransportError

Group = Any
"""What a transport runs over: a torch ProcessGroup, None for an axis of size 1, or a local group of threads."""


Shape = Sequence[int]


class Flight(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Blocks (on CUDA: the current stream) until they have arrived and what was sent may be reused.

        Raises:
            TransportError: a peer failed, or did not deliver within the time-out of the group.
        """


@contextmanager
def during(what: str) -> Iterator[None]:
    """What an error of a transport begins with."""
    try:
        yield
    except TransportError as error:
        raise TransportError(f"{what}: {error}") from error


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Where a rank waits for others: `during`, and a span of the profiler."""
    with span(f"usp::{what}: wait"), during(what):
        yield


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

    def name(self, rank: int) -> str:
        """Who a rank of the axis is, for people."""
        return f"rank {rank} of {self.size}"

    def circulate(self, own: Sequence[Tensor], shapes: Sequence[Sequence[Shape]], hops: int) -> Iterator["Stop"]:
        """Passes every rank's tensors round the ring, `hops` times from each rank to the next.

        The next block is under way while the present one is used. The caller may leave gradients at a stop: those of
        other ranks' blocks follow the block one hop behind, are summed on the way, and come home to its owner with the
        last message. While that is under way this rank's own block comes again, for what is left to do with it.

        Args:
            own: this rank's block, tensors of one dtype that travel as one message.
            shapes: the shapes of every rank's block.
            hops: how often blocks move; 0 to size - 1.

        Yields:
            A stop for each block that comes by, this rank's own first; and, if gradients were left at others, this
            rank's own once more. When the iteration has ended, the first stop holds the sum of the gradients that all
            ranks left for this rank's block.
        """
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        numels = [sum(map(math.prod, block)) for block in shapes]
        block = flatten(own) if hops else own[0].new_empty(0)
        first = stop = Stop(self.rank, unflatten(block, shapes[self.rank]) if hops else list(own), comes_again=hops > 0)
        behind: Move | None = None
        for hop in range(hops + 1):
            following = (stop.owner - 1) % self.size
            with during(f"ring hop {hop}"):
                ahead = self._move(block, after, before, numels[following]) if hop < hops else None
            with span(f"usp::ring hop {hop}: compute"):
                yield stop
            if stop is first:
                first.tensors = list(own)  # the message is for the first hop only
            with waiting(f"ring hop {hop}"):
                if stop.gradients is not None and hop:
                    if hop < hops:
                        way = after, before, numels[following]
                    else:
                        way = stop.owner, (self.rank + hops) % self.size, numels[self.rank]
                    behind = self._move(_take(stop, None if behind is None else behind.wait()), *way)
                if ahead is not None:
                    block = ahead.wait()
                    stop = Stop(following, unflatten(block, shapes[following]))
        if behind is not None:
            first.comes_again, stop, block = False, first, None  # the last block is needed no more
            with span("usp::ring home: compute"):
                yield first
            with waiting("ring home"):
                add_home(first, [behind.wait()], shapes[self.rank])

    def _move(self, tensor: Tensor, target: int, source: int, numel: int) -> "Move":
        """Sends `tensor` to `target` and receives `numel` elements from `source`."""
        received = tensor.new_empty(numel)
        return Move(self.exchange({target: tensor}, {source: received}), received)


@dataclass
class Stop:
    """One block at one rank.

    Attributes:
        owner: the rank whose block it is.
        tensors: the block.
        gradients: what this rank adds to the block's gradients. The caller leaves them here, and gives them up: every
            rank of a ring at every stop, or none at any.
        comes_again: whether this stop comes a second time if gradients are left; those of both times may be left then.
    """

    owner: int
    tensors: list[Tensor]
    gradients: list[Tensor] | None = None
    comes_again: bool = False


class Move:
    """A tensor on its way here."""

    def __init__(self, flight: Flight, tensor: Tensor) -> None:
        self._flight, self._tensor = flight, tensor

    def wait(self) -> Tensor:
        """The tensor, once it is here."""
        self._flight.wait()
        return self._tensor


def _take(stop: Stop, arrived: Tensor | None) -> Tensor:
    """The gradients left at a stop, added to those that came after it, as one message.

    They are forgotten at the stop: memory is short on the way home.
    """
    left, stop.gradients = stop.gradients, None
    assert left is not None  # asked by the caller
    if arrived is None:
        return flatten(left)
    add_(unflatten(arrived, [share.shape for share in left]), left)
    return arrived


def add_home(first: Stop, messages: Iterable[Tensor], shapes: Sequence[Shape]) -> None:
    """Adds what other ranks left for this rank's block to what it left itself."""
    for message in messages:
        shares = unflatten(message, shapes)
        if first.gradients is None:
            first.gradients = [share.clone() for share in shares]
        else:
            add_(first.gradients, shares)


def add_(totals: Sequence[Tensor], shares: Sequence[Tensor]) -> None:
    """Adds tensor by tensor, in place."""
    for total, share in zip(totals, shares, strict=True):
        total += share


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """One flat message of several tensors of one dtype."""
    message = tensors[0].new_empty(sum(t.numel() for t in tensors))
    for part, tensor in zip(unflatten(message, [t.shape for t in tensors]), tensors, strict=True):
        part.copy_(tensor)
    return message


def unflatten(message: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """The tensors of a flat message, as views of it."""
    parts = message.split_with_sizes([math.prod(shape) for shape in shapes])  # half the time of split
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]
