"""Ranks as threads of one process: the whole library without process groups, for tests and for teaching.

```python
from usp.transports import local


def attend(topology):
    q, k, v = (usp.shard(x, topology, layout="zigzag") for x in (query, key, value))
    return usp.attention(q, k, v, topology=topology, layout="zigzag", is_causal=True)


shards = local.run(attend, ulysses_degree=2, ring_degree=2)
```
"""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from typing_extensions import override

from usp.agreement import Options
from usp.errors import TransportError
from usp.placement import place
from usp.topology import Topology, assemble
from usp.transports.base import Flight, Transport

T = TypeVar("T")


class Hub:
    """The mailboxes between the threads of one run."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.failed = threading.Event()
        self._boxes: dict[tuple[int, int, str], queue.Queue[Tensor]] = {}
        self._lock = threading.Lock()

    def box(self, source: int, target: int, axis: str) -> queue.Queue[Tensor]:
        """The queue of messages from one thread to another on one axis."""
        with self._lock:
            return self._boxes.setdefault((source, target, axis), queue.Queue())


@dataclass(frozen=True, eq=False)
class LocalGroup:
    """One axis as one thread sees it: the threads on it, by their global ranks."""

    hub: Hub
    axis: str
    ranks: tuple[int, ...]
    rank: int

    def size(self) -> int:
        """Number of threads on the axis."""
        return len(self.ranks)


class Local(Transport):
    """Messages as tensors in queues."""

    group_types = (LocalGroup,)

    def __init__(self, group: LocalGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank, group.size()

    @override
    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Flight:
        for peer, tensor in sends.items():
            if tensor.numel():
                self._box(self.rank, peer).put(tensor.detach().clone())  # the sender may go on and change it
        return Arrivals(
            self.group.hub,
            [(self.name(peer), self._box(peer, self.rank), t) for peer, t in receives.items() if t.numel()],
        )

    @override
    def name(self, rank: int) -> str:
        return f"rank {self.group.ranks[rank]}"

    def _box(self, source: int, target: int) -> queue.Queue[Tensor]:
        ranks = self.group.ranks
        return self.group.hub.box(ranks[source], ranks[target], self.group.axis)


class Arrivals:
    """Messages that have been asked for."""

    def __init__(self, hub: Hub, awaited: Sequence[tuple[str, queue.Queue[Tensor], Tensor]]) -> None:
        self._hub, self._awaited = hub, awaited

    def wait(self) -> None:
        """Blocks until all have arrived."""
        for peer, box, target in self._awaited:
            target.copy_(self._next(box, peer))

    def _next(self, box: queue.Queue[Tensor], peer: str) -> Tensor:
        waited, step = 0.0, 0.05
        while waited < self._hub.timeout_seconds:
            try:
                return box.get(timeout=step)
            except queue.Empty:
                waited += step
            if self._hub.failed.is_set():
                raise TransportError(f"stopped waiting for {peer}: another rank failed")
        raise TransportError(f"{peer} sent nothing for {self._hub.timeout_seconds:g} s")


def run(
    work: Callable[[Topology], T], *, ulysses_degree: int = 1, ring_degree: int = 1, timeout_seconds: float = 60.0
) -> list[T]:
    """Runs `work(topology)` in one thread a rank and returns the results in rank order.

    Args:
        work: called in every thread with that rank's topology; forward, backward and autograd all work there.
        ulysses_degree: size of the Ulysses axis.
        ring_degree: size of the ring axis.
        timeout_seconds: how long a rank waits for another's message.

    Raises:
        Exception: whatever the first rank to fail raised; the others stop waiting for it.
    """
    grids = place(["local"] * (ulysses_degree * ring_degree), ulysses_degree, ring_degree)
    hub, store = Hub(timeout_seconds), HashStore()
    world = range(ulysses_degree * ring_degree)
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def group(axis: str, ranks: tuple[int, ...], rank: int) -> LocalGroup | None:
        return LocalGroup(hub, axis, ranks, ranks.index(rank)) if len(ranks) > 1 else None

    def body(rank: int) -> None:
        options = Options(timeout=timedelta(seconds=timeout_seconds))
        topology = assemble(rank, grids, ("local",) * len(world), store, group, options)
        try:
            results[rank] = work(topology)
        except BaseException as failure:  # re-raised below, in the caller's thread
            failures.append(failure)
            hub.failed.set()
            topology.object(failure)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in world]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in world]
