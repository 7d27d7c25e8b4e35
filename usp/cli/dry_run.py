"""`usp dry-run`: the real code of every kind of rank, on tensors without numbers, beside what `usp plan` says of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from usp.cli.mask_options import MaskOptions, describe_mask
from usp.cli.output import AsJson, console, document
from usp.cli.plan import ChoiceOptions, ClusterOptions, ModelOptions, WorkloadOptions
from usp.planner.memory import FRAMEWORK_BYTES, estimate
from usp.planner.messages import ALL_TO_ALLS
from usp.planner.plan import Choice
from usp.planner.plan import plan as make_plan
from usp.planner.problem import Problem, nodes
from usp.planner.spec import ModelSpec
from usp.planner.traffic import Layer

if TYPE_CHECKING:
    from usp.dry_run import DryRun, Run

EXAMPLES = (
    "Examples: `usp dry-run --model llama3-8b --gpus 4096 --gpu h100 --seq-len 16M`; "
    "`usp dry-run --heads 24 --gpus 16 --gpu h100 --seq-len 64K --full -u 2 -r 8 --transport double_ring`. "
    "Exit code 1: bytes differ from the plan's."
)
SHOWN = 6
"""Most ranks that are listed, besides those that differ from the plan."""
ROWS = {
    "forward all-to-all": ALL_TO_ALLS[:2],
    "forward ring": ("forward ring",),
    "backward all-to-all": ALL_TO_ALLS[2:],
    "backward ring": ("backward ring",),
}
"""What is listed of a rank, by the parts that it adds up."""


@dataclass(frozen=True)
class DryOptions:
    """What is run, besides a choice of the plan."""

    dtype: Annotated[str | None, typer.Option(help="Of q, k and v; that of the model if not given.")] = None
    device: Annotated[str, typer.Option(help="Where tensors pretend to be: cuda or cpu.")] = "cuda"
    kernel: Annotated[str, typer.Option(help="auto, sdpa, flash_attn or reference.")] = "auto"
    every: Annotated[bool, typer.Option("--all", help="Every kind of rank, however long that takes.")] = False
    as_json: AsJson = False

    def model(self, given: ModelSpec) -> ModelSpec:
        """The model in the dtype that was asked for. Raises InputError: there is no such dtype."""
        return given if self.dtype is None else ModelSpec.read({**given.model_dump(), "dtype": self.dtype})


@dataclass(frozen=True)
class Kind:
    """Layers that are alike, and one of them as it ran.

    Attributes:
        count: how many the model has.
        layer: the attention layer.
        found: its dry run.
        planned_peak_bytes: what the planner says that its fullest rank holds.
    """

    count: int
    layer: Layer
    found: "DryRun"
    planned_peak_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most that a rank held."""
        return max(run.peak_bytes for run in self.found.runs)


def dry_run(
    model: ModelOptions,
    cluster: ClusterOptions,
    mask: MaskOptions,
    workload: WorkloadOptions,
    choice: ChoiceOptions,
    options: DryOptions,
) -> None:
    """Run the real attention of every kind of rank without numbers: do shapes, splits, groups and bytes come out?

    One attention layer is run, as layers are alike: forward, and in training backward. Neither GPUs nor processes are
    needed.
    """
    begin, shape = perf_counter(), options.model(model.read())
    problem = Problem(shape, cluster.read(), workload.read(mask, shape))
    chosen = choice.choose(make_plan(shape, problem.cluster, problem.workload))
    kinds = list(_run(problem, chosen, options))
    sent, planned = _step(problem, kinds), {"all-to-alls": chosen.bytes_all_to_all, "ring": chosen.bytes_ring}
    equal = sent == planned and all(run.equal for kind in kinds for run in kind.found.runs)
    out = console(options.as_json)
    out.print(
        f"{shape.name} on {problem.cluster.name}, {problem.workload.batch} x {problem.workload.seq_len:,} tokens, "
        f"{describe_mask(problem.workload)}: U={chosen.ulysses_degree} R={chosen.ring_degree} {chosen.layout} "
        f"{chosen.transport}, {shape.dtype} on {options.device}, kernel {kinds[0].found.kernel}"
    )
    for kind in kinds:
        for text in _describe(kind, problem):
            out.print(text)
    layers = f"{shape.layers} layers" if shape.layers > 1 else "one layer"
    for axis, size in sent.items():
        is_said = "as the plan says" if size == planned[axis] else f"where the plan says {planned[axis]:,}"
        out.print(f"{axis} of a step, {layers}: {size:,} bytes sent, {is_said}")
    out.print(f"{perf_counter() - begin:.1f} s; bytes {'equal' if equal else 'DIFFER FROM'} the plan's")
    if options.as_json:
        step = {"sent_bytes": sent, "planned_bytes": planned}
        document({"equal": equal, "step": step, **_choice(chosen), "layers": [_as_json(kind) for kind in kinds]})
    if not equal:
        raise typer.Exit(1)


def _run(problem: Problem, chosen: Choice, options: DryOptions) -> Iterator[Kind]:
    """Every kind of layer of a choice."""
    from usp.dry_run import MOST_STEPS, How, attention_alone
    from usp.dry_run import dry_run as run

    work, degrees = problem.workload, (chosen.ulysses_degree, chosen.ring_degree)
    how = How(problem.model.dtype, options.device, options.kernel, work.mode == "train")
    where = nodes(problem.cluster, work.tensor_parallel, problem.cluster.gpus // work.tensor_parallel)
    layers = problem.layers(*degrees, chosen.layout, chosen.transport)
    for count, layer in layers:
        found = run(layer, where, how, None if options.every else MOST_STEPS // len(layers))
        alone = attention_alone(problem.model, windowed=layer.schedule.mask != work.mask)
        needed = estimate(
            alone, work.model_copy(update={"checkpointing": "full"}), *degrees, chosen.layout, chosen.transport
        )
        yield Kind(count, layer, found, needed.total_bytes - FRAMEWORK_BYTES)


def _step(problem: Problem, kinds: Sequence[Kind]) -> dict[str, int]:
    """What the rank that the planner counts sends in a step: all layers, and passes as often as they are run."""
    parts = {
        "forward": (ALL_TO_ALLS[:2], "forward ring"),
        "exchange": (ALL_TO_ALLS[:1], ""),
        "backward": (ALL_TO_ALLS[2:], "backward ring"),
    }
    total = {"all-to-alls": 0, "ring": 0}
    for kind in kinds:
        sent = {part: kind.count * sent.bytes_sent for part, sent in kind.found.runs[0].sent.items()}
        for name, times in problem.passes.items():
            exchanges, ring = parts[name]
            total["all-to-alls"] += times * sum(sent[part] for part in exchanges)
            total["ring"] += times * sent.get(ring, 0)
    return total


def _describe(kind: Kind, problem: Problem) -> Iterator[str | Table]:
    found, windowed = kind.found, kind.layer.schedule.mask != problem.workload.mask
    alike = f"one {'windowed ' if windowed else ''}layer of {kind.count}"
    passes = "forward and backward" if problem.workload.mode == "train" else "forward"
    run = "all run" if len(found.runs) == found.classes else f"ONLY {len(found.runs):,} RUN, to save time (--all)"
    yield f"\n{alike}, {passes}; ranks: {found.ranks:,}, kinds of them: {found.classes:,}, {run}"
    if len(found.hops) <= kind.layer.schedule.hops:
        yield f"kinds are told apart by {len(found.hops)} of the {kind.layer.schedule.hops + 1} blocks of each rank"
    shown = [run for i, run in enumerate(found.runs) if i < SHOWN or not run.equal]
    yield _table(shown)
    if len(shown) < len(found.runs):
        yield f"not listed: {len(found.runs) - len(shown):,} more, all equal (--json has them)"
    more = "" if kind.peak_bytes <= kind.planned_peak_bytes else ": MORE THAN PLANNED"
    yield (
        f"attention holds {_size(kind.peak_bytes)} at most; the plan has {_size(kind.planned_peak_bytes)}, with what "
        f"a CUDA kernel holds inside{more}"
    )


def _table(runs: Sequence["Run"]) -> Table:
    """Bytes of the parts of a pass, by the link that they cross."""
    table = Table(Column("", no_wrap=True), box=None)
    for head in ("messages", "in node", "across", "against plan", "peak"):
        table.add_column(head, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(f"rank {run.rank:,}, {run.stands_for:,} alike", "", "", "", "", _size(run.peak_bytes))
        for name, parts in ROWS.items():
            if parts[0] in run.sent:
                table.add_row(f"  {name}", *_figures(run, parts))
    return table


def _figures(run: "Run", parts: Sequence[str]) -> Iterator[str]:
    messages, collectives, inside, across = map(sum, zip(*(run.sent[part] for part in parts), strict=True))
    yield f"{messages:,}" + f" + {collectives} gather" * bool(collectives)
    yield _size(inside)
    yield _size(across)
    more = inside + across - sum(run.planned_bytes[part] for part in parts)
    yield f"{more:+,} B" if more else "equal"


def _choice(chosen: Choice) -> dict[str, Any]:
    return chosen.model_dump(include={"ulysses_degree", "ring_degree", "layout", "transport"})


def _as_json(kind: Kind) -> Mapping[str, Any]:
    found = kind.found
    runs = [
        {
            "rank": run.rank,
            "stands_for": run.stands_for,
            "peak_bytes": run.peak_bytes,
            "sent": {p: {**sent._asdict(), "planned_bytes": run.planned_bytes[p]} for p, sent in run.sent.items()},
        }
        for run in found.runs
    ]
    return {
        "count": kind.count,
        "mask": str(kind.layer.schedule.mask),
        "kernel": found.kernel,
        "ranks": found.ranks,
        "kinds": found.classes,
        "hops_looked_at": list(found.hops),
        "planned_peak_bytes": kind.planned_peak_bytes,
        "runs": runs,
    }


def _size(size: int) -> str:
    """Bytes for people."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"
