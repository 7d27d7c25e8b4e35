"""What the property tests draw from, and brute-force answers to hold the arithmetic against."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from usp import layouts
from usp.mask import Band, Mask, Region
from usp.positions import Positions
from usp.tiles import Tile


def examples(number: int) -> settings:
    """`number` examples, the same ones every time, however slow or busy the machine."""
    return settings(max_examples=number, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def bounds(reach: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(-reach, reach)


def any_bands(reach: int = 12) -> st.SearchStrategy[Band]:
    """Bands of every kind, those that hold no offset at all among them."""
    return st.builds(Band, bounds(reach), bounds(reach))


@st.composite
def boundaries(draw: st.DrawFn, total: int) -> tuple[int, ...]:
    """Document boundaries over `total` tokens: (0, ..., total)."""
    inner = draw(st.sets(st.integers(1, total - 1), max_size=5)) if total > 1 else set()
    return (0, *sorted(inner), total)


@st.composite
def spans(draw: st.DrawFn, total: int) -> tuple[int, int | None]:
    start = draw(st.integers(0, total))
    return start, draw(st.none() | st.integers(start, total))


@st.composite
def unions(draw: st.DrawFn, total: int, reach: int = 12) -> Mask:
    """Masks of several regions: the named ones, and what `&` and `|` make of any."""
    one = masks(total, reach)
    count = st.integers(0, total)
    named = (
        st.builds(Mask.prefix_lm, count)
        | st.builds(Mask.streaming, count, count)
        | st.builds(Mask.longformer, count, count)
        | st.builds(Mask.chunks, st.integers(1, total), st.just(total))
        | spans(total).map(lambda span: Mask.keys(*span))
        | spans(total).map(lambda span: Mask.queries(*span))
    )
    mask = draw(one | named)
    for other in draw(st.lists(one | named, max_size=2)):
        mask = mask | other if draw(st.booleans()) else mask & other
    return mask


@st.composite
def masks(draw: st.DrawFn, total: int | None = None, reach: int = 12) -> Mask:
    """The masks people use, and arbitrary unions of bands; with documents over `total` tokens at times."""
    mask = draw(
        st.sampled_from([Mask.full(), Mask.causal()])
        | st.builds(Mask.window, st.integers(-1, reach), st.integers(-1, reach))
        | st.lists(any_bands(reach), max_size=3).map(lambda bands: Mask.offsets(*bands))
    )
    if total and draw(st.booleans()):
        mask &= Mask.cu_seqlens(draw(boundaries(total)))
    return mask


@st.composite
def run_sets(draw: st.DrawFn, step: int, longest: int = 6) -> Positions:
    """Ascending disjoint runs of one step (runs of one token have any), empty ones among them."""
    runs, start = [], draw(st.integers(0, 8))
    for length in draw(st.lists(st.integers(0, longest), max_size=4)):
        run_step = step if length > 1 else draw(st.integers(1, 3))
        runs.append(range(start, start + length * run_step, run_step))
        start = (runs[-1][-1] + 1 if runs[-1] else start) + draw(st.integers(0, 7))
    return tuple(runs)


layout_names = st.sampled_from([name for name in layouts.names() if not layouts.needs_mask(name)])
"""Those that are named without a mask."""


@st.composite
def layout_texts(draw: st.DrawFn, total: int, names: Sequence[str] = tuple(layouts.names())) -> str:
    """Layouts of every name, those that deal `total` tokens by a mask by any mask."""
    name = draw(st.sampled_from(names))
    return layouts.layout_for(name, draw(unions(total)) if layouts.needs_mask(name) else Mask.full())


def flat(positions: Positions) -> list[int]:
    return [position for run in positions for position in run]


def in_band(band: Band, offset: int) -> bool:
    return (band.lo is None or band.lo <= offset) and (band.hi is None or offset <= band.hi)


def sees(mask: Mask, i: int, j: int) -> bool:
    """Whether query i sees key j, from the definition."""
    return any(_in_region(region, i, j) for region in mask.regions)


def _in_region(region: Region, i: int, j: int) -> bool:
    same = bisect_right(region.boundaries, i) == bisect_right(region.boundaries, j)
    inside = in_band(region.queries, i) and in_band(region.keys, j)
    return same and inside and any(in_band(band, j - i) for band in region.bands)


def visible(mask: Mask, queries: list[int], keys: list[int]) -> np.ndarray:
    """(queries, keys) of 0 and 1: which pairs are visible, one by one."""
    return np.array([[sees(mask, i, j) for j in keys] for i in queries], dtype=int).reshape(len(queries), len(keys))


def pairs(tile: Tile) -> set[tuple[int, int]]:
    """The visible pairs of a tile, in the indices that its slices count in."""
    return {
        (i, j)
        for i in range(tile.q.start, tile.q.stop)
        for j in range(tile.k.start, tile.k.stop)
        if in_band(tile.band, (j - tile.k.start) - (i - tile.q.start))
    }


def coverage(found: tuple[Tile, ...], rows: int, columns: int) -> np.ndarray:
    """(rows, columns): how many of the tiles each pair lies in. A tile that leaves the rectangle is an error."""
    covered = np.zeros((rows, columns), dtype=int)
    for tile in found:
        assert 0 <= tile.q.start < tile.q.stop <= rows and 0 <= tile.k.start < tile.k.stop <= columns, tile
        for i, j in pairs(tile):
            covered[i, j] += 1
    return covered
