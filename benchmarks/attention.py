"""Speed of usp against torch's attention in one process on the same cores, as ratios from one run.

    python benchmarks/attention.py                      # or: make bench
    python benchmarks/attention.py --seq-len 4096       # a few minutes

One process of scaled_dot_product_attention with a thread for each core is the limit that a sharded run on one machine
can reach: the same work on the same cores, and nothing is sent. The sides take turns, one call each a round, in
alternating order; a round in which other programs used the cores is repeated while there is patience. A ratio is the
median over rounds of SDPA's seconds / usp's seconds in the same round, and usp's are those of its slowest rank.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from machine import describe
from problem import EXACT_UP_TO, RESULTS, Grid, Problem, capabilities, errors, measure, save_reference
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from team import Load, Team, wait_for_quiet

CORES = os.cpu_count() or 1
NO_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX2"}  # oneDNN then multiplies bfloat16 matrices as CPUs without units for it do
TARGETS = {(16384, False, "float32"): 0.93, (16384, True, "float32"): 0.90}
QUIET = 0.05
"""Share of the cores that other programs may use during a call that counts."""

console = Console(width=None if sys.stdout.isatty() else 110)


@dataclass(frozen=True)
class Side:
    """One way to solve a problem; without a grid, torch's attention in one process."""

    grid: Grid | None
    team: Team

    def __str__(self) -> str:
        return f"SDPA, {CORES} threads" if self.grid is None else str(self.grid)


@dataclass(frozen=True)
class Turn:
    """One call: seconds of the slowest rank, and who else used the cores meanwhile."""

    forward: float
    both: float
    foreign: float
    idle_side: float


Round = dict[Side, Turn]


class Bench:
    """Teams by number of ranks, all of one environment."""

    def __init__(self, grids: Sequence[Grid], environment: dict[str, str]) -> None:
        ranks = sorted({grid.ranks for grid in grids})
        self._teams = {0: Team(1, CORES, environment)} | {n: Team(n, 1, environment) for n in ranks}
        self.sides = [Side(None, self._teams[0]), *(Side(grid, self._teams[grid.ranks]) for grid in grids)]
        self.capabilities = self._teams[0].run(capabilities)[0]

    def run(self, problem: Problem, repeats: int, patience: float, advance) -> list[Round]:
        """The `repeats` quietest rounds."""
        for side in self.sides:
            side.team.run(measure, problem, side.grid)  # the ranks agree on arguments, pages and code are loaded
        rounds: list[Round] = []
        deadline = time.monotonic() + patience
        while True:
            wait_for_quiet(QUIET, deadline)
            order = self.sides if len(rounds) % 2 else self.sides[::-1]
            rounds.append({side: self._turn(side, problem) for side in order})
            quiet = sum(_disturbance(r) <= QUIET for r in rounds)
            late = time.monotonic() > deadline
            advance(min(repeats, len(rounds) if late else quiet))
            if quiet >= repeats or (late and len(rounds) >= repeats):
                return sorted(rounds, key=_disturbance)[:repeats]

    def errors(self, problem: Problem) -> dict[Side, dict[str, float]]:
        """Relative errors norm(x - ref) / norm(ref) over all ranks."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "reference.pt"
            self._teams[0].run(save_reference, problem, path)
            found = {}
            for side in self.sides:
                ranks = side.team.run(errors, problem, side.grid, path)
                sums = [[sum(part) for part in zip(*pairs, strict=True)] for pairs in zip(*ranks, strict=True)]
                found[side] = {name: (a / b) ** 0.5 for name, (a, b) in zip(RESULTS, sums, strict=True)}
            return found

    def close(self) -> None:
        for team in self._teams.values():
            team.close()

    def _turn(self, side: Side, problem: Problem) -> Turn:
        load = Load(side.team, list(self._teams.values()))
        ranks = side.team.run(measure, problem, side.grid)
        load.stop()
        return Turn(max(s.forward for s in ranks), max(s.both for s in ranks), load.foreign, load.idle_side)


def _disturbance(turns: Round) -> float:
    return max(turn.foreign for turn in turns.values())


def problems(seq_lens: Sequence[int], dtypes: Sequence[str]) -> list[Problem]:
    found = []
    if "float32" in dtypes:
        found += [Problem(seq_len, causal) for seq_len in seq_lens for causal in (False, True)]
        found += [Problem(min(seq_lens), True, kv_heads=2)]
    if "bfloat16" in dtypes:
        found += [Problem(min(seq_lens), True, "bfloat16")]
    return found


def rows(problem: Problem, rounds: list[Round], found: dict[Side, dict[str, float]], note: str) -> list[dict]:
    """What is printed and written for each side."""
    limit = next(side for side in rounds[0] if side.grid is None)
    target = TARGETS.get((problem.seq_len, problem.causal, problem.dtype))
    results = []
    for side in found:
        ratios = [turns[limit].both / turns[side].both for turns in rounds]
        results.append(
            {
                "problem": asdict(problem),
                "environment": note,
                "side": str(side),
                "grid": side.grid and asdict(side.grid),
                "seconds_forward": statistics.median(turns[side].forward for turns in rounds),
                "seconds_forward_backward": statistics.median(turns[side].both for turns in rounds),
                "ratio_forward": statistics.median(turns[limit].forward / turns[side].forward for turns in rounds),
                "ratio": statistics.median(ratios),
                "ratios": ratios,
                "target": target if side.grid and side.grid.ranks <= CORES else None,
                "errors": found[side],
                "errors_against": "float64" if problem.seq_len <= EXACT_UP_TO else "SDPA in float32",
                "foreign_load": [turns[side].foreign for turns in rounds],
                "idle_side_load": max(turns[side].idle_side for turns in rounds),
            }
        )
    return results


def show(problem: Problem, results: list[dict], note: str) -> None:
    against = results[0]["errors_against"]
    title = f"{problem}{f' {note}' if note else ''}; errors against {against}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    for heading in ("fwd s", "both s", "fwd ratio", "ratio", "range", "target", *RESULTS):
        table.add_column(heading, justify="right")
    for row in results:
        alone = row["grid"] is None
        speed = [
            f"{row['ratio_forward']:.2f}",
            f"[bold]{row['ratio']:.2f}[/bold]",
            f"{min(row['ratios']):.2f}-{max(row['ratios']):.2f}",
            f">= {row['target']:.2f}" if row["target"] else "",
        ]
        table.add_row(
            row["side"],
            f"{row['seconds_forward']:.3f}",
            f"{row['seconds_forward_backward']:.3f}",
            *([""] * len(speed) if alone else speed),
            *("" if alone and against != "float64" else f"{error:.1e}" for error in row["errors"].values()),
        )
    console.print(table)
    noisy = max(max(row["foreign_load"]) for row in results)
    if noisy > QUIET:
        console.print(
            f"  other programs used up to {noisy:.0%} of the cores: not a measurement to quote", style="yellow"
        )


def main(
    seq_len: Annotated[
        list[int] | None, typer.Option(help="global tokens; again for more [default: 4096, 16384]")
    ] = None,
    grid: Annotated[list[str] | None, typer.Option(help="ulysses x ring [default: 2x1, 1x2, 2x2]")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="[default: float32, bfloat16]")] = None,
    repeats: Annotated[int, typer.Option(help="rounds that count")] = 5,
    patience: Annotated[
        float, typer.Option(help="seconds to wait, for each problem, for other programs to stop")
    ] = 60.0,
    no_amx: Annotated[bool, typer.Option(help="hide the CPU's bfloat16 matrix units from every process")] = False,
    out: Annotated[Path, typer.Option(help="where the JSON goes")] = Path(__file__).parent
    / "results"
    / "attention.json",
) -> None:
    """Times usp against scaled_dot_product_attention in one process, forward and backward."""
    grids = [Grid.parse(text) for text in grid or ["2x1", "1x2", "2x2"]]
    wanted = problems(seq_len or [4096, 16384], dtype or ["float32", "bfloat16"])
    info = describe()
    console.print(" | ".join(f"{name} {value}" for name, value in info.items()))
    results: list[dict] = []
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:

        def compare(batch: list[Problem], environment: dict[str, str]) -> None:
            bench = Bench(grids, environment)
            has_amx = bench.capabilities["amx"] and bench.capabilities["onednn_bf16"]
            try:
                for problem in batch:
                    note = "" if problem.dtype == "float32" else "with AMX" if has_amx else "without AMX"
                    task = progress.add_task(str(problem), total=repeats)
                    rounds = bench.run(
                        problem, repeats, patience, lambda n, task=task: progress.update(task, completed=n)
                    )
                    found = rows(problem, rounds, bench.errors(problem), note)
                    progress.remove_task(task)
                    show(problem, found, note)
                    results.extend(found)
            finally:
                bench.close()

        compare(wanted, NO_AMX if no_amx else {})
        half = [problem for problem in wanted if problem.dtype != "float32"]
        if half and not no_amx:
            compare(half, NO_AMX)

    out.parent.mkdir(parents=True, exist_ok=True)
    settings = {"repeats": repeats, "quiet": QUIET, "no_amx": no_amx}
    out.write_text(json.dumps({"machine": info, "settings": settings, "results": results}, indent=2) + "\n")
    console.print(f"written: {os.path.relpath(out)}")


if __name__ == "__main__":
    typer.run(main)
