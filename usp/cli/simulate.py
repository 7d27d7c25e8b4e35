"""`usp simulate`: one attention layer as a timeline, every rank at its own pace over links that they share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table

from usp.cli import timeline_plot
from usp.cli.mask_options import MaskOptions, describe_mask
from usp.cli.output import AsJson, console, document
from usp.cli.plan import ChoiceOptions, ClusterOptions, ModelOptions, WorkloadOptions
from usp.errors import InputError
from usp.planner.cost import seconds
from usp.planner.plan import plan as make_plan
from usp.planner.problem import Problem
from usp.planner.programs import Work
from usp.planner.simulate import simulate as run
from usp.planner.timeline import Timeline

EXAMPLES = (
    "Examples: `usp simulate --model llama3-8b --gpus 32 --gpu h100 --seq-len 128K`; "
    "`usp simulate --heads 24 --gpus 16 --gpu a100 --seq-len 64K --full -u 4 -r 4 --backward --plot timeline.png`; "
    "`usp simulate --model llama3-8b --gpus 4096 --gpu h100 --seq-len 16M -u 8 --trace trace.json`."
)
SHOWN = 12
"""Most ranks, and most calls of a rank, that are listed."""


@dataclass(frozen=True)
class RunOptions(ChoiceOptions):
    """How the layer is run."""

    backward: Annotated[bool, typer.Option("--backward", help="The backward pass.")] = False
    adapters: Annotated[int | None, typer.Option(min=1, help="Network adapters of a node; one a device.")] = None

    def sharing(self, gpus_per_node: int) -> int:
        """Devices of each adapter.

        Raises:
            InputError: they would not be equally many.
        """
        if self.adapters is not None and gpus_per_node % self.adapters:
            raise InputError(f"--adapters {self.adapters} does not divide the {gpus_per_node} devices of a node")
        return gpus_per_node // (self.adapters or gpus_per_node)


@dataclass(frozen=True)
class OutputOptions:
    """What is printed and written."""

    plot: Annotated[Path | None, typer.Option(metavar="OUT.PNG", help="Draw the timeline.")] = None
    trace: Annotated[Path | None, typer.Option(metavar="OUT.JSON", help="Write it for Perfetto or Chrome.")] = None
    as_json: AsJson = False


class Simulated(BaseModel):
    """The document of `usp simulate --json`. Seconds are of one pass through one layer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ulysses_degree: int
    ring_degree: int
    layout: str
    transport: str
    backward: bool
    seconds: float = Field(description="Until the last rank has done.")
    planned_seconds: float = Field(description="What the planner says, for the transport it knows.")
    efficiency: float = Field(description="Kernels of all ranks, dealt evenly, over seconds.")
    hidden: float = Field(description="1 - waiting / transfers, both summed over ranks; at least 0.")
    compute_seconds: list[float] = Field(description="Of every ring rank.")
    wait_seconds: list[float]
    transfer_seconds: list[float]


def simulate(
    model: ModelOptions,
    cluster: ClusterOptions,
    mask: MaskOptions,
    workload: WorkloadOptions,
    how: RunOptions,
    output: OutputOptions,
) -> None:
    """Simulate one attention layer: when each rank computes, waits and sends.

    The kernels, bytes and links are those of `usp plan`; here no rank waits for the slowest but for what it needs.
    """
    shape = model.read()
    problem = Problem(shape, cluster.read(), workload.read(mask, shape))
    choice = how.choose(make_plan(shape, problem.cluster, problem.workload))
    degrees, name = (choice.ulysses_degree, choice.ring_degree), choice.transport
    (_, layer), *_ = problem.layers(*degrees, choice.layout, name)
    work = Work(layer, problem.machines[degrees], how.backward)
    sharing = how.sharing(problem.cluster.gpus_per_node)
    line = run(work, problem.workload.tensor_parallel, sharing)
    told = Simulated(
        ulysses_degree=degrees[0],
        ring_degree=degrees[1],
        layout=choice.layout,
        transport=name,
        backward=how.backward,
        seconds=line.seconds,
        planned_seconds=seconds(layer, work.machine, how.backward).total,
        efficiency=line.efficiency,
        hidden=line.hidden,
        compute_seconds=line.totals("compute"),
        wait_seconds=line.totals("wait"),
        transfer_seconds=line.totals("transfer"),
    )
    title = (
        f"{shape.name} on {problem.cluster.name}, {problem.workload.seq_len:,} tokens, "
        f"{describe_mask(problem.workload)}: U={degrees[0]} R={degrees[1]} {choice.layout} {name}, "
        f"{'backward' if how.backward else 'forward'}"
    )
    _show(told, line, title, output)
    if output.plot is not None:
        timeline_plot.draw(line.spans, output.plot, title)
    if output.trace is not None:
        timeline_plot.write_events(line.spans, output.trace)
    if output.as_json:
        document(told.model_dump(mode="json"))


def _show(told: Simulated, line: Timeline, title: str, output: OutputOptions) -> None:
    show = console(output.as_json)
    show.print(title)
    show.print(
        f"{told.seconds * 1e3:.4g} ms a layer (the planner says {told.planned_seconds * 1e3:.4g}), "
        f"efficiency {told.efficiency:.0%}, {told.hidden:.0%} of the transfers hidden"
    )
    columns = (told.compute_seconds, told.wait_seconds, told.transfer_seconds)
    ranks = _some(range(line.ranks))
    show.print(_table(("rank", "computes", "waits", "sends"), [(f"{r}", tuple(c[r] for c in columns)) for r in ranks]))
    busiest = told.compute_seconds.index(max(told.compute_seconds))
    calls = [i for i in line.spans if i.rank == busiest and i.kind == "compute"]
    show.print(f"rank {busiest}, call by call")
    rows = [(c.label, (c.start, c.stop, c.seconds)) for c in (calls[i] for i in _some(range(len(calls))))]
    show.print(_table(("block", "from", "to", "takes"), rows))


def _some(indices: range) -> list[int]:
    """All of them, or `SHOWN` at even distances."""
    number = min(SHOWN, len(indices))
    return [round(i * (len(indices) - 1) / max(1, number - 1)) for i in range(number)]


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, tuple[float, ...]]]) -> Table:
    table = Table(*heads, box=None, caption="milliseconds", caption_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, times in rows:
        table.add_row(name, *(f"{time * 1e3:.4g}" for time in times))
    return table
