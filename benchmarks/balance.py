"""How even the layouts share the work of packed documents, and how many kernel calls that takes.

    .venv/bin/python benchmarks/balance.py                  # the tables
    .venv/bin/python benchmarks/balance.py --write FILE     # the same in Markdown

Two kinds of packed sequences of 131,072 tokens, 50 seeded draws of each, over 8 ring ranks; documents are causal. All
numbers are arithmetic on positions: nothing is sent and nothing is timed but the dealing itself.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from usp import layouts
from usp.mask import Mask
from usp.schedule import Schedule

SEQ_LEN, RING_DEGREE, DRAWS = 131_072, 8, 50


def log_normal(rng: random.Random) -> list[int]:
    """Documents of 1,100 tokens in the median and 2,250 in the mean; the last one is cut to fit."""
    return list(_fill(SEQ_LEN, lambda: rng.lognormvariate(7.0, 1.2)))


def heavy_tailed(rng: random.Random) -> list[int]:
    """One document of a quarter to three quarters of the sequence, among short ones of 400 tokens in the median."""
    longest = rng.randint(SEQ_LEN // 4, 3 * SEQ_LEN // 4)
    lengths = [longest, *_fill(SEQ_LEN - longest, lambda: rng.lognormvariate(6.0, 1.0))]
    rng.shuffle(lengths)
    return lengths


KINDS: dict[str, Callable[[random.Random], list[int]]] = {"log-normal": log_normal, "heavy-tailed": heavy_tailed}


def draws(kind: str) -> list[list[int]]:
    """Lengths of the documents of every draw."""
    return [KINDS[kind](random.Random(seed)) for seed in range(DRAWS)]


def _fill(tokens: int, length: Callable[[], float]) -> Iterator[int]:
    while tokens:
        drawn = min(tokens, max(1, int(length())))
        tokens -= drawn
        yield drawn


@dataclass(frozen=True)
class Score:
    """One layout on one draw.

    Attributes:
        total: work of the busiest rank over the mean: the time where no rank waits for another before the end.
        ring: time round a ring, over the mean work, where a rank is never more than a hop ahead of its neighbours.
        hop: the same where all ranks wait for the busiest one at every hop.
        tiles: kernel calls of a rank at a hop, in the mean.
        moved: how often blocks move on.
        deal_ms: CPU time of dealing.
    """

    total: float
    ring: float
    hop: float
    tiles: float
    moved: int
    deal_ms: float

    @classmethod
    def of(cls, lengths: list[int], layout: str) -> "Score":
        mask = Mask.causal() & Mask.documents(lengths)
        schedule = Schedule(mask, layouts.layout_for(layout, mask), SEQ_LEN, RING_DEGREE)
        ranks, began = range(RING_DEGREE), process_time()
        schedule.positions(0)
        deal_ms = 1e3 * (process_time() - began)
        work = [schedule.pairs_at(hop, ranks) for hop in ranks]
        totals = [sum(hops) for hops in zip(*work, strict=True)]
        calls = mean(len(schedule.tiles(rank, owner)) for rank in ranks for owner in ranks)
        total, ring, hop = (time / mean(totals) for time in (max(totals), ring_time(work), sum(map(max, work))))
        return cls(total, ring, hop, calls, schedule.hops, deal_ms)


def ring_time(work: list[list[int]]) -> int:
    """When the last rank is done with `work[hop][rank]`, where a hop starts once both neighbours are at the one before.

    That is a ring with two buffers, the block in use and the one on its way, in which transfers take no time.
    """
    starts = [0] * RING_DEGREE
    for here in work[:-1]:
        ends = [start + pairs for start, pairs in zip(starts, here, strict=True)]
        starts = [max(ends[r], starts[r - 1], starts[(r + 1) % RING_DEGREE]) for r in range(RING_DEGREE)]
    return max(start + pairs for start, pairs in zip(starts, work[-1], strict=True))


COLUMNS = (
    ("busiest rank / mean", "total", mean, 3), ("worst draw", "total", max, 3), ("in a ring", "ring", mean, 3),
    ("worst draw", "ring", max, 3), ("hop by hop", "hop", mean, 3), ("tiles a rank and hop", "tiles", mean, 1),
    ("hops", "moved", mean, 1), ("ms to deal", "deal_ms", mean, 1),
)  # fmt: skip
"""(heading, field of a score, of all draws its mean or maximum, decimals)."""


def table(kind: str) -> Table:
    """The layouts on all draws of a kind."""
    drawn = draws(kind)
    documents = [len(lengths) for lengths in drawn]
    found = Table("layout", title=f"{kind}: {min(documents)} to {max(documents)} documents, {DRAWS} draws")
    for heading, *_ in COLUMNS:
        found.add_column(heading, justify="right")
    for layout in layouts.names():
        scores = [Score.of(lengths, layout) for lengths in track(drawn, layout, transient=True)]
        cells = (f"{of([getattr(score, name) for score in scores]):.{digits}f}" for _, name, of, digits in COLUMNS)
        found.add_row(layout, *cells)
    return found


def markdown(shown: Table) -> str:
    """A table as Markdown."""
    columns = [[str(column.header), *map(str, column.cells)] for column in shown.columns]
    head, *rows = [f"| {' | '.join(row)} |" for row in zip(*columns, strict=True)]
    return "\n".join(
        (f"## {str(shown.title).capitalize()}", "", head, "|---" + "|---:" * (len(columns) - 1) + "|", *rows)
    )


def main(write: Annotated[Path | None, typer.Option(help="Where the Markdown goes.")] = None) -> None:
    """Prints a table for each kind of documents."""
    shown = [table(kind) for kind in KINDS]
    Console().print(*shown, sep="\n")
    if write:
        write.write_text("\n\n".join(map(markdown, shown)) + "\n")


if __name__ == "__main__":
    typer.run(main)
