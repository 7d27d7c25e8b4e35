"""Which heads a Ulysses rank receives: uneven query heads, grouped-query attention, more ranks than kv heads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.strategies import examples
from usp.heads import HeadRun, groups, halves, runs, share


@st.composite
def deals(draw: st.DrawFn) -> tuple[int, int, int]:
    """(heads, kv_heads, degree): kv_heads divides heads, degree is at most heads."""
    kv_heads = draw(st.integers(1, 12))
    heads = kv_heads * draw(st.integers(1, 8))
    return heads, kv_heads, draw(st.integers(1, heads))


@examples(200)
@given(deals())
def test_shares_of_the_query_heads_are_a_partition(deal):
    heads, _, degree = deal
    shares = [share(heads, heads, degree, rank) for rank in range(degree)]
    assert [head for part in shares for head in part] == list(range(heads))
    assert {len(part) for part in shares} <= {heads // degree, -(-heads // degree)}
    assert all(shares), "degree <= heads leaves no rank without work"


@examples(200)
@given(deals())
def test_a_rank_gets_exactly_the_kv_heads_its_query_heads_use(deal):
    heads, kv_heads, degree = deal
    for rank in range(degree):
        used = {head // (heads // kv_heads) for head in share(heads, heads, degree, rank)}
        assert set(share(heads, kv_heads, degree, rank)) == used


@examples(200)
@given(deals())
def test_groups_count_the_query_heads_of_each_kv_head(deal):
    heads, kv_heads, degree = deal
    for rank in range(degree):
        mine = share(heads, heads, degree, rank)
        expected = [
            sum(head // (heads // kv_heads) == kv for head in mine) for kv in share(heads, kv_heads, degree, rank)
        ]
        assert list(groups(heads, kv_heads, degree, rank)) == expected
        assert sum(expected) == len(mine)


@examples(200)
@given(deals())
def test_runs_are_at_most_three_uniform_groups_that_cover_both_sides(deal):
    heads, kv_heads, degree = deal
    for rank in range(degree):
        sizes = groups(heads, kv_heads, degree, rank)
        found = runs(sizes)
        assert 1 <= len(found) <= 3
        assert [h for run in found for h in range(run.q.start, run.q.stop)] == list(range(sum(sizes)))
        assert [h for run in found for h in range(run.kv.start, run.kv.stop)] == list(range(len(sizes)))
        for run in found:
            kv = run.kv.stop - run.kv.start
            assert set(sizes[run.kv]) == {(run.q.stop - run.q.start) // kv} and (run.q.stop - run.q.start) % kv == 0


@pytest.mark.parametrize(
    ("heads", "kv_heads", "query_shares", "kv_shares", "sizes"),
    [
        (  # two ranks share each kv head
            8, 2,
            [range(0, 2), range(2, 4), range(4, 6), range(6, 8)],
            [range(0, 1), range(0, 1), range(1, 2), range(1, 2)],
            [(2,), (2,), (2,), (2,)],
        ),
        (  # one rank has a head less
            7, 7,
            [range(0, 2), range(2, 4), range(4, 6), range(6, 7)],
            [range(0, 2), range(2, 4), range(4, 6), range(6, 7)],
            [(1, 1), (1, 1), (1, 1), (1,)],
        ),
        (
            30, 30,
            [range(0, 8), range(8, 16), range(16, 23), range(23, 30)],
            [range(0, 8), range(8, 16), range(16, 23), range(23, 30)],
            [(1,) * 8, (1,) * 8, (1,) * 7, (1,) * 7],
        ),
        (  # groups cut by the borders between ranks: partial and whole
            12, 4,
            [range(0, 4), range(4, 8), range(8, 12)],
            [range(0, 2), range(1, 3), range(2, 4)],
            [(3, 1), (2, 2), (1, 3)],
        ),
    ],
)  # fmt: skip
def test_by_hand(heads, kv_heads, query_shares, kv_shares, sizes):
    degree = len(query_shares)
    assert [share(heads, heads, degree, rank) for rank in range(degree)] == query_shares
    assert [share(heads, kv_heads, degree, rank) for rank in range(degree)] == kv_shares
    assert [groups(heads, kv_heads, degree, rank) for rank in range(degree)] == sizes


def test_a_rank_for_every_query_head():
    """40 heads on 8 kv heads over 40 ranks: five ranks in a row receive the same kv head."""
    assert [share(40, 40, 40, rank) for rank in range(40)] == [range(r, r + 1) for r in range(40)]
    assert [share(40, 8, 40, rank) for rank in range(40)] == [range(r // 5, r // 5 + 1) for r in range(40)]
    assert {groups(40, 8, 40, rank) for rank in range(40)} == {(1,)}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((4,), [HeadRun(slice(0, 4), slice(0, 1))]),
        ((2, 2, 2), [HeadRun(slice(0, 6), slice(0, 3))]),
        (
            (1, 4, 4, 3),
            [
                HeadRun(slice(0, 1), slice(0, 1)),
                HeadRun(slice(1, 9), slice(1, 3)),
                HeadRun(slice(9, 12), slice(3, 4)),
            ],
        ),
        ((3, 1), [HeadRun(slice(0, 3), slice(0, 1)), HeadRun(slice(3, 4), slice(1, 2))]),
        ((), []),
    ],
)
def test_runs_by_hand(sizes, expected):
    assert list(runs(sizes)) == expected


@given(st.lists(st.integers(1, 5), min_size=1, max_size=9))
def test_halves_are_the_same_heads_in_two_parts(groups):
    """Every query head once, with the kv head that it had; uniform groups; no part larger by more than a group."""
    whose = [kv for kv, size in enumerate(groups) for _ in range(size)]
    first, rest = halves(runs(groups))
    found = []
    for run in (*first, *rest):
        heads, kv_heads = range(len(whose))[run.q], range(len(groups))[run.kv]
        assert len(heads) % len(kv_heads) == 0
        size = len(heads) // len(kv_heads)
        found += [(head, kv_heads[i // size]) for i, head in enumerate(heads)]
    assert sorted(found) == list(enumerate(whose))
    sizes = [sum(run.q.stop - run.q.start for run in part) for part in (first, rest)]
    assert sizes[0] >= 1
    assert abs(sizes[0] - sizes[1]) <= 2 * max(groups)
