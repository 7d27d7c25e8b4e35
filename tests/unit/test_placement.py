"""Which rank sits where on the grid, for any way a launcher may have numbered the ranks of any nodes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.strategies import examples
from usp.errors import TopologyError
from usp.placement import place

TWO_NODES_OF_SIX = ["a"] * 6 + ["b"] * 6


def test_block_dealt_ranks():
    nodes = ["a"] * 4 + ["b"] * 4
    assert place(nodes, 4, 2) == (((0, 1, 2, 3), (4, 5, 6, 7)),)
    assert place(nodes, 2, 4) == (((0, 1), (2, 3), (4, 5), (6, 7)),)
    assert place(nodes, 1, 8) == (((0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)),)


def test_what_is_left_of_the_world_is_data_parallel():
    nodes = ["a"] * 4 + ["b"] * 4
    assert place(nodes, 2, 2) == (((0, 1), (2, 3)), ((4, 5), (6, 7)))
    assert place(nodes, 1, 1) == tuple(((rank,),) for rank in range(8))


def test_ranks_dealt_round_robin_over_nodes():
    nodes = ["a", "b"] * 4
    assert place(nodes, 4, 2) == (((0, 2, 4, 6), (1, 3, 5, 7)),)
    assert place(nodes, 2, 2) == (((0, 2), (4, 6)), ((1, 3), (5, 7)))


def test_nodes_of_different_sizes_that_fit():
    assert place(["a"] * 4 + ["b"] * 2, 2, 3) == (((0, 1), (2, 3), (4, 5)),)


def test_nodes_of_different_sizes_that_do_not_fit_are_shown():
    nodes = ["alpha"] * 5 + ["beta"] * 3
    with pytest.raises(TopologyError) as caught:
        place(nodes, 2, 4)
    assert str(caught.value) == (
        "ulysses_degree=2 does not divide the ranks of every node, so a Ulysses group would span nodes, "
        "where its all-to-all is slow:\n"
        "  alpha: 5 ranks (0, 1, 2, 3, 4)\n"
        "  beta: 3 ranks (5, 6, 7)\n"
        "ulysses_degree x ring_degree of 1 x 8 would fit; allow_cross_node=True accepts it as it is"
    )
    assert place(nodes, 2, 4, allow_cross_node=True) == (((0, 1), (2, 3), (4, 5), (6, 7)),)


def test_a_long_list_of_ranks_is_cut():
    with pytest.raises(TopologyError, match=r"  a: 9 ranks \(0, 1, 2, 3, 4, 5, 6, 7, \.\.\.\)"):
        place(["a"] * 9 + ["b"] * 9, 2, 9)


def test_two_nodes_of_six():
    with pytest.raises(
        TopologyError,
        match=r"ulysses_degree=4 does not divide the ranks of every node(.|\n)*"
        r"ulysses_degree x ring_degree of 1 x 12, 2 x 6, 3 x 4, 6 x 2 would fit; allow_cross_node=True accepts",
    ):
        place(TWO_NODES_OF_SIX, 4, 3)
    for ulysses_degree, ring_degree in ((2, 6), (3, 4), (6, 2)):
        (grid,) = place(TWO_NODES_OF_SIX, ulysses_degree, ring_degree)
        assert [rank for row in grid for rank in row] == list(range(12))
        assert {len(row) for row in grid} == {ulysses_degree} and len(grid) == ring_degree


def test_what_would_fit_does_fit():
    """The degrees that the error offers keep the product that was asked for, and are accepted."""
    with pytest.raises(TopologyError) as caught:
        place(["a"] * 4 + ["b"] * 8, 3, 4)
    offered = str(caught.value).split("ring_degree of ")[1].split(" would fit")[0].split(", ")
    assert offered == ["1 x 12", "2 x 6", "4 x 3"]
    for pair in offered:
        place(["a"] * 4 + ["b"] * 8, *map(int, pair.split(" x ")))
    with pytest.raises(TopologyError, match="ring_degree of 1 x 4, 2 x 2 would fit"):  # 3 and 6 do not divide 4
        place(TWO_NODES_OF_SIX, 4, 1)


@pytest.mark.parametrize("bad", [0, -2, True, 2.0, "2", None])
@pytest.mark.parametrize("name", ["ulysses_degree", "ring_degree"])
def test_degrees_must_be_positive_integers(name, bad):
    degrees = {"ulysses_degree": 2, "ring_degree": 2} | {name: bad}
    with pytest.raises(TopologyError, match=f"^{name} must be a positive integer, got {bad!r}$"):
        place(["a"] * 4, **degrees)


def test_a_world_that_the_degrees_do_not_divide():
    with pytest.raises(
        TopologyError,
        match=r"ulysses_degree x ring_degree = 4 x 2 = 8 does not divide the 12 ranks there are; over all of them "
        r"1 x 12, 2 x 6, 3 x 4, 4 x 3, 6 x 2, 12 x 1 would",
    ):
        place(TWO_NODES_OF_SIX, 4, 2)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[str], int, int]:
    """(node of every rank in any order, ulysses_degree, ring_degree) that fit together."""
    ulysses_degree = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    ranks = [f"node{i}" for i, size in enumerate(sizes) for _ in range(size * ulysses_degree)]
    rings = [r for r in range(1, sum(sizes) + 1) if sum(sizes) % r == 0]
    return draw(st.permutations(ranks)), ulysses_degree, draw(st.sampled_from(rings))


@examples(200)
@given(clusters())
def test_ulysses_groups_lie_inside_nodes(cluster):
    nodes, ulysses_degree, ring_degree = cluster
    grids = place(nodes, ulysses_degree, ring_degree)
    assert sorted(rank for grid in grids for row in grid for rank in row) == list(range(len(nodes)))
    for grid in grids:
        assert len(grid) == ring_degree
        for row in grid:
            assert len(row) == ulysses_degree
            assert len({nodes[rank] for rank in row}) == 1


@examples(200)
@given(clusters())
def test_rings_cross_between_nodes_as_seldom_as_they_can(cluster):
    """Along a ring the ranks of one node follow each other."""
    nodes, ulysses_degree, ring_degree = cluster
    for grid in place(nodes, ulysses_degree, ring_degree):
        for ring in zip(*grid, strict=True):
            visited = [nodes[rank] for rank in ring]
            changes = sum(a != b for a, b in itertools.pairwise(visited))
            assert changes == len(set(visited)) - 1
