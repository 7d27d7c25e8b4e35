"""Bands, masks and tiles against their definitions, pair by pair."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.strategies import (
    any_bands,
    boundaries,
    coverage,
    examples,
    flat,
    in_band,
    layout_texts,
    masks,
    pairs,
    run_sets,
    sees,
    unions,
    visible,
)
from usp import layouts
from usp.errors import InputError
from usp.mask import CAUSAL, FULL, Band, Mask, Region
from usp.positions import Positions
from usp.tiles import Tile, area, blocks, reach, tiles, trim


def bands_of(mask: Mask) -> tuple[Band, ...]:
    return mask.regions[0].bands if mask.regions else ()


OFFSETS = range(-30, 31)
"""Beyond every finite bound that the strategies draw."""


# ---- Band ------------------------------------------------------------------------------------------------------------


def test_bands_by_hand():
    assert (Band(None, None), Band(None, 0)) == (FULL, CAUSAL)
    assert Band(-4, None) & Band(-9, 2) == Band(-4, 2)
    assert Band(-3, 0).shift(5) == Band(2, 5)
    assert CAUSAL.shift(-1) == Band(None, -1)
    assert [str(band) for band in (FULL, CAUSAL, Band(-3, 0), Band(2, None))] == [":", ":0", "-3:0", "2:"]
    assert Band(0, 0) and not Band(1, 0)


@examples(200)
@given(any_bands(), any_bands(), st.integers(-9, 9))
def test_band_algebra(a, b, by):
    both, moved = a & b, a.shift(by)
    for offset in OFFSETS:
        assert in_band(both, offset) == (in_band(a, offset) and in_band(b, offset))
        assert in_band(moved, offset + by) == in_band(a, offset)
    assert bool(a) == any(in_band(a, offset) for offset in OFFSETS)


# ---- Mask ------------------------------------------------------------------------------------------------------------


def test_masks_by_hand():
    assert Mask.full() == Mask.window(None, None) == Mask.window(-1, -1)
    assert Mask.causal() == Mask.offsets(CAUSAL) == Mask.window(-1, 0)
    assert Mask.window(4, 0) == Mask.offsets(Band(-4, 0))
    assert Mask.window(None, 3) == Mask.offsets(Band(None, 3))
    assert Mask.window(3, 5) & Mask.causal() == Mask.window(3, 0)
    assert Mask.documents([3, 5]).regions == (Region((FULL,), (0, 3, 8), FULL, FULL),)
    assert (Mask.causal() & Mask.documents([3, 5])) == Mask((Region((CAUSAL,), (0, 3, 8), FULL, FULL),))


def test_text_by_hand():
    mask = Mask.offsets(Band(-6, -4), Band(0, 0), Band(3, None)) & Mask.cu_seqlens((0, 3, 8))
    assert str(mask) == "-6:-4+0:0+3:@0,3,8"
    assert str(Mask.full()) == ":" and str(Mask.causal()) == ":0" and str(Mask.offsets()) == "nothing"


def test_overlapping_and_touching_bands_are_united():
    assert Mask.offsets(Band(3, 5), Band(-2, 0), Band(-1, 2)) == Mask.offsets(Band(-2, 5))
    assert Mask.offsets(Band(2, 4), Band(-2, 0)).regions[0].bands == (Band(-2, 0), Band(2, 4))
    assert Mask.offsets(Band(None, -1), Band(0, None)) == Mask.full()
    assert Mask.offsets(Band(5, 3)) == Mask.offsets()


@examples(200)
@given(st.lists(any_bands(), max_size=5))
def test_the_constructor_unites_bands_into_a_normal_form(bands):
    found = bands_of(Mask.offsets(*bands))
    for offset in OFFSETS:
        assert any(in_band(band, offset) for band in found) == any(in_band(band, offset) for band in bands)
    assert all(found), "an empty band is kept"
    for a, b in pairwise(found):
        assert a.hi is not None and b.lo is not None and a.hi + 1 < b.lo, f"{a} and {b} overlap or touch"


@examples(200)
@given(st.lists(any_bands(), max_size=4), st.data())
def test_equal_offsets_are_equal_masks(bands, data):
    """In any order, and with a band cut in two, it is the same value."""
    pieces = []
    for band in data.draw(st.permutations(bands)):
        cut = data.draw(st.integers(-12, 12))
        pieces += [band & Band(None, cut), band & Band(cut + 1, None)] if data.draw(st.booleans()) else [band]
    assert Mask.offsets(*pieces) == Mask.offsets(*bands)
    assert hash(Mask.offsets(*pieces)) == hash(Mask.offsets(*bands))


@examples(150)
@given(st.data(), st.integers(1, 12))
def test_and_sees_what_both_see(data, total):
    a, b = data.draw(masks(total)), data.draw(masks(total))
    both = a & b
    for i in range(total):
        for j in range(total):
            assert sees(both, i, j) == (sees(a, i, j) and sees(b, i, j)), (i, j)
    assert both == b & a
    assert a & a == a and a & Mask.full() == a


@examples(150)
@given(st.data(), st.integers(1, 12))
def test_and_or_of_any_masks(data, total):
    a, b = data.draw(unions(total)), data.draw(unions(total))
    tokens = list(range(total))
    seen_a, seen_b = (visible(mask, tokens, tokens) for mask in (a, b))
    np.testing.assert_array_equal(visible(a & b, tokens, tokens), seen_a & seen_b)
    np.testing.assert_array_equal(visible(a | b, tokens, tokens), seen_a | seen_b)
    for mask in (a & b, a | b):
        held = [visible(Mask((region,)), tokens, tokens) for region in mask.regions]
        assert sum(held, np.zeros_like(seen_a)).max(initial=0) <= 1, "regions overlap"
        assert Mask.parse(str(mask)) == mask and " " not in str(mask)


def test_named_masks_by_hand():
    """Rows are queries, columns keys."""
    by_hand = {
        Mask.prefix_lm(3): ("11100", "11100", "11100", "11110", "11111"),
        Mask.streaming(1, 1): ("10000", "11000", "11100", "10110", "10011"),
        Mask.longformer(1, 1): ("11111", "11100", "11110", "10111", "10011"),
        Mask.chunks(2, 5) & Mask.causal(): ("10000", "11000", "00100", "00110", "00001"),
        Mask.keys(1, 4): ("01110",) * 5,
        Mask.queries(3, None) & Mask.causal(): ("00000", "00000", "00000", "11110", "11111"),
        Mask.documents([2, 3]) | Mask.window(0, 1): ("11000", "11100", "00111", "00111", "00111"),
        Mask.documents([2, 3]) | Mask.documents([3, 2]): ("11100", "11100", "11111", "00111", "00111"),
        Mask.documents([5]) | Mask.documents([2, 3]): ("11111",) * 5,
    }
    tokens = list(range(5))
    for mask, rows in by_hand.items():
        np.testing.assert_array_equal(visible(mask, tokens, tokens), [[int(bit) for bit in row] for row in rows])


def test_text_of_unions_by_hand():
    assert str(Mask.prefix_lm(4)) == ":k:3|:0k4:"
    assert str(Mask.streaming(2, 3)) == "-3:0|:-4k:1"
    assert str(Mask.keys(1, 4) & Mask.documents([5, 3])) == ":q:4k1:3"
    assert str(Mask.keys(0, None)) == ":" and str(Mask.keys(3, 3)) == "nothing"


def test_neighbouring_regions_are_one():
    assert Mask.keys(0, 3) | Mask.keys(3, 9) == Mask.keys(0, 9)
    assert Mask.queries(0, 3) | Mask.queries(3, None) == Mask.full()
    assert Mask.causal() | Mask.offsets(Band(1, None)) == Mask.full()
    assert Mask.prefix_lm(3) & Mask.keys(0, 3) == Mask.keys(0, 3)


@examples(200)
@given(masks(total=15))
def test_parse_reads_the_text_back(mask):
    assert Mask.parse(str(mask)) == mask
    assert hash(Mask.parse(str(mask))) == hash(mask)


@examples(200)
@given(masks(total=15), masks(total=15))
def test_the_text_tells_masks_apart(a, b):
    assert (str(a) == str(b)) == (a == b)


def test_a_mask_is_a_frozen_value():
    assert len({Mask.causal(), Mask.window(None, 0), Mask.full(), Mask.full() & Mask.causal()}) == 2
    with pytest.raises(AttributeError, match="cannot assign to field"):
        Mask.full().regions = ()  # pyright: ignore[reportAttributeAccessIssue]


@examples(100)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_documents_are_cu_seqlens(lengths):
    mask = Mask.documents(lengths)
    assert mask == Mask.documents(iter(lengths)) == Mask.cu_seqlens([sum(lengths[:n]) for n in range(len(lengths) + 1)])
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    for i in range(len(document)):
        for j in range(len(document)):
            assert sees(mask, i, j) == (document[i] == document[j])
    mask.check(sum(lengths))


@pytest.mark.parametrize(
    "given_as",
    [list, np.array, lambda x: np.array(x, dtype=np.int32), lambda x: torch.tensor(x, dtype=torch.int32)],
    ids=["list", "numpy", "numpy int32", "torch"],
)
def test_boundaries_come_in_the_types_that_users_have(given_as):
    plain = Mask.cu_seqlens((0, 3, 8))
    for mask in (Mask.cu_seqlens(given_as([0, 3, 8])), Mask.documents(given_as([3, 5]))):
        assert mask == plain and hash(mask) == hash(plain)
        assert str(mask) == ":@0,3,8" and Mask.parse(str(mask)) == plain


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mask.window(-2, 0), r"^window left is -2: it must be >= 0, or -1 or None for no bound$"),
        (lambda: Mask.window(0, -7), r"^window right is -7: it must be >= 0, or -1 or None for no bound$"),
        (lambda: Mask.documents([]), r"^document boundaries hold no document, got \(0\): give \(0, \.\.\., seq_len\)$"),
        (lambda: Mask.cu_seqlens([]), r"^document boundaries hold no document, got \(\)"),
        (lambda: Mask.documents([3, 0, 2]), r"^document boundaries must start at 0 and ascend, got \(0, 3, 3, 5\); "),
        (lambda: Mask.documents([3, -1]), r"^document boundaries must start at 0 and ascend, got \(0, 3, 2\); "),
        (lambda: Mask.cu_seqlens([2, 5]), r"got \(2, 5\); they are cumulative, like cu_seqlens: lengths 3, 5 give"),
        (lambda: Mask.cu_seqlens([*range(20), 3]), r"got \(0, 1, 2, 3, 4, 5, 6, 7, \.\.\. 21 in all\); "),
        (
            lambda: Mask.documents([3]) & Mask.documents([2, 3]),
            r"^masks with documents of different total length cannot be combined: \[3, 5\]$",
        ),
        (lambda: Mask.keys(-1, 4), r"^positions start <= i < stop need 0 <= start <= stop, got start=-1 and stop=4$"),
        (lambda: Mask.queries(5, 4), r"^positions start <= i < stop need 0 <= start <= stop, got start=5 and stop=4$"),
        (lambda: Mask.prefix_lm(-1), r"^positions start <= i < stop need 0 <= start <= stop, got start=0 and stop=-1$"),
        (lambda: Mask.chunks(0, 4), r"^chunks need a positive size and seq_len, got size=0 and seq_len=4$"),
        (
            lambda: Mask.documents([3, 5]).check(9),
            r"^the documents add up to 8 tokens and the global sequence has 9; boundaries are GLOBAL",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_a_mask_without_documents_fits_every_length():
    Mask.causal().check(7)


# ---- area, trim, blocks ----------------------------------------------------------------------------------------------

sides = st.integers(0, 12)


@st.composite
def any_tiles(draw: st.DrawFn) -> Tile:
    """Any rectangle at any place under any band: as they are before trimming."""
    row, column = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    return Tile(slice(row, row + draw(sides)), slice(column, column + draw(sides)), draw(any_bands(16)))


@examples(250)
@given(any_tiles())
def test_area_counts_the_visible_pairs(tile):
    assert tile.area == len(pairs(tile))
    assert area(tile.q.stop - tile.q.start, tile.k.stop - tile.k.start, tile.band) == len(pairs(tile))


def test_area_of_long_sequences_is_exact():
    n = 10**12
    assert area(n, n, CAUSAL) == n * (n + 1) // 2
    assert area(n, n, Band(-1, 0)) == 2 * n - 1


@examples(250)
@given(any_tiles())
def test_trim(tile):
    trimmed = trim(tile)
    if trimmed is None:
        assert not pairs(tile)
        return
    seen = pairs(trimmed)
    assert seen == pairs(tile)
    assert {i for i, _ in seen} == set(range(trimmed.q.start, trimmed.q.stop)), "a row sees nothing"
    assert {j for _, j in seen} == set(range(trimmed.k.start, trimmed.k.stop)), "a column is not seen"
    assert trim(trimmed) == trimmed
    for loose in (Band(None, trimmed.band.hi), Band(trimmed.band.lo, None)):
        if loose != trimmed.band:
            assert pairs(Tile(trimmed.q, trimmed.k, loose)) != seen, "a bound that hides nothing is kept"


def test_trim_by_hand():
    assert trim(Tile(slice(0, 4), slice(0, 9), CAUSAL)) == Tile(slice(0, 4), slice(0, 4), CAUSAL)
    assert trim(Tile(slice(0, 9), slice(0, 4), Band(0, None))) == Tile(slice(0, 4), slice(0, 4), Band(0, None))
    assert trim(Tile(slice(2, 6), slice(1, 5), Band(-3, 3))) == Tile(slice(2, 6), slice(1, 5), FULL)
    assert trim(Tile(slice(0, 4), slice(0, 4), Band(None, -2))) == Tile(slice(2, 4), slice(0, 2), CAUSAL)
    assert trim(Tile(slice(0, 4), slice(0, 4), Band(None, -4))) is None
    assert trim(Tile(slice(3, 3), slice(0, 4), FULL)) is None


@examples(200)
@given(any_tiles(), st.integers(1, 7), st.none() | st.integers(1, 7))
def test_blocks_cover_exactly(tile, rows, columns):
    covered: list[tuple[int, int]] = []
    for block in blocks(tile, rows, columns):
        assert block.q.stop - block.q.start <= rows
        assert columns is None or block.k.stop - block.k.start <= columns
        assert trim(block) == block
        covered += pairs(block)
    assert sorted(covered) == sorted(pairs(tile))


# ---- tiles -----------------------------------------------------------------------------------------------------------


@st.composite
def two_ranks(draw: st.DrawFn, seq_len: int, ring_degree: int) -> list[Positions]:
    """The positions of two ranks of any layout."""
    layout = draw(layout_texts(seq_len))
    return [layouts.positions(layout, seq_len, ring_degree, draw(st.integers(0, ring_degree - 1))) for _ in range(2)]


@examples(150)
@given(st.data(), st.integers(1, 24), st.integers(1, 5))
def test_tiles_of_unions(data, seq_len, ring_degree):
    q, k = data.draw(two_ranks(seq_len, ring_degree))
    mask = data.draw(unions(seq_len))
    assert_exact(q, k, mask)
    start, stop = reach(q, mask)
    seen = visible(mask, flat(q), list(range(seq_len))).any(0).nonzero()[0]
    assert all(start <= key < stop for key in seen)


def assert_exact(q, k, mask):
    """Each visible pair lies in exactly one tile, no other pair in any, and every tile is ready for a kernel."""
    found = tiles(q, k, mask)
    rows, columns = flat(q), flat(k)
    np.testing.assert_array_equal(coverage(found, len(rows), len(columns)), visible(mask, rows, columns))
    assert all(trim(tile) == tile for tile in found)


@examples(200)
@given(st.data(), st.integers(1, 4))
def test_tiles_between_any_positions(data, step):
    q, k = data.draw(run_sets(step)), data.draw(run_sets(step))
    assert_exact(q, k, data.draw(masks(total=max([1, *flat(q), *flat(k)]) + 1, reach=20)))


@examples(200)
@given(st.data(), st.integers(1, 40), st.integers(1, 6))
def test_tiles_between_the_ranks_of_a_layout(data, seq_len, ring_degree):
    q, k = data.draw(two_ranks(seq_len, ring_degree))
    assert_exact(q, k, data.draw(masks(total=seq_len, reach=20)))


@examples(100)
@given(st.data(), st.integers(2, 40), st.integers(1, 4), st.integers(0, 15), st.integers(0, 15))
def test_windows_of_packed_documents(data, seq_len, ring_degree, left, right):
    mask = Mask.window(left, right) & Mask.cu_seqlens(data.draw(boundaries(seq_len)))
    q, k = data.draw(two_ranks(seq_len, ring_degree))
    assume(q and k)
    assert_exact(q, k, mask)


def test_tiles_by_hand():
    q, k = (range(0, 2), range(6, 8)), (range(2, 4), range(4, 6))  # zigzag over 8 tokens, ranks 0 and 1
    assert tiles(q, k, Mask.causal()) == (Tile(slice(2, 4), slice(0, 4), FULL),)
    assert tiles(k, q, Mask.causal()) == (Tile(slice(0, 4), slice(0, 2), FULL),)
    assert tiles(q, q, Mask.causal()) == (Tile(slice(0, 4), slice(0, 4), CAUSAL),)
    assert tiles(q, k, Mask.offsets()) == ()
    striped = (range(0, 8, 2),), (range(1, 8, 2),)
    assert tiles(striped[1], striped[0], Mask.causal()) == (Tile(slice(0, 4), slice(0, 4), CAUSAL),)
    assert tiles(striped[0], striped[1], Mask.causal()) == (Tile(slice(1, 4), slice(0, 3), CAUSAL),)


def test_two_documents_are_two_tiles():
    q = (range(0, 6),)
    assert tiles(q, q, Mask.documents([2, 4])) == (
        Tile(slice(0, 2), slice(0, 2), FULL),
        Tile(slice(2, 6), slice(2, 6), FULL),
    )


@examples(100)
@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_tiles_between_runs_of_different_steps(data, q_step, k_step):
    """As between joint tokens, dealt in runs, and a striped sequence."""
    q, k = data.draw(run_sets(q_step)), data.draw(run_sets(k_step))
    assert_exact(q, k, data.draw(masks(total=max([1, *flat(q), *flat(k)]) + 1, reach=20)))
