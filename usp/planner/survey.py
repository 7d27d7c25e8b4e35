"""Who works how much at each hop of a ring, as far as blocks move: all of it, or of a long ring a sample."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

from usp.positions import split
from usp.schedule import Schedule
from usp.tiles import Tile

ENOUGH_RANKS = 16
"""A sample holds about as many ranks as hops, up to that many ranks; more if there is room for all hops."""


@dataclass(frozen=True)
class Survey:
    """What some ranks of a ring do at some hops.

    Attributes:
        schedule: what was looked at.
        ranks: those that were looked at.
        hops: (hop, how many hops it stands for), ascending.
        work: visible pairs, `work[i][j]` of `ranks[j]` at `hops[i]`.
    """

    schedule: Schedule
    ranks: tuple[int, ...]
    hops: tuple[tuple[int, int], ...]
    work: tuple[tuple[int, ...], ...]

    @property
    def complete(self) -> bool:
        """Whether every rank was looked at at every hop."""
        return len(self.ranks) == self.schedule.ring_degree and len(self.hops) == self.schedule.hops + 1

    @property
    def totals(self) -> list[int]:
        """Visible pairs of each rank over all hops."""
        weights = [stands_for for _, stands_for in self.hops]
        return [sum(w * n for w, n in zip(work, weights, strict=True)) for work in zip(*self.work, strict=True)]

    @property
    def slowest(self) -> int:
        """Sum over hops of the slowest rank's visible pairs: the ring waits for it at each."""
        return sum(stands_for * max(work) for (_, stands_for), work in zip(self.hops, self.work, strict=True))

    @property
    def waiting(self) -> float:
        """Share of the time that a rank waits on average, 0 to 1: 1 - mean / slowest, both summed over hops."""
        return max(0.0, 1 - sum(self.totals) / len(self.ranks) / self.slowest) if self.slowest else 0.0

    def tiles(self, index: int, rank: int) -> tuple[Tile, ...]:
        """The tiles of a rank at `hops[index]`."""
        return self.schedule.tiles(rank, (rank - self.hops[index][0]) % self.schedule.ring_degree)

    def slowest_tiles(self, index: int) -> tuple[Tile, ...]:
        """The tiles of the rank that has most to compute at `hops[index]`.

        Of several, of the first or the last, whose tiles have more rows to merge: under zigzag one of them has half the
        rows of all columns, and the other all rows of half the columns.
        """
        most = max(self.work[index])
        busiest = [rank for rank, work in zip(self.ranks, self.work[index], strict=True) if work == most]
        ends = (self.tiles(index, rank) for rank in (busiest[0], busiest[-1]))
        return max(ends, key=lambda tiles: sum(tile.q.stop - tile.q.start for tile in tiles))


@lru_cache(maxsize=256)
def survey(schedule: Schedule, budget: int) -> Survey:
    """Counts what each rank does at each hop, of a sample of ranks and hops if there are too many.

    Args:
        schedule: what is counted.
        budget: most pairs of pieces (stretches of one run and one document) to compare.
    """
    ring = schedule.ring_degree
    fits = budget // _pieces(schedule)
    ranks = _spread(ring, max(2, min(ENOUGH_RANKS, isqrt(fits)), fits // ring))
    hops = _stand_for(schedule.hops + 1, max(1, fits // len(ranks)))
    return Survey(schedule, ranks, hops, tuple(tuple(schedule.pairs_at(hop, ranks)) for hop, _ in hops))


def _pieces(schedule: Schedule) -> int:
    """Pairs of pieces that the tiles of two ranks are made from, about: runs of one by stretches of the other."""
    runs = [run for run in schedule.positions(schedule.ring_degree // 2) if run]

    def stretches(run: range, boundaries: tuple[int, ...]) -> int:
        return min(len(run), bisect_right(boundaries, run[-1]) - bisect_right(boundaries, run[0]) + 1)

    return max(
        1,
        len(runs) * sum(len(r.bands) * stretches(run, r.boundaries) for r in schedule.mask.regions for run in runs),
    )


def _spread(total: int, number: int) -> tuple[int, ...]:
    """All of `range(total)`, or `number` of them from the first to the last at even distances."""
    if number >= total:
        return tuple(range(total))
    return tuple(round(index * (total - 1) / (number - 1)) for index in range(number))


def _stand_for(total: int, number: int) -> tuple[tuple[int, int], ...]:
    """(hop, how many it stands for): all of `range(total)`, or the first and the middles of `number - 1` runs."""
    if number >= total:
        return tuple((hop, 1) for hop in range(total))
    runs = split(total - 1, max(1, number - 1))
    return (0, 1), *((1 + run[len(run) // 2], len(run)) for run in runs)
