"""`usp trace`: runs attention under torchrun, and shows which messages it hides behind computing."""

from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from usp import layouts
from usp.cli import timeline_plot
from usp.cli.mask_options import MaskOptions, describe_mask
from usp.cli.output import AsJson, console, document
from usp.cli.processes import place
from usp.errors import InputError
from usp.planner.spec import DTYPE_BYTES, Workload
from usp.planner.timeline import Hop, hidden, hops
from usp.planner.traffic import Layer, Shape
from usp.schedule import Schedule

EXAMPLES = (
    "Examples: `torchrun --nproc-per-node 4 -m usp.cli trace --seq-len 8K --heads 8 -u 2 -r 2 --layout zigzag "
    "--trace trace.json --plot trace.png`; open trace.json in ui.perfetto.dev."
)


@dataclass(frozen=True)
class ProblemOptions:
    """The attention, and over how many ranks."""

    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key/value heads; as many as query heads.")] = None
    head_dim: Annotated[int, typer.Option(min=1, help="Their size.")] = 64
    dtype: Annotated[str, typer.Option(help="Of q, k, v.")] = "float32"
    ulysses_degree: Annotated[int, typer.Option("--ulysses-degree", "-u", min=1, help="Ranks that swap heads.")] = 1
    ring_degree: Annotated[
        int | None, typer.Option("--ring-degree", "-r", min=1, help="Ranks of a ring; all that are left.")
    ] = None
    layout: Annotated[str, typer.Option(help=f"One of {', '.join(layouts.names())}.")] = "zigzag"
    backward: Annotated[bool, typer.Option(help="Whether a step is a forward and a backward pass.")] = True
    steps: Annotated[int, typer.Option(min=1, help="How many to trace; the one of median length is shown.")] = 5

    def layer(self, workload: Workload, world_size: int) -> Layer:
        """The problem that is run by so many ranks. Raises InputError: there is no such dtype or layout."""
        if self.dtype not in DTYPE_BYTES:
            raise InputError(f"dtype is {self.dtype!r}: it must be one of {', '.join(DTYPE_BYTES)}")
        ring = self.ring_degree or max(1, world_size // self.ulysses_degree)
        schedule = Schedule(workload.mask, layouts.layout_for(self.layout, workload.mask), workload.seq_len, ring)
        kv_heads, bytes_each = self.kv_heads or self.heads, int(DTYPE_BYTES[self.dtype])
        shape = Shape(1, self.heads, kv_heads, self.head_dim, self.head_dim, bytes_each)
        return Layer(shape, schedule, self.ulysses_degree)


@dataclass(frozen=True)
class OutputOptions:
    """What is written."""

    trace: Annotated[Path | None, typer.Option(dir_okay=False, help="Write Chrome trace events, for Perfetto.")] = None
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Write a picture, such as trace.png.")] = None
    as_json: AsJson = False


def trace(mask: MaskOptions, problem: ProblemOptions, output: OutputOptions) -> None:
    """Run attention in the processes that torchrun started, and show what it waits for, hop by hop."""
    _, world_size = place()
    if world_size < 2:
        raise InputError("one process sends nothing: start two or more with `torchrun --nproc-per-node 2 -m usp.cli`")
    workload = Workload.read(mask.fields())
    layer = problem.layer(workload, world_size)
    import torch
    import torch.distributed as dist

    from usp.probe import TIMEOUT
    from usp.topology import Topology
    from usp.trace import trace as run

    if torch.cuda.is_available():
        raise InputError("this times threads of the CPU, not streams of a GPU: set CUDA_VISIBLE_DEVICES=")
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        topology = Topology.build(layer.ulysses_degree, layer.schedule.ring_degree, allow_cross_node=True)
        found = run(layer, topology, getattr(torch, problem.dtype), problem.backward, problem.steps)
        if dist.get_rank() > 0:
            return
    finally:
        dist.destroy_process_group()
    rows, out = hops(found.spans, found.transfers), console(output.as_json)
    ring = hidden([hop for hop in rows if hop.ring])
    title = (
        f"U{layer.ulysses_degree} R{layer.schedule.ring_degree} {problem.layout}: {workload.seq_len:,} tokens, "
        f"{problem.heads}:{layer.shape.kv_heads} heads, {problem.dtype}, {describe_mask(workload)}"
    )
    out.print(title, _table(rows), sep="\n")
    out.print(
        f"A step takes {found.step_seconds * 1e3:.1f} ms; {_share(ring)} of the ring's transfers is hidden. Those were "
        f"timed alone, after the steps. Clocks are aligned to {found.clock_error_seconds * 1e6:.0f} us."
    )
    if output.trace:
        timeline_plot.write_events(found.spans, output.trace)
    if output.plot:
        timeline_plot.draw(found.spans, output.plot, f"{title}: {_share(ring)} hidden")
    if output.as_json:
        totals = {"step_seconds": found.step_seconds, "clock_error_seconds": found.clock_error_seconds, "hidden": ring}
        document({**totals, "hops": [{**asdict(hop), "hidden": hidden([hop])} for hop in rows]})


def _table(rows: Iterable[Hop]) -> Table:
    """Means over ranks, and the longest wait of one."""
    table = Table(Column("ms", no_wrap=True), "compute", "start", "wait", "longest, rank", "transfer", "hidden")
    for hop in rows:
        compute, start, wait, transfer, longest = (f"{seconds * 1e3:.2f}" for seconds in astuple(hop)[1:6])
        table.add_row(hop.label, compute, start, wait, f"{longest}, {hop.slowest}", transfer, _share(hidden([hop])))
    return table


def _share(of_one: float | None) -> str:
    return "-" if of_one is None else f"{of_one:.1%}"
