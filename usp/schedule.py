"""Who computes what, at which hop: pure arithmetic that the ring, the sharder and the planner all read."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from usp import layouts
from usp.mask import Mask
from usp.positions import Positions, count
from usp.tiles import Tile, extent, pairs, reach, tiles


@dataclass(frozen=True)
class Schedule:
    """The work of one attention call over a ring, decided by its values alone.

    Attributes:
        mask: which keys a query sees, on global positions.
        layout: name of the layout that deals positions to ring ranks.
        seq_len: global number of tokens.
        ring_degree: number of ring ranks.
    """

    mask: Mask
    layout: str
    seq_len: int
    ring_degree: int

    def __post_init__(self) -> None:
        """Raises InputError if the documents of the mask do not add up to `seq_len`."""
        self.mask.check(self.seq_len)

    def positions(self, rank: int) -> Positions:
        """Global positions that ring rank `rank` holds."""
        return _positions(self, rank)

    def length(self, rank: int) -> int:
        """Number of tokens that ring rank `rank` holds."""
        return count(self.positions(rank))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of every ring rank."""
        return _lengths(self)

    def tiles(self, rank: int, owner: int) -> tuple[Tile, ...]:
        """What rank `rank`'s queries see of rank `owner`'s keys, in local indices of both."""
        return _tiles(self, rank, owner)

    def work(self, rank: int) -> int:
        """Visible (query, key) pairs that rank `rank` computes, per head."""
        return sum(self.pairs(rank, owner) for owner in range(self.ring_degree))

    def pairs(self, rank: int, owner: int) -> int:
        """Visible (query, key) pairs of rank `rank`'s queries and rank `owner`'s keys: the areas of their tiles."""
        return pairs(self.positions(rank), self.positions(owner), self.mask)

    def pairs_at(self, hop: int, ranks: Sequence[int]) -> list[int]:
        """`pairs` of each of some ranks with the block that it has at a hop, that of rank - hop."""
        ring, known = _ring(self), {}
        for rank in ranks:
            if (question := ring.question(rank, rank - hop)) not in known:
                known[question] = pairs(ring.held[rank], ring.held[rank - hop], self.mask)
        return [known[ring.question(rank, rank - hop)] for rank in ranks]

    @property
    def hops(self) -> int:
        """How often the blocks must move on: beyond the last hop no rank needs the block it would receive."""
        return _hops(self)

    def __str__(self) -> str:
        """The fingerprint: equal text, equal work."""
        return f"{self.mask} {self.layout} S={self.seq_len} R={self.ring_degree}"


@lru_cache(maxsize=4096)
def _positions(schedule: Schedule, rank: int) -> Positions:
    return layouts.load(schedule.layout)(schedule.seq_len, schedule.ring_degree, rank)


@lru_cache(maxsize=4096)
def _tiles(schedule: Schedule, rank: int, owner: int) -> tuple[Tile, ...]:
    return tiles(schedule.positions(rank), schedule.positions(owner), schedule.mask)


@lru_cache(maxsize=1024)
def _lengths(schedule: Schedule) -> tuple[int, ...]:
    return tuple(schedule.length(rank) for rank in range(schedule.ring_degree))


@dataclass(frozen=True)
class _Ring:
    """The positions of all ranks, and what tells pairs of ranks apart before any tile is looked at.

    Attributes:
        held: positions of every rank.
        extents: where they begin and end.
        shapes: a number for every rank, equal where positions differ by a shift only.
        absolute: whether more than the distance of two ranks decides what one sees of the other.
    """

    held: tuple[Positions, ...]
    extents: tuple[tuple[int, int], ...]
    shapes: tuple[int, ...]
    absolute: bool

    def question(self, rank: int, owner: int) -> Hashable:
        """Equal for pairs of ranks of which one sees as much of the other: 1,024 ranks are then not 2^20 questions."""
        distance = self.extents[owner][0] - self.extents[rank][0]
        return self.shapes[rank], self.shapes[owner], distance, rank if self.absolute else 0


@lru_cache(maxsize=64)
def _ring(schedule: Schedule) -> _Ring:
    held = tuple(schedule.positions(rank) for rank in range(schedule.ring_degree))
    extents, numbers = tuple(map(extent, held)), {}
    shapes = (
        tuple((run.start - first, len(run), run.step) for run in runs)
        for runs, (first, _) in zip(held, extents, strict=True)
    )
    numbered = tuple(numbers.setdefault(shape, len(numbers)) for shape in shapes)
    return _Ring(held, extents, numbered, not schedule.mask.relative)


@lru_cache(maxsize=1024)
def _hops(schedule: Schedule) -> int:
    ring, ranks = _ring(schedule), range(schedule.ring_degree)[::-1]
    extents, reaches = ring.extents, [reach(runs, schedule.mask) for runs in ring.held]
    for hop in ranks:
        near = (r for r in ranks if extents[r - hop][0] < reaches[r][1] and extents[r - hop][1] > reaches[r][0])
        distinct = {ring.question(rank, rank - hop): rank for rank in near}.values()
        if any(pairs(ring.held[rank], ring.held[rank - hop], schedule.mask) for rank in distinct):
            return hop
    return 0
