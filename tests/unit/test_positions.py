"""Positions: cutting a length, and taking a stretch of what a rank holds."""

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.strategies import examples, flat, run_sets
from usp.positions import count, split, take

position_sets = st.integers(1, 4).flatmap(run_sets)


def test_split_by_hand():
    assert split(7, 3) == (range(0, 3), range(3, 5), range(5, 7))
    assert split(2, 4) == (range(0, 1), range(1, 2), range(2, 2), range(2, 2))
    assert split(0, 2) == (range(0, 0), range(0, 0))
    assert split(10**15, 10)[3] == range(3 * 10**14, 4 * 10**14)


@examples(200)
@given(total=st.integers(0, 500), parts=st.integers(1, 40))
def test_split_cuts_into_consecutive_runs_longer_ones_first(total, parts):
    runs = split(total, parts)
    assert len(runs) == parts
    assert flat(runs) == list(range(total))
    lengths = [len(run) for run in runs]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1
    assert all(run.step == 1 for run in runs)


def test_count_by_hand():
    assert count(()) == 0
    assert count((range(3, 3), range(4, 10, 2), range(20, 21))) == 4


@examples(100)
@given(position_sets)
def test_count_is_the_number_of_tokens(positions):
    assert count(positions) == len(flat(positions))


def test_take_by_hand():
    zigzag = (range(0, 3), range(9, 12))
    assert take(zigzag, range(0, 6)) == zigzag
    assert take(zigzag, range(2, 4)) == (range(2, 3), range(9, 10))
    assert take(zigzag, range(3, 3)) == ()
    assert take((range(1, 12, 4),), range(1, 3)) == (range(5, 13, 4),)


@examples(300)
@given(positions=position_sets, start=st.integers(0, 26), length=st.integers(0, 26))
def test_take_is_a_slice_of_the_tokens(positions, start, length):
    taken = take(positions, range(start, start + length))
    assert flat(taken) == flat(positions)[start : start + length]
    assert all(taken), "a run without tokens says nothing"


@examples(150)
@given(positions=position_sets, parts=st.integers(1, 7))
def test_the_parts_of_a_split_take_every_token_once(positions, parts):
    pieces = [take(positions, part) for part in split(count(positions), parts)]
    assert [token for piece in pieces for token in flat(piece)] == flat(positions)
