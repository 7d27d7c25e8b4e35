"""The contract of a kernel, over every file in usp/kernels: one convention for bands, dead rows, lse and gradients.

A kernel that cannot take a call on the CPU is skipped with the reason it gives itself.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from tests.dense import dense_attention, relative_error
from tests.unit.strategies import examples
from usp import kernels
from usp.errors import InputError, KernelError
from usp.kernels._windows import Launch, Sequences, WindowKernel
from usp.kernels.base import Alibi, Call, Kernel, Scores, hidden_by
from usp.kernels.reference import Reference
from usp.mask import CAUSAL, FULL, Band
from usp.merge import accumulation_dtype, merge_


def stretches(q: torch.Tensor, k: torch.Tensor, sequences: Sequences) -> list[tuple[slice, slice]]:
    """Where the sequences lie among all rows and columns, as their flash kernels ask for it."""
    *ends, longest_q, longest_k = sequences
    assert all(t.dtype == torch.int32 and t.is_contiguous() and t.device == q.device for t in ends)
    rows, columns = ([slice(a, b) for a, b in itertools.pairwise(t.tolist())] for t in ends)
    for side, x, longest in ((rows, q, longest_q), (columns, k, longest_k)):
        assert x.ndim == 3 and (side[0].start, side[-1].stop) == (0, x.shape[0])
        assert max(part.stop - part.start for part in side) == longest
    return list(zip(rows, columns, strict=True))


class Windows(WindowKernel):
    """What kernels on CUDA are given, with FlashAttention-2's reading of a window (left, right) and no GPU.

    Its flash_api.cpp reads a side that reaches over all keys, or those of the longest sequence, as no bound, and no
    bound beside another as all keys. `launches` says how many sequences each computed; 0 is a batch of equal ones.
    """

    def __init__(self) -> None:
        self.launches: list[int] = []

    @override
    def refuses(self, call: Call) -> str | None:
        return "a window kernel is given no linear biases" if call.alibi else None

    @override
    def window_forward(self, q, k, v, launch):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0
        parts = [
            Reference().tile_forward(q[rows], k[columns], v[columns], band, launch.scores)
            for rows, columns, band in self.pieces(q, k, launch)
        ]
        out, lse = (torch.cat(side, 1) for side in zip(*parts, strict=True))
        out, lse = out.to(q.dtype), lse.transpose(1, 2)
        return (out[0], lse[0]) if launch.sequences else (out, lse)

    @override
    def window_backward(self, dout, q, k, v, result, launch):
        out, lse = result
        assert lse.is_contiguous() and lse.shape == (*q.shape[:-3], q.shape[-2], q.shape[-3])
        assert dout.shape == q.shape == out.shape and k.shape == v.shape and q.shape[-1] % 8 == 0
        lse = lse.transpose(-1, -2)
        parts = [
            Reference().tile_backward(
                dout[rows], q[rows], k[columns], v[columns], (out[rows], lse[rows]), band, launch.scores
            )
            for rows, columns, band in self.pieces(q, k, launch)
        ]
        grads = (torch.cat(side, 1).to(q.dtype) for side in zip(*parts, strict=True))
        return tuple(grad[0] if launch.sequences else grad for grad in grads)

    def pieces(self, q: torch.Tensor, k: torch.Tensor, launch: Launch) -> list[tuple]:
        """What a launch computes: indices of (1 or B, S, ...) batches of rows and of columns, and their band."""
        if launch.sequences is None:
            self.launches.append(0)
            return [(..., ..., self.band(q.shape[1], k.shape[1], k.shape[1], launch.window))]
        found, longest = stretches(q, k, launch.sequences), launch.sequences[-1]
        self.launches.append(len(found))
        bands = [self.band(r.stop - r.start, c.stop - c.start, longest, launch.window) for r, c in found]
        return [((None, r), (None, c), band) for (r, c), band in zip(found, bands, strict=True)]

    @staticmethod
    def band(rows: int, columns: int, longest: int, window: tuple[int | None, int | None]) -> Band:
        assert all(side is None or side >= 0 for side in window), f"a window of {window}"
        left, right = (None if side is None or side >= longest else side for side in window)
        if (left is None) != (right is None):
            left, right = (longest if side is None else side for side in (left, right))
        last = columns - rows
        return Band(None if left is None else last - left, None if right is None else last + right)


MAKERS = {name: (lambda name=name: kernels.load(name)) for name in kernels.names()}
MAKERS |= {
    "reference-64": lambda: Reference(block=64),
    "reference-dense": lambda: Reference(block=0),
    "windows": Windows,
}
WIDE = {torch.float64: 1e-12, torch.float32: 2e-6}
HALF = [torch.bfloat16, torch.float16]

every_kernel = pytest.mark.parametrize("name", MAKERS)
every_change = pytest.mark.parametrize(
    "changes", [("softcap",), ("alibi",), ("softcap", "alibi")], ids=["softcap", "alibi", "both"]
)


pytestmark = pytest.mark.usefixtures("one_thread")


def kernel_for(name: str, dtype: torch.dtype, head_dim: int = 8, v_head_dim: int = 8, changes=()) -> Kernel:
    kernel = MAKERS[name]()
    reason = kernel.refuses(Call("cpu", dtype, head_dim, v_head_dim, **dict.fromkeys(changes, True)))
    if reason is not None:
        pytest.skip(reason)
    return kernel


def strided(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, laid out in memory as a caller might have them."""
    if layout == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "head_dim second":
        return x.transpose(1, 3).contiguous().transpose(1, 3)
    if layout == "every other":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    if layout == "inside a larger tensor":
        return F.pad(x, (3, 2, 0, 1, 2, 0), value=torch.nan)[:, 2:, : x.shape[2], 3 : 3 + x.shape[3]]
    return x


layouts = st.sampled_from(["contiguous", "heads first", "head_dim second", "every other", "inside a larger tensor"])


@st.composite
def shapes(draw: st.DrawFn, lengths=None) -> dict:
    """Everything a call consists of but its dtype."""
    if lengths is None:
        lengths = st.sampled_from([0, 1, 2]) | st.integers(0, 40) | st.integers(60, 140)
    return {
        "rows": draw(lengths),
        "columns": draw(lengths),
        "batch": draw(st.integers(1, 2)),
        "kv_heads": draw(st.integers(1, 3)),
        "group": draw(st.integers(1, 3)),
        "head_dim": draw(st.sampled_from([1, 5, 8, 16])),
        "v_head_dim": draw(st.sampled_from([1, 3, 8, 24])),
        "scale": draw(st.sampled_from([0.05, 0.3, 1.0, 2.0])),
        "layouts": draw(st.tuples(layouts, layouts, layouts, layouts)),
        "seed": draw(st.integers(0, 10**6)),
    }


@st.composite
def calls(draw: st.DrawFn, **how) -> dict:
    """A shape, and a band of any kind over it: those that hide rows, columns or everything among them."""
    call = draw(shapes(**how))
    reach = max(call["rows"], call["columns"]) + 2
    bound = st.none() | st.integers(-reach, reach)
    narrow = st.integers(-reach, reach).flatmap(lambda lo: st.builds(Band, st.just(lo), st.integers(lo, lo + 3)))
    call["band"] = draw(st.sampled_from([FULL, CAUSAL]) | st.builds(Band, bound, bound) | narrow)
    return call


def tensors(call: dict, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and dout."""
    generator = torch.Generator().manual_seed(call["seed"])
    heads = call["kv_heads"] * call["group"]
    sizes = [
        (call["rows"], heads, call["head_dim"]),
        (call["columns"], call["kv_heads"], call["head_dim"]),
        (call["columns"], call["kv_heads"], call["v_head_dim"]),
        (call["rows"], heads, call["v_head_dim"]),
    ]
    made = [torch.randn(call["batch"], *size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
    return [strided(x, layout) for x, layout in zip(made, call["layouts"], strict=True)]


def seen_in(call: dict) -> torch.Tensor:
    return ~hidden_by(call["band"], call["rows"], call["columns"], torch.device("cpu"))


def changed(call: dict, changes: tuple[str, ...]) -> dict:
    """The call with changes of its scores: a softcap that binds, slopes, and positions of two runs a side."""
    heads = call["kv_heads"] * call["group"]
    generator = torch.Generator().manual_seed(call["seed"])
    softcap = (0.3, 2.0, 30.0)[call["seed"] % 3] if "softcap" in changes else 0.0
    slopes = torch.rand(heads, generator=generator) / 20 if "alibi" in changes else None
    return call | {"softcap": softcap, "slopes": slopes}


def two_runs(length: int, gap: int) -> torch.Tensor:
    """Positions as a zigzag tile has them."""
    return torch.arange(length) + gap * (torch.arange(length) >= length // 2)


def positions(call: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Of queries and of keys; keys also lie behind queries that see them."""
    return two_runs(call["rows"], call["seed"] % 89) + 20, two_runs(call["columns"], call["seed"] % 97)


def scores_of(call: dict, dtype: torch.dtype) -> Scores:
    if call.get("slopes") is None:
        return Scores(call["scale"], call.get("softcap", 0.0))
    alibi = Alibi(*(t.to(accumulation_dtype(dtype)) for t in (call["slopes"], *positions(call))))
    return Scores(call["scale"], call["softcap"], alibi)


def changes_of(call: dict) -> dict:
    """The same changes, as the dense definition takes them."""
    rows, columns = positions(call)
    distance = rows.unsqueeze(-1) - columns
    return {"softcap": call.get("softcap", 0.0), "slopes": call.get("slopes"), "distance": distance}


def run(kernel: Kernel, call: dict, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """out, lse, dq, dk and dv."""
    q, k, v, dout = tensors(call, dtype)
    scores = scores_of(call, dtype)
    before = [t.clone() for t in (q, k, v, dout)]
    out, lse = kernel.forward(q, k, v, call["band"], scores)
    grads = kernel.backward(dout, q, k, v, (out.to(dtype), lse), call["band"], scores)
    assert all(torch.equal(now, then) for now, then in zip((q, k, v, dout), before, strict=True)), "inputs changed"
    return out, lse, *grads


def oracle(call: dict, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    q, k, v, dout = tensors(call, dtype)
    return dense_attention(q, k, v, dout, seen_in(call), call["scale"], **changes_of(call))


def assert_conventions(result: tuple[torch.Tensor, ...], call: dict, dtype: torch.dtype) -> None:
    """Shapes and dtypes; and rows and columns that see or are seen by nothing."""
    out, lse, dq, dk, dv = result
    q, k, v, dout = tensors(call, dtype)
    assert [t.shape for t in (out, lse, dq, dk, dv)] == [dout.shape, q.shape[:-1], q.shape, k.shape, v.shape]
    assert lse.dtype == accumulation_dtype(dtype)
    assert all(t.dtype in (dtype, accumulation_dtype(dtype)) for t in (out, dq, dk, dv))
    seen = seen_in(call)
    dead, unseen = ~seen.any(1), ~seen.any(0)
    assert torch.equal(lse == -torch.inf, dead.view(1, -1, 1).expand_as(lse))
    assert all((t[:, dead] == 0).all() for t in (out, dq))
    assert all((t[:, unseen] == 0).all() for t in (dk, dv))
    assert all(t.isfinite().all() for t in (out, dq, dk, dv))


def terms(call: dict, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """What out, dq, dk and dv are sums of, without the signs: where terms cancel, they set the scale of rounding.

    A row that sees one key has dq = 0 as the difference of two equal numbers, each rounded on its own.
    """
    q, k, v, dout = (t.double() for t in tensors(call, dtype))
    changes, slope_of_softcap = changes_of(call), 1.0
    out, lse, *_ = dense_attention(q, k, v, dout, seen_in(call), call["scale"], **changes)
    group = call["group"]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(group, 2)) * call["scale"]
    if cap := changes["softcap"]:
        tanh = torch.tanh(scores / cap)
        scores, slope_of_softcap = cap * tanh, 1.0 + tanh.square()
    if changes["slopes"] is not None:
        scores = scores - changes["slopes"].double().view(-1, 1, 1) * changes["distance"].abs()
    weights = torch.exp(scores - lse.transpose(1, 2).unsqueeze(-1)).masked_fill(~seen_in(call), 0.0)
    q, k, v, dout = q.abs(), k.abs().repeat_interleave(group, 2), v.abs().repeat_interleave(group, 2), dout.abs()
    products = torch.einsum("bqhe,bkhe->bhqk", dout, v) + (dout * out.abs()).sum(-1).transpose(1, 2).unsqueeze(-1)
    dscores = weights * products * slope_of_softcap * call["scale"]
    return (
        torch.einsum("bhqk,bkhe->bqhe", weights, v),
        torch.einsum("bhqk,bkhd->bqhd", dscores, k),
        torch.einsum("bhqk,bqhd->bkhd", dscores, q).unflatten(2, (-1, group)).sum(3),
        torch.einsum("bhqk,bqhe->bkhe", weights, dout).unflatten(2, (-1, group)).sum(3),
    )


def assert_close(
    result: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], call: dict, dtype: torch.dtype
) -> None:
    """By norms: out and dv relative to the reference, dq and dk (in half precision: all) to the terms they sum.

    lse is a logarithm: its absolute error is what counts while it is below 1. torch's exp of bfloat16 is a short one.
    """
    half, live = dtype in HALF, expected[1] != -torch.inf
    assert torch.equal(result[1] != -torch.inf, live)
    out, dq, dk, dv = terms(call, dtype)
    scales = {"out": out if half else expected[0], "dq": dq, "dk": dk, "dv": dv if half else expected[4]}
    for what, x, reference in zip(("out", "lse", "dq", "dk", "dv"), result, expected, strict=True):
        if what == "lse":
            x, reference = x[live], reference[live]
            scale, tolerance = reference.abs().clamp(min=1.0), 1e-4 if half else WIDE[dtype]
        else:
            scale, tolerance = scales[what], torch.finfo(dtype).eps if half else WIDE[dtype]
        off = (x.double() - reference).norm() / scale.norm().clamp(min=1e-30)
        assert off <= tolerance, f"{what} is off by {off:.1e}"


def assert_matches_dense(kernel: Kernel, call: dict, dtype: torch.dtype) -> None:
    """Conventions and values of a call, forward and backward."""
    result = run(kernel, call, dtype)
    assert_conventions(result, call, dtype)
    assert_close(result, oracle(call, dtype), call, dtype)


# ---- against the dense oracle ----------------------------------------------------------------------------------------


@every_kernel
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@examples(20)
@given(call=calls())
def test_forward_and_backward_match_dense_attention(name, dtype, call):
    kernel = kernel_for(name, dtype, call["head_dim"], call["v_head_dim"])
    assert_matches_dense(kernel, call, dtype)


@every_kernel
@every_change
@pytest.mark.parametrize("dtype", [*WIDE, *HALF], ids=str)
@examples(15)
@given(call=calls())
def test_changes_of_scores_match_dense_attention(name, changes, dtype, call):
    kernel = kernel_for(name, dtype, call["head_dim"], call["v_head_dim"], changes)
    call = changed(call, changes)
    assert_matches_dense(kernel, call, dtype)


@every_kernel
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("head_dims", [(24, 24), (40, 40), (80, 80), (128, 128), (192, 128), (256, 256)], ids=str)
def test_head_dims_of_models(name, dtype, head_dims):
    call = {
        "rows": 70, "columns": 90, "batch": 1, "kv_heads": 2, "group": 2, "head_dim": head_dims[0],
        "v_head_dim": head_dims[1], "scale": head_dims[0] ** -0.5, "layouts": ("heads first",) * 4, "seed": 1,
        "band": Band(-40, 10),
    }  # fmt: skip
    result = run(kernel_for(name, dtype, *head_dims), call, dtype)
    assert_conventions(result, call, dtype)
    assert_close(result, oracle(call, dtype), call, dtype)


@every_kernel
@every_change
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_changes_of_scores_over_many_blocks(name, changes, dtype):
    call = {
        "rows": 800, "columns": 900, "batch": 1, "kv_heads": 2, "group": 3, "head_dim": 8, "v_head_dim": 8,
        "scale": 0.3, "layouts": ("contiguous",) * 4, "seed": 1, "band": Band(-700, 0),
    }  # fmt: skip
    kernel = kernel_for(name, dtype, changes=changes)
    call = changed(call, changes)
    assert_matches_dense(kernel, call, dtype)


@every_kernel
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "band"),
    [
        (900, 900, Band(-1100, 0)),  # several row blocks, corners on one side
        (600, 700, Band(-40, 25)),  # a narrow window has its own block size
        (600, 500, Band(None, -130)),
        (1, 1500, Band(1000, None)),
    ],
    ids=str,
)
def test_long_sequences(name, dtype, rows, columns, band):
    """Beyond the block sizes that kernels choose."""
    call = {
        "rows": rows, "columns": columns, "batch": 1, "kv_heads": 1, "group": 2, "head_dim": 8, "v_head_dim": 8,
        "scale": 0.3, "layouts": ("contiguous",) * 4, "seed": 0, "band": band,
    }  # fmt: skip
    kernel = kernel_for(name, dtype)
    assert_matches_dense(kernel, call, dtype)


@every_kernel
@pytest.mark.parametrize("dtype", HALF, ids=str)
@examples(20)
@given(call=calls())
def test_half_precision_matches_dense_attention(name, dtype, call):
    kernel = kernel_for(name, dtype, call["head_dim"], call["v_head_dim"])
    assert_matches_dense(kernel, call, dtype)


def torch_attention(call: dict, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """out, dq, dk and dv of torch's scaled_dot_product_attention in the same dtype, under a boolean mask."""
    q, k, v, dout = tensors(call, dtype)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in leaves), attn_mask=seen_in(call), scale=call["scale"], enable_gqa=True
    ).transpose(1, 2)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


@every_kernel
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(-20, 0), Band(-5, 30), Band(None, 7)], ids=str)
def test_half_precision_is_as_good_as_torchs(name, dtype, band):
    """At most 1.5 times the error of torch's attention, on enough elements for that to be no matter of luck.

    With one head_dim for q, k and v: for others torch computes in float32.
    """
    call = {
        "rows": 90, "columns": 90, "batch": 2, "kv_heads": 2, "group": 2, "head_dim": 32, "v_head_dim": 32,
        "scale": 0.2, "layouts": ("contiguous",) * 4, "seed": 5, "band": band,
    }  # fmt: skip
    out, _, dq, dk, dv = run(kernel_for(name, dtype, 32, 32), call, dtype)
    expected_out, _, *expected = oracle(call, dtype)
    theirs = torch_attention(call, dtype)
    for what, x, other, reference in zip(
        ("out", "dq", "dk", "dv"), (out, dq, dk, dv), theirs, (expected_out, *expected), strict=True
    ):
        off, allowed = relative_error(x, reference), 1.5 * relative_error(other, reference)
        assert off <= allowed, f"{what}: {off:.1e} > {allowed:.1e}"


# ---- what a ring relies on -------------------------------------------------------------------------------------------


cut_calls = given(call=calls(lengths=st.integers(1, 60)), cuts=st.lists(st.integers(1, 59), max_size=3, unique=True))


def assert_shares_add_up(kernel: Kernel, call: dict, cuts: list[int], dtype: torch.dtype) -> None:
    """Merged outputs are the whole output; with the whole out and lse, gradients of the blocks are its gradients."""
    q, k, v, dout = tensors(call, dtype)
    scores, rows = scores_of(call, dtype), slice(0, call["rows"])
    edges = [0, *sorted(cut for cut in cuts if cut < call["columns"]), call["columns"]]
    blocks = [(slice(a, b), call["band"].shift(-a)) for a, b in itertools.pairwise(edges)]
    out, lse = torch.zeros_like(dout), q.new_full(q.shape[:-1], -torch.inf)
    for columns, band in blocks:
        merge_(out, lse, *kernel.forward(q, k[:, columns], v[:, columns], band, scores.cut(rows, columns)))
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    for columns, band in blocks:
        cut = scores.cut(rows, columns)
        shares = kernel.backward(dout, q, k[:, columns], v[:, columns], (out, lse), band, cut)
        dq += shares[0]
        dk[:, columns] += shares[1]
        dv[:, columns] += shares[2]
    assert_close((out, lse, dq, dk, dv), oracle(call, dtype), call, dtype)


@every_kernel
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@examples(15)
@cut_calls
def test_shares_of_blocks_of_keys_add_up(name, dtype, call, cuts):
    assert_shares_add_up(kernel_for(name, dtype, call["head_dim"], call["v_head_dim"]), call, cuts, dtype)


@every_kernel
@every_change
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@examples(10)
@cut_calls
def test_shares_add_up_under_changes_of_scores(name, changes, dtype, call, cuts):
    kernel = kernel_for(name, dtype, call["head_dim"], call["v_head_dim"], changes)
    assert_shares_add_up(kernel, changed(call, changes), cuts, dtype)


@every_kernel
@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (0, 5), (5, 0)])
def test_empty_sides(name, rows, columns):
    kernel = kernel_for(name, torch.float32)
    q, k = torch.randn(2, rows, 4, 8), torch.randn(2, columns, 2, 8)
    out, lse = kernel.forward(q, k, k, FULL, Scores(1.0))
    assert out.shape == q.shape and (out == 0).all()
    assert lse.shape == q.shape[:-1] and (lse == -torch.inf).all()
    grads = kernel.backward(q, q, k, k, (out, lse), FULL, Scores(1.0))
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape] and all((g == 0).all() for g in grads)


@every_kernel
def test_large_scores_do_not_overflow(name):
    kernel = kernel_for(name, torch.float32)
    generator = torch.Generator().manual_seed(3)
    q, k, v, dout = (size * torch.randn(1, 7, 1, 8, generator=generator) for size in (100, 100, 1, 1))
    out, lse = kernel.forward(q, k, v, CAUSAL, Scores(1.0))
    dq, dk, dv = kernel.backward(dout, q, k, v, (out, lse), CAUSAL, Scores(1.0))
    expected = dense_attention(q, k, v, dout, ~hidden_by(CAUSAL, 7, 7, torch.device("cpu")), 1.0)
    assert expected[1].max() > 10_000
    for x, reference in zip((out, lse, dv), (expected[0], expected[1], expected[4]), strict=True):
        assert relative_error(x, reference) <= 1e-6
    for x in (dq, dk):  # the softmax is one-hot: what is left is the rounding of terms of size 100
        assert x.abs().max() <= 1e-3 and expected[2].abs().max() < 1e-9


@every_kernel
def test_a_saturated_softcap_passes_no_gradient_to_scores(name):
    kernel = kernel_for(name, torch.float64, changes=("softcap",))
    q, k = torch.ones(1, 3, 1, 8, dtype=torch.float64), torch.full((1, 4, 1, 8), 100.0, dtype=torch.float64)
    v = torch.arange(32.0, dtype=torch.float64).view(1, 4, 1, 8)
    out, lse = kernel.forward(q, k, v, FULL, Scores(1.0, 5.0))
    dq, dk, dv = kernel.backward(out, q, k, v, (out, lse), FULL, Scores(1.0, 5.0))
    assert relative_error(out, v.mean(1, keepdim=True).expand_as(out)) <= 1e-12
    assert relative_error(lse, torch.full_like(lse, 5.0 + math.log(4))) <= 1e-12
    assert relative_error(dv, out[:, :1].expand_as(dv) * 3 / 4) <= 1e-12
    assert (dq == 0).all() and (dk == 0).all()


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_too_far_to_matter_weigh_nothing(name, dtype):
    """Their weights underflow, in the block of keys where a row begins as in later ones."""
    kernel = kernel_for(name, dtype, changes=("alibi",))
    q, k, v, dout = (torch.randn(1, 130, 1, 8, generator=torch.Generator().manual_seed(s)).to(dtype) for s in range(4))
    alibi = Alibi(torch.tensor([1000.0]), torch.arange(130.0), torch.arange(130.0))
    out, lse = kernel.forward(q, k, v, FULL, Scores(1.0, alibi=alibi))
    dq, dk, dv = kernel.backward(dout, q, k, v, (v, lse), FULL, Scores(1.0, alibi=alibi))
    assert torch.equal(out.to(dtype), v)
    assert torch.equal(dv.to(dtype), dout)
    assert dq.abs().max() <= 1e-4 and dk.abs().max() <= 1e-4


@every_kernel
def test_nan_comes_out(name):
    kernel = kernel_for(name, torch.float32)
    q, k, v = (torch.randn(1, 6, 1, 8) for _ in range(3))
    k[0, 3] = torch.nan
    out, lse = kernel.forward(q, k, v, CAUSAL, Scores(1.0))
    assert torch.equal(out.isnan().any(-1).flatten(), torch.arange(6) >= 3)
    assert torch.equal(lse.isnan().flatten(), torch.arange(6) >= 3)


class Scratch(TorchDispatchMode):
    """Keeps every tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []

    @override
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.made += [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        return result

    def largest(self, *known: torch.Tensor) -> int:
        """Bytes of the largest storage that is none of those of `known`."""
        pointers = {t.untyped_storage().data_ptr() for t in known}
        storages = [t.untyped_storage() for t in self.made]
        return max(storage.nbytes() for storage in storages if storage.data_ptr() not in pointers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_reference_holds_one_head_and_blocks(dtype):
    given = [torch.randn(2, 512, 8, 16).to(dtype) for _ in range(4)]
    (q, k, v, dout), scores, one_head, block = given, Scores(0.3, 2.0), 512 * 16, 64
    with Scratch() as scratch:
        result = Reference(block).forward(q, k, v, CAUSAL, scores)
    assert scratch.largest(*given, *result) == 4 * max(one_head, block * block)
    with Scratch() as scratch:
        grads = Reference(block).backward(dout, q, k, v, result, CAUSAL, scores)
    assert scratch.largest(*given, *result, *grads) == 4 * max(one_head, block * block)


# ---- names and selection ---------------------------------------------------------------------------------------------


def test_the_folder_holds_the_kernels_users_name():
    assert set(kernels.names()) >= {"reference", "sdpa"} and "base" not in kernels.names()
    assert set(kernels.AUTO) <= set(kernels.names()) and kernels.AUTO[-1] == "reference"


@pytest.mark.parametrize("name", kernels.names())
def test_a_name_stands_for_itself_alone(name):
    ((found, kernel),) = kernels.candidates(name).items()
    assert found == name and isinstance(kernel, Kernel)


def test_an_unknown_kernel_lists_those_there_are():
    with pytest.raises(
        InputError, match=r"unknown kernel 'spda': there are .*reference.*sdpa.*; did you mean 'sdpa'\?"
    ):
        kernels.candidates("spda")


def select(name: str, *call, **changes) -> str:
    return kernels.select(kernels.candidates(name), Call(*call, **changes))


def test_auto_takes_the_first_that_does_not_refuse():
    assert tuple(kernels.candidates("auto")) == kernels.AUTO
    assert select("auto", "cpu", torch.float32, 64, 64) == "sdpa"
    assert select("auto", "cuda", torch.bfloat16, 128, 128) == "sdpa"
    assert select("auto", "cuda", torch.float32, 64, 64) == "reference"
    assert select("auto", "cuda", torch.bfloat16, 60, 44) == "sdpa"
    assert select("auto", "cuda", torch.bfloat16, 264, 64) == "reference"
    assert select("auto", "mps", torch.float32, 64, 64) == "reference"
    assert select("auto", "cpu", torch.float32, 64, 64, softcap=True) == "reference"
    assert select("auto", "cuda", torch.bfloat16, 64, 64, alibi=True) == "reference"


def test_a_kernel_asked_for_by_name_is_never_replaced():
    with pytest.raises(
        KernelError,
        match=r"^no kernel takes torch\.float32 on cuda with head_dim 64 \(v: 32\); "
        r"sdpa: torch's CUDA flash attention takes bfloat16 and float16",
    ):
        select("sdpa", "cuda", torch.float32, 64, 32)


def test_when_all_refuse_the_error_has_each_ones_reason():
    with pytest.raises(
        KernelError,
        match=r"no kernel takes torch\.int64 on cpu .*; sdpa: torch's CPU flash attention takes .*; "
        r"reference: attention needs a floating dtype, not torch\.int64$",
    ):
        select("auto", "cpu", torch.int64, 64, 64)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (("cuda", torch.float64, 64, 64), "takes bfloat16 and float16"),
        (("cuda", torch.bfloat16, 257, 64), "head_dim up to 256"),
        (("cuda", torch.bfloat16, 64, 264), "head_dim up to 256"),
        (("mps", torch.float32, 64, 64), "for cpu and cuda, not mps"),
        (("cpu", torch.int32, 64, 64), "torch.float64, torch.float32, torch.bfloat16, torch.float16"),
        (("cpu", torch.float32, 64, 64, True, False), "torch's CPU flash attention has no softcap"),
        (("cuda", torch.bfloat16, 64, 64, False, True), "torch's CUDA flash attention has no alibi"),
    ],
)
def test_sdpa_says_why(call, reason):
    assert reason in (kernels.load("sdpa").refuses(Call(*call)) or "")


def test_hidden_by_is_the_complement_of_the_band():
    hidden = hidden_by(Band(-1, 2), 4, 5, torch.device("cpu"))
    assert hidden.tolist() == [[not -1 <= j - i <= 2 for j in range(5)] for i in range(4)]
    assert not hidden_by(FULL, 3, 3, torch.device("cpu")).any()
