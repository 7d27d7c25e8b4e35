"""Who computes what, at which hop: pure arithmetic that the ring, the sharder and the planner all read."""

from dataclasses import dataclass
from functools import lru_cache

from usp import layouts
from usp.mask import Mask, Tile, extent, pairs, reach, tiles
from usp.positions import Positions, count


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

    def tiles(self, rank: int, owner: int) -> tuple[Tile, ...]:
        """What rank `rank`'s queries see of rank `owner`'s keys, in local indices of both."""
        return _tiles(self, rank, owner)

    def work(self, rank: int) -> int:
        """Visible (query, key) pairs that rank `rank` computes, per head."""
        return sum(self.pairs(rank, owner) for owner in range(self.ring_degree))

    def pairs(self, rank: int, owner: int) -> int:
        """Visible (query, key) pairs of rank `rank`'s queries and rank `owner`'s keys: the areas of their tiles."""
        return pairs(self.positions(rank), self.positions(owner), self.mask)

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
def _hops(schedule: Schedule) -> int:
    mask, held = schedule.mask, [schedule.positions(rank) for rank in range(schedule.ring_degree)]
    # Most pairs of ranks are told apart by where their positions begin and end; and without documents, pairs of equal
    # shape and distance are one question. Only so is a ring of 1,024 ranks no matter of minutes.
    extents, reaches = [extent(runs) for runs in held], [reach(runs, mask) for runs in held]
    shapes: dict[tuple, int] = {}
    shape = [
        shapes.setdefault(tuple((run.start - first, len(run), run.step) for run in runs), len(shapes))
        for runs, (first, _) in zip(held, extents, strict=True)
    ]
    ring = range(schedule.ring_degree)[::-1]
    for hop in ring:
        questions = {
            (shape[r], shape[r - hop], extents[r - hop][0] - extents[r][0], r if mask.boundaries else 0): r
            for r in ring
            if extents[r - hop][0] < reaches[r][1] and extents[r - hop][1] > reaches[r][0]
        }
        if any(pairs(held[rank], held[rank - hop], mask) for rank in questions.values()):
            return hop
    return 0
