"""Which keys a query sees, as arithmetic on positions.

Mask: disjoint bands of `key position - query position`, and document boundaries. A value: frozen, hashable, printable.
Tile: a rectangle of one (query block, key block) pair, in local indices, whose mask is exactly one band. After `trim`
a tile is one call of a flash kernel, and nothing in it is wasted but what its band hides.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf

from usp.errors import InputError
from usp.positions import Positions

Bound = int | None
"""An end of a band: an offset `key - query`, or None for "no bound"."""


def _lower(a: Bound, b: Bound) -> Bound:
    """The tighter of two lower bounds."""
    return b if a is None else a if b is None else max(a, b)


def _upper(a: Bound, b: Bound) -> Bound:
    """The tighter of two upper bounds."""
    return b if a is None else a if b is None else min(a, b)


def _shift(bound: Bound, by: int) -> Bound:
    return None if bound is None else bound + by


@dataclass(frozen=True)
class Band:
    """Query i sees key j iff `lo <= j - i <= hi`. Full is (None, None), causal (None, 0), a sliding window (-w, 0)."""

    lo: Bound = None
    hi: Bound = None

    def __and__(self, other: "Band") -> "Band":
        return Band(_lower(self.lo, other.lo), _upper(self.hi, other.hi))

    def __bool__(self) -> bool:
        """Whether any offset satisfies the band."""
        return self.lo is None or self.hi is None or self.lo <= self.hi

    def shift(self, by: int) -> "Band":
        """The same band after keys were renumbered by `+by` relative to the queries."""
        return Band(_shift(self.lo, by), _shift(self.hi, by))

    def __str__(self) -> str:
        return f"{'' if self.lo is None else self.lo}:{'' if self.hi is None else self.hi}"


FULL = Band()
CAUSAL = Band(None, 0)


@dataclass(frozen=True)
class Mask:
    """Disjoint bands of offsets, and document boundaries that no query looks across.

    Attributes:
        bands: ascending and disjoint; overlapping or touching bands given to the constructor are united.
        boundaries: cumulative document boundaries `(0, ..., seq_len)`, empty for one document of any length.
    """

    bands: tuple[Band, ...] = (FULL,)
    boundaries: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "bands", _unite(self.bands))
        ascending = all(a < b for a, b in pairwise(self.boundaries))
        if self.boundaries and (self.boundaries[0] != 0 or not ascending):
            raise InputError(
                f"document boundaries must start at 0 and ascend, got {_brief(self.boundaries)}; "
                "they are cumulative, like cu_seqlens: lengths 3, 5 give 0, 3, 8"
            )

    @classmethod
    def full(cls) -> "Mask":
        """Every query sees every key."""
        return cls((FULL,))  # torch.compile traces a band that it is given, and not the one of a default

    @classmethod
    def causal(cls) -> "Mask":
        """A query sees itself and what came before."""
        return cls((CAUSAL,))

    @classmethod
    def window(cls, left: Bound, right: Bound) -> "Mask":
        """A query sees `left` keys back and `right` keys ahead; None or -1 is "no bound", as in flash-attention.

        Raises:
            InputError: a bound is below -1.
        """
        for side, reach in (("left", left), ("right", right)):
            if reach is not None and reach < -1:
                raise InputError(f"window {side} is {reach}: it must be >= 0, or -1 or None for no bound")
        return cls((Band(None if left in (None, -1) else -left, None if right == -1 else right),))

    @classmethod
    def documents(cls, lengths: Iterable[int]) -> "Mask":
        """Packed documents by their lengths, in the order of the GLOBAL sequence; a query sees its own document only.

        Raises:
            InputError: there is no document, or a length is not positive.
        """
        return cls.cu_seqlens(tuple(accumulate(lengths, initial=0)))

    @classmethod
    def cu_seqlens(cls, boundaries: Sequence[int]) -> "Mask":
        """Packed documents by cumulative boundaries over the GLOBAL sequence, `(0, ..., seq_len)`.

        Raises:
            InputError: the boundaries do not start at 0, do not ascend, or hold no document.
        """
        if len(boundaries) < 2:
            raise InputError(f"document boundaries hold no document, got {_brief(boundaries)}: give (0, ..., seq_len)")
        return cls((FULL,), tuple(map(int, boundaries)))

    def __and__(self, other: "Mask") -> "Mask":
        """Sees what both see.

        Raises:
            InputError: both have documents, of different total length.
        """
        ends = {mask.boundaries[-1] for mask in (self, other) if mask.boundaries}
        if len(ends) > 1:
            raise InputError(f"masks with documents of different total length cannot be combined: {sorted(ends)}")
        bands = tuple(both for a in self.bands for b in other.bands if (both := a & b))
        return Mask(bands, tuple(sorted({*self.boundaries, *other.boundaries})))

    def check(self, seq_len: int) -> None:
        """Raises InputError if the documents do not add up to `seq_len`."""
        if self.boundaries and self.boundaries[-1] != seq_len:
            raise InputError(
                f"the documents add up to {self.boundaries[-1]} tokens and the global sequence has {seq_len}; "
                "boundaries are GLOBAL and the last document ends with the sequence (padding is a document too)"
            )

    def __str__(self) -> str:
        """The canonical text, which `parse` reads back."""
        bands = "+".join(str(band) for band in self.bands) or "nothing"
        return bands + ("@" + ",".join(map(str, self.boundaries)) if self.boundaries else "")

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, text: str) -> "Mask":
        """Reads `str(mask)` back."""
        bands, _, boundaries = text.partition("@")
        ends = (band.split(":") for band in bands.split("+") if ":" in band)
        return cls(
            tuple(Band(*(int(end) if end else None for end in pair)) for pair in ends),
            tuple(map(int, boundaries.split(","))) if boundaries else (),
        )


@dataclass(frozen=True)
class Tile:
    """Rows `q` and columns `k` of a block, and the one band over indices counted from the starts of both."""

    q: slice
    k: slice
    band: Band

    @property
    def area(self) -> int:
        """Number of visible (query, key) pairs."""
        return area(self.q.stop - self.q.start, self.k.stop - self.k.start, self.band)


def area(rows: int, columns: int, band: Band) -> int:
    """Number of pairs `0 <= i < rows, 0 <= j < columns` with `j - i` in the band, in closed form."""

    def triangle(n: int) -> int:
        return n * (n + 1) // 2 if n > 0 else 0

    def at_most(offset: int) -> int:  # pairs with j - i <= offset: sum over i of clamp(i + offset + 1, 0, columns)
        return (
            triangle(rows + offset) - triangle(offset) - triangle(rows + offset - columns) + triangle(offset - columns)
        )

    above = rows * columns if band.hi is None else at_most(band.hi)
    below = 0 if band.lo is None else at_most(band.lo - 1)
    return max(above - below, 0)


def trim(tile: Tile) -> Tile | None:
    """Drops the rows and columns that see nothing and the bounds that never bind; None if nothing is left.

    Every row and every column of the result holds a visible pair. Idempotent.
    """
    rows, columns = tile.q.stop - tile.q.start, tile.k.stop - tile.k.start
    lo, hi = tile.band.lo, tile.band.hi
    if rows <= 0 or columns <= 0 or not tile.band:
        return None
    row_start = 0 if hi is None else max(0, -hi)
    row_stop = rows if lo is None else min(rows, columns - lo)
    if row_start >= row_stop:
        return None
    column_start = 0 if lo is None else max(0, row_start + lo)
    column_stop = columns if hi is None else min(columns, row_stop + hi)
    band = tile.band.shift(row_start - column_start)
    rows, columns = row_stop - row_start, column_stop - column_start
    return Tile(
        slice(tile.q.start + row_start, tile.q.start + row_stop),
        slice(tile.k.start + column_start, tile.k.start + column_stop),
        Band(
            None if band.lo is not None and band.lo <= 1 - rows else band.lo,
            None if band.hi is not None and band.hi >= columns - 1 else band.hi,
        ),
    )


def blocks(tile: Tile, rows: int, columns: int | None = None) -> Iterator[Tile]:
    """Cuts a tile into trimmed tiles of at most `rows` x `columns` (None: all columns that the rows see)."""
    columns = columns or max(1, tile.k.stop - tile.k.start)
    for q in range(tile.q.start, tile.q.stop, rows):
        for k in range(tile.k.start, tile.k.stop, columns):
            band = tile.band.shift((q - tile.q.start) - (k - tile.k.start))
            piece = Tile(slice(q, min(q + rows, tile.q.stop)), slice(k, min(k + columns, tile.k.stop)), band)
            if trimmed := trim(piece):
                yield trimmed


def tiles(q: Positions, k: Positions, mask: Mask) -> tuple[Tile, ...]:
    """The tiles of one (query block, key block) pair: each visible pair lies in exactly one.

    Between two runs of equal step s whose starts differ by d, the band `lo <= d + s * (jj - ii) <= hi` on positions is
    the band `ceil((lo - d) / s) <= jj - ii <= floor((hi - d) / s)` on indices. Tiles that together are again one band
    over one rectangle are joined, so zigzag and striped causal need one launch a hop.
    """
    return tuple(tile for document in _pieces(q, k, mask) for tile in _coalesce(document))


def pairs(q: Positions, k: Positions, mask: Mask) -> int:
    """Number of visible (query, key) pairs: the areas of the tiles, without the work of joining them."""
    return sum(piece.area for document in _pieces(q, k, mask) for piece in document)


def _pieces(q: Positions, k: Positions, mask: Mask) -> Iterator[list[Tile]]:
    """The tiles of each document before they are joined: one for every two runs and band that meet."""
    start, stop = reach(q, mask)
    first, last = extent(k)
    if last <= start or first >= stop:
        return
    rows, columns = _by_document(q, mask.boundaries), _by_document(k, mask.boundaries)
    for document, row_runs in rows.items():
        yield [
            piece
            for i, q_run in row_runs
            for j, k_run in columns.get(document, ())
            for band in mask.bands
            if (piece := _tile(i, q_run, j, k_run, band))
        ]


def extent(positions: Positions) -> tuple[int, int]:
    """Where positions begin, and where they end."""
    runs = [run for run in positions if run]
    return (runs[0].start, runs[-1].stop) if runs else (0, 0)


def reach(q: Positions, mask: Mask) -> tuple[float, float]:
    """Where keys must lie for any of these queries to see them: from the first to before the second position.

    Cheap, and no more than that: not every key there is seen.
    """
    first, stop = extent(q)
    if first == stop or not mask.bands:
        return 0, 0
    last = min(stop, mask.boundaries[-1] if mask.boundaries else stop) - 1
    lo, hi, boundaries = mask.bands[0].lo, mask.bands[-1].hi, mask.boundaries
    start = -inf if lo is None else first + lo
    stop = inf if hi is None else last + hi + 1
    if boundaries:
        start = max(start, boundaries[bisect_right(boundaries, first) - 1])
        stop = min(stop, boundaries[bisect_left(boundaries, last + 1)])
    return start, stop


def _tile(i: int, q_run: range, j: int, k_run: range, band: Band) -> Tile | None:
    """The trimmed tile between two runs that start at local indices `i` and `j`."""
    step = q_run.step if len(q_run) > 1 else k_run.step
    if len(k_run) > 1 and k_run.step != step:
        raise ValueError(f"runs of different steps: {q_run} and {k_run}")
    offset = k_run.start - q_run.start
    local = Band(
        None if band.lo is None else -((offset - band.lo) // step),
        None if band.hi is None else (band.hi - offset) // step,
    )
    return trim(Tile(slice(i, i + len(q_run)), slice(j, j + len(k_run)), local))


def _by_document(positions: Positions, boundaries: tuple[int, ...]) -> dict[int, list[tuple[int, range]]]:
    """(local start, run) of every stretch that lies inside one run and one document."""
    stretches: dict[int, list[tuple[int, range]]] = defaultdict(list)
    offset = 0
    for run in positions:
        start = 0
        while start < len(run):
            document = bisect_right(boundaries, run[start]) - 1 if boundaries else 0
            stop = len(run)
            if boundaries:
                stop = min(stop, -((run.start - boundaries[document + 1]) // run.step))
            stretches[document].append((offset + start, run[start:stop]))
            start = stop
        offset += len(run)
    return stretches


def _coalesce(pieces: Iterable[Tile]) -> list[Tile]:
    """Joins tiles until no two of them are again one tile."""
    done: list[Tile] = []
    for tile in pieces:
        while joined := next(((other, both) for other in reversed(done) if (both := _join(other, tile))), None):
            done.remove(joined[0])
            tile = joined[1]
        done.append(tile)
    return done


def _join(a: Tile, b: Tile) -> Tile | None:
    """The tile that sees exactly what the disjoint tiles `a` and `b` see, if there is one.

    A candidate that sees all of both and has the sum of their areas sees nothing else.
    """
    q = slice(min(a.q.start, b.q.start), max(a.q.stop, b.q.stop))
    k = slice(min(a.k.start, b.k.start), max(a.k.stop, b.k.stop))
    a_band, b_band = (t.band.shift((t.k.start - k.start) - (t.q.start - q.start)) for t in (a, b))
    lowest = min(t.k.start - t.q.stop + 1 for t in (a, b)) - k.start + q.start  # the offsets of their corners, which
    highest = max(t.k.stop - 1 - t.q.start for t in (a, b)) - k.start + q.start  # bind where a trimmed bound did not
    lows, highs = {a_band.lo, b_band.lo, lowest}, {a_band.hi, b_band.hi, highest}
    for band in (Band(lo, hi) for lo in lows for hi in highs):
        if area(q.stop - q.start, k.stop - k.start, band) != a.area + b.area:
            continue
        if all(_restricted(t, q, k, band) == t.area for t in (a, b)):
            return trim(Tile(q, k, band))
    return None


def _restricted(tile: Tile, q: slice, k: slice, band: Band) -> int:
    """How many pairs of `tile` also lie in `band`, which counts from the starts of `q` and `k`."""
    return Tile(tile.q, tile.k, tile.band & band.shift((k.start - tile.k.start) - (q.start - tile.q.start))).area


def _unite(bands: Iterable[Band]) -> tuple[Band, ...]:
    """The same offsets as ascending, disjoint bands that do not touch."""
    united: list[Band] = []
    for band in sorted(filter(None, bands), key=lambda b: (b.lo is not None, b.lo or 0)):
        last = united[-1] if united else None
        if last and (last.hi is None or band.lo is None or band.lo <= last.hi + 1):
            hi = None if last.hi is None or band.hi is None else max(last.hi, band.hi)
            united[-1] = Band(last.lo, hi)
        else:
            united.append(band)
    return tuple(united)


def _brief(values: Sequence[int]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return f"({shown}, ... {len(values)} in all)" if len(values) > 8 else f"({shown})"
