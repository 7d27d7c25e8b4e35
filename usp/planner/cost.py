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
from usp.planner.spec import ClusterSpec, DeviceSpec, LinkSpec
from usp.planner.survey import survey
from usp.planner.traffic import Layer, Shape, bytes_all_to_all
from usp.schedule import Schedule
from usp.tiles import Tile

BACKWARD_FLOPS = 2.5
"""FLOPs of the backward pass over those of the forward pass: five matrix products, where forward has two."""
FULL_SPEED_HEAD_DIM, HALF_SPEED_HEAD_DIM = 128, 22
"""Kernels are slower with small heads: speed grows as d / (d + 22) up to 128, which fits FlashAttention-2 on an A100 at
head_dim 32 and 128 (142 and 205 TFLOP/s; yunchang's tables, 131,072 tokens)."""
BUDGET = 2**10
"""How closely a ring is looked at, as for `survey`: zigzag rings of up to 16 ranks are not sampled."""


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
    device = machine.cluster.device  # frozen, so it has a hash
    steps = _steps(layer.shape, layer.schedule, layer.ulysses_degree, device, backward)  # pyright: ignore[reportArgumentType]
    busy = Seconds()
    for count, step in steps:
        busy += step * count
    exposed = _ring(layer, machine, steps, backward)
    return busy + Seconds(ring=exposed, all_to_all=sum(all_to_all_seconds(layer, machine, backward)))


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
    relative = _head_speed(dims / 2) / _head_speed(device.head_dim)
    return flops / (_tflops(device, length, backward) * 1e12 * relative)


def _head_speed(head_dim: float) -> float:
    """Speed with heads of some size, as a share of what large ones would have."""
    size = min(head_dim, FULL_SPEED_HEAD_DIM)
    return size / (size + HALF_SPEED_HEAD_DIM)


def _tflops(device: DeviceSpec, length: float, backward: bool) -> float:
    """Speed at a block length: interpolated between the logarithms of both, and in proportion below the shortest."""
    points = [(p.block_length, p.backward_tflops if backward else p.forward_tflops) for p in device.attention]
    if length <= points[0][0]:
        return points[0][1] * length / points[0][0]
    for (short, slow), (long, fast) in pairwise(points):
        if length <= long:
            return slow * (fast / slow) ** (log(length / short) / log(long / short))
    return points[-1][1]


@lru_cache(maxsize=64)  # whatever the transport
def _steps(
    shape: Shape, schedule: Schedule, ulysses_degree: int, device: DeviceSpec, backward: bool
) -> tuple[tuple[int, Seconds], ...]:
    """(how often, what the busiest rank does with a block): its kernels, and joining their results to what it has."""
    layer = Layer(shape, schedule, ulysses_degree)
    heads, seen = kernel_heads(layer), survey(schedule, BUDGET)
    steps = [block_seconds(shape, seen.slowest_tiles(i), heads, device, backward) for i in range(len(seen.hops))]
    if schedule.ring_degree == 1:
        steps[0] = Seconds(steps[0].compute)  # a single block is not merged into anything
    return tuple((count, step) for (_, count), step in zip(seen.hops, steps, strict=True))


def kernel_heads(layer: Layer) -> list[int]:
    """Query heads of each kernel call that the busiest Ulysses rank makes for a tile: one for each uniform group."""
    own = groups(layer.shape.heads, layer.shape.kv_heads, layer.ulysses_degree, layer.busiest_ulysses_rank)
    return [run.q.stop - run.q.start for run in runs(own)]


def block_seconds(
    shape: Shape, tiles: Sequence[Tile], heads: Sequence[int], device: DeviceSpec, backward: bool
) -> Seconds:
    """The kernel calls for the tiles of a block, one for each of `kernel_heads`, and joining their results."""
    dims, launch, compute, rows = shape.head_dim + shape.value_dim, device.launch_us * 1e-6, 0.0, 0
    for tile in tiles:
        rows += (tile.q.stop - tile.q.start) * sum(heads)
        compute += sum(max(launch, kernel_seconds(tile, shape.batch, n, dims, device, backward)) for n in heads)
    merge = shape.batch * rows * shape.value_dim * device.merge_bytes / (device.memory_gb_per_s * 1e9)
    merge += len(tiles) * len(heads) * launch
    return Seconds(compute=compute, merge=merge * (2 if backward else 1))


def _ring(layer: Layer, machine: Machine, steps: Sequence[tuple[int, Seconds]], backward: bool) -> float:
    """Seconds of the ring's transfers that are not hidden behind the steps."""
    ring, last, width = layer.schedule.ring_degree, layer.schedule.hops, layer.width
    if not last:
        return 0.0
    elements = layer.schedule.length(0) * layer.token_elements(layer.busiest_ulysses_rank)
    across, inside = machine.path(machine.ring), (machine.cluster.intra, machine.ring.devices)
    moved = (elements * layer.shape.dtype_bytes, elements * layer.shape.gradient_bytes if backward else 0)
    times = [step.total for count, step in steps for _ in range(count)]
    # Half of the work on its own block is kept for the time in which the last gradients come home.
    kept = times[0] / 2 if backward else 0.0
    times[0] -= kept
    if layer.transport == "all_gather":
        return _exposed(across, moved[0] * (ring - 1), times[0]) + _exposed(across, moved[1] * last, kept)
    lost = 0.0
    if width < ring:
        # Rounds inside nodes, at whose end gradients come home there, beside half of the round's first block. Of its
        # own block a rank keeps that half for the last message across. Blocks cross meanwhile.
        times += [0.0] * (ring - len(times))
        rounds = [times[first : first + width] for first in range(0, ring, width)]
        halves = [hops[0] / 2 if turn and backward else 0.0 for turn, hops in enumerate(rounds)]
        exposed = [
            _circulating(inside, moved, [hops[0] - half, *hops[1:]]) + _exposed(inside, moved[1], half)
            for half, hops in zip(halves, rounds, strict=True)
        ]
        times, lost = [sum(pair) for pair in zip(map(sum, rounds), exposed, strict=True)], sum(exposed)
    return lost + _circulating(across, moved, times) + _exposed(across, moved[1], kept)


def _circulating(path: tuple[LinkSpec, int], moved: tuple[int, int], times: Sequence[float]) -> float:
    """Seconds that moving adds to hops of so many: a block at each but the last, and gradients from the third on."""
    block, gradient = moved
    sizes = ((block if hop + 1 < len(times) else 0) + (gradient if hop > 1 else 0) for hop in range(len(times)))
    return sum(_exposed(path, sent, time) for sent, time in zip(sizes, times, strict=True))


def _exposed(path: tuple[LinkSpec, int], sent: int, computing: float) -> float:
    """Seconds that a message adds to computing at the same time."""
    link, devices = path
    transfer = message_seconds(link, "ring", devices, sent) if sent else 0.0
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
