"""Speed of usp and of other libraries against torch's attention in one process on the same cores, as ratios of one run.

    python benchmarks/attention.py                      # long; or: make bench
    python benchmarks/attention.py --seq-len 4096       # a part; also --grid, --dtype, --no-peers
    python benchmarks/report.py                         # docs/benchmarks.md from the results

One process of scaled_dot_product_attention with a thread for each core is the limit that a sharded run on one machine
can reach: the same work on the same cores, and nothing is sent. The sides on the same number of ranks take turns with
it, one call each a round, in alternating order; where other programs used the cores, rounds are added while there is
patience. A ratio is the median over a side's quietest rounds of SDPA's seconds / the side's seconds in the same round,
and a side's are those of its slowest rank.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import peers as others
import typer
from machine import describe
from problem import (
    RESULTS,
    Grid,
    Problem,
    Side,
    capabilities,
    compare,
    measure,
    save_reference,
    sdpa,
    with_usp,
    with_usp_contiguous,
    with_usp_striped,
)
from rich import box
from rich.console import Console
from rich.table import Table
from team import Load, RankError, Team, wait_for_quiet

CORES = os.cpu_count() or 1
NO_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX2"}  # oneDNN then multiplies bfloat16 matrices as CPUs without units for it do
PEER_ENVIRONMENT = {"DS_ACCELERATOR": "cpu"}
SDPA = Side(f"SDPA, {CORES} threads", None, sdpa)
AIMED = {Grid(2, 1), Grid(1, 2), Grid(2, 2)}
TARGETS = {
    (2, 4096, True): 0.94,
    (2, 8192, False): 0.98, (2, 8192, True): 0.98,
    (2, 16384, False): 0.99, (2, 16384, True): 0.99,
    (4, 4096, False): 0.90, (4, 4096, True): 0.90,
    (4, 8192, False): 0.96, (4, 8192, True): 0.96,
    (4, 16384, False): 0.97, (4, 16384, True): 0.97,
}  # fmt: skip
"""By ranks, tokens and whether causal, in float32, on the grids in `AIMED`."""
TARGET_WITHOUT_AMX = 4.5
ALL_SIDES_UP_TO = 8192
"""Longest sequence that is measured on sides without a target."""
QUIET = 0.05
"""Share of the cores that other programs, and idle sides, may use during a call that counts."""
SLOW, SLOW_ROUNDS = 4.0, 2
"""A peer that takes that many times SDPA's time gets so many rounds, and no longer sequence."""

console = Console(width=None if sys.stdout.isatty() else 140)


@dataclass(frozen=True)
class Turn:
    """One call: seconds of the slowest rank, and who else used the cores meanwhile."""

    forward: float
    both: float
    foreign: float
    idle_side: float

    @property
    def disturbance(self) -> float:
        """The share of the cores that went to anything else."""
        return self.foreign + self.idle_side


@dataclass
class Outcome:
    """What became of a side: pairs of SDPA's turn and its own, by round, or why there are none."""

    pairs: list[tuple[Turn, Turn]] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def quiet(self) -> int:
        return sum(_disturbance(pair) <= QUIET for pair in self.pairs)

    @property
    def best(self) -> float:
        """The largest ratio: noise in one round must not make a side look slow."""
        return max(limit.both / turn.both for limit, turn in self.pairs)


def _disturbance(pair: tuple[Turn, Turn]) -> float:
    return max(turn.disturbance for turn in pair)


class Bench:
    """Teams, all of one environment. Peers have their own: they may change what is global in a process, or end it."""

    def __init__(self, environment: dict[str, str], tell: Callable[[str], Any]) -> None:
        self._environment, self._tell = environment, tell
        self._teams: dict[tuple[bool, int], Team] = {}
        self._left_out: dict[tuple[Side, Problem | None], str] = {}
        self._warm: dict[Side, tuple[Problem, Team]] = {}
        self.capabilities = self._team(SDPA).run(capabilities)[0]

    def run(self, problem: Problem, sides: Sequence[Side], repeats: int, patience: float) -> dict[Side, Outcome]:
        """What became of SDPA and of each of `sides`."""
        with tempfile.TemporaryDirectory() as folder:
            reference = Path(folder) / "reference.pt"
            self._tell(f"{problem}: the reference in float64")
            self._team(SDPA).run(save_reference, problem, reference)
            found = {side: self._first_call(problem, side, reference) for side in [SDPA, *sides]}
        groups: dict[int, dict[Side, Outcome]] = defaultdict(dict)
        for side, outcome in found.items():
            if side.grid and not outcome.reason:  # turns that are compared must be close in time
                group = side.grid.ranks if problem.seq_len <= ALL_SIDES_UP_TO else 0
                groups[group][side] = outcome
        for group in groups.values():
            found[SDPA].pairs += [(turn, turn) for turn in self._rounds(problem, group, repeats, patience)]
        return found

    def close(self) -> None:
        for team in self._teams.values():
            team.close()

    def _first_call(self, problem: Problem, side: Side, reference: Path) -> Outcome:
        """Loads pages and code, makes usp's ranks agree on arguments, and finds the relative errors."""
        if problem.seq_len > ALL_SIDES_UP_TO and side.grid and not is_aimed(side):
            return Outcome(reason=f"not run beyond {ALL_SIDES_UP_TO} tokens")
        for known in ((side, None), _kind(problem, side)):
            if known in self._left_out:
                return Outcome(reason=self._left_out[known])
        self._tell(f"{problem}: {side}, first call")
        try:
            ranks = self._team(side).run(compare, problem, side, reference)
        except RankError as error:
            return Outcome(reason=self._fail(problem, side, error))
        self._warm[side] = problem, self._team(side)
        sums = [[sum(part) for part in zip(*pairs, strict=True)] for pairs in zip(*ranks, strict=True)]
        return Outcome(errors={name: (a / b) ** 0.5 for name, (a, b) in zip(RESULTS, sums, strict=True)})

    def _rounds(self, problem: Problem, group: dict[Side, Outcome], repeats: int, patience: float) -> list[Turn]:
        """SDPA and the sides of a group, until each has `repeats` quiet rounds or patience is over; SDPA's quietest."""
        deadline = time.monotonic() + patience
        running, count = dict(group), 0
        limits: list[Turn] = []
        while running:
            wait_for_quiet(QUIET, deadline)
            count += 1
            self._tell(f"{problem}: {', '.join(map(str, running))}; round {count}")
            order = [SDPA, *running]
            turns: dict[Side, Turn] = {}
            for side in order if count % 2 else order[::-1]:
                try:
                    turns[side] = self._turn(problem, side)
                except RankError as error:
                    running.pop(side, Outcome()).reason = self._fail(problem, side, error)
            limits.append(turns[SDPA])
            late = time.monotonic() > deadline
            for side, outcome in list(running.items()):
                outcome.pairs.append((turns[SDPA], turns[side]))
                slow = side.is_peer and count >= min(SLOW_ROUNDS, repeats) and outcome.best < 1 / SLOW
                if slow:
                    reason = f"not run: {1 / outcome.best:.0f} x slower at S {problem.seq_len}"
                    self._left_out[_kind(problem, side)] = reason
                if slow or (count >= repeats and (late or outcome.quiet >= repeats)):
                    del running[side]
        for outcome in group.values():
            outcome.pairs = sorted(outcome.pairs, key=_disturbance)[:repeats]
        return sorted(limits, key=lambda turn: turn.disturbance)[:repeats]

    def _turn(self, problem: Problem, side: Side) -> Turn:
        team = self._team(side)
        if self._warm.get(side) != (problem, team):  # another side's failure ended the team that knew it
            team.run(measure, problem, side)
            self._warm[side] = problem, team
        load = Load(team, list(self._teams.values()))
        ranks = team.run(measure, problem, side)
        load.stop()
        return Turn(max(s.forward for s in ranks), max(s.both for s in ranks), load.foreign, load.idle_side)

    def _team(self, side: Side) -> Team:
        key = side.is_peer, side.grid.ranks if side.grid else 0
        if key not in self._teams:
            extra = PEER_ENVIRONMENT if side.is_peer else {}
            threads = 1 if side.grid else CORES
            self._teams[key] = Team(key[1] or 1, threads, self._environment | extra, silent=side.is_peer)
        return self._teams[key]

    def _fail(self, problem: Problem, side: Side, error: RankError) -> str:
        """What the table says of a peer that raised.

        It is not asked again for more tokens of the same, and for nothing if it has not solved anything: a new team for
        each failure takes longer than most calls.
        """
        if not side.is_peer:
            raise error
        self._teams.pop((True, side.grid.ranks if side.grid else 0)).close()
        known = _kind(problem, side) if side in self._warm else (side, None)
        self._left_out[known] = f"not run: fails at {problem}"
        return f"fails: {error.failure}"


def _kind(problem: Problem, side: Side) -> tuple[Side, Problem]:
    return side, replace(problem, seq_len=0)


def is_aimed(side: Side) -> bool:
    """Whether there are targets for it."""
    return side.grid in AIMED and not side.is_peer and not side.note


def target(problem: Problem, side: Side, note: str) -> float | None:
    if side.grid is None or not is_aimed(side):
        return None
    if problem.dtype == "float32":
        return TARGETS.get((side.grid.ranks, problem.seq_len, problem.causal))
    return TARGET_WITHOUT_AMX if note == "without AMX" else None


def sides(problem: Problem, grids: Sequence[Grid], peers: bool) -> list[Side]:
    """All but SDPA."""
    found = [Side("usp", grid, with_usp) for grid in grids]
    if problem.causal and Grid(1, 2) in grids:
        found.append(Side("usp", Grid(1, 2), with_usp_striped, "striped"))
        found.append(Side("usp", Grid(1, 2), with_usp_contiguous, "contiguous"))
    return found + (others.sides(grids) if peers else [])


def problems(seq_lens: Sequence[int], dtypes: Sequence[str]) -> list[Problem]:
    """From short to long: what was slow is not asked for more."""
    found = []
    if "float32" in dtypes:
        for seq_len in sorted(seq_lens):
            found += [Problem(seq_len, causal) for causal in (False, True)]
            if seq_len <= ALL_SIDES_UP_TO:
                found += [Problem(seq_len, True, kv_heads=2)]
    if "bfloat16" in dtypes:
        found += [Problem(min(seq_lens), True, "bfloat16")]
    return found


def rows(problem: Problem, found: dict[Side, Outcome], note: str) -> list[dict[str, Any]]:
    """What is printed and written for each side."""
    results = []
    for side, outcome in found.items():
        row: dict[str, Any] = {
            "problem": asdict(problem),
            "environment": note,
            "side": str(side),
            "grid": side.grid and asdict(side.grid),
            "is_peer": side.is_peer,
            "reason": outcome.reason,
        }
        if not outcome.reason:
            ratios = [limit.both / turn.both for limit, turn in outcome.pairs]
            row |= {
                "seconds_forward": statistics.median(turn.forward for _, turn in outcome.pairs),
                "seconds_forward_backward": statistics.median(turn.both for _, turn in outcome.pairs),
                "ratio_forward": statistics.median(limit.forward / turn.forward for limit, turn in outcome.pairs),
                "ratio": statistics.median(ratios),
                "ratios": ratios,
                "target": target(problem, side, note),
                "errors": outcome.errors,
                "foreign_load": [max(turn.foreign for turn in pair) for pair in outcome.pairs],
                "idle_side_load": [max(turn.idle_side for turn in pair) for pair in outcome.pairs],
                "disturbance": max(map(_disturbance, outcome.pairs)),
            }
        results.append(row)
    return results


def show(problem: Problem, results: list[dict[str, Any]], note: str) -> None:
    table = Table(title=f"{problem} {note}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    for heading in ("fwd s", "both s", "fwd ratio", "ratio", "range", "rounds", "target", *RESULTS):
        table.add_column(heading, justify="right")
    for row in results:
        if row["reason"]:
            continue
        speed = [
            f"{row['ratio_forward']:.2f}",
            f"[bold]{row['ratio']:.2f}[/bold]",
            f"{min(row['ratios']):.2f}-{max(row['ratios']):.2f}",
            str(len(row["ratios"])),
            f">= {row['target']:.2f}" if row["target"] else "",
        ]
        table.add_row(
            row["side"],
            f"{row['seconds_forward']:.3f}",
            f"{row['seconds_forward_backward']:.3f}",
            *(speed if row["grid"] else [""] * len(speed)),
            *(f"{error:.1e}" for error in row["errors"].values()),
        )
    console.print(table)
    for row in results:
        if row["reason"]:
            console.print(f"  {row['side']}: {row['reason']}", markup=False, overflow="ellipsis", no_wrap=True)
    noisy = max(row["disturbance"] for row in results if not row["reason"])
    if noisy > QUIET:
        console.print(
            f"  up to {noisy:.0%} of the cores went to other programs: not a measurement to quote", style="yellow"
        )


def main(
    seq_len: Annotated[
        list[int] | None, typer.Option(help="global tokens; again for more [default: 4096, 8192, 16384]")
    ] = None,
    grid: Annotated[list[str] | None, typer.Option(help="ulysses x ring [default: 2x1, 1x2, 4x1, 2x2, 1x4]")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="[default: float32, bfloat16]")] = None,
    peers: Annotated[bool, typer.Option(help="measure the other libraries that are installed")] = True,
    repeats: Annotated[int, typer.Option(help="rounds that count")] = 5,
    patience: Annotated[
        float, typer.Option(help="seconds to wait, for each group of sides, for other programs to stop")
    ] = 60.0,
    no_amx: Annotated[bool, typer.Option(help="hide the CPU's bfloat16 matrix units from every process")] = False,
    out: Annotated[Path, typer.Option(help="where the JSON goes")] = Path(__file__).parent
    / "results"
    / "attention.json",
) -> None:
    """Times usp and its peers against scaled_dot_product_attention in one process, forward and backward."""
    grids = [Grid.parse(text) for text in grid or ["2x1", "1x2", "4x1", "2x2", "1x4"]]
    wanted = problems(seq_len or [4096, 8192, 16384], dtype or ["float32", "bfloat16"])
    info = describe()
    console.print(" | ".join(f"{name} {value}" for name, value in info.items()))
    missing = [peer.name for peer in others.PEERS if peers and not peer.is_installed]
    if missing:
        console.print(f"left out, not installed: {', '.join(missing)}: {others.INSTALL}", soft_wrap=True)
    results: list[dict[str, Any]] = []
    settings = {"repeats": repeats, "quiet": QUIET, "no_amx": no_amx, "all_sides_up_to": ALL_SIDES_UP_TO}
    settings |= {"peers": others.versions() if peers else {}}
    out.parent.mkdir(parents=True, exist_ok=True)

    def run(batch: list[Problem], environment: dict[str, str]) -> bool:
        """Whether the processes had AMX."""
        with console.status("") as status, closing(Bench(environment, status.update)) as bench:
            has_amx = bench.capabilities["amx"] and bench.capabilities["onednn_bf16"]
            for problem in batch:
                note = "" if problem.dtype == "float32" else "with AMX" if has_amx else "without AMX"
                found = rows(problem, bench.run(problem, sides(problem, grids, peers), repeats, patience), note)
                show(problem, found, note)
                results.extend(found)
                # After every problem: a run is long, and what was measured is worth keeping if it is ended.
                out.write_text(json.dumps({"machine": info, "settings": settings, "results": results}, indent=2) + "\n")
        return has_amx

    half = [problem for problem in wanted if problem.dtype != "float32"]
    if run(wanted, NO_AMX if no_amx else {}) and half:
        run(half, NO_AMX)

    console.print(f"written: {os.path.relpath(out)}")


if __name__ == "__main__":
    typer.run(main)
