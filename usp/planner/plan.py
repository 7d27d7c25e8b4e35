"""The plan: every legal choice of degrees, layout and transport with its predicted time and memory, ranked, and why.

All devices that tensor and data parallelism leave form sequence-parallel groups of ulysses x ring ranks. Ulysses groups
are dealt to nodes first, as `Topology.build` does, so they stay inside a node where their degree allows it.
"""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from usp import layouts
from usp.errors import InputError
from usp.planner import models, reasons
from usp.planner.cost import Machine, Seconds, all_to_all_seconds, seconds
from usp.planner.memory import estimate
from usp.planner.problem import Pass, Problem
from usp.planner.spec import ClusterSpec, ModelSpec, Workload
from usp.planner.traffic import TRANSPORTS, Layer, bytes_all_to_all, bytes_ring, transport_kind


class Report(BaseModel):
    """What all parts of a plan share."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Choice(Report):
    """One way to run the model, with what is predicted for it. Seconds are of all attention layers, of one step.

    Attributes:
        ulysses_degree: ranks of a Ulysses group.
        ring_degree: ranks of a ring.
        layout: how positions are dealt to ring ranks; "balanced" is that of the workload's mask (`layouts.layout_for`).
        transport: what moves the blocks of the ring; "double_ring:W" with W of its ranks in each node.
        ulysses_crosses_nodes: whether some Ulysses group spans nodes.
        ring_crosses_nodes: whether some ring spans nodes.
        seconds: attention in one step: forward, and in training backward and what is run again.
        seconds_compute: of that, in kernels.
        seconds_merge: of that, joining blocks.
        seconds_ring: of that, waiting for the ring.
        seconds_all_to_all: of that, in the exchanges of the Ulysses group.
        bytes_all_to_all: what a rank sends in these exchanges.
        bytes_ring: what a rank sends round the ring.
        memory: bytes of the fullest rank, by what they hold.
        memory_bytes: their sum.
        fits: whether that is no more than the device has.
        slower: `seconds` over that of the fastest choice that fits (or, if none does, of the fastest).
        why: in one line, what makes it slower or impossible, or the best.
    """

    ulysses_degree: int
    ring_degree: int
    layout: str
    transport: str
    ulysses_crosses_nodes: bool
    ring_crosses_nodes: bool
    seconds: float
    seconds_compute: float
    seconds_merge: float
    seconds_ring: float
    seconds_all_to_all: float
    bytes_all_to_all: int
    bytes_ring: int
    memory: dict[str, int]
    memory_bytes: int
    fits: bool
    slower: float = 1.0
    why: str = ""


class Rejected(Report):
    """A pair of degrees that is not legal, and why."""

    ulysses_degree: int
    ring_degree: int
    why: str


class Plan(Report):
    """All choices for a model on a cluster, best first.

    Attributes:
        model: the model.
        cluster: the cluster.
        workload: what it is run on.
        choices: the legal choices: those that fit into memory by time, then those that do not.
        rejected: pairs of degrees that are not legal.
        remedies: if nothing fits, what would make it fit, the cheapest first.
    """

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    choices: tuple[Choice, ...]
    rejected: tuple[Rejected, ...]
    remedies: tuple[str, ...] = ()

    @property
    def best(self) -> Choice | None:
        """The fastest choice that fits; None if none does."""
        return self.choices[0] if self.choices and self.choices[0].fits else None


def plan(
    model: ModelSpec | str,
    cluster: ClusterSpec,
    workload: Workload | None = None,
    *,
    seq_len: int | str | None = None,
) -> Plan:
    """Predicts time and memory of every legal choice of degrees, layout and transport.

    Args:
        model: the shape of the model, or the name of a preset, or the path of a `config.json`.
        cluster: the cluster.
        workload: what the model is run on.
        seq_len: in its place, the global number of tokens of a training step: causal for a model with a vocabulary,
            with full checkpointing and FSDP.

    Raises:
        InputError: not exactly one of `workload` and `seq_len`; the devices do not divide among the degrees; the heads
            do not divide among the tensor-parallel ranks.
    """
    if (workload is None) == (seq_len is None):
        raise InputError("give either workload or seq_len")
    model = models.find(model) if isinstance(model, str) else model
    problem = Problem(model, cluster, workload or Workload.read({"seq_len": seq_len, "is_causal": model.vocab > 0}))
    rejected = {degrees: why for degrees in problem.degrees if (why := problem.objection(*degrees))}
    choices = [c for degrees in problem.degrees if degrees not in rejected for c in _choices(problem, *degrees)]
    choices.sort(
        key=lambda c: (not c.fits, c.seconds, TRANSPORTS.index(transport_kind(c.transport)), -c.ulysses_degree)
    )
    return Plan(
        model=model,
        cluster=cluster,
        workload=problem.workload,
        choices=tuple(c.model_copy(update=reasons.explain(problem, c, choices)) for c in choices),
        rejected=tuple(Rejected(ulysses_degree=u, ring_degree=r, why=why) for (u, r), why in rejected.items()),
        remedies=() if not choices or any(c.fits for c in choices) else tuple(reasons.remedies(problem)),
    )


def _choices(problem: Problem, ulysses_degree: int, ring_degree: int) -> Iterator[Choice]:
    """The choices of one pair of degrees. With one ring rank there is nothing for a layout or a transport to decide."""
    machine = problem.machines[ulysses_degree, ring_degree]
    for layout in _layouts(problem) if ring_degree > 1 else ["contiguous"]:
        for transport in problem.transports(ulysses_degree, ring_degree, layout):
            spent, to_all, round_ring = Seconds(), 0, 0
            for count, layer in problem.layers(ulysses_degree, ring_degree, layout, transport):
                for kind, times in problem.passes.items():
                    taken, exchanged, passed_on = _run(layer, machine, kind)
                    spent += taken * (count * times)
                    to_all += exchanged * count * times
                    round_ring += passed_on * count * times
            memory = estimate(problem.model, problem.workload, ulysses_degree, ring_degree, layout, transport)
            yield Choice(
                ulysses_degree=ulysses_degree,
                ring_degree=ring_degree,
                layout=layout,
                transport=transport,
                ulysses_crosses_nodes=machine.ulysses.crosses,
                ring_crosses_nodes=machine.ring.crosses,
                seconds=spent.total,
                seconds_compute=spent.compute,
                seconds_merge=spent.merge,
                seconds_ring=spent.ring,
                seconds_all_to_all=spent.all_to_all,
                bytes_all_to_all=to_all,
                bytes_ring=round_ring,
                memory=dict(memory.rows),
                memory_bytes=memory.total_bytes,
                fits=memory.total_bytes <= problem.cluster.device.memory_bytes,
            )


def _layouts(problem: Problem) -> list[str]:
    """Those that may be best: one that deals by a mask has nothing to find where the offset alone decides.

    There contiguous, zigzag or striped is even.
    """
    relative = problem.workload.mask.relative
    return [name for name in layouts.names() if not (relative and layouts.needs_mask(name))]


def _run(layer: Layer, machine: Machine, kind: Pass) -> tuple[Seconds, int, int]:
    """Time of one pass through a layer, and what a rank sends meanwhile: in all-to-alls, and round the ring."""
    backward, rank = kind == "backward", layer.busiest_ulysses_rank
    before, after = bytes_all_to_all(layer, 0, rank, backward)
    if kind == "exchange":
        return Seconds(all_to_all=all_to_all_seconds(layer, machine)[0]), before, 0
    return seconds(layer, machine, backward), before + after, bytes_ring(layer, 0, rank, backward)
