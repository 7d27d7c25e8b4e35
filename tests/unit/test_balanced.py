"""The balanced layout: what it promises for any mask, and how even it is for documents of realistic lengths."""

from itertools import pairwise
from random import Random
from time import process_time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.balance import KINDS, RING_DEGREE, SEQ_LEN, draws
from tests.unit.strategies import examples, flat, unions, visible
from usp.layouts.balanced import _work, balanced
from usp.layouts.contiguous import contiguous
from usp.layouts.zigzag import zigzag
from usp.mask import Mask
from usp.positions import count, split
from usp.tiles import pairs


def held(seq_len, ring_degree, mask):
    return [balanced(seq_len, ring_degree, rank, mask) for rank in range(ring_degree)]


def uneven(ranks, seen):
    """Work of the busiest rank over the mean, from the number of keys that each query sees."""
    work = [sum(seen[run.start : run.stop : run.step].sum() for run in positions) for positions in ranks]
    return max(work) / max(1e-9, sum(work)) * len(work)


def seen_in_documents(lengths):
    """Keys that each query of packed causal documents sees: 1, 2, ... in each."""
    return np.concatenate([np.arange(1, length + 1) for length in lengths])


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_realistic_lengths(kind):
    found = draws(kind)
    assert len(found) == 50 and len({tuple(lengths) for lengths in found}) == 50
    for lengths in found:
        ranks, seen = held(SEQ_LEN, RING_DEGREE, Mask.causal() & Mask.documents(lengths)), seen_in_documents(lengths)
        assert uneven(ranks, seen) <= 1.03, lengths
        assert {count(positions) for positions in ranks} == {SEQ_LEN // RING_DEGREE}
        assert max(map(len, ranks)) <= 12, lengths
        others = ([layout(SEQ_LEN, RING_DEGREE, r) for r in range(RING_DEGREE)] for layout in (contiguous, zigzag))
        assert all(uneven(other, seen) > 1.03 for other in others)


@examples(150)
@given(st.data(), st.integers(1, 200), st.integers(1, 6))
def test_any_mask(data, seq_len, ring_degree):
    mask = data.draw(unions(seq_len))
    ranks = held(seq_len, ring_degree, mask)
    assert sorted(token for positions in ranks for token in flat(positions)) == list(range(seq_len))
    for rank, positions in enumerate(ranks):
        assert count(positions) == count(contiguous(seq_len, ring_degree, rank))
        assert all(run and run.step == 1 for run in positions)
        assert all(a.stop < b.start for a, b in pairwise(positions)), "ascending, neighbours joined"
        assert len(positions) <= 4, "chunks this short are few"


@examples(60)
@given(st.data(), st.integers(1, 60), st.integers(1, 6))
def test_never_less_even_than_contiguous(data, seq_len, ring_degree):
    mask = data.draw(unions(seq_len))
    seen = visible(mask, list(range(seq_len)), list(range(seq_len))).sum(1)
    runs = [contiguous(seq_len, ring_degree, rank) for rank in range(ring_degree)]
    assert uneven(held(seq_len, ring_degree, mask), seen) <= uneven(runs, seen) + 0.01


@examples(30)
@given(st.data(), st.integers(1, 200), st.integers(1, 6))
def test_equal_masks_deal_equally(data, seq_len, ring_degree):
    """On every rank: computed anew, and from the mask's text."""
    mask = data.draw(unions(seq_len))
    twin = Mask.parse(str(mask))
    fresh = [balanced(seq_len, ring_degree, rank, twin) for rank in reversed(range(ring_degree))]
    assert held(seq_len, ring_degree, mask) == fresh[::-1]


@pytest.mark.parametrize(
    "mask",
    [Mask.window(512, 0), Mask.window(300, 200), Mask.streaming(4, 512), Mask.full(), Mask.keys(100, 9000),
     Mask.causal() & Mask.chunks(2048, 16384)],
    ids=str,
)  # fmt: skip
def test_where_contiguous_is_even_nothing_is_cut(mask):
    assert held(16384, 8, mask) == [contiguous(16384, 8, rank) for rank in range(8)]


@pytest.mark.parametrize("ring_degree", [2, 3, 4, 8])
@pytest.mark.parametrize("chunk", [1, 5, 512])
def test_causal_is_zigzag(ring_degree, chunk):
    seq_len = 2 * ring_degree * chunk
    expected = [flat(zigzag(seq_len, ring_degree, rank)) for rank in range(ring_degree)]
    assert [flat(positions) for positions in held(seq_len, ring_degree, Mask.causal())] == expected


@pytest.mark.parametrize("prefix", [500, 3000, 9000])
def test_a_prefix_is_dealt_evenly(prefix):
    seq_len = 16384
    seen = np.maximum(np.arange(1, seq_len + 1), prefix)
    seen[prefix:] = np.arange(prefix + 1, seq_len + 1)
    assert uneven(held(seq_len, 8, Mask.prefix_lm(prefix)), seen) <= 1.025


def test_by_hand():
    """Keys seen: 1 2 3 4 1 1 1 1. Of chunks of 4, 2 or about 1.3 tokens none are even; single tokens are, 7 and 7."""
    mask = Mask.causal() & Mask.documents([4, 1, 1, 1, 1])
    assert [flat(positions) for positions in held(8, 2, mask)] == [[0, 3, 4, 6], [1, 2, 5, 7]]


def test_longer_chunks_are_shared_evenly():
    """13 tokens on 3 ranks are chunks of 5, 4, 4 and then of 3, 2, 2, 2, 2, 2; the odd token is rank 0's in either."""
    for mask in (Mask.full(), Mask.causal(), Mask.window(3, 0), Mask.documents([9, 4])):
        assert [count(positions) for positions in held(13, 3, mask)] == [5, 4, 4]


def test_what_no_cut_makes_even_is_left_in_one_run():
    assert held(8192, 4, Mask.queries(0, 1)) == [contiguous(8192, 4, rank) for rank in range(4)]
    assert held(8192, 4, Mask.offsets()) == [contiguous(8192, 4, rank) for rank in range(4)]


@pytest.mark.parametrize(
    ("seq_len", "hot", "ratio"),
    [
        (128, 32, 1),  # a few chunks may be short: 4 a rank, of 8 tokens each
        (128, 16, 2),
        (64 * 4 * 32, 64 * 4, 1),  # 32 a rank, of 64 tokens
        (64 * 4 * 32 - 1, 255, 4 / 3),  # too short for 32: 24 a rank, of 85 or 86 tokens
        (2**20, 2**15, 1),
        (2**20, 2**14, 2),  # 64 a rank would be even, and are too many
    ],
)
def test_chunks_are_neither_too_short_nor_too_many(seq_len, hot, ratio):
    """All work is that of the first queries, so four ranks share it as evenly as those are cut."""
    ranks = held(seq_len, 4, Mask.queries(0, hot))
    assert uneven(ranks, np.arange(seq_len) < hot) == pytest.approx(ratio, rel=0.02)


def test_fewer_tokens_than_ranks():
    assert held(3, 5, Mask.causal()) == [(range(0, 1),), (range(1, 2),), (range(2, 3),), (), ()]
    assert held(0, 2, Mask.causal()) == [(), ()]


def test_ten_thousand_documents_in_a_million_tokens(monkeypatch):
    """A chunk looks at the documents that it reaches, so that all chunks together do not look at one much oftener."""
    looked = []

    def spy(q, k, mask):
        looked.append(sum(1 for cut in cuts if k[0].start < cut < k[0].stop) + 1)
        return pairs(q, k, mask)

    seq_len = 2**20
    cuts = sorted(Random(0).sample(range(1, seq_len), 9_999))
    mask = Mask.causal() & Mask.cu_seqlens((0, *cuts, seq_len))
    seen = seen_in_documents(np.diff([0, *cuts, seq_len]))
    began = process_time()
    ranks = held(seq_len, 8, mask)
    assert process_time() - began < 5
    assert uneven(ranks, seen) <= 1.03

    monkeypatch.setattr("usp.layouts.balanced.pairs", spy)
    chunks = split(seq_len, 64)
    assert _work(chunks, mask) == [seen[chunk.start : chunk.stop].sum() for chunk in chunks]
    assert len(looked) == 64 and sum(looked) <= 10_000 + 64
