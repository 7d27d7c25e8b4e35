"""The contract of a layout, over every file in usp/layouts; small examples by hand; and how layouts are named."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.strategies import examples, flat, layout_texts
from usp import layouts
from usp.errors import InputError
from usp.mask import Mask
from usp.positions import count

every_layout = pytest.mark.parametrize("name", layouts.names())
BALANCED_COUNTS = {"balanced", "contiguous", "striped", "zigzag"}
"""Layouts that give ranks equal shares; one that deals by work alone may not."""


def deal(data, name, seq_len, ring_degree):
    """The positions of all ranks, for some mask."""
    text = data.draw(layout_texts(seq_len, [name])) if seq_len else layouts.layout_for(name, Mask.causal())
    return [layouts.positions(text, seq_len, ring_degree, rank) for rank in range(ring_degree)]


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
    text = layouts.layout_for(name, Mask.causal())
    held = (layouts.positions(text, 97, 5, rank) for rank in range(5))
    assert len({run.step for runs in held for run in runs if len(run) > 1}) == 1


def test_balanced_alone_needs_the_mask():
    """Also listed last, so that of equally good layouts the first is one that needs none."""
    assert layouts.names()[-1] == "balanced" and [*filter(layouts.needs_mask, layouts.names())] == ["balanced"]
    masks = Mask.full(), Mask.causal(), Mask.causal() & Mask.documents([20, 20])
    texts = [layouts.layout_for("balanced", mask) for mask in masks]
    assert texts == ["balanced[:]", "balanced[:0]", "balanced[:0@0,20,40]"]
    full, causal, documents = (flat(layouts.positions(text, 40, 2, 0)) for text in texts)
    assert (full, causal, documents) == ([*range(20)], [*range(10), *range(30, 40)], [*range(20)])
    assert layouts.layout_for("striped", Mask.causal()) == "striped"
    assert layouts.positions("striped", 40, 2, 0) == layouts.load("striped")(40, 2, 0)


@pytest.mark.parametrize(
    ("text", "seq_len", "held"),
    [
        ("contiguous:3+zigzag", 11, [[0, 1, 3, 4, 9, 10], [2, 5, 6, 7, 8]]),
        ("zigzag+contiguous:3", 11, [[0, 1, 6, 7, 8, 9], [2, 3, 4, 5, 10]]),
        ("striped:4+contiguous+striped:3", 9, [[0, 2, 4, 6, 8], [1, 3, 5, 7]]),
        ("contiguous:4+striped:0+zigzag", 4, [[0, 1], [2, 3]]),
        # Keys seen by those of the section: 1 2 3 4 5 1, chunks of 2, 2, 1 and 1 have 3, 7, 5 and 1: 8 a rank.
        ("contiguous:2+balanced[:0@0,5,6]", 8, [[0, 2, 3, 6], [1, 4, 5, 7]]),
        ("balanced[:0@0,5,6]:6+contiguous", 8, [[0, 1, 4, 6], [2, 3, 5, 7]]),
    ],
)
def test_sections_by_hand(text, seq_len, held):
    assert [flat(layouts.positions(text, seq_len, len(held), rank)) for rank in range(len(held))] == held


@examples(100)
@given(data=st.data(), lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4), ring_degree=st.integers(1, 5))
def test_sections_are_dealt_one_after_the_other(data, lengths, ring_degree):
    rest = data.draw(st.integers(0, len(lengths) - 1))
    texts = [data.draw(layout_texts(length)) for length in lengths]
    whole = "+".join(text if n == rest else f"{text}:{lengths[n]}" for n, text in enumerate(texts))
    for rank in range(ring_degree):
        wanted, start = [], 0
        for text, length in zip(texts, lengths, strict=True):
            wanted += [start + token for token in flat(layouts.positions(text, length, ring_degree, rank))]
            start += length
        assert flat(layouts.positions(whole, sum(lengths), ring_degree, rank)) == wanted


def test_what_a_name_says():
    """The function and the length of every section; of one that deals by a mask, the function with that mask."""
    (first, length), (second, none) = layouts.parse("contiguous:77+zigzag")
    assert (first, length, second, none) == (layouts.load("contiguous"), 77, layouts.load("zigzag"), None)
    ((balanced, none),) = layouts.parse("balanced[:k:3|:0k4:]")
    mask = Mask.prefix_lm(4)
    assert none is None and balanced(99, 4, 1) == layouts.load("balanced")(99, 4, 1, mask)
    assert layouts.layout_for("balanced", mask) == "balanced[:k:3|:0k4:]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("balanced", r'^the balanced layout deals tokens by a mask: give usp.layout_for\("balanced", mask\)$'),
        ("balanced:7+zigzag", r'^the balanced layout deals tokens by a mask: give usp.layout_for\("balanced"'),
        ("zigzag[:0]", r"^the zigzag layout takes no mask$"),
        ("zigzag[]", r"^the zigzag layout takes no mask$"),
        ("contiguous+zigzag", r"^layout 'contiguous\+zigzag': one section must have no length, and gets what the oth"),
        ("contiguous:3", r"^layout 'contiguous:3': one section must have no length, and gets what the others leave$"),
        ("contiguous:3+zigzag:5", r"^layout 'contiguous:3\+zigzag:5': one section must have no length"),
        ("contiguous:3+spiral", r"^unknown layout 'spiral': there are "),
        ("zigzag+", r"^unknown layout 'zigzag\+': there are "),
        ("zigzag:-1", r"^unknown layout 'zigzag:-1': there are "),
        ("balanced[:0]x", r"^unknown layout 'balanced\[:0\]x': there are "),
        ("", r"^unknown layout '': there are "),
        ("contiguous:5+zigzag:4+striped", r"^a sequence of 8 tokens is shorter than the sections of contiguous:5\+zig"),
        ("balanced[:0@0,5,9]", r"^the documents add up to 9 tokens and the global sequence has 8"),
        ("contiguous:3+balanced[:0@0,5,8]", r"^the documents add up to 8 tokens and the global sequence has 5"),
    ],
)
def test_names_that_are_no_layout(text, message):
    with pytest.raises(InputError, match=message):
        layouts.positions(text, 8, 2, 0)


def test_an_unknown_layout_needs_no_mask_either():
    with pytest.raises(InputError, match=r"^unknown layout 'spiral'"):
        layouts.layout_for("spiral", Mask.full())


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
