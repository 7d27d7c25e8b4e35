"""One attention layer as a timeline: every rank at its own pace, and messages that share the links they cross.

Where `usp.planner.cost` adds up the longer of computing and transfer of the slowest rank at each hop, this runs the
program of all ranks event by event. Both read the same kernels, bytes and links.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from typing import NamedTuple

from usp.errors import InputError
from usp.planner.cost import Machine
from usp.planner.programs import Generator, Program, Work, all_gather, build, double_ring, p2p
from usp.planner.spec import LinkSpec
from usp.planner.timeline import Span, Timeline
from usp.planner.traffic import transport_kind

GENERATORS: Mapping[str, Generator] = {f.__name__: f for f in (p2p, all_gather, double_ring)}
LONGEST = 2**9
"""Ring ranks that are simulated, at most: a backward pass over so many is 800,000 steps."""


class Path(NamedTuple):
    """How messages from one rank to another go.

    Attributes:
        lane: what they queue for: they go one after another.
        sides: what they occupy, and share evenly with others that do.
        seconds_per_byte: on a side of their own.
        latency_seconds: what each takes besides; the next may move meanwhile.
        overlap: share of a transfer that computing at the same time hides.
    """

    lane: Hashable
    sides: tuple[Hashable, ...]
    seconds_per_byte: float
    latency_seconds: float
    overlap: float


@dataclass(frozen=True)
class Wires:
    """Which links the messages of a ring cross, and who shares them.

    Inside a node every device has a side that sends and one that receives (one for both, if not full duplex). So it has
    between nodes, unless devices share an adapter: then that is as fast as all of them together. The rings of the other
    Ulysses ranks, which do the same at the same time, have their share of it.

    Attributes:
        machine: the cluster and where the groups lie in it.
        rank_devices: devices of a ring rank: its Ulysses group, and their tensor-parallel groups.
        sharing: neighbouring devices that share an adapter.
    """

    machine: Machine
    rank_devices: int
    sharing: int = 1

    def path(self, source: int, target: int) -> Path:
        """The path of a message; from a rank to itself, that of the exchanges of its Ulysses group."""
        cluster, ring = self.machine.cluster, self.machine.ring
        ends = [rank * self.rank_devices for rank in (source, target)]
        across = len({end // cluster.gpus_per_node for end in ends}) > 1
        if source == target:
            across = self.machine.ulysses.crosses
        link, span = (cluster.inter, ring.reach) if across else (cluster.intra, ring.devices)
        speed = link.speed("ring", span) * 1e9
        if across:
            speed *= self.sharing / min(self.sharing, self.rank_devices)
            ends = [end // self.sharing for end in ends]
        lane = (source, source == target, across)
        return Path(lane, _sides(link, across, *ends), 1 / speed, link.latency_us * 1e-6, link.overlap)


def _sides(link: LinkSpec, across: bool, source: int, target: int) -> tuple[Hashable, ...]:
    if link.full_duplex:
        return (across, "sends", source), (across, "receives", target)
    return tuple({(across, source), (across, target)})


class _Run:
    """The state of a simulation. Work is counted in seconds that it takes alone; `rate` says how fast it goes now."""

    def __init__(self, program: Program, wires: Wires) -> None:
        self.steps, number, path = program.steps, len(program.steps), cache(wires.path)
        self.paths = [None if step.kind == "compute" else path(step.rank, step.target) for step in self.steps]
        self.free = all(path is None or path.overlap == 1 for path in self.paths)  # transfers cost no computing
        self.shared = [
            (*(path.sides if path else ()), *(() if self.free else {step.rank, step.target}))
            for step, path in zip(self.steps, self.paths, strict=True)
        ]
        self.awaited = [len(step.after) for step in self.steps]
        self.followers: dict[int, list[int]] = defaultdict(list)
        for index, step in enumerate(self.steps):
            for before in step.after:
                self.followers[before].append(index)
        self.events: list[tuple[float, int, int, int]] = []
        self.order = 0
        self.lanes: dict[Hashable, deque[int]] = defaultdict(deque)
        self.users: dict[Hashable, dict[int, None]] = defaultdict(dict)
        self.start, self.stop = [0.0] * number, [0.0] * number
        self.left, self.since, self.rate, self.version = [0.0] * number, [0.0] * number, [0.0] * number, [0] * number

    def run(self) -> None:
        for index, number in enumerate(self.awaited):
            if not number:
                self.ready(index, 0.0)
        while self.events:
            now, _, index, version = heappop(self.events)
            if version < 0:
                self.begin(index, now)
            elif version == self.version[index]:
                self.end(index, now)

    def at(self, when: float, index: int, version: int) -> None:
        """Notes when a step begins (version -1), or ends unless its rate changes before: then its version does."""
        self.order += 1
        heappush(self.events, (when, self.order, index, version))

    def ready(self, index: int, now: float) -> None:
        """Nothing is waited for any more: a call starts, a transfer queues for its lane."""
        step, path = self.steps[index], self.paths[index]
        if path is None:
            self.start[index] = now
            self.begin(index, now)
            return
        alone = step.kind == "exchange" or step.onward
        self.since[index] = now if alone else now + path.latency_seconds  # when its first byte could move
        lane = self.lanes[path.lane]
        lane.append(index)
        if len(lane) == 1:
            self.enter(index, now)

    def enter(self, index: int, now: float) -> None:
        self.start[index] = now
        self.at(max(now, self.since[index]), index, -1)

    def begin(self, index: int, now: float) -> None:
        step, path = self.steps[index], self.paths[index]
        self.left[index] = step.seconds + (step.bytes_sent * path.seconds_per_byte if path else 0.0)
        self.since[index] = now
        self.pace(index, now)
        for shared in self.shared[index]:
            self.users[shared][index] = None
            self.paces(shared, now)

    def end(self, index: int, now: float) -> None:
        self.stop[index] = now
        for shared in self.shared[index]:
            del self.users[shared][index]
            self.paces(shared, now)
        if path := self.paths[index]:
            lane = self.lanes[path.lane]
            lane.popleft()
            if lane:
                self.enter(lane[0], now)
        for follower in self.followers.pop(index, ()):
            self.awaited[follower] -= 1
            if not self.awaited[follower]:
                self.ready(follower, now)

    def paces(self, shared: Hashable, now: float) -> None:
        for index in self.users[shared]:
            self.pace(index, now)

    def pace(self, index: int, now: float) -> None:
        """Sets how fast a step goes, and so when it ends."""
        rate = 1 / self.slower(index) if self.shared[index] else 1.0
        if rate != self.rate[index]:
            self.left[index] -= (now - self.since[index]) * self.rate[index]
            self.since[index], self.rate[index] = now, rate
            self.version[index] += 1
            self.at(now + max(0.0, self.left[index]) / rate, index, self.version[index])

    def slower(self, index: int) -> float:
        """How many times as long a step takes now: sides are shared; a rank that computes and moves does both slower.

        Both at 1 / (2 - overlap) of their speed: so computing hides that share of a transfer, as in `cost`.
        """
        step, path = self.steps[index], self.paths[index]
        shares = max(1, *(len(self.users[side]) for side in path.sides)) if path else 1
        overlap = 1.0
        for rank in () if self.free else {step.rank, step.target}:
            for other in self.users[rank]:
                moving = (path, self.paths[other])
                if None in moving and any(moving):
                    overlap = min(overlap, *(way.overlap for way in moving if way))
        return shares * (2 - overlap)


def simulate(work: Work, tensor_parallel: int = 1, sharing: int = 1) -> Timeline:
    """The timeline of one pass through a layer, whose transport is one of `GENERATORS`.

    Args:
        work: the pass.
        tensor_parallel: devices of a rank.
        sharing: devices of a node that share an adapter to other nodes.

    Raises:
        InputError: there is no such transport, or the ring is too long.
    """
    ring, kind = work.layer.schedule.ring_degree, transport_kind(work.layer.transport)
    if kind not in GENERATORS:
        raise InputError(f"unknown transport {work.layer.transport!r}: there are {', '.join(GENERATORS)}")
    if ring > LONGEST:
        raise InputError(f"R={ring} is more than the {LONGEST} ring ranks that are simulated: give a larger U")
    wires = Wires(work.machine, work.layer.ulysses_degree * tensor_parallel, sharing)
    return timeline(build(work, GENERATORS[kind]), wires, work.ideal_seconds)


def timeline(program: Program, wires: Wires, ideal_seconds: float) -> Timeline:
    """Runs a program.

    Args:
        program: what every rank does.
        wires: how its messages go.
        ideal_seconds: as in `Timeline`.
    """
    state = _Run(program, wires)
    state.run()
    spans, idle, end = [], [0.0] * program.ranks, max(state.stop, default=0.0)
    for step, start, stop in zip(program.steps, state.start, state.stop, strict=True):
        if step.kind != "compute":
            spans.append(Span(step.rank, "transfer", start, stop, step.label))
            continue
        if start > idle[step.rank]:  # a rank's calls are in the order of time
            spans.append(Span(step.rank, "wait", idle[step.rank], start, step.label))
        spans.append(Span(step.rank, "compute", start, stop, step.label))
        idle[step.rank] = stop
    spans += (Span(rank, "wait", since, end, "the end") for rank, since in enumerate(idle) if since < end)
    return Timeline(tuple(sorted(spans, key=lambda i: (i.start, i.rank))), ideal_seconds, program.ranks)
