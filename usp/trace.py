"""What the ranks did during an attention step, and how much of its messages they hid behind computing.

Spans that attention marks for the profiler are gathered from all ranks, on the clock of rank 0. When a message arrived
nobody says, so the messages of every hop are sent again alone, by all ranks at once: that takes the transfer time. Of
it is exposed what the computing thread spends to start an exchange (gloo copies into the socket there) and to wait for
it. What torch computes inside a wait, such as sums of gradients, is computing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import usp
from usp import transports
from usp.collect import gather
from usp.planner.messages import ALL_TO_ALLS, Message, messages
from usp.planner.timeline import Span
from usp.planner.traffic import Layer
from usp.probe import Meter
from usp.topology import Topology

PASSES = {"usp::attention": "forward", "usp::attention_backward": "backward"}
KINDS: Mapping[str, Literal["compute", "wait"]] = {
    "compute": "compute",
    "own part": "compute",
    "pack": "compute",
    "unpack": "compute",
    "wait": "wait",
}
BARRIER, STEP = "usp::trace barrier", "usp::trace step"
BARRIERS = 20  # to compare clocks by, besides the one before each step
ALONE_SECONDS = 0.3  # how long to look at the messages of a hop


class Mark(NamedTuple):
    """What a profiler saw: a name, seconds on its own clock, and in a wait what was done inside."""

    name: str
    start: float
    stop: float
    inside: tuple["Mark", ...] = ()

    @classmethod
    def of(cls, told: Sequence[Any]) -> "Mark":
        """From what JSON makes of one: lists."""
        name, start, stop, inside = told
        return cls(name, start, stop, tuple(map(cls.of, inside)))


@dataclass(frozen=True)
class Trace:
    """The step of median length.

    Attributes:
        spans: what all ranks did, on one clock.
        transfers: seconds that the messages of each hop take alone, on the slowest rank.
        steps: seconds of every step, on the slowest rank.
        clock_error_seconds: by how much a rank's clock may differ from that of rank 0 at most.
    """

    spans: tuple[Span, ...]
    transfers: Mapping[str, float]
    steps: tuple[float, ...]
    clock_error_seconds: float

    @property
    def step_seconds(self) -> float:
        """Seconds of that step."""
        return median_low(self.steps)


def trace(
    layer: Layer, topology: Topology, dtype: torch.dtype, backward: bool = True, steps: int = 5, warm_up: int = 2
) -> Trace:
    """Runs attention on random tensors on the CPU; every rank of the default process group calls, all get the same.

    Args:
        layer: the problem, with the degrees of `topology`.
        topology: the grid of processes.
        dtype: of q, k and v.
        backward: whether a step is a forward and a backward pass.
        steps: how many to trace, of which the one of median length is shown.
        warm_up: how many to run before.

    Raises:
        USPError: as `usp.attention`.
    """
    shape, schedule = layer.shape, layer.schedule
    attention = usp.USPAttention(topology=topology, layout=schedule.layout, transport="p2p")
    local = usp.positions(schedule.seq_len, topology, layout=schedule.layout).numel()
    sizes = (shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.value_dim)
    q, k, v = (torch.randn(shape.batch, local, *size, dtype=dtype, requires_grad=backward) for size in sizes)
    dout = torch.randn(shape.batch, local, shape.heads, shape.value_dim, dtype=dtype)

    def step() -> None:
        out = attention(q, k, v, seq_len=schedule.seq_len, mask=schedule.mask)
        if backward:
            torch.autograd.grad(out, (q, k, v), dout)

    for _ in range(warm_up):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for i in range(-BARRIERS, steps):
            with record_function(BARRIER):
                dist.barrier()
            if i >= 0:
                with record_function(STEP):
                    step()
    everyone = [list(map(Mark.of, told)) for told in gather(_marks(profiler.events() or ()))]
    under_way = messages(layer, topology.ring.rank, topology.ulysses.rank, backward)
    return assemble(everyone, {label: _alone(sent, topology) for label, sent in under_way.items()})


def assemble(everyone: Sequence[Sequence[Mark]], transfers: Mapping[str, float]) -> Trace:
    """The step of median length, from the marks of every rank, each on its own clock."""
    offsets, error = align([[(m.start, m.stop) for m in marks if m.name == BARRIER] for marks in everyone])
    steps = [[mark for mark in marks if mark.name == STEP] for marks in everyone]
    seconds = tuple(max(step.stop - step.start for step in of_ranks) for of_ranks in zip(*steps, strict=True))
    chosen = [of_rank[seconds.index(median_low(seconds))] for of_rank in steps]
    zero = min(step.start - offset for step, offset in zip(chosen, offsets, strict=True))
    found: list[Span] = []
    for rank, (marks, step, offset) in enumerate(zip(everyone, chosen, offsets, strict=True)):
        spans = read([mark for mark in marks if step.start <= mark.start < step.stop], rank)
        firsts = {span.label: span for span in reversed(spans) if span.kind == "start"}
        spans += [s._replace(kind="transfer", stop=s.start + transfers[label]) for label, s in firsts.items()]
        found += [s._replace(start=s.start - offset - zero, stop=s.stop - offset - zero) for s in spans]
    return Trace(tuple(found), transfers, seconds, error)


def align(barriers: Sequence[Sequence[tuple[float, float]]]) -> tuple[list[float], float]:
    """How far each rank's clock is ahead of rank 0's, and by how much that may be wrong at most, in seconds.

    Nobody leaves a barrier before all have entered: each one bounds the difference of two clocks from both sides, as
    a round trip does in NTP (Mills 1991).

    Args:
        barriers: for every rank, when it entered and left each barrier, on its own clock.
    """
    offsets, errors = [0.0], [0.0]
    for mine in barriers[1:]:
        both = list(zip(mine, barriers[0], strict=True))
        low = max(entered - left for (entered, _), (_, left) in both)
        high = min(left - entered for (_, left), (entered, _) in both)
        offsets.append((low + high) / 2)
        errors.append((high - low) / 2)
    return offsets, max(errors)


def read(marks: Iterable[Mark], rank: int) -> list[Span]:
    """The spans of one step of a rank. An exchange belongs to what is computed next, while it is under way."""
    found, started, begun, exchanges = list[Span](), list[tuple[float, float]](), None, iter(ALL_TO_ALLS)
    label = where = ""
    for mark in sorted(marks, key=lambda mark: mark.start):
        what, _, part = mark.name.partition(": ")
        where = PASSES.get(mark.name, where)
        if mark.name.startswith("c10d::"):
            begun = begun or mark.start
        if part not in KINDS:
            continue
        if what.startswith("usp::ring "):
            label = f"{where} {what.removeprefix('usp::ring ')}"
        elif part == "pack":
            label = next(exchanges)
        if part in ("compute", "own part"):
            # Up to here, so that a transport that sends before it returns hides nothing.
            started += [(begun, mark.start)] if begun else []
            found += [Span(rank, "start", *when, label) for when in started]
            started, begun = [], None
        now = mark.start
        for inner in mark.inside:
            found.append(Span(rank, "wait", now, inner.start, label))
            if inner.name.startswith("c10d::"):
                started.append((inner.start, inner.stop))
            else:
                found.append(Span(rank, "compute", inner.start, inner.stop, label))
            now = inner.stop
        found.append(Span(rank, KINDS[part], now, mark.stop, label))
    return found


def _alone(sent: Sequence[Message], topology: Topology) -> float:
    """Seconds that some messages take when nobody computes, on the slowest rank. Every rank calls."""
    ends = {axis.name: transports.load("auto", axis.group) for axis in (topology.ring, topology.ulysses)}
    ready = [(ends[message.axis], *map(_buffers, (message.sends, message.receives))) for message in sent]

    def exchange() -> None:
        for flight in [end.exchange(*buffers) for end, *buffers in ready]:
            flight.wait()

    return Meter(torch.device("cpu"), ALONE_SECONDS, lambda items, _: items).clock(exchange)


def _buffers(sizes: Mapping[int, int]) -> dict[int, torch.Tensor]:
    return {peer: torch.zeros(size, dtype=torch.uint8) for peer, size in sizes.items()}


def _marks(events: Iterable[Any]) -> list[Mark]:
    """What of a profile is read: the library's spans, exchanges outside of its waits, and what waits contain."""

    def mark(event: Any) -> Mark:
        inside = tuple(map(mark, event.cpu_children)) if event.name.endswith(": wait") else ()
        return Mark(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6, inside)

    def waits(event: Any) -> bool:
        return event is not None and (event.name.endswith(": wait") or waits(event.cpu_parent))

    return [mark(e) for e in events if e.name.startswith(("usp::", "c10d::")) and not waits(e.cpu_parent)]
