"""`usp explain`: who computes which tile at which hop, and how evenly."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.text import Text

from usp import layouts
from usp.cli import tile_plot
from usp.cli.mask_options import MaskOptions, describe_mask
from usp.cli.output import AsJson, console, document
from usp.mask import Mask
from usp.planner.spec import Workload
from usp.planner.survey import Survey, survey
from usp.schedule import Schedule

EXAMPLES = (
    "Examples: `usp explain --seq-len 128K -r 4 --layout zigzag`; `usp explain --seq-len 8K -r 4 --window 1023,0`; "
    "`usp explain --seq-len 8K -r 4 --prefix 1K --documents 3K,5K --layout balanced --plot tiles.png`."
)
BUDGET = 2**14
"""Most pairs of pieces of positions that one survey compares: beyond it ranks, then hops are sampled."""
WORTHWHILE = 0.95
"""Another layout is recommended if it takes at most this share of the time."""
SHOWN = 12
"""Most ranks or hops that are listed for people."""
COLUMNS = 8
"""Longest ring whose ranks have a column each."""
SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyz"
T = TypeVar("T")


class Part(BaseModel):
    """What all parts of the document share."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Rank(Part):
    """One rank of the ring."""

    rank: int
    positions: list[tuple[int, int, int]] = Field(description="The global positions it holds: start, stop, step.")
    tokens: int
    work: int | None = Field(description="Visible pairs that it computes, per head; null: not in the sample.")


class Hop(Part):
    """One step of the ring: rank r computes with the keys of rank r - hop."""

    hop: int
    stands_for: int = Field(description="How many hops of the ring it stands for: 1 unless hops were sampled.")
    max: int = Field(description="Visible pairs of the slowest rank, for which all wait.")
    mean: float = Field(description="Mean of the ranks' visible pairs.")
    max_over_mean: float | None = Field(description="null: no rank has work.")
    tiles: int = Field(description="Most kernel calls of a rank, per run of heads.")


class LayoutTime(Part):
    """How another layout, or the same, would do."""

    layout: str
    relative_time: float = Field(description="Sum over hops of the slowest rank's visible pairs, relative to yours.")
    tiles: int = Field(description="Sum over hops of the most kernel calls of a rank.")
    hops_moved: int
    sampled: bool = Field(description="Whether these numbers are estimates.")


class Sample(Part):
    """How much was looked at, where all of it would take too long."""

    ranks: int
    hops: int


class Explanation(Part):
    """The document of `usp explain --json`."""

    schedule: str = Field(description="The fingerprint of the schedule.")
    ring_degree: int
    seq_len: int
    layout: str = Field(description="Its name; one that deals by a mask deals by this one.")
    mask: str = Field(
        description="Regions, joined by |: bands of key - query offsets, q and k: the queries and keys, @: boundaries."
    )
    ranks: list[Rank]
    hops: list[Hop]
    balance: float | None = Field(description="Slowest rank over mean, of the totals; null: no rank has work.")
    waiting: float = Field(description="Share of the time that a rank waits on average: each hop takes the slowest.")
    hops_moved: int = Field(description="Hops after which no rank needs another block.")
    layouts: list[LayoutTime]
    better_layout: str | None
    sampled: Sample | None = Field(
        description="null: every rank and hop was looked at; else the numbers are estimates."
    )


def summary(survey: Survey) -> list[Hop]:
    """The balance of each hop."""
    found = []
    for index, ((hop, stands_for), work) in enumerate(zip(survey.hops, survey.work, strict=True)):
        most, mean = max(work), sum(work) / len(work)
        ratio = most / mean if most else None
        calls = max(len(survey.tiles(index, rank)) for rank in survey.ranks)
        found.append(Hop(hop=hop, stands_for=stands_for, max=most, mean=mean, max_over_mean=ratio, tiles=calls))
    return found


def dealt(mask: Mask) -> dict[str, str]:
    """The built-in layouts by their names: those that deal by a mask, by this one."""
    return {name: layouts.layout_for(name, mask) for name in layouts.names()}


def compare(schedule: Schedule, own: Survey) -> list[LayoutTime]:
    """The built-in layouts for the mask, length and ring of a schedule, of which there is a survey already."""
    found = {
        name: own if layout == schedule.layout else survey(replace(schedule, layout=layout), BUDGET)
        for name, layout in dealt(schedule.mask).items()
    }
    return [
        LayoutTime(
            layout=name,
            relative_time=other.slowest / own.slowest if own.slowest else 1.0,
            tiles=sum(hop.stands_for * hop.tiles for hop in summary(other)),
            hops_moved=other.schedule.hops,
            sampled=not other.complete,
        )
        for name, other in found.items()
    ]


def best(layouts: Sequence[LayoutTime]) -> LayoutTime | None:
    """The fastest layout, of about equal ones that of fewest kernel calls; None if it is hardly worth a change."""
    found = min(layouts, key=lambda layout: (round(layout.relative_time, 3), layout.tiles, layout.relative_time))
    return found if found.relative_time <= WORTHWHILE else None


def explanation(schedule: Schedule, survey: Survey) -> Explanation:
    """The document about a schedule."""
    totals, compared = survey.totals, compare(schedule, survey)
    work, better = dict(zip(survey.ranks, totals, strict=True)), best(compared)
    names = {layout: name for name, layout in dealt(schedule.mask).items()}
    return Explanation(
        schedule=str(schedule),
        ring_degree=schedule.ring_degree,
        seq_len=schedule.seq_len,
        layout=names[schedule.layout],
        mask=str(schedule.mask),
        ranks=[
            Rank(
                rank=rank,
                positions=[(run.start, run.stop, run.step) for run in schedule.positions(rank)],
                tokens=schedule.length(rank),
                work=work.get(rank),
            )
            for rank in range(schedule.ring_degree)
        ],
        hops=summary(survey),
        balance=max(totals) * len(totals) / sum(totals) if any(totals) else None,
        waiting=survey.waiting,
        hops_moved=schedule.hops,
        layouts=compared,
        better_layout=better.layout if better else None,
        sampled=None if survey.complete else Sample(ranks=len(survey.ranks), hops=len(survey.hops)),
    )


@dataclass(frozen=True)
class RingOptions:
    """Over how many ranks the sequence is dealt, and how."""

    ring_degree: Annotated[int, typer.Option("--ring-degree", "-r", min=1, max=4096, help="Ranks of the ring.")]
    layout: Annotated[str, typer.Option(help=f"One of {', '.join(layouts.names())}.")] = "contiguous"


@dataclass(frozen=True)
class OutputOptions:
    """What is printed and drawn."""

    as_json: AsJson = False
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Write a picture, such as tiles.png.")] = None


def explain(mask: MaskOptions, ring: RingOptions, output: OutputOptions) -> None:
    """Show who computes which tile at which hop of the ring, and how evenly.

    Work is counted in visible (query, key) pairs per head, from the schedule that the attention executes.
    """
    workload = Workload.read(mask.fields())
    layout = layouts.layout_for(ring.layout, workload.mask)
    schedule = Schedule(workload.mask, layout, workload.seq_len, ring.ring_degree)
    found = survey(schedule, BUDGET)
    told = explanation(schedule, found)
    about = f"{workload.seq_len:,} tokens, {describe_mask(workload)}"
    title = f"{ring.layout} over a ring of {ring.ring_degree:,}: {about}"
    if output.plot:
        bars = [tile_plot.Bar(hop.hop, hop.stands_for, hop.max, hop.mean) for hop in told.hops]
        tile_plot.draw(schedule, bars, title + " (bars sampled)" * bool(told.sampled), output.plot)
    out = console(output.as_json)
    out.print(title)
    _positions(out, schedule)
    _picture(out, schedule, told.hops_moved)
    _work(out, found, told)
    _conclusion(out, told)
    if output.as_json:
        document(told.model_dump(mode="json"))


def _listed(items: Sequence[T], text: Callable[[T], str], noun: str) -> list[str]:
    """The text of each item; of many, the first and the last and how many are left out between."""
    if len(items) <= SHOWN:
        return [text(item) for item in items]
    left_out = f"... {len(items) - SHOWN:,} more {noun}"
    return [*(text(item) for item in items[: SHOWN - 1]), left_out, text(items[-1])]


def _positions(out: Console, schedule: Schedule) -> None:
    def held(rank: int) -> str:
        tokens, runs = schedule.length(rank), [run for run in schedule.positions(rank) if run]
        where = ", ".join(_listed(runs, _run, "runs")) or "none"
        return f"rank {rank}: {where} ({tokens:,} token{'s' * (tokens != 1)})"

    out.print("\nPositions")
    for line in _listed(range(schedule.ring_degree), held, "ranks"):
        out.print(f"  {line}")


def _run(run: range) -> str:
    if len(run) == 1:
        return f"{run[0]}"
    return f"{run[0]}-{run[-1]}" + (f" step {run.step}" if run.step > 1 else "")


def _picture(out: Console, schedule: Schedule, last: int) -> None:
    """The plane at most 64 x 32 characters large: rows are queries, two columns a row are keys."""
    ring = schedule.ring_degree
    rows = min(32 - 32 % (2 * ring) if ring <= 16 else 32, schedule.seq_len)
    queries, keys = tile_plot.cells(schedule, rows), tile_plot.cells(schedule, 2 * rows)
    each = -(-ring // len(SYMBOLS))
    hops = f"the hop, {' '.join(SYMBOLS[:ring])}" if each == 1 else f"the hop, {each} of them a symbol, 0-9 then a-z"
    out.print(f"\nTiles: queries down, keys across, named by the ranks that hold them; {hops}; . nothing visible")
    if any(cell.shared for cell in queries + keys):
        out.print("  where several ranks share a stretch of the sequence, they take turns from cell to cell")
    margin = len(str(ring - 1)) + 5
    for line in _axis([cell.rank for cell in keys]):
        out.print(" " * margin + "  " + line)
    names = [f"rank {cell.rank}" for cell in queries]
    for index, row in enumerate(tile_plot.raster(schedule, queries, keys)):
        name = names[index] if index == 0 or names[index] != names[index - 1] else ""
        line = Text(f"{name:>{margin}}  ")
        for hop in row:
            style = f"{tile_plot.ink(hop, last)} on {tile_plot.colour(hop, last)}" if hop is not None else ""
            line.append("." if hop is None else SYMBOLS[hop // each], style)
        out.print(line)


def _axis(ranks: Sequence[int]) -> list[str]:
    """The ranks along the keys, each where its cells begin: in one line, or downwards where that is too narrow."""
    starts = [index for index, rank in enumerate(ranks) if index == 0 or rank != ranks[index - 1]]
    width = len(str(max(ranks)))
    room = min((b - a for a, b in pairwise([*starts, len(ranks) + 1])), default=1)
    if width == 1 or room > width:
        line = ""
        for start in starts:
            line = line.ljust(start) + str(ranks[start])
        return [line]
    names = [str(rank).rjust(width) if index in starts else " " * width for index, rank in enumerate(ranks)]
    return ["".join(name[digit] for name in names).rstrip() for digit in range(width)]


def _work(out: Console, survey: Survey, told: Explanation) -> None:
    """A table of the hops, with a bar as long as the hop takes: full for the mean, light for the waiting."""
    totals, ring = survey.totals, told.ring_degree
    exponent = 3 * ((len(str(max(totals))) - 1) // 3)
    named = len(survey.ranks) == ring <= COLUMNS
    full, light = "█░" if out.encoding.startswith("utf") else "#-"
    longest = max(hop.max for hop in told.hops) or 1

    def line(name: str, work: Sequence[float], ratio: float | None, calls: int, bar: str = "") -> str:
        shown = work if named else (max(work), sum(work) / len(work))
        cells = "".join(f"{n / 10**exponent:>11,.3f}" if exponent else f"{n:>11,.5g}" for n in shown)
        return f"{name:>9} {cells} {'-' if ratio is None else f'{ratio:.2f}':>9} {calls:>7,}  {bar}".rstrip()

    def row(index: int) -> str:
        hop = told.hops[index]
        whole, mean = (round(24 * n / longest) for n in (hop.max, hop.mean))
        bar = full * mean + light * (whole - mean)
        return line(f"{hop.hop}", survey.work[index], hop.max_over_mean, hop.tiles, bar)

    unit = f", in 10^{exponent}" if exponent else ""
    out.print(f"\nVisible pairs per hop{unit} (rank r with the keys of rank r - hop); calls: kernel calls of a rank")
    heads = [f"rank {rank}" for rank in survey.ranks] if named else ["slowest", "mean"]
    out.print(f"  {'hop':>9} {''.join(f'{head:>11}' for head in heads)} {'max/mean':>9} {'calls':>7}")
    for text in _listed(range(len(told.hops)), row, "hops"):
        out.print(f"  {text}")
    out.print("  " + line("all", totals, told.balance, sum(hop.stands_for * hop.tiles for hop in told.hops)))


def _conclusion(out: Console, told: Explanation) -> None:
    rest = told.ring_degree - 1
    out.print(f"\nA rank waits {told.waiting:.0%} of the time: every hop takes as long as its slowest rank.")
    out.print(f"Blocks move {told.hops_moved:,} of {rest:,} hops.")
    compared = {layout.layout: layout for layout in told.layouts}
    own, other = compared[told.layout], compared.get(told.better_layout or "")
    if other:
        about = "about " if own.sampled or other.sampled else ""
        text = f"{other.layout} would take {about}{other.relative_time:.2f} of the time"
        if other.tiles > own.tiles:
            text += f", in {other.tiles:,} kernel calls of a rank instead of {own.tiles:,}"
        if other.hops_moved > own.hops_moved:
            text += f", moving {other.hops_moved:,} hops instead of {own.hops_moved:,}"
        out.print(f"{text}.")
    else:
        out.print("No other layout takes noticeably less time.")
    if told.sampled:
        ranks, hops = (
            f"{number:,} of {total:,}"
            for number, total in ((told.sampled.ranks, told.ring_degree), (told.sampled.hops, told.hops_moved + 1))
        )
        out.print(f"Sampled: the numbers are estimates, from {ranks} ranks at {hops} hops.")
