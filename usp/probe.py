"""Measures the devices and links that the processes run on: what `usp plan` predicts times from.

All ranks measure the same thing at the same moment, as they would work, and the slowest one counts: ranks that share
cores, memory or a network card slow each other down here as they do there. A link is a fixed time and a bandwidth
(Hockney 1994), fitted to messages of several sizes between the same functions that attention sends with.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from usp import kernels, transports
from usp.errors import TopologyError
from usp.kernels.base import Call, Scores
from usp.mask import CAUSAL
from usp.merge import Accumulator
from usp.planner.spec import ClusterSpec, DeviceSpec, KernelSpeed, LinkSpec, SpanSpeed
from usp.topology import Topology
from usp.transports.base import Flight

TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for the others before it gives up."""
SHORTEST = 256
MESSAGE_BYTES = (2**10, 2**14, 2**18, 2**22, 2**24)
LONG_ENOUGH = 0.1
"""Seconds: no longer message is sent after one that took as long, unless there would be less than two sizes."""

Work = Callable[[], Any]
Points = Sequence[tuple[float, float]]
"""(bytes, seconds) of messages."""


@dataclass(frozen=True)
class Problem:
    """The attention that is measured.

    Attributes:
        heads: query heads and kv heads of a device.
        head_dim: of q, k and v.
        dtype: of q, k and v.
        max_length: longest block.
    """

    heads: int
    head_dim: int
    dtype: torch.dtype
    max_length: int

    @property
    def lengths(self) -> list[int]:
        """Block lengths to measure: 256, 512, ... up to the longest."""
        return [SHORTEST << i for i in range((self.max_length // SHORTEST).bit_length())]


class Meter:
    """Times what all ranks of the default process group do at the same moment.

    Args:
        device: this rank's device.
        seconds: how long to look at one thing, for three calls at least.
        track: wraps what is measured one after the other, with what it is: a progress bar, say.
    """

    def __init__(
        self, device: torch.device, seconds: float, track: Callable[[Sequence[int], str], Iterable[int]]
    ) -> None:
        self.device, self.seconds, self.track = device, seconds, track
        self._transport = transports.load("auto", dist.group.WORLD)

    def clock(self, work: Work) -> float:
        """Seconds of one call: the slowest rank's, median of batches. Every rank calls, and gets the same number."""
        self._batch(work, 1)  # warms up
        first = self._batch(work, 1)
        calls = max(2, min(500, int(self.seconds / first)))
        size = max(1, calls // 5)
        return median([first, *(self._batch(work, size) for _ in range(calls // size))])

    def once(self, work: Work) -> float:
        """Seconds of a single call, of the slowest rank."""
        return self._batch(work, 1)

    def messages(self, targets: Sequence[int], sources: Sequence[int], bytes_sent: int) -> Callable[[], Flight]:
        """What starts to send `bytes_sent` in equal parts to some global ranks while as much comes from others."""

        def parts(peers: Sequence[int]) -> dict[int, torch.Tensor]:
            return {p: torch.ones(bytes_sent // len(peers), dtype=torch.uint8, device=self.device) for p in peers}

        sends, receives = parts(targets), parts(sources)
        return lambda: self._transport.exchange(sends, receives)

    def _batch(self, work: Work, calls: int) -> float:
        """Seconds of a call, on average. Ends together on all ranks, so that the next one starts together."""
        self._synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        self._synchronize()
        seconds = torch.tensor((time.perf_counter() - start) / calls, dtype=torch.float64, device=self.device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(problem: Problem, meter: Meter) -> ClusterSpec:
    """Measures the cluster that the default process group spans; every rank of it calls and gets the same numbers.

    Raises:
        TopologyError: the nodes hold different numbers of ranks.
        KernelError: no kernel takes the problem.
        AgreementError: a rank did not come.
    """
    nodes = by_node(Topology.build(timeout=TIMEOUT).nodes)
    devices, rank = len(nodes[0]), dist.get_rank()
    home = next(node for node in nodes if rank in node)
    across = [node[home.index(rank)] for node in nodes]
    everyone = [member for node in nodes for member in node]
    device = measure_device(problem, meter, devices)
    intra = inter = None
    if devices > 1:
        groups = {k: _run(home, k) for k in _divisors(devices)}
        intra = measure_link(problem, meter, groups, [rank], "inside a node")
    if len(nodes) > 1:
        groups = {(k - 1) * devices + 1: _run(across, k) for k in _divisors(len(nodes))}
        groups |= {k * devices: _run(everyone, k * devices) for k in _divisors(len(nodes))}
        inter = measure_link(problem, meter, groups, home, "across nodes")
    intra = intra or _unmeasured(inter, "not measured (one device a node)")
    inter = inter or _unmeasured(intra, "not measured (one node)")
    name = f"measured: {len(nodes)} x {devices} {device.name}"
    return ClusterSpec(name=name, nodes=len(nodes), gpus_per_node=devices, device=device, intra=intra, inter=inter)


def by_node(nodes: Sequence[str]) -> list[list[int]]:
    """The global ranks of each node, from the node of every rank.

    Raises:
        TopologyError: they hold different numbers of ranks: a cluster is described as equal nodes.
    """
    members: dict[str, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        members[node].append(rank)
    if len(set(map(len, members.values()))) > 1:
        held = ", ".join(f"{node}: {len(ranks)}" for node, ranks in members.items())
        raise TopologyError(f"nodes hold different numbers of ranks ({held}): start as many on each to measure them")
    return list(members.values())


def measure_device(problem: Problem, meter: Meter, devices: int) -> DeviceSpec:
    """Measures a device, one of so many of its node."""
    cuda = meter.device.type == "cuda"
    speeds = [attention_speed(problem, meter, n) for n in meter.track(problem.lengths, "attention")]
    memory = meter.device, 2**30 if cuda else 2**26
    source, target = (torch.ones(memory[1], dtype=torch.uint8, device=memory[0]) for _ in range(2))
    gb_per_s = 2 * memory[1] / meter.clock(lambda: target.copy_(source)) / 1e9
    size = 8192 if cuda else 1024
    square = torch.ones(size, size, dtype=problem.dtype, device=meter.device)
    forward, _ = attention(problem, meter.device, 16)
    if cuda:
        total_bytes = torch.cuda.get_device_properties(meter.device).total_memory
    else:
        total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / devices
    return DeviceSpec(
        name=torch.cuda.get_device_name(meter.device) if cuda else "cpu",
        memory_gib=_short(total_bytes / 2**30),
        peak_tflops=_short(2 * size**3 / meter.clock(lambda: square @ square) / 1e12),
        memory_gb_per_s=_short(gb_per_s),
        attention=tuple(speeds),
        head_dim=problem.head_dim,
        launch_us=_short(meter.clock(forward) * 1e6),
        merge_bytes=_short(merge_seconds(problem, meter) * gb_per_s * 1e9),
    )


def attention(problem: Problem, device: torch.device, length: int) -> tuple[Work, Work]:
    """The forward and the backward pass of a causal block, with the kernel that the library would choose."""
    heads, dim = problem.heads, problem.head_dim
    q, k, v, dout = (torch.randn(1, length, heads, dim, dtype=problem.dtype, device=device) for _ in range(4))
    among = kernels.candidates("auto")
    kernel = among[kernels.select(among, Call(device.type, problem.dtype, dim, dim))]
    result = kernel.forward(q, k, v, CAUSAL, Scores(dim**-0.5))
    return (
        lambda: kernel.forward(q, k, v, CAUSAL, Scores(dim**-0.5)),
        lambda: kernel.backward(dout, q, k, v, result, CAUSAL, Scores(dim**-0.5)),
    )


def attention_speed(problem: Problem, meter: Meter, length: int) -> KernelSpeed:
    """Speed of causal attention: 4 FLOPs a visible pair, head and element of head_dim; 2.5 x as many backward."""
    forward, backward = attention(problem, meter.device, length)
    tflop = 4 * problem.heads * problem.head_dim * (length * (length + 1) // 2) / 1e12
    return KernelSpeed(
        block_length=length,
        forward_tflops=_short(tflop / meter.clock(forward)),
        backward_tflops=_short(2.5 * tflop / meter.clock(backward)),
    )


def merge_seconds(problem: Problem, meter: Meter) -> float:
    """Seconds to merge an element of a block's output."""
    shape = 1, min(problem.max_length, 4096), problem.heads, problem.head_dim
    out = torch.ones(shape, dtype=problem.dtype, device=meter.device)
    lse = torch.zeros(shape[:-1], dtype=torch.promote_types(problem.dtype, torch.float32), device=meter.device)
    total, everything = Accumulator(out, problem.head_dim), (slice(None), slice(None), slice(None))
    total.add(everything, out.clone(), lse.clone())
    return meter.clock(lambda: total.add(everything, out, lse)) / out.numel()


def measure_link(
    problem: Problem, meter: Meter, groups: Mapping[int, Sequence[int]], home: Sequence[int], what: str
) -> LinkSpec:
    """Measures what connects the members of some groups.

    Args:
        problem: what to compute meanwhile, to see how much of a message that hides.
        meter: the clock.
        groups: by the number of devices that they span, global ranks, this one among them.
        home: global ranks, this one among them, to which what is sent is not counted.
        what: to show while it runs.
    """
    rings, exchanges = [], []
    for span, members in sorted(groups.items()):
        peers = [member for member in members if member != dist.get_rank()]
        outside = sum(peer not in home for peer in peers) / len(peers)
        rings.append((span, fit(_points(meter, *_neighbours(members), f"ring {what}, {span}"))))
        points = _points(meter, peers, peers, f"all-to-all {what}, {span}")
        exchanges.append((span, fit([(n * outside, t) for n, t in points])))
    neighbours, (latency, speed) = _neighbours(groups[rings[0][0]]), rings[0][1]
    return LinkSpec(
        name="measured",
        gb_per_s=_short(speed / 1e9),
        ring=tuple(SpanSpeed(devices=span, gb_per_s=_short(each / 1e9)) for span, (_, each) in rings),
        all_to_all=tuple(SpanSpeed(devices=span, gb_per_s=_short(each / 1e9)) for span, (_, each) in exchanges),
        latency_us=_short(latency * 1e6),
        full_duplex=True,  # messages went both ways at once, and the speeds are of that
        overlap=_short(_overlap(problem, meter, neighbours, speed)),
    )


def _neighbours(ring: Sequence[int]) -> tuple[list[int], list[int]]:
    """The global ranks after and before this one."""
    here = ring.index(dist.get_rank())
    return [ring[(here + 1) % len(ring)]], [ring[here - 1]]


def _overlap(problem: Problem, meter: Meter, neighbours: tuple[list[int], list[int]], speed: float) -> float:
    """Share of a message's time that a kernel at the same time hides, with a message about as long as the kernel.

    The median of rounds that each time the kernel, the message and both: the speed of all drifts.
    """
    _, compute = attention(problem, meter.device, min(problem.max_length, 2048))
    start = meter.messages(*neighbours, max(1024, int(meter.clock(compute) * speed)))

    def both() -> None:
        flight = start()
        compute()
        flight.wait()

    def hidden() -> float:
        computing, moving, together = meter.once(compute), meter.once(lambda: start().wait()), meter.once(both)
        return (computing + moving - together) / min(computing, moving)

    return min(1.0, max(0.0, median([hidden() for _ in meter.track(range(9), "overlap")])))


def fit(points: Points) -> tuple[float, float]:
    """Latency in seconds and bandwidth in bytes/s, from (bytes, seconds) of messages.

    Least squares of `latency + bytes / bandwidth` over the measured time, so that short messages count as much as long
    ones. Where that is no time a link can have (a latency or a bandwidth below 0), the best without latency.
    """
    weights, rates = sum(1 / t for _, t in points), sum(n / t for n, t in points)
    ww, wr, rr = (sum(n**power / t**2 for n, t in points) for power in range(3))
    determinant = ww * rr - wr * wr
    latency = (weights * rr - rates * wr) / determinant
    slope = (rates * ww - weights * wr) / determinant
    return (latency, 1 / slope) if latency >= 0 and slope > 0 else (0.0, rr / rates)


def _points(meter: Meter, targets: Sequence[int], sources: Sequence[int], what: str) -> list[tuple[int, float]]:
    """The best of three rounds: what disturbs messages only adds to their time, and may last longer than a round."""
    best: dict[int, float] = {}
    for _ in meter.track(range(3), what):
        for size in MESSAGE_BYTES:
            if len(best) > 1 and size > max(best) and max(best.values()) > LONG_ENOUGH:
                break
            start = meter.messages(targets, sources, size)
            best[size] = min(best.get(size, inf), meter.clock(lambda start=start: start().wait()))
    return sorted(best.items())


def _run(members: Sequence[int], length: int) -> Sequence[int]:
    """The run of so many members that this rank is in, when they are cut into runs."""
    start = members.index(dist.get_rank()) // length * length
    return members[start : start + length]


def _divisors(number: int) -> list[int]:
    return [k for k in range(2, number + 1) if number % k == 0]


def _unmeasured(like: LinkSpec | None, name: str) -> LinkSpec:
    assert like is not None  # there are two ranks or more
    return like.model_copy(update={"name": name})


def _short(number: float) -> float:
    """Four digits: more were not measured."""
    return float(f"{number:.4g}")
