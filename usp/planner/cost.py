"""How long an attention layer takes: kernels, hops and all-to-alls, from the schedule that the ring executes.

A hop takes as long as the longer of computing with the present block and fetching the next one (Ring Attention, Liu et
al. 2023); the all-to-alls before and after are exposed (DeepSpeed-Ulysses, Jacobs et al. 2023). Every hop waits for its
slowest rank. What a hop costs besides - launching its kernels, merging its output, its message's latency - is what
makes long rings lose on fast links, and is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import log
from typing import Literal

from usp.heads import groups, runs
from usp.mask import Tile
from usp.planner.spec import ClusterSpec, DeviceSpec, LinkSpec
from usp.planner.traffic import Layer, bytes_all_to_all
from usp.schedule import Schedule

BACKWARD_FLOPS = 2.5
"""FLOPs of the backward pass over those of the forward pass: five matrix products, where forward has two."""
REFERENCE_HEAD_DIM = 128
HALF_SPEED_HEAD_DIM = 22.0
"""Kernels are slower with small heads: speed grows as d / (d + 22), which fits FlashAttention-2 on an A100 at head_dim
32 and 128 (142 and 205 TFLOP/s; yunchang's tables, 131,072 tokens)."""
EXACT_RING = 16
"""Rings up to this size are looked at rank by rank and hop by hop, longer ones at a sample of both."""


@dataclass(frozen=True)
class Span:
    """Where the members of a group lie.

    Attributes:
        devices: from the first to the last device of the group in one node, the widest there is.
        reach: from the first to the last device of the group, wherever they are.
        local: members in one node, the fewest there are.
        size: members.
    """

    devices: int
    reach: int
    local: int
    size: int

    @property
    def crosses(self) -> bool:
        """Whether the group spans nodes."""
        return self.local < self.size


@dataclass(frozen=True)
class Seconds:
    """Where the time of one attention layer on the slowest rank goes.

    Attributes:
        compute: kernels.
        merge: joining the results of blocks.
        ring: what of the ring's transfers no computation hides.
        all_to_all: the exchanges of the Ulysses group.
    """

    compute: float = 0.0
    merge: float = 0.0
    ring: float = 0.0
    all_to_all: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(
            self.compute + other.compute,
            self.merge + other.merge,
            self.ring + other.ring,
            self.all_to_all + other.all_to_all,
        )

    def __mul__(self, times: float) -> "Seconds":
        return Seconds(self.compute * times, self.merge * times, self.ring * times, self.all_to_all * times)

    @property
    def total(self) -> float:
        """All of it."""
        return self.compute + self.merge + self.ring + self.all_to_all


@dataclass(frozen=True)
class Machine:
    """What a layer runs on: the cluster, and where the groups of both axes lie in it."""

    cluster: ClusterSpec
    ulysses: Span
    ring: Span

    def path(self, group: Span) -> tuple[LinkSpec, int]:
        """The slowest link between neighbours of a group, and how many devices it spans there."""
        return (self.cluster.inter, group.reach) if group.crosses else (self.cluster.intra, group.devices)


def span(groups: Sequence[tuple[int, ...]], slots_per_node: int, devices_per_rank: int) -> Span:
    """The span of the worst of some groups of ranks, with ranks dealt to nodes in order.

    Args:
        groups: ranks of each group; all of one size.
        slots_per_node: ranks of a node.
        devices_per_rank: devices of a rank (its tensor-parallel group).
    """
    widest, fewest = 1, len(groups[0])
    for group in groups:
        members: dict[int, list[int]] = {}
        for rank in group:
            members.setdefault(rank // slots_per_node, []).append(rank)
        widest = max(widest, *(max(ranks) - min(ranks) + 1 for ranks in members.values()))
        fewest = min(fewest, *(len(ranks) for ranks in members.values()))
    reach = max(max(group) - min(group) + 1 for group in groups)
    return Span(widest * devices_per_rank, reach * devices_per_rank, fewest, len(groups[0]))


def seconds(layer: Layer, machine: Machine, backward: bool = False) -> Seconds:
    """Time of one pass through one attention layer on the slowest rank."""
    device = machine.cluster.device
    ulysses_rank = layer.busiest_ulysses_rank
    steps = [_step(layer, ulysses_rank, tiles, device, backward) for _, tiles in hops(layer.schedule)]
    times = [times for times, _ in hops(layer.schedule)]
    steps[0] = steps[0] if layer.schedule.ring_degree > 1 else Seconds(steps[0].compute)
    busy = Seconds()
    for count, step in zip(times, steps, strict=True):
        busy += step * count
    exposed = _ring(layer, machine, list(zip(times, steps, strict=True)), ulysses_rank, backward)
    return busy + Seconds(ring=exposed, all_to_all=sum(all_to_all_seconds(layer, machine, backward)))


@lru_cache(maxsize=1024)
def hops(schedule: Schedule) -> tuple[tuple[int, tuple[Tile, ...]], ...]:
    """The hops of a ring, each with the tiles of the rank that has most to compute there: what all others wait for.

    Returns:
        (how many hops it stands for, tiles), from the first hop to the last. In rings beyond `EXACT_RING` ranks both
        hops and ranks are a sample, evenly spread and with the ends of the ring.
    """
    last = schedule.hops
    looked_at = _sample(last + 1)
    found = []
    for hop, following in zip(looked_at, [*looked_at[1:], last + 1], strict=True):
        ranks = _sample(schedule.ring_degree, hop - 1, hop, hop + 1)
        slowest = max(ranks, key=lambda rank: schedule.pairs(rank, (rank - hop) % schedule.ring_degree))
        found.append((following - hop, schedule.tiles(slowest, (slowest - hop) % schedule.ring_degree)))
    return tuple(found)


def _sample(size: int, *wanted: int) -> list[int]:
    """At most about `EXACT_RING` of range(size), in order, with both ends and what is wanted."""
    if size <= EXACT_RING:
        return list(range(size))
    even = {i * (size - 1) // (EXACT_RING - 1) for i in range(EXACT_RING)}
    return sorted(even | {i for i in wanted if 0 <= i < size} | {1})


def kernel_seconds(tile: Tile, batch: int, heads: int, dims: int, device: DeviceSpec, backward: bool = False) -> float:
    """Time of one kernel call.

    The speed of a tile is that of the causal square whose rows are as long on average: 2 x area / the longer side.

    Args:
        tile: rows, columns and band.
        batch: sequences.
        heads: query heads.
        dims: head_dim of q and k plus that of v.
        device: whose speeds are taken.
        backward: of the backward pass.
    """
    flops = 2.0 * batch * heads * dims * tile.area * (BACKWARD_FLOPS if backward else 1.0)
    length = 2 * tile.area / max(tile.q.stop - tile.q.start, tile.k.stop - tile.k.start)
    size = dims / 2
    slower = (size / (size + HALF_SPEED_HEAD_DIM)) / (REFERENCE_HEAD_DIM / (REFERENCE_HEAD_DIM + HALF_SPEED_HEAD_DIM))
    return flops / (_tflops(device, length, backward) * 1e12 * min(slower, 1.0))


def _tflops(device: DeviceSpec, length: float, backward: bool) -> float:
    """Speed at a block length: interpolated between the logarithms of both, and in proportion below the shortest."""
    points = [(p.block_length, p.backward_tflops if backward else p.forward_tflops) for p in device.attention]
    if length <= points[0][0]:
        return points[0][1] * length / points[0][0]
    for (short, slow), (long, fast) in pairwise(points):
        if length <= long:
            return slow * (fast / slow) ** (log(length / short) / log(long / short))
    return points[-1][1]


def _step(layer: Layer, ulysses_rank: int, tiles: Sequence[Tile], device: DeviceSpec, backward: bool) -> Seconds:
    """What a rank does with one block: its kernels, and joining their results to what it has."""
    shape, dims = layer.shape, layer.shape.head_dim + layer.shape.value_dim
    calls = [
        (tile, run.q.stop - run.q.start)
        for tile in tiles
        for run in runs(groups(shape.heads, shape.kv_heads, layer.ulysses_degree, ulysses_rank))
    ]
    compute = sum(
        max(device.launch_us * 1e-6, kernel_seconds(tile, shape.batch, heads, dims, device, backward))
        for tile, heads in calls
    )
    rows = sum((tile.q.stop - tile.q.start) * heads for tile, heads in calls) * shape.value_dim
    merged = shape.batch * rows * device.merge_bytes / (device.memory_gb_per_s * 1e9)
    merged += len(calls) * device.launch_us * 1e-6
    return Seconds(compute=compute, merge=merged * (2 if backward else 1))


def _ring(
    layer: Layer, machine: Machine, steps: Sequence[tuple[int, Seconds]], ulysses_rank: int, backward: bool
) -> float:
    """Seconds of the ring's transfers that are not hidden behind the steps."""
    last = layer.schedule.hops
    if not last:
        return 0.0
    elements = layer.schedule.length(0) * layer.token_elements(ulysses_rank)
    link, devices = machine.path(machine.ring)
    block, gradient = elements * layer.shape.dtype_bytes, elements * layer.shape.gradient_bytes if backward else 0

    def moving(sent: float) -> float:
        return message_seconds(link, "ring", devices, sent) if sent else 0.0

    if layer.transport == "all_gather":
        gather = moving(block * (layer.schedule.ring_degree - 1))
        return _exposed(gather, steps[0][1].total, link) + moving(gradient * last)
    exposed, hop = 0.0, 0
    for count, step in steps:
        for _ in range(count):
            # The next block, and the gradients of the block before, move while this one is used.
            sent = (block if hop < last else 0) + (gradient if hop > 0 else 0)
            exposed += _exposed(moving(sent), step.total, link)
            hop += 1
    return exposed + moving(gradient)  # the last gradients, on their way home


def _exposed(transfer: float, computing: float, link: LinkSpec) -> float:
    """Seconds that a transfer adds to computing at the same time."""
    return max(transfer - computing, 0.0) + (1 - link.overlap) * min(transfer, computing)


def message_seconds(link: LinkSpec, kind: Literal["ring", "all_to_all"], devices: int, sent: float) -> float:
    """Time in which every member of a group sends so many bytes and receives as many.

    Args:
        link: what the group lies on.
        kind: whether each member sends to the next one, or to all others.
        devices: the span of the group.
        sent: bytes that each member sends.
    """
    return link.latency_us * 1e-6 + sent / (link.speed(kind, devices) * 1e9) * (1 if link.full_duplex else 2)


def all_to_all_seconds(layer: Layer, machine: Machine, backward: bool = False) -> tuple[float, float]:
    """Time of the exchanges (before, after) the attention of one pass on the busiest rank."""
    if layer.ulysses_degree == 1:
        return 0.0, 0.0
    cluster, group = machine.cluster, machine.ulysses
    outside = (group.size - group.local) / (group.size - 1)

    def exchange(sent: int) -> float:
        inside = message_seconds(cluster.intra, "all_to_all", group.devices, sent * (1 - outside))
        across = message_seconds(cluster.inter, "all_to_all", group.reach, sent * outside)
        packing = 4 * sent / (cluster.device.memory_gb_per_s * 1e9)  # read and written on either side
        return packing + (max(inside, across) if group.crosses else inside)

    before, after = bytes_all_to_all(layer, 0, layer.busiest_ulysses_rank, backward)
    return exchange(before), exchange(after)
