"""The contract of a layout, over every file in usp/layouts, and small examples written out by hand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.strategies import examples, flat, unions
from usp import layouts
from usp.errors import InputError
from usp.mask import Mask
from usp.positions import count

every_layout = pytest.mark.parametrize("name", layouts.names())
BALANCED_COUNTS = {"balanced", "contiguous", "striped", "zigzag"}
"""Layouts that give ranks equal shares; one that deals by work alone may not."""


def deal(data, name, seq_len, ring_degree):
    """The positions of all ranks, for some mask."""
    mask = data.draw(unions(seq_len)) if seq_len and layouts.needs_mask(name) else Mask.causal()
    return [layouts.positions(name, seq_len, ring_degree, rank, mask) for rank in range(ring_degree)]


def test_the_folder_holds_the_layouts_users_name():
    assert set(layouts.names()) >= {"contiguous", "striped", "zigzag"}
    assert "base" not in layouts.names() and "__init__" not in layouts.names()


def test_an_unknown_layout_lists_those_there_are():
    with pytest.raises(
        InputError, match=r"unknown layout 'zigzga': there are .*contiguous.*striped.*zigzag.*; did you "
    ):
        layouts.load("zigzga")


@every_layout
@examples(150)
@given(data=st.data(), seq_len=st.integers(0, 200), ring_degree=st.integers(1, 9))
def test_ranks_partition_the_sequence(name, data, seq_len, ring_degree):
    held = deal(data, name, seq_len, ring_degree)
    assert sorted(token for positions in held for token in flat(positions)) == list(range(seq_len))
    for positions in held:
        assert isinstance(positions, tuple) and all(isinstance(run, range) for run in positions)
        tokens = flat(positions)
        assert all(a < b for a, b in itertools.pairwise(tokens)), f"not ascending: {positions}"


@every_layout
@examples(150)
@given(data=st.data(), seq_len=st.integers(0, 200), ring_degree=st.integers(1, 9))
def test_counts_differ_by_at_most_one(name, data, seq_len, ring_degree):
    if name not in BALANCED_COUNTS:
        pytest.skip(f"{name} does not deal by count")
    counts = [count(positions) for positions in deal(data, name, seq_len, ring_degree)]
    assert max(counts) - min(counts) <= 1
    if seq_len % ring_degree == 0:
        assert set(counts) == {seq_len // ring_degree}


@every_layout
def test_runs_of_one_rank_and_of_its_peers_share_a_step(name):
    """Tiles exist between runs of equal step only."""
    held = (layouts.positions(name, 97, 5, rank, Mask.causal()) for rank in range(5))
    assert len({run.step for runs in held for run in runs if len(run) > 1}) == 1


def test_balanced_alone_needs_the_mask():
    assert [name for name in layouts.names() if layouts.needs_mask(name)] == ["balanced"]
    full, causal = (layouts.positions("balanced", 40, 2, 0, mask) for mask in (Mask.full(), Mask.causal()))
    assert (flat(full), flat(causal)) == ([*range(20)], [*range(10), *range(30, 40)])
    assert layouts.positions("striped", 40, 2, 0, Mask.full()) == layouts.load("striped")(40, 2, 0)


@examples(100)
@given(chunk=st.integers(0, 20), ring_degree=st.integers(1, 9))
def test_zigzag_is_head_and_tail(chunk, ring_degree):
    seq_len = 2 * ring_degree * chunk
    for rank in range(ring_degree):
        head = range(rank * chunk, (rank + 1) * chunk)
        tail = range(seq_len - (rank + 1) * chunk, seq_len - rank * chunk)
        assert flat(layouts.load("zigzag")(seq_len, ring_degree, rank)) == [*head, *tail]


@pytest.mark.parametrize(
    ("name", "seq_len", "held"),
    [
        ("contiguous", 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("contiguous", 7, [[0, 1, 2], [3, 4], [5, 6]]),
        ("contiguous", 2, [[0], [1], []]),
        ("zigzag", 8, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        ("zigzag", 7, [[0, 1, 6], [2, 3, 4, 5]]),  # chunks of 2, 2, 2 and 1
        ("zigzag", 12, [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
        ("zigzag", 1, [[0], []]),
        ("striped", 8, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("striped", 7, [[0, 3, 6], [1, 4], [2, 5]]),
        ("striped", 2, [[0], [1], [], []]),
    ],
)
def test_by_hand(name, seq_len, held):
    assert [flat(layouts.load(name)(seq_len, len(held), rank)) for rank in range(len(held))] == held
