"""`usp check`: compares attention with dense attention in float64, on the user's problem, processes and devices."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, astuple, dataclass, replace
from itertools import product
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from usp import layouts
from usp.cli.mask_options import MaskOptions, describe_mask
from usp.cli.output import AsJson, console, document
from usp.cli.processes import place, progress, this_device
from usp.errors import InputError
from usp.mask import Mask
from usp.planner.spec import DTYPE_BYTES, Workload

if TYPE_CHECKING:
    from usp.check import CheckReport, Problem, Track

EXAMPLES = (
    "Examples: `usp check --seq-len 4K`; `torchrun --nproc-per-node 4 -m usp.cli check --seq-len 8K --heads 8 "
    "--kv-heads 2 --dtype bfloat16 -u 2 -r 2`; `torchrun --nproc-per-node 4 -m usp.cli check --seq-len 999 --sweep`."
)
MASKS: dict[str, Callable[[int], Mask]] = {
    "full": lambda seq_len: Mask.full(),
    "causal": lambda seq_len: Mask.causal(),
    "window": lambda seq_len: Mask.window(seq_len // 4, 0),
    "documents": lambda seq_len: _documents(seq_len),
    "causal documents": lambda seq_len: Mask.causal() & _documents(seq_len),
}
"""What a sweep goes over."""


@dataclass(frozen=True)
class ProblemOptions:
    """The attention."""

    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key/value heads; as many as query heads.")] = None
    head_dim: Annotated[int, typer.Option(min=1, help="Their size.")] = 64
    dtype: Annotated[str, typer.Option(help="Of q, k, v.")] = "float32"


@dataclass(frozen=True)
class GridOptions:
    """Over which ranks, and how."""

    ulysses_degree: Annotated[
        int | None, typer.Option("--ulysses-degree", "-u", min=1, help="Ranks that swap heads; 1.")
    ] = None
    ring_degree: Annotated[
        int | None, typer.Option("--ring-degree", "-r", min=1, help="Ranks of a ring; all that are left.")
    ] = None
    layout: Annotated[str | None, typer.Option(help=f"One of {', '.join(layouts.names())}; zigzag.")] = None
    kernel: Annotated[str, typer.Option(help="As in usp.USPAttention.")] = "auto"
    transport: Annotated[str, typer.Option(help="As in usp.USPAttention.")] = "auto"
    device: Annotated[str, typer.Option(help="cpu or cuda; auto: a GPU where there is one.")] = "auto"
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Go over all degrees, layouts and masks that were not given.")
    ] = False
    as_json: AsJson = False

    def degrees(self, processes: int) -> list[tuple[int, int]]:
        """Ulysses and ring degrees. Raises InputError: there are none for so many processes."""
        if not self.sweep:
            ulysses = self.ulysses_degree or 1
            ring = self.ring_degree or max(1, processes // ulysses)
            if processes == 1 < ulysses * ring:
                raise InputError(
                    f"ulysses {ulysses} x ring {ring} is {ulysses * ring} ranks, and this is one process: start with "
                    f"`torchrun --nproc-per-node {ulysses * ring} -m usp.cli check`, and the same options"
                )
            return [(ulysses, ring)]
        found = [(u, processes // u) for u in range(1, processes + 1) if processes % u == 0]
        wanted = self.ulysses_degree, self.ring_degree
        found = [pair for pair in found if all(w in (None, degree) for w, degree in zip(wanted, pair, strict=True))]
        if not found:
            raise InputError(f"a sweep is over all {processes} processes: give a degree that divides them, or none")
        return found


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        degrees: Ulysses and ring degree.
        layout: its name, without a mask.
        mask: the mask in words.
        problem: what is computed.
        skipped: why it is not, if so.
    """

    degrees: tuple[int, int]
    layout: str
    mask: str
    problem: "Problem"
    skipped: str


def check(mask: MaskOptions, problem: ProblemOptions, grid: GridOptions) -> None:
    """Compare attention with dense attention in float64; the exit code is 1 if an error is past its bound."""
    (_, processes), device = place(), this_device(grid.device)
    cases = list(_cases(mask, problem, grid, processes, str(device)))
    if all(case.skipped for case in cases):
        raise InputError(f"nothing to check: {cases[0].skipped}; lower the Ulysses degree, or give more heads")
    import torch.distributed as dist

    from usp.check import untracked
    from usp.probe import TIMEOUT

    if processes > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        first = processes == 1 or dist.get_rank() == 0
        with progress(first) as track:
            if grid.sweep:
                reports = [None if case.skipped else _run(case, untracked) for case in track(cases, "checking")]
            else:
                reports = [_run(case, track) for case in cases]
    finally:
        if processes > 1:
            dist.destroy_process_group()
    found, made = list(zip(cases, reports, strict=True)), [report for report in reports if report is not None]
    failures = sum(not report.passed for report in made)
    if first:
        out = console(grid.as_json)
        out.print(_title(cases[0], grid.sweep), _sweep(found) if grid.sweep else _results(made[0]), sep="\n")
        verdict = f"{failures} of {len(made)} past a bound" if failures else "all within their bounds"
        out.print(f"{verdict}, {len(cases) - len(made)} skipped" if len(cases) > len(made) else verdict)
        if grid.as_json:
            document({"passed": not failures, "cases": [_content(*each) for each in found]})
    if failures:
        raise typer.Exit(1)


def _cases(
    mask: MaskOptions, problem: ProblemOptions, grid: GridOptions, processes: int, device: str
) -> Iterator[Case]:
    """Degrees x layouts x masks. Raises InputError for what does not fit."""
    workload = Workload.read(mask.fields())
    if problem.dtype not in DTYPE_BYTES:
        raise InputError(f"dtype is {problem.dtype!r}: it must be one of {', '.join(DTYPE_BYTES)}")
    masks = {describe_mask(workload): workload.mask}
    if grid.sweep and mask == MaskOptions(mask.seq_len):
        masks = {words: make(mask.seq_len) for words, make in MASKS.items()}
    names = [grid.layout] if grid.layout else layouts.names() if grid.sweep else ["zigzag"]
    degrees = grid.degrees(processes)
    import torch

    from usp.check import Problem

    shared: dict[str, Any] = asdict(problem) | {
        "seq_len": mask.seq_len,
        "dtype": getattr(torch, problem.dtype),
        "kernel": grid.kernel,
        "transport": grid.transport,
        "device": device,
    }
    for (ulysses, ring), layout, (words, which) in product(degrees, names, masks.items()):
        whole = Problem(mask=which, layout=layouts.layout_for(layout, which), **shared)
        few = grid.sweep and problem.heads < ulysses
        yield Case((ulysses, ring), layout, words, whole, "fewer heads than Ulysses ranks" if few else "")


def _run(case: Case, track: "Track") -> "CheckReport":
    """The worst report of the groups of ranks that share a sequence: the same on every rank."""
    import torch.distributed as dist

    from usp.check import Comparison
    from usp.check import check as run
    from usp.collect import gather
    from usp.topology import Topology

    report = run(Topology.build(*case.degrees, allow_cross_node=True), track=track, **vars(case.problem))
    if not dist.is_initialized():
        return report
    told = gather([astuple(result) for result in report.results])
    everywhere = (replace(report, results=tuple(Comparison(*result) for result in results)) for results in told)
    return max(everywhere, key=lambda each: each.worst.of_bound)


def _title(case: Case, sweep: bool) -> str:
    """The problem in words, without what a sweep goes over."""
    (ulysses, ring), problem = case.degrees, case.problem
    where = "" if sweep else f"U{ulysses} R{ring} {case.layout}, {case.mask}: "
    heads = f"{problem.heads}:{problem.kv_heads or problem.heads} heads of {problem.head_dim}"
    dtype = str(problem.dtype).removeprefix("torch.")
    return f"{where}{problem.seq_len:,} tokens, batch {problem.batch}, {heads}, {dtype} on {problem.device}"


def _results(report: "CheckReport") -> Table:
    table = Table("", "rel. error", "single device", "bound", "which is", "")
    for result in report.results:
        errors = (f"{error:.1e}" for error in (result.error, result.single_device, result.bound))
        table.add_row(result.name, *errors, result.bound_from, "passes" if result.passed else "FAILS")
    return table


def _sweep(found: "Iterable[tuple[Case, CheckReport | None]]") -> Table:
    """A row a case: the worst of its four errors. No wider than 80 columns."""
    table = Table("U x R", "layout", "mask", "worst", "bound", "of bound")
    for case, report in found:
        row = (" x ".join(map(str, case.degrees)), case.layout, case.mask)
        if report is None:
            table.add_row(*row, "skipped", "", case.skipped)
        else:
            worst = report.worst
            verdict = f"{worst.of_bound:.2f}" + " FAILS" * (not worst.passed)
            table.add_row(*row, f"{worst.name} {worst.error:.1e}", f"{worst.bound:.1e}", verdict)
    return table


def _content(case: Case, report: "CheckReport | None") -> dict[str, Any]:
    """For the document, where an error that is no finite number is null."""
    ulysses, ring = case.degrees
    found = {"ulysses_degree": ulysses, "ring_degree": ring, "layout": case.layout, "mask": case.mask}
    if report is None:
        return {**found, "skipped": case.skipped}
    results = {result.name: {key: _finite(value) for key, value in asdict(result).items()} for result in report.results}
    return {**found, "passed": report.passed, "results": results}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


def _documents(seq_len: int) -> Mask:
    """Three, of different lengths."""
    return Mask.cu_seqlens(sorted({0, seq_len // 5, seq_len // 2, seq_len}))
