"""Merging partial softmax results: exact in any order, whatever has seen nothing."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.dense import relative_error
from tests.unit.strategies import examples
from usp.merge import Accumulator, Sum, accumulation_dtype, merge_

B, S, H, D = 2, 5, 3, 4


def softmax(scores, values):
    """out and lse of the definition; a row without a finite score is 0 and -inf."""
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return torch.einsum("bshk,kd->bshd", weights, values), lse


def nothing(dtype=torch.float64):
    return torch.zeros(B, S, H, D, dtype=dtype), torch.full((B, S, H), -torch.inf, dtype=dtype)


@examples(100)
@given(
    seed=st.integers(0, 10**6),
    cuts=st.lists(st.integers(1, 11), max_size=4, unique=True),
    hidden=st.floats(0.0, 1.0),
    scale=st.sampled_from([1.0, 30.0, 1000.0]),
    data=st.data(),
)
def test_blocks_in_any_order_are_the_whole_softmax(seed, cuts, hidden, scale, data):
    """With scores hidden at random, so that some rows see nothing of a block, and some nothing at all."""
    generator = torch.Generator().manual_seed(seed)
    scores = scale * torch.randn(B, S, H, 12, dtype=torch.float64, generator=generator)
    scores[torch.rand(scores.shape, generator=generator) < hidden] = -torch.inf
    values = torch.randn(12, D, dtype=torch.float64, generator=generator)
    edges = [0, *sorted(cuts), 12]
    out, lse = nothing()
    for start, stop in data.draw(st.permutations(list(itertools.pairwise(edges)))):
        merge_(out, lse, *softmax(scores[..., start:stop], values[start:stop]))
    whole_out, whole_lse = softmax(scores, values)
    assert relative_error(out, whole_out) <= 1e-14
    dead = whole_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, dead)
    assert (out[dead] == 0).all()
    torch.testing.assert_close(lse[~dead], whole_lse[~dead], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("seen", "block_seen"), [(True, False), (False, True), (False, False)])
def test_minus_infinity_on_a_side_weighs_nothing(dtype, seen, block_seen):
    values = torch.randn(B, S, H, D, dtype=dtype)
    sides = [
        (values.clone(), torch.full((B, S, H), -3.5, dtype=dtype)) if given else nothing(dtype)
        for given in (seen, block_seen)
    ]
    (out, lse), (block_out, block_lse) = sides
    expected = sides[0] if seen else sides[1]
    expected = expected[0].clone(), expected[1].clone()
    merge_(out, lse, block_out, block_lse)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_two_equal_scores_are_a_mean():
    out, lse = torch.full((1, 1, 1, 1), 2.0), torch.zeros(1, 1, 1)
    merge_(out, lse, torch.full((1, 1, 1, 1), 4.0), torch.zeros(1, 1, 1))
    assert out.item() == 3.0 and lse.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("side", ["out", "lse", "block_out", "block_lse"])
def test_nan_is_not_hidden(side):
    tensors = {
        "out": torch.zeros(B, S, H, D), "lse": torch.zeros(B, S, H),
        "block_out": torch.zeros(B, S, H, D), "block_lse": torch.zeros(B, S, H),
    }  # fmt: skip
    tensors[side][1, 2, 0] = torch.nan
    merge_(**tensors)
    rows = torch.zeros(B, S, H, dtype=torch.bool)
    rows[1, 2, 0] = True
    assert torch.equal(tensors["out"].isnan().any(-1), rows)
    assert torch.equal(tensors["lse"].isnan(), rows if "lse" in side else torch.zeros_like(rows))


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_accumulation_dtype(dtype, wide):
    assert accumulation_dtype(dtype) == wide


# ---- Accumulator -----------------------------------------------------------------------------------------------------

WHOLE = slice(0, S), slice(0, H)
EVERYTHING = slice(None), *WHOLE


def query(dtype=torch.float32):
    return torch.zeros(B, S, H, 7, dtype=dtype)  # v's head_dim, D, is another one


def partial(rows=S, heads=H, dtype=torch.float32, lse_dtype=torch.float32):
    return torch.randn(B, rows, heads, D, dtype=dtype), torch.randn(B, rows, heads, dtype=lse_dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_nothing_added_is_zero_and_minus_infinity(dtype):
    out, lse = Accumulator(query(dtype), D).result()
    assert (out.shape, out.dtype) == ((B, S, H, D), dtype)
    assert (lse.shape, lse.dtype) == ((B, S, H), accumulation_dtype(dtype))
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_first_whole_result_is_kept_as_it_is(dtype):
    total, (out, lse) = Accumulator(query(dtype), D), partial(dtype=dtype)
    total.add(EVERYTHING, out, lse)
    result = total.result()
    assert result[0].data_ptr() == out.data_ptr() and result[1].data_ptr() == lse.data_ptr()
    assert result[0].dtype == dtype


def test_a_whole_result_in_a_wider_dtype_comes_out_in_the_querys():
    total, (out, lse) = Accumulator(query(torch.bfloat16), D), partial()
    total.add(EVERYTHING, out, lse)
    assert torch.equal(total.result()[0], out.bfloat16())


def test_results_are_contiguous():
    """What a kernel returns may be a transposed view; what an op returns may not."""
    total, (out, lse) = Accumulator(query(), D), partial()
    heads_first = out.transpose(1, 2).contiguous().transpose(1, 2), lse.transpose(1, 2).contiguous().transpose(1, 2)
    total.add(EVERYTHING, *heads_first)
    result = total.result()
    assert all(t.is_contiguous() for t in result)
    assert torch.equal(result[0], out) and torch.equal(result[1], lse)


@pytest.mark.parametrize("whole_first", [True, False])
def test_rows_and_heads_are_merged_where_they_belong(whole_first):
    expected_out, expected_lse = nothing(torch.float32)
    total = Accumulator(query(), D)
    places = [(slice(1, 4), slice(0, 2)), (slice(0, 2), slice(1, 3)), (slice(4, 5), slice(0, 3))]
    for rows, heads in [WHOLE, *places] if whole_first else [*places, WHOLE]:
        out, lse = partial(rows.stop - rows.start, heads.stop - heads.start)
        merge_(expected_out[:, rows, heads], expected_lse[:, rows, heads], out, lse)
        total.add((slice(None), rows, heads), out, lse)
    out, lse = total.result()
    torch.testing.assert_close(out, expected_out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)


def test_what_no_result_covers_stays_zero_and_minus_infinity():
    total, (out, lse) = Accumulator(query(), D), partial(2, 1)
    total.add((slice(None), slice(2, 4), slice(1, 2)), out.clone(), lse.clone())
    result_out, result_lse = total.result()
    assert torch.equal(result_out[:, 2:4, 1:2], out) and torch.equal(result_lse[:, 2:4, 1:2], lse)
    result_lse[:, 2:4, 1:2], result_out[:, 2:4, 1:2] = -torch.inf, 0
    assert (result_lse == -torch.inf).all() and (result_out == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_in_float32(dtype):
    """64 results of equal weight: rounded at each step, their mean would drift by many times its own rounding."""
    generator = torch.Generator().manual_seed(0)
    outs = (1 + torch.rand(64, B, S, H, D, generator=generator)).to(dtype)
    total = Accumulator(query(dtype), D)
    for out in outs:
        total.add(EVERYTHING, out.clone(), torch.zeros(B, S, H))
    out, lse = total.result()
    assert out.dtype == dtype and lse.dtype == torch.float32
    mean = outs.double().mean(0)
    assert relative_error(out, mean) <= 1.01 * relative_error(mean.to(dtype), mean)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(64)), rtol=1e-6, atol=0)


# ---- Sum -------------------------------------------------------------------------------------------------------------


def values(dtype=torch.float32):
    return torch.zeros(B, S, H, D, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_sum_of_no_shares_is_zero(dtype):
    total = Sum(values(dtype)).result()
    assert (total.shape, total.dtype) == ((B, S, H, D), accumulation_dtype(dtype))
    assert (total == 0).all()


def test_the_first_whole_share_is_kept_as_it_is():
    total, share = Sum(values()), torch.randn(B, S, H, D)
    total.add(EVERYTHING, share)
    assert total.result().data_ptr() == share.data_ptr()


@pytest.mark.parametrize("whole_first", [True, False])
def test_shares_are_added_where_they_belong(whole_first):
    total, expected = Sum(values()), torch.zeros(B, S, H, D)
    places = [(slice(1, 4), slice(0, 2)), (slice(0, 2), slice(1, 3)), (slice(4, 5), slice(0, 3))]
    for rows, heads in [WHOLE, *places] if whole_first else [*places, WHOLE]:
        share = torch.randn(B, rows.stop - rows.start, heads.stop - heads.start, D)
        expected[:, rows, heads] += share
        total.add((slice(None), rows, heads), share)
    torch.testing.assert_close(total.result(), expected, rtol=1e-6, atol=1e-6)


def test_two_whole_shares_are_added():
    total = Sum(values())
    for _ in range(3):
        total.add(EVERYTHING, torch.ones(B, S, H, D))
    assert (total.result() == 3).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_shares_are_added_in_float32(dtype):
    """1 + 4096 x 2^-12: in half precision each addition would be lost."""
    total = Sum(values(dtype))
    total.add(EVERYTHING, torch.ones(B, S, H, D, dtype=dtype))
    for _ in range(4096):
        total.add(EVERYTHING, torch.full((B, S, H, D), 2.0**-12, dtype=dtype))
    assert total.result().dtype == torch.float32 and (total.result() == 2).all()
