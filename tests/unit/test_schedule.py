"""The schedule: every visible pair is computed once, by the rank that holds its query, and no work is wasted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.strategies import coverage, examples, flat, layout_texts, unions, visible
from usp import layouts
from usp.errors import InputError
from usp.mask import Mask
from usp.schedule import Schedule
from usp.tiles import tiles

every_layout = pytest.mark.parametrize("name", layouts.names())


@st.composite
def schedules(draw: st.DrawFn, longest: int = 30) -> Schedule:
    seq_len = draw(st.integers(1, longest))
    return Schedule(draw(unions(seq_len)), draw(layout_texts(seq_len)), seq_len, draw(st.integers(1, 6)))


def ranks(schedule: Schedule) -> range:
    return range(schedule.ring_degree)


@examples(150)
@given(schedules())
def test_every_visible_pair_is_computed_once(schedule):
    tokens = range(schedule.seq_len)
    computed = np.zeros((schedule.seq_len, schedule.seq_len), dtype=int)
    for rank in ranks(schedule):
        for owner in ranks(schedule):
            q, k = flat(schedule.positions(rank)), flat(schedule.positions(owner))
            computed[np.ix_(q, k)] += coverage(schedule.tiles(rank, owner), len(q), len(k))
    np.testing.assert_array_equal(computed, visible(schedule.mask, list(tokens), list(tokens)))


@examples(150)
@given(schedules())
def test_work_is_the_number_of_visible_pairs(schedule):
    tokens = list(range(schedule.seq_len))
    for rank in ranks(schedule):
        assert schedule.work(rank) == visible(schedule.mask, flat(schedule.positions(rank)), tokens).sum()
        assert schedule.length(rank) == len(flat(schedule.positions(rank)))


@examples(150)
@given(schedules())
def test_hops_is_the_last_that_any_rank_needs(schedule):
    needed = [
        hop
        for hop in ranks(schedule)
        if any(schedule.tiles(rank, (rank - hop) % schedule.ring_degree) for rank in ranks(schedule))
    ]
    assert schedule.hops == max(needed, default=0)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("ring_degree", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunk", [1, 2, 3, 10])
def test_causal_takes_one_tile_a_hop(layout, ring_degree, chunk):
    schedule = Schedule(Mask.causal(), layout, 2 * ring_degree * chunk, ring_degree)
    for rank in ranks(schedule):
        assert [len(schedule.tiles(rank, owner)) for owner in ranks(schedule)] == [1] * ring_degree


@every_layout
@examples(50)
@given(seq_len=st.integers(0, 60), ring_degree=st.integers(1, 8))
def test_full_takes_one_tile_a_hop(name, seq_len, ring_degree):
    schedule = Schedule(Mask.full(), layouts.layout_for(name, Mask.causal()), seq_len, ring_degree)
    for rank in ranks(schedule):
        for owner in ranks(schedule):
            wanted = bool(schedule.length(rank) and schedule.length(owner))
            assert len(schedule.tiles(rank, owner)) == wanted


@pytest.mark.parametrize("ring_degree", [2, 3, 4, 8])
def test_causal_work_is_balanced(ring_degree):
    seq_len = 2 * ring_degree * 10
    zigzag, striped, contiguous = (
        [Schedule(Mask.causal(), layout, seq_len, ring_degree).work(rank) for rank in range(ring_degree)]
        for layout in ("zigzag", "striped", "contiguous")
    )
    assert set(zigzag) == {seq_len * (seq_len + 1) // 2 // ring_degree}
    # Each of a striped rank's queries sees one key more than its neighbour's.
    assert striped == [striped[0] + rank * seq_len // ring_degree for rank in range(ring_degree)]
    assert max(striped) - min(striped) < seq_len
    assert max(contiguous) > 1.4 * max(zigzag)


@pytest.mark.parametrize("ring_degree", [2, 3, 4, 8])
@pytest.mark.parametrize(("left", "hops"), [(0, 0), (1, 1), (10, 1), (11, 2), (20, 2), (10**6, None)])
def test_a_short_window_in_the_contiguous_layout_needs_few_hops(ring_degree, left, hops):
    schedule = Schedule(Mask.window(left, 0), "contiguous", 10 * ring_degree, ring_degree)
    assert schedule.hops == min(ring_degree - 1, ring_degree if hops is None else hops)


def test_a_window_ahead_waits_for_the_last_hop():
    """Blocks travel upwards: the next rank's arrives last."""
    assert Schedule(Mask.window(0, 1), "contiguous", 40, 4).hops == 3


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_balanced_layouts_need_every_hop(layout):
    assert Schedule(Mask.causal(), layout, 40, 4).hops == 3


def test_nothing_to_see_is_no_hop_and_no_work():
    for schedule in (Schedule(Mask.offsets(), "zigzag", 40, 4), Schedule(Mask.causal(), "zigzag", 0, 4)):
        assert schedule.hops == 0
        assert [schedule.work(rank) for rank in range(4)] == [0] * 4
    documents = Schedule(Mask.documents([10] * 4), "contiguous", 40, 4)
    assert documents.hops == 0 and [documents.work(rank) for rank in range(4)] == [100] * 4


def test_the_fingerprint_by_hand():
    schedule = Schedule(Mask.causal() & Mask.documents([3, 5]), "zigzag", 8, 2)
    assert str(schedule) == ":0@0,3,8 zigzag S=8 R=2"


def test_the_fingerprint_tells_every_field():
    base = Schedule(Mask.causal(), "zigzag", 24, 2)
    others = [
        Schedule(Mask.full(), "zigzag", 24, 2),
        Schedule(Mask.causal() & Mask.documents([12, 12]), "zigzag", 24, 2),
        Schedule(Mask.causal(), "striped", 24, 2),
        Schedule(Mask.causal(), "zigzag", 25, 2),
        Schedule(Mask.causal(), "zigzag", 24, 3),
    ]
    assert len({str(schedule) for schedule in [base, *others]}) == 6
    assert str(base) == str(Schedule(Mask.window(None, 0), "zigzag", 24, 2))


@examples(100)
@given(schedules(), schedules())
def test_equal_text_is_equal_work(a, b):
    assert (str(a) == str(b)) == (a == b)


@examples(50)
@given(schedules())
def test_what_is_remembered_is_what_is_computed(schedule):
    for rank in ranks(schedule):
        fresh = layouts.positions(schedule.layout, schedule.seq_len, schedule.ring_degree, rank)
        assert schedule.positions(rank) == schedule.positions(rank) == fresh
        for owner in ranks(schedule):
            computed = tiles(schedule.positions(rank), schedule.positions(owner), schedule.mask)
            assert schedule.tiles(rank, owner) == schedule.tiles(rank, owner) == computed
    twin = Schedule(Mask.parse(str(schedule.mask)), schedule.layout, schedule.seq_len, schedule.ring_degree)
    assert twin == schedule and hash(twin) == hash(schedule)
    assert (twin.hops, twin.work(0)) == (schedule.hops, schedule.work(0))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])  # those of few ranges
def test_a_trillion_tokens_cost_no_more_than_a_thousand(layout):
    schedule = Schedule(Mask.causal() & Mask.window(10**9, 0), layout, 10**12, 8)
    n, w = 10**12, 10**9
    assert sum(schedule.work(rank) for rank in range(8)) == n * (w + 1) - w * (w + 1) // 2


def test_an_unknown_layout_is_an_error():
    with pytest.raises(InputError, match="unknown layout 'spiral'"):
        Schedule(Mask.full(), "spiral", 8, 2).positions(0)


@pytest.mark.parametrize("documents", [[3, 2], [10, 10]])
def test_documents_of_another_length_are_an_error(documents):
    """Not an IndexError from inside, and not silently wrong tiles."""
    with pytest.raises(InputError, match=f"add up to {sum(documents)} tokens and the global sequence has 8"):
        Schedule(Mask.documents(documents), "contiguous", 8, 2).tiles(0, 0)
