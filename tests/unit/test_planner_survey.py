"""The survey of a ring against a dense mask, pair by pair, and what a sample of a large one stands for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.strategies import examples, flat, layout_texts, pairs, unions, visible
from usp import layouts
from usp.mask import Mask
from usp.planner.survey import Survey, survey
from usp.schedule import Schedule

EVERYTHING = 10**9
"""A budget under which nothing is sampled."""


@st.composite
def schedules(draw: st.DrawFn, longest: int = 40, largest_ring: int = 8) -> Schedule:
    seq_len = draw(st.integers(1, longest))
    return Schedule(draw(unions(seq_len)), draw(layout_texts(seq_len)), seq_len, draw(st.integers(1, largest_ring)))


def work_of(schedule: Schedule) -> np.ndarray:
    """(hop, rank): visible pairs of a rank's queries and the keys that it has by then, counted one by one."""
    ring = schedule.ring_degree
    held = [flat(schedule.positions(rank)) for rank in range(ring)]
    return np.array(
        [[visible(schedule.mask, held[r], held[r - hop]).sum() for r in range(ring)] for hop in range(ring)]
    )


def needed(work: np.ndarray) -> int:
    """The last hop at which any rank has work."""
    return max(np.flatnonzero(work.any(axis=1)), default=0)


@examples(50)
@given(schedules())
def test_a_whole_survey_is_the_dense_mask(schedule):
    found, work = survey(schedule, EVERYTHING), work_of(schedule)
    kept = work[: needed(work) + 1]
    assert found.complete
    assert found.ranks == tuple(range(schedule.ring_degree))
    assert found.hops == tuple((hop, 1) for hop in range(len(kept)))
    np.testing.assert_array_equal(found.work, kept)
    assert found.totals == kept.sum(axis=0).tolist() == work.sum(axis=0).tolist()
    assert found.slowest == kept.max(axis=1).sum()
    mean = work.sum() / schedule.ring_degree
    assert found.waiting == pytest.approx(1 - mean / found.slowest if found.slowest else 0, abs=1e-12)


@examples(50)
@given(data=st.data(), schedule=schedules(longest=80, largest_ring=40), budget=st.integers(1, 400))
def test_a_sample_holds_true_numbers_and_stands_for_every_hop(data, schedule, budget):
    found, ring = survey(schedule, budget), schedule.ring_degree
    work = work_of(schedule)
    ranks, hops = found.ranks, [hop for hop, _ in found.hops]
    assert sum(stands_for for _, stands_for in found.hops) == schedule.hops + 1 == needed(work) + 1
    assert hops == sorted(set(hops)) and hops[0] == 0 and hops[-1] <= schedule.hops
    assert ranks == tuple(sorted(set(ranks))) and {ranks[0], ranks[-1]} == {0, ring - 1}
    np.testing.assert_array_equal(found.work, work[np.ix_(hops, ranks)])
    index = data.draw(st.integers(0, len(hops) - 1))
    for rank in ranks:
        owner = (rank - hops[index]) % ring
        seen = visible(schedule.mask, flat(schedule.positions(rank)), flat(schedule.positions(owner)))
        covered = {pair for tile in found.tiles(index, rank) for pair in pairs(tile)}
        assert covered == set(zip(*(axis.tolist() for axis in np.nonzero(seen)), strict=True))


@examples(50)
@given(schedule=schedules(longest=200, largest_ring=64), budget=st.integers(1, 300))
def test_the_slowest_tiles_are_those_of_the_rank_with_most_work(schedule, budget):
    found = survey(schedule, budget)
    for index, work in enumerate(found.work):
        assert sum(tile.area for tile in found.slowest_tiles(index)) == max(work)
    assert 0 <= found.waiting < 1


@pytest.mark.parametrize("hop", [1, 4, 7])
def test_among_equals_the_rank_that_merges_most_rows(hop):
    """Zigzag over 8 ranks, chunks of 4: at any hop some see half a block with all 8 rows, the others a block with 4."""
    found = survey(Schedule(Mask.causal(), "zigzag", 64, 8), EVERYTHING)
    assert len(set(found.work[hop])) == 1
    assert sum(len(range(8)[tile.q]) for tile in found.slowest_tiles(hop)) == 8


@pytest.mark.parametrize("name", layouts.names())
@pytest.mark.parametrize("budget", [10, 100, 2**10, 2**14])
def test_a_sample_keeps_to_its_budget_and_uses_it(name, budget):
    """Pieces of two ranks: 1 x 1 run contiguous or striped, else 2 x 2. Two ranks at two hops are the least."""
    found = survey(Schedule(Mask.causal(), layouts.layout_for(name, Mask.causal()), 2**20, 512), budget)
    pieces = 1 if name in ("contiguous", "striped") else 4
    looked_at = len(found.ranks) * len(found.hops)
    assert budget / 2 < looked_at * pieces <= max(budget, 4 * pieces)
    assert not found.complete


def test_documents_are_pieces_too():
    """A contiguous rank of 1,000 tokens has 100 documents, a striped one all 800."""
    mask = Mask.causal() & Mask.documents([10] * 800)
    for layout, pieces in (("contiguous", 100), ("striped", 800)):
        found = survey(Schedule(mask, layout, 8000, 8), 3200)
        assert pieces < len(found.ranks) * len(found.hops) * pieces <= 3200


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_a_sample_of_an_even_layout_is_as_good_as_all_of_it(layout):
    schedule = Schedule(Mask.causal(), layout, 2**14, 64)
    whole, some = survey(schedule, EVERYTHING), survey(schedule, 2**9)
    assert whole.complete and not some.complete
    assert some.slowest == pytest.approx(whole.slowest, rel=0.01)


def test_a_sample_of_contiguous_by_hand():
    """Causal over 32 blocks of 2: after hop 0 (3 pairs) the last rank always sees a whole block (4 pairs)."""
    found = survey(Schedule(Mask.causal(), "contiguous", 64, 32), budget=16)
    # 31 hops in three runs, 1-11, 12-21 and 22-31, of which the middles are looked at
    assert found.hops == ((0, 1), (6, 11), (17, 10), (27, 10))
    assert found.ranks == (0, 10, 21, 31)
    assert found.work == ((3,) * 4, (0, 4, 4, 4), (0, 0, 4, 4), (0, 0, 0, 4))
    assert found.slowest == 3 + 31 * 4
    assert found.totals == [3, 3 + 11 * 4, 3 + 21 * 4, 3 + 31 * 4]
    assert found.waiting == pytest.approx(1 - (3 + 63 * 4 / 4) / 127)


def test_a_window_ends_the_hops():
    """Blocks of 8, a window of 3 back: rank r sees its own and the one before."""
    found = survey(Schedule(Mask.causal() & Mask.window(3, 0), "contiguous", 64, 8), EVERYTHING)
    own, before = 1 + 2 + 3 + 5 * 4, 3 + 2 + 1
    assert found.work == ((own,) * 8, (0,) + (before,) * 7)


def test_nothing_to_see():
    found = survey(Schedule(Mask.offsets(), "zigzag", 16, 4), EVERYTHING)
    assert (found.hops, found.slowest, found.waiting) == (((0, 1),), 0, 0.0)
    assert found.slowest_tiles(0) == ()


def test_waiting_by_hand():
    """Of the 10 + 6 pairs that the slowest ranks need, ranks compute 12 and 8 in all."""
    found = Survey(Schedule(Mask.full(), "contiguous", 4, 2), (0, 1), ((0, 1), (1, 2)), ((10, 2), (1, 3)))
    assert found.totals == [12, 8]
    assert found.slowest == 10 + 2 * 3
    assert found.waiting == pytest.approx(1 - 10 / 16)
