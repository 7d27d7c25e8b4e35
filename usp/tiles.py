"""The rectangles of a mask between the positions of two ranks: what a kernel computes, a call each.

Tile: a rectangle of one (query block, key block) pair, in local indices, whose mask is exactly one band. After `trim`
a tile is one call of a flash kernel, and nothing in it is wasted but what its band hides.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import inf

from usp.mask import FULL, Band, Mask, Region
from usp.positions import Positions

LATEST = 32
"""Among how many tiles a neighbour is looked for: all of them would be quadratic in the runs of two ranks."""


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


def _pieces(q: Positions, k: Positions, mask: Mask) -> Iterable[list[Tile]]:
    """The tiles of each document before they are joined: one for every two runs and band that meet."""
    found: dict[int, list[Tile]] = defaultdict(list)
    first, last = extent(k)
    for region in mask.regions:
        start, stop = _reach(q, region)
        if last <= start or first >= stop:
            continue
        rows = _by_document(q, region.queries, region.boundaries)
        columns = _by_document(k, region.keys, region.boundaries)
        for document, row_runs in rows.items():
            found[document] += (
                piece
                for i, q_run in row_runs
                for j, k_run in columns.get(document, ())
                for band in region.bands
                for piece in _between(i, q_run, j, k_run, band)
            )
    return found.values()


def extent(positions: Positions) -> tuple[int, int]:
    """Where positions begin, and where they end."""
    runs = [run for run in positions if run]
    return (runs[0].start, runs[-1].stop) if runs else (0, 0)


def reach(q: Positions, mask: Mask) -> tuple[float, float]:
    """Where keys must lie for any of these queries to see them: from the first to before the second position.

    Cheap, and no more than that: not every key there is seen.
    """
    found = [(start, stop) for region in mask.regions for start, stop in (_reach(q, region),) if start < stop]
    return (min(start for start, _ in found), max(stop for _, stop in found)) if found else (0, 0)


@lru_cache(maxsize=256)
def offsets(mask: Mask) -> tuple[Band, ...]:
    """Bands beyond which no query sees a key, whatever its position: a document is as long as the longest."""
    longest = [max((b - a for a, b in pairwise(region.boundaries)), default=inf) for region in mask.regions]
    return tuple(
        band if limit == inf else band & Band(1 - int(limit), int(limit) - 1)
        for region, limit in zip(mask.regions, longest, strict=True)
        for band in region.bands
    )


def meets(q_run: range, k_run: range, band: Band) -> bool:
    """Whether a band holds the offset of some query of one run and some key of another of the same step."""
    step = q_run.step if q_run.step == k_run.step else 1
    first = k_run.start - q_run.start
    lowest, highest = k_run.start - q_run[-1], k_run[-1] - q_run.start
    lo = lowest if band.lo is None else max(lowest, band.lo)
    hi = highest if band.hi is None else min(highest, band.hi)
    return -((first - lo) // step) <= (hi - first) // step


def _reach(q: Positions, region: Region) -> tuple[float, float]:
    first, end = extent(q)
    lo, hi, boundaries = region.bands[0].lo, region.bands[-1].hi, region.boundaries
    first, last = max(first, region.queries.lo or 0), end - 1
    if region.queries.hi is not None:
        last = min(last, region.queries.hi)
    if boundaries:
        last = min(last, boundaries[-1] - 1)
    if first > last:
        return 0, 0
    start = max(-inf if lo is None else first + lo, -inf if region.keys.lo is None else region.keys.lo)
    stop = min(inf if hi is None else last + hi + 1, inf if region.keys.hi is None else region.keys.hi + 1)
    if boundaries:
        start = max(start, boundaries[bisect_right(boundaries, first) - 1])
        stop = min(stop, boundaries[bisect_left(boundaries, last + 1)])
    return start, stop


def _between(i: int, q_run: range, j: int, k_run: range, band: Band) -> Iterator[Tile]:
    """The trimmed tiles between two runs that start at local indices `i` and `j`: one, if their steps agree.

    Between runs of different steps a bounded band is no band of indices, but between a run and a single token it is.
    """
    if q_run.step != k_run.step:
        corners = Band(k_run[0] - q_run[-1], k_run[-1] - q_run[0])
        band = FULL if band & corners == corners else band & corners
    if q_run.step == k_run.step or band == FULL or not band or min(len(q_run), len(k_run)) <= 1:
        pieces = [(i, q_run, j, k_run)] if band else []
    elif len(q_run) < len(k_run):
        pieces = [(i + n, q_run[n : n + 1], j, k_run) for n in range(len(q_run))]
    else:
        pieces = [(i, q_run, j + n, k_run[n : n + 1]) for n in range(len(k_run))]
    yield from filter(None, (_tile(*piece, band) for piece in pieces))


def _tile(i: int, q_run: range, j: int, k_run: range, band: Band) -> Tile | None:
    """The trimmed tile between two runs of one step, or any steps under a band without bounds."""
    step = q_run.step if len(q_run) > 1 else k_run.step
    offset = k_run.start - q_run.start
    local = Band(
        None if band.lo is None else -((offset - band.lo) // step),
        None if band.hi is None else (band.hi - offset) // step,
    )
    return trim(Tile(slice(i, i + len(q_run)), slice(j, j + len(k_run)), local))


def _by_document(positions: Positions, span: Band, boundaries: tuple[int, ...]) -> dict[int, list[tuple[int, range]]]:
    """(local start, run) of every stretch in the span that lies inside one run and one document."""
    stretches: dict[int, list[tuple[int, range]]] = defaultdict(list)
    offset = 0
    for run in positions:
        start = 0 if span.lo is None else max(0, -((run.start - span.lo) // run.step))
        end = len(run) if span.hi is None else min(len(run), (span.hi - run.start) // run.step + 1)
        while start < end:
            document = bisect_right(boundaries, run[start]) - 1 if boundaries else 0
            stop = end
            if boundaries:
                stop = min(stop, -((run.start - boundaries[document + 1]) // run.step))
            stretches[document].append((offset + start, run[start:stop]))
            start = stop
        offset += len(run)
    return stretches


def _coalesce(pieces: Iterable[Tile]) -> list[Tile]:
    """Joins tiles that are again one tile, each with one of the latest: neighbours come soon after one another."""
    done: list[Tile] = []
    for tile in pieces:
        while joined := next(
            ((other, both) for other in reversed(done[-LATEST:]) if (both := _join(other, tile))), None
        ):
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
