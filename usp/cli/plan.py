"""`usp plan`: which degrees, layout and transport for a model on a cluster, and what the others would cost."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from usp import layouts
from usp.cli import plan_plot
from usp.cli.mask_options import MaskOptions, describe_mask
from usp.cli.output import AsJson, console, document
from usp.errors import InputError
from usp.planner import hardware, models
from usp.planner.plan import Choice, Plan
from usp.planner.plan import plan as make_plan
from usp.planner.spec import ClusterSpec, ModelSpec, Workload
from usp.planner.traffic import TRANSPORTS, transport_kind

EXAMPLES = (
    "Examples: `usp plan --model llama3-8b --gpus 32 --gpus-per-node 8 --gpu h100 --seq-len 1M`; "
    "`usp plan --heads 28 --kv-heads 4 --gpus 8 --gpu l20 --seq-len 128K --mode inference`; "
    "`usp plan --model ./config.json --cluster cluster.yaml --seq-len 256K --plot plan.png`. "
    "Exit code 2: nothing fits into memory."
)
GIB = 2**30


@dataclass(frozen=True)
class ModelOptions:
    """What model: a name or a file, and fields that are given beside it or in its place."""

    model: Annotated[
        str | None, typer.Option(help=f"A config.json, its folder, or one of {', '.join(models.PRESETS)}.")
    ] = None
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None
    kv_heads: Annotated[int | None, typer.Option(help="Key/value heads; as many as query heads if not given.")] = None
    head_dim: Annotated[int | None, typer.Option(help="Size of a head; 128 if not given.")] = None
    layers: Annotated[int | None, typer.Option(help="Layers; 1 if not given.")] = None
    hidden: Annotated[int | None, typer.Option(help="Width of the model; heads x head_dim if not given.")] = None
    intermediate: Annotated[int | None, typer.Option(help="Width of the MLP; 4 x hidden if not given.")] = None
    vocab: Annotated[int | None, typer.Option(help="Size of the vocabulary; 0 if not given.")] = None

    def read(self) -> ModelSpec:
        """The model.

        Raises:
            InputError: neither a model nor heads are given, there is no such model, or a field is wrong.
        """
        given = {name: value for name, value in vars(self).items() if name != "model" and value is not None}
        if self.model is not None:
            named = models.find(self.model)
            if given:  # the number of parameters, and of windowed layers, was of another shape
                windowed = round(named.windowed_layers * (self.layers or named.layers) / named.layers)
                given = {"parameters": None, "windowed_layers": windowed, **given}
            return ModelSpec.read({**named.model_dump(), **given})
        if self.heads is None:
            raise InputError("give --model, or --heads and what else differs from the defaults")
        hidden = given.get("hidden", self.heads * given.get("head_dim", 128))
        usual = {"kv_heads": self.heads, "hidden": hidden, "intermediate": 4 * hidden}
        return ModelSpec.read({**usual, **given})


@dataclass(frozen=True)
class ClusterOptions:
    """What cluster: a file, or preset parts."""

    cluster: Annotated[Path | None, typer.Option(help="A cluster file, as `usp probe` writes it.")] = None
    gpu: Annotated[str | None, typer.Option(help=f"One of {', '.join(hardware.DEVICES)}.")] = None
    gpus: Annotated[int | None, typer.Option(help="How many there are; 8 if not given.")] = None
    gpus_per_node: Annotated[int | None, typer.Option(help="How many a node has; 8 if not given.")] = None
    intra: Annotated[str | None, typer.Option(help=f"Link inside a node, one of {', '.join(hardware.LINKS)}.")] = None
    inter: Annotated[str | None, typer.Option(help="Link between nodes, one of the same.")] = None

    def read(self) -> ClusterSpec:
        """The cluster.

        Raises:
            InputError: not exactly one of --cluster and --gpu, or a part that there is not.
        """
        parts = {name: value for name, value in vars(self).items() if name != "cluster" and value is not None}
        if self.cluster is not None:
            if parts:
                raise InputError(f"--cluster says it all: leave out {', '.join(map(_flag, parts))}")
            return ClusterSpec.read(self.cluster)
        if self.gpu is None:
            raise InputError(f"give --gpu (one of {', '.join(hardware.DEVICES)}) or --cluster")
        return hardware.cluster(**{"gpus": 8, **parts})


@dataclass(frozen=True)
class WorkloadOptions:
    """What the model is run on, besides the sequence and its mask."""

    batch: Annotated[int, typer.Option(help="Sequences of a sequence-parallel group at a time.")] = 1
    mode: Annotated[str, typer.Option(help="train or inference.")] = "train"
    tensor_parallel: Annotated[int, typer.Option("--tensor-parallel", "--tp", help="Its degree.")] = 1
    data_parallel: Annotated[int, typer.Option("--data-parallel", "--dp", help="Sequence-parallel groups.")] = 1
    checkpointing: Annotated[str, typer.Option(help="Of activations: none, selective or full.")] = "full"
    loss_chunks: Annotated[int, typer.Option(help="Pieces in which logits and loss are computed.")] = 1
    zero_stage: Annotated[int, typer.Option(help="0 to 3; 3 is FSDP.")] = 3

    def read(self, mask: MaskOptions, model: ModelSpec) -> Workload:
        """The workload of a model under a mask.

        Raises:
            InputError: a field is wrong.
        """
        return Workload.read(mask.fields(causal=model.vocab > 0) | vars(self))


@dataclass(frozen=True)
class ChoiceOptions:
    """One of a plan's choices: what is not given is as in the best."""

    ulysses_degree: Annotated[int | None, typer.Option("--ulysses-degree", "-u", help="Ranks of a group.")] = None
    ring_degree: Annotated[int | None, typer.Option("--ring-degree", "-r", help="Ranks of the ring.")] = None
    layout: Annotated[str | None, typer.Option(help=f"One of {', '.join(layouts.names())}.")] = None
    transport: Annotated[str | None, typer.Option(help=f"One of {', '.join(TRANSPORTS)}.")] = None

    def choose(self, made: Plan) -> Choice:
        """The best choice of a plan that is as the options say.

        Raises:
            InputError: there is none.
        """
        if self.transport and transport_kind(self.transport) not in TRANSPORTS:
            raise InputError(f"unknown transport {self.transport!r}: there are {', '.join(TRANSPORTS)}")
        names = [field.name for field in fields(ChoiceOptions)]
        wanted = {name: value for name in names if (value := getattr(self, name)) is not None}
        for choice in made.choices:
            free = ("layout", "transport") if choice.ring_degree == 1 else ()  # where they decide nothing
            if all(f"{getattr(choice, name)}:".startswith(f"{wanted[name]}:") for name in wanted if name not in free):
                return choice
        given = ", ".join(f"{name}={value}" for name, value in wanted.items()) or "legal degrees"
        degrees = {name: wanted[name] for name in names[:2] if name in wanted}
        rejected = (pair.why for pair in made.rejected if degrees and degrees.items() <= vars(pair).items())
        why = "".join(f" ({objection})" for objection in islice(rejected, 1))
        legal = ", ".join(sorted({f"{c.ulysses_degree} x {c.ring_degree}" for c in made.choices})) or "none"
        raise InputError(f"the plan has no choice with {given}{why}: its U x R are {legal}")


@dataclass(frozen=True)
class OutputOptions:
    """What is printed."""

    show_all: Annotated[bool, typer.Option("--all", help="Every layout and transport, not only the best.")] = False
    plot: Annotated[Path | None, typer.Option(metavar="OUT.PNG", help="Draw the times.")] = None
    as_json: AsJson = False


def plan(
    model: ModelOptions, cluster: ClusterOptions, mask: MaskOptions, workload: WorkloadOptions, output: OutputOptions
) -> None:
    """Show which Ulysses and ring degrees are fastest, and why the others are not.

    Times are predicted, of the attention of one step; memory is of the fullest rank at its peak.
    """
    shape = model.read()
    made = make_plan(shape, cluster.read(), workload.read(mask, shape))
    _show(made, output)
    if output.plot is not None:
        plan_plot.draw(made, output.plot)
    if output.as_json:
        document(made.model_dump(mode="json"))
    if made.best is None:
        raise typer.Exit(2)


def _show(made: Plan, output: OutputOptions) -> None:
    show, work = console(output.as_json), made.workload
    degrees = f"tensor parallel {work.tensor_parallel}, data parallel {work.data_parallel}"
    show.print(f"{made.model.name} on {made.cluster.name}, {degrees}")
    show.print(
        f"{work.mode}, {work.batch} x {work.seq_len:,} tokens, {describe_mask(work)}; seconds of attention a step\n"
    )
    for line in _table(made.choices if output.show_all else leading(made.choices)):
        show.print(line)
    for pair in made.rejected:
        show.print(f"{pair.ulysses_degree:3} {pair.ring_degree:4} not legal: {pair.why}")
    best = made.best
    if shown := best or next(iter(made.choices), None):
        show.print(f"\nmemory of the fullest rank with U={shown.ulysses_degree} R={shown.ring_degree}, GiB")
        for line in _memory(shown, made.cluster):
            show.print(line)
    if best is not None:
        show.print(f"\n{code(best)}")
        return
    if not made.choices:
        show.print("\nno pair of degrees is legal")
        return
    show.print("\nnothing fits into memory; what would make it fit, the cheapest first:")
    for remedy in made.remedies or ("nothing that was tried: try a smaller model, or devices of more memory",):
        show.print(f"  {remedy}")


def leading(choices: Sequence[Choice]) -> list[Choice]:
    """The best choice of each pair of degrees, in their order."""
    first: dict[tuple[int, int], Choice] = {}
    for choice in choices:
        first.setdefault((choice.ulysses_degree, choice.ring_degree), choice)
    return list(first.values())


def code(choice: Choice) -> str:
    """The choice as a line of Python, in which `mask` is that of the workload."""
    topology = f"usp.Topology.build({choice.ulysses_degree}, {choice.ring_degree}, allow_cross_node=True)"
    degrees = f"ulysses_degree={choice.ulysses_degree}, ring_degree={choice.ring_degree}"
    which = f"topology={topology}" if choice.ulysses_crosses_nodes else degrees
    named = f'"{choice.layout}"'
    layout = f"usp.layout_for({named}, mask)" if layouts.needs_mask(choice.layout) else named
    how = f', layout={layout}, transport="{choice.transport}"' if choice.ring_degree > 1 else ""
    return f"usp.USPAttention({which}{how})"


def _table(choices: Sequence[Choice]) -> Iterator[str]:
    """Two lines for each choice: its figures, and why."""
    yield "  U    R layout     transport        total compute   merge    ring all-to-all    GiB"
    for c in choices:
        times = (c.seconds, c.seconds_compute, c.seconds_merge, c.seconds_ring)
        figures = "".join(f"{seconds:8.3g}" for seconds in times) + f"{c.seconds_all_to_all:11.3g}"
        names = f"{c.layout:<10} {c.transport:<14}" if c.ring_degree > 1 else f"{'-':<10} {'-':<14}"
        yield f"{c.ulysses_degree:3} {c.ring_degree:4} {names}{figures}{c.memory_bytes / GIB:7.1f}"
        yield f"         {c.why}"


def _memory(choice: Choice, cluster: ClusterSpec) -> Iterator[str]:
    for name, size in choice.memory.items():
        yield f"{size / GIB:9.2f}  {name}"
    yield f"{choice.memory_bytes / GIB:9.2f}  in all, of {cluster.device.memory_gib:g}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
