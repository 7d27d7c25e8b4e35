"""Who computes what, at which hop: pure arithmetic that the ring, the sharder and the planner all read."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from usp import layouts
from usp.mask import Mask
from usp.positions import Positions, count
from usp.tiles import Tile, extent, meets, offsets, pairs, reach, tiles


@dataclass(frozen=True)
class Schedule:
    """The work of one attention call over a ring, decided by its values alone.

    Attributes:
        mask: which keys a query sees, on global positions.
        layout: name of the layout that deals positions to ring ranks.
        seq_len: global number of tokens.
        ring_degree: number of ring ranks.
        keys: layout and global number of the keys, where they are other tokens than the queries (cross attention).
    """

    mask: Mask
    layout: str
    seq_len: int
    ring_degree: int
    keys: tuple[str, int] | None = None

    @cached_property
    def _hash(self) -> int:
        return hash((self.mask, self.layout, self.seq_len, self.ring_degree, self.keys))

    def __hash__(self) -> int:
        """Found once: every question to a schedule is looked up by it."""
        return self._hash

    def __post_init__(self) -> None:
        """Raises InputError if the documents of the mask do not add up to `seq_len`, or to the number of keys."""
        self.mask.check(self.seq_len)
        if self.keys is not None:
            self.mask.check(self.keys[1])

    def positions(self, rank: int) -> Positions:
        """Global positions that ring rank `rank` holds."""
        return _positions(self, rank)

    @property
    def of_keys(self) -> "Schedule":
        """The schedule whose positions and lengths are those of the keys: this one, but in cross attention."""
        return self if self.keys is None else Schedule(self.mask, *self.keys, self.ring_degree)

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
        return pairs(self.positions(rank), self.of_keys.positions(owner), self.mask)

    def pairs_at(self, hop: int, ranks: Sequence[int]) -> list[int]:
        """`pairs` of each of some ranks with the block that it has at a hop, that of rank - hop."""
        ring, known = _ring(self), {}
        for rank in ranks:
            if (question := ring.question(rank, rank - hop)) not in known:
                known[question] = pairs(ring.queries.held[rank], ring.keys.held[rank - hop], self.mask)
        return [known[ring.question(rank, rank - hop)] for rank in ranks]

    @property
    def hops(self) -> int:
        """How often the blocks must move on: beyond the last hop no rank needs the block it would receive."""
        return _hops(self)

    def __str__(self) -> str:
        """The fingerprint: equal text, equal work."""
        keys = "" if self.keys is None else f" keys={self.keys[0]} S={self.keys[1]}"
        return f"{self.mask} {self.layout} S={self.seq_len} R={self.ring_degree}{keys}"


@lru_cache(maxsize=4096)
def _positions(schedule: Schedule, rank: int) -> Positions:
    return layouts.positions(schedule.layout, schedule.seq_len, schedule.ring_degree, rank)


@lru_cache(maxsize=4096)
def _tiles(schedule: Schedule, rank: int, owner: int) -> tuple[Tile, ...]:
    return tiles(schedule.positions(rank), schedule.of_keys.positions(owner), schedule.mask)


@lru_cache(maxsize=1024)
def _lengths(schedule: Schedule) -> tuple[int, ...]:
    return tuple(schedule.length(rank) for rank in range(schedule.ring_degree))


@dataclass(frozen=True)
class _Side:
    """The positions of all ranks: of their queries, or of their keys.

    Attributes:
        held: positions of every rank.
        extents: where they begin and end.
        shapes: equal where positions differ by a shift only.
    """

    held: tuple[Positions, ...]
    extents: tuple[tuple[int, int], ...]
    shapes: tuple[int, ...]


@dataclass(frozen=True)
class _Ring:
    """What tells pairs of ranks apart before any tile is looked at.

    Attributes:
        queries: positions of the queries.
        keys: positions of the keys.
        absolute: whether more than the distance of two ranks decides what one sees of the other.
    """

    queries: _Side
    keys: _Side
    absolute: bool

    def question(self, rank: int, owner: int) -> Hashable:
        """Equal for pairs of ranks of which one sees as much of the other: 1,024 ranks are then not 2^20 questions."""
        distance = self.keys.extents[owner][0] - self.queries.extents[rank][0]
        return self.queries.shapes[rank], self.keys.shapes[owner], distance, rank if self.absolute else 0


@lru_cache(maxsize=64)
def _ring(schedule: Schedule) -> _Ring:
    numbers: dict[Hashable, int] = {}
    queries = _side(schedule, numbers)
    keys = queries if schedule.keys is None else _side(schedule.of_keys, numbers)
    return _Ring(queries, keys, not schedule.mask.relative)


def _side(schedule: Schedule, numbers: dict[Hashable, int]) -> _Side:
    held = tuple(schedule.positions(rank) for rank in range(schedule.ring_degree))
    extents = tuple(map(extent, held))
    shapes = (
        tuple((run.start - first, len(run), run.step) for run in runs)
        for runs, (first, _) in zip(held, extents, strict=True)
    )
    return _Side(held, extents, tuple(numbers.setdefault(shape, len(numbers)) for shape in shapes))


@lru_cache(maxsize=1024)
def _hops(schedule: Schedule) -> int:
    ring, ranks = _ring(schedule), range(schedule.ring_degree)[::-1]
    held, owned = ring.queries.held, ring.keys.held
    bands = offsets(schedule.mask)
    reaches = [[(run, *reach((run,), schedule.mask)) for run in runs if run] for runs in held]

    def near(rank: int, owner: int) -> bool:
        """Whether some run of keys lies where some run of queries may see it: cheap, where `pairs` is exact."""
        return any(
            keys[0] < stop and keys[-1] >= start and any(meets(run, keys, band) for band in bands)
            for run, start, stop in reaches[rank]
            for keys in owned[owner]
            if keys
        )

    for hop in ranks:
        distinct = {ring.question(rank, rank - hop): rank for rank in ranks if near(rank, rank - hop)}.values()
        if any(pairs(held[rank], owned[rank - hop], schedule.mask) for rank in distinct):
            return hop
    return 0
