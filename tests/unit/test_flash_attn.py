"""FlashAttention's packages are not needed here: fakes with their signatures, which compute by the reference kernel on
the CPU, stand in for them and bound windows as their C++ does."""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.dense import dense_attention, relative_error
from tests.unit.test_kernels import stretches
from usp import kernels
from usp.kernels._windows import _parts
from usp.kernels.base import Backward, Call, Forward, Scores
from usp.kernels.flash_attn import FlashAttn
from usp.kernels.reference import Reference
from usp.mask import Band
from usp.tiles import Tile, trim

FLASH3_FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new{none}, Tensor(v_new!)? v_new{none}, Tensor? q_v{none}, "
    "Tensor(out!)? out{none}, Tensor? cu_seqlens_q{none}, Tensor? cu_seqlens_k{none}, Tensor? cu_seqlens_k_new{none}, "
    "Tensor? seqused_q{none}, Tensor? seqused_k{none}, int? max_seqlen_q{none}, int? max_seqlen_k{none}, "
    "Tensor? page_table{none}, Tensor? kv_batch_idx{none}, Tensor? leftpad_k{none}, Tensor? rotary_cos{none}, "
    "Tensor? rotary_sin{none}, Tensor? seqlens_rotary{none}, Tensor? q_descale{none}, Tensor? k_descale{none}, "
    "Tensor? v_descale{none}, {scale_and_causal}, int window_size_left=-1, int window_size_right=-1, "
    "int attention_chunk=0, float softcap=0., bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, "
    "int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
FLASH3_BWD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq{none}, "
    "Tensor(dk!)? dk{none}, Tensor(dv!)? dv{none}, Tensor? cu_seqlens_q{none}, Tensor? cu_seqlens_k{none}, "
    "Tensor? seqused_q{none}, Tensor? seqused_k{none}, int? max_seqlen_q{none}, int? max_seqlen_k{none}, "
    "{scale_and_causal}, int window_size_left=-1, int window_size_right=-1, float softcap=0., "
    "bool deterministic=False, int sm_margin=0) -> ({grads}Tensor, Tensor, Tensor, Tensor, Tensor)"
)
REQUIRED = {"none": "", "scale_and_causal": "float softmax_scale, bool is_causal"}
OPTIONAL = {"none": "=None", "scale_and_causal": "float? softmax_scale=None, bool is_causal=False"}
RETURNED = {"grads": "Tensor(dq!), Tensor(dk!), Tensor(dv!), "}
FLASH3_SCHEMAS = {
    "flash3_required": REQUIRED | RETURNED,
    "flash3_optional": OPTIONAL | RETURNED,
    "flash3_in_place": OPTIONAL | {"grads": ""},
}
"""What the ops of flash-attn-3 have been declared as."""
SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


class Fake:
    """The computation that both packages share. `calls` says who was called, and how backward was to be."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool | None]] = []

    def check(self, q: Tensor, *others: Tensor) -> None:
        assert q.shape[-1] % 8 == 0
        assert all(t.shape[-1] == q.shape[-1] and t.stride(-1) == 1 for t in (q, *others))

    def forward(
        self, tensors: tuple[Tensor, ...], sequences: tuple | None, window: "Window", scores: Scores
    ) -> tuple[Tensor, Tensor]:
        self.check(*tensors)
        q, k, v = tensors
        outs, lses = [], []
        for rows, columns, band in self.pieces(q, k, sequences, window):
            out, lse = Reference().tile_forward(q[rows], k[columns], v[columns], band, scores)
            outs.append(out)
            lses.append(lse.masked_fill(lse == -torch.inf, torch.inf).transpose(1, 2))
        out, lse = torch.cat(outs, 1), torch.cat(lses, 2).contiguous()
        return (out[0], lse[0]) if sequences else (out, lse)

    def backward(
        self,
        given: tuple[Tensor, ...],
        grads: tuple[Tensor, ...],
        sequences: tuple | None,
        window: "Window",
        scores: Scores,
    ) -> None:
        *tensors, lse = given
        self.check(*tensors, *grads)
        dout, q, k, v, out = tensors
        assert lse.shape == (*q.shape[:-3], q.shape[-2], q.shape[-3])
        assert lse.is_contiguous()
        lse = lse.transpose(-1, -2)
        for rows, columns, band in self.pieces(q, k, sequences, window):
            result = out[rows], lse[rows]
            shares = Reference().tile_backward(dout[rows], q[rows], k[columns], v[columns], result, band, scores)
            for grad, where, share in zip(grads, (rows, columns, columns), shares, strict=True):
                grad[where].copy_(share)

    @staticmethod
    def pieces(q: Tensor, k: Tensor, sequences: tuple | None, window: "Window") -> list[tuple]:
        """Indices of (1 or B, S, ...) batches of rows and of columns, and their band."""
        if sequences is None:
            lengths = q.shape[1], k.shape[1]
            return [(..., ..., window(lengths, lengths))]
        found = stretches(q, k, sequences)
        return [((None, r), (None, c), window((r.stop - r.start, c.stop - c.start), sequences[2:])) for r, c in found]


Window = Callable[[tuple[int, int], tuple[int, int]], Band]
"""The band of a sequence by its rows and columns and by those of the longest ones: the window that C++ was given."""


def flash2_band(lengths: tuple[int, int], longest: tuple[int, int], left: int, right: int) -> Band:
    """csrc/flash_attn/flash_api.cpp of 2.7.0 to 2.8.3: mha_(varlen_)fwd, mha_(varlen_)bwd and set_params_fprop."""
    (rows, columns), (_, most) = lengths, longest
    left, right = (-1 if side >= most else side for side in (left, right))
    if left < 0 and right < 0:
        return Band()
    left, right = (most if side < 0 else side for side in (left, right))
    return Band(columns - rows - left, columns - rows + right)


def flash3_band(lengths: tuple[int, int], longest: tuple[int, int], left: int, right: int) -> Band:
    """hopper/flash_api.cpp: mha_fwd, mha_bwd and set_params_fprop."""
    (rows, columns), (tallest, widest) = lengths, longest
    left, right = -1 if left >= widest - 1 else left, -1 if right >= tallest - 1 else right
    if left < 0 and right < 0:
        return Band()
    left, right = widest - 1 if left < 0 else left, tallest - 1 if right < 0 else right
    return Band(columns - rows - left, columns - rows + right)


def flash2_modules(fake: Fake, version: str = "2.8.3") -> dict[str, ModuleType]:
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (dropout_p, causal, alibi_slopes, return_softmax) == (0.0, False, None, False)
        fake.calls.append(("flash2", None))
        window = partial(flash2_band, left=window_size_left, right=window_size_right)
        out, lse = fake.forward((q, k, v), None, window, Scores(softmax_scale, softcap))
        return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None,
    ):  # fmt: skip
        assert (dropout_p, causal, alibi_slopes, return_softmax) == (0.0, False, None, False)
        assert (block_table, leftpad_k, seqused_k) == (None, None, None)
        fake.calls.append(("flash2 varlen", None))
        window = partial(flash2_band, left=window_size_left, right=window_size_right)
        sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        out, lse = fake.forward((q, k, v), sequences, window, Scores(softmax_scale, softcap))
        return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, causal, alibi_slopes, rng_state) == (0.0, False, None, None)
        fake.calls.append(("flash2", deterministic))
        window = partial(flash2_band, left=window_size_left, right=window_size_right)
        given, scores = (dout, q, k, v, out, softmax_lse), Scores(softmax_scale, softcap)
        fake.backward(given, (dq, dk, dv), None, window, scores)
        return torch.empty(0)

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, causal, alibi_slopes, rng_state) == (0.0, False, None, None)
        fake.calls.append(("flash2 varlen", deterministic))
        window = partial(flash2_band, left=window_size_left, right=window_size_right)
        sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        given, scores = (dout, q, k, v, out, softmax_lse), Scores(softmax_scale, softcap)
        fake.backward(given, (dq, dk, dv), sequences, window, scores)
        return torch.empty(0)

    vars(package).update(__version__=version, flash_attn_interface=interface)
    functions = _flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward, _flash_attn_varlen_backward
    vars(interface).update({function.__name__: function for function in functions})
    return {"flash_attn": package, "flash_attn.flash_attn_interface": interface}


def define_flash3(library: torch.library.Library, fake: Fake, schema: dict[str, str]) -> None:
    def named(text: str, args: tuple) -> dict:
        """Arguments by name; they come by position, without those at the end that have their default."""
        arguments = torch._C.parse_schema(f"flash_attn_3::{text}").arguments
        given = {a.name: a.default_value for a in arguments} | dict(
            zip([a.name for a in arguments], args, strict=False)
        )
        ours = {"q", "k", "v", "dout", "out", "softmax_lse", "dq", "dk", "dv", "softmax_scale", "is_causal"}
        ours |= {"window_size_left", "window_size_right", "softcap", "num_splits", "deterministic", *SEQUENCES}
        assert not any(value for name, value in given.items() if name not in ours)
        assert not given["is_causal"]
        return given

    def sequences(a: dict) -> tuple | None:
        given = tuple(a[name] for name in SEQUENCES)
        return None if given == (None,) * 4 else given

    def fwd(*args):
        a = named(forward, args)
        assert (a["out"], a["num_splits"]) == (None, 1)
        packed = sequences(a)
        fake.calls.append(("flash3 varlen" if packed else "flash3", None))
        window = partial(flash3_band, left=a["window_size_left"], right=a["window_size_right"])
        scores = Scores(a["softmax_scale"], a["softcap"])
        return *fake.forward((a["q"], a["k"], a["v"]), packed, window, scores), torch.empty(0), torch.empty(0)

    def bwd(*args):
        a = named(backward, args)
        packed = sequences(a)
        fake.calls.append(("flash3 varlen" if packed else "flash3", a["deterministic"]))
        window = partial(flash3_band, left=a["window_size_left"], right=a["window_size_right"])
        grads = a["dq"], a["dk"], a["dv"]
        given = tuple(a[t] for t in ("dout", "q", "k", "v", "out", "softmax_lse"))
        fake.backward(given, grads, packed, window, Scores(a["softmax_scale"], a["softcap"]))
        return *(grads if schema["grads"] else ()), *(torch.empty(0) for _ in range(5))

    forward, backward = FLASH3_FWD.format_map(schema), FLASH3_BWD.format_map(schema)
    library.define(forward)
    library.define(backward)
    library.impl("fwd", fwd, "CPU")
    library.impl("bwd", bwd, "CPU")


def without_packages(monkeypatch: pytest.MonkeyPatch, **found: ModuleType) -> None:
    """Leaves only the packages `found` importable."""
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_3", "flash_attn_3._C"):
        monkeypatch.setitem(sys.modules, name, found.get(name))


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture(params=["flash2", *FLASH3_SCHEMAS])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fake: Fake) -> Iterator[FlashAttn]:
    """A kernel that finds one fake package."""
    capability = (8, 0) if request.param == "flash2" else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    if request.param == "flash2":
        without_packages(monkeypatch, **flash2_modules(fake))
        yield FlashAttn()
        return
    without_packages(monkeypatch, **{name: ModuleType(name) for name in ("flash_attn_3", "flash_attn_3._C")})
    with torch.library._scoped_library("flash_attn_3", "DEF") as library:
        define_flash3(library, fake, FLASH3_SCHEMAS[request.param])
        yield FlashAttn()


def random_tiles(count: int) -> list[tuple[int, int, Band]]:
    """Rows, columns and band of random trimmed tiles, many of them much taller than wide."""
    rng = random.Random(0)
    found = []
    while len(found) < count:
        rows, columns = rng.choice([(rng.randint(1, 16), rng.randint(1, 16)), (rng.randint(8, 24), rng.randint(2, 6))])
        lo, hi = (rng.choice([None, rng.randint(-24, 16)]) for _ in range(2))
        if tile := trim(Tile(slice(0, rows), slice(0, columns), Band(lo, hi))):
            found.append((tile.q.stop - tile.q.start, tile.k.stop - tile.k.start, tile.band))
    return found


def tensors(rows: int, columns: int, head_dim: int, v_head_dim: int, **options) -> tuple[Tensor, ...]:
    """q, k, v and dout, with two kv heads for six heads."""
    torch.manual_seed(rows * 100 + columns)
    shapes = (rows, 6, head_dim), (columns, 2, head_dim), (columns, 2, v_head_dim), (rows, 6, v_head_dim)
    return tuple(torch.randn(2, *shape, **options) for shape in shapes)


def seen(rows: int, columns: int, band: Band) -> Tensor:
    pairs = [
        (band.lo is None or j - i >= band.lo) and (band.hi is None or j - i <= band.hi)
        for i in range(rows)
        for j in range(columns)
    ]
    return torch.tensor(pairs).view(rows, columns)


@pytest.mark.parametrize("softcap", [0.0, 0.5])
def test_forward_and_backward_are_exact(kernel: FlashAttn, softcap: float) -> None:
    scores = Scores(0.3, softcap)
    for (rows, columns, band), head_dims in zip(random_tiles(45), cycle([(8, 8), (12, 20), (24, 16)]), strict=False):
        q, k, v, dout = tensors(rows, columns, *head_dims, dtype=torch.float64)
        out, lse = kernel.forward(q, k, v, band, scores)
        grads = kernel.backward(dout, q, k, v, (out, lse), band, scores)
        expected = dense_attention(q, k, v, dout, seen(rows, columns, band), 0.3, softcap=softcap)
        for name, x, reference in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), expected, strict=True):
            assert x.shape == reference.shape
            assert relative_error(x, reference) < 1e-12, f"{name} of {rows} x {columns} under {band}"


def test_tiles_are_cut_only_where_flash_attention_2_would_lose_the_window() -> None:
    cut = 0
    for rows, columns, band in random_tiles(1000):
        q, k = torch.empty(1, rows, 1, 8), torch.empty(1, columns, 1, 8)
        shift = columns - rows
        window = -1 if band.lo is None else shift - band.lo, -1 if band.hi is None else band.hi - shift
        lengths = rows, columns
        kept = torch.equal(seen(rows, columns, flash2_band(lengths, lengths, *window)), seen(rows, columns, band))
        parts = _parts(q, k, band)
        assert 1 <= len(parts) <= 3
        assert kept or len(parts) > 1
        assert not kept or len(parts) == 1 or columns == (rows - 1 if band.hi is None else window[1])
        cut += not kept
    assert cut > 100


def launches(tiles: list[tuple[int, int, Band]]) -> tuple[int, int]:
    """How many the tiles take, that is windows and parts of tiles that must be cut; and how many of several tiles."""
    alike, parts = Counter(), 0
    for rows, columns, band in tiles:
        cut = _parts(torch.empty(1, rows, 1, 1), torch.empty(1, columns, 1, 1), band)
        if len(cut) > 1:
            parts += len(cut)
        else:
            left = None if band.lo is None else columns - rows - band.lo
            right = None if band.hi is None else band.hi - columns + rows
            alike[left, right] += 1
    return len(alike) + parts, sum(count > 1 for count in alike.values())


@pytest.mark.parametrize("softcap", [0.0, 0.5])
def test_many_blocks_are_one_by_one_in_a_launch_for_each_window(kernel: FlashAttn, fake: Fake, softcap: float) -> None:
    scores, tiles = Scores(0.3, softcap), random_tiles(100)
    given = [tensors(rows, columns, 12, 20, dtype=torch.float64) for rows, columns, _ in tiles]
    blocks = [Forward(*x[:3], band, scores) for x, (*_, band) in zip(given, tiles, strict=True)]
    alone = [kernel.forward(*block) for block in blocks]
    backwards = [
        Backward(x[3], *x[:3], result, block.band, scores)
        for x, block, result in zip(given, blocks, alone, strict=True)
    ]
    singly = [(*kernel.forward(*a), *kernel.backward(*b)) for a, b in zip(blocks, backwards, strict=True)]
    fake.calls.clear()
    results = list(kernel.forward_many(blocks))
    called = len(fake.calls), sum("varlen" in name for name, _ in fake.calls)
    together = [(*result, *grads) for result, grads in zip(results, kernel.backward_many(backwards), strict=True)]
    for found, expected in zip(together, singly, strict=True):
        assert [t.shape for t in found] == [t.shape for t in expected]
        assert all(relative_error(x, reference) < 1e-12 for x, reference in zip(found, expected, strict=True))
    assert called == launches(tiles) and called[1] > 2


def test_the_output_and_lse_of_the_whole_row_are_honoured(kernel: FlashAttn) -> None:
    q, k, v, dout = tensors(10, 14, 16, 16, dtype=torch.float64)
    out, lse, *expected = dense_attention(q, k, v, dout, seen(10, 14, Band(None, 6)), 0.25)
    left = kernel.backward(dout, q, k[:, :9], v[:, :9], (out, lse), Band(None, 6), Scores(0.25))
    right = kernel.backward(dout, q, k[:, 9:], v[:, 9:], (out, lse), Band(None, -3), Scores(0.25))
    grads = left[0] + right[0], torch.cat([left[1], right[1]], 1), torch.cat([left[2], right[2]], 1)
    assert all(relative_error(x, reference) < 1e-12 for x, reference in zip(grads, expected, strict=True))


def test_deterministic_algorithms_are_asked_for(kernel: FlashAttn, fake: Fake) -> None:
    q, k, v, dout = tensors(4, 4, 8, 8, dtype=torch.float64)
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            kernel.backward(dout, q, k, v, kernel.forward(q, k, v, Band(), Scores(0.3)), Band(), Scores(0.3))
        finally:
            torch.use_deterministic_algorithms(False)
        assert fake.calls[-1][1] is wanted


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_flash_attention_3_serves_hopper(
    monkeypatch: pytest.MonkeyPatch, fake: Fake, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    both = flash2_modules(fake) | {name: ModuleType(name) for name in ("flash_attn_3", "flash_attn_3._C")}
    without_packages(monkeypatch, **both)
    q, k, v, _ = tensors(4, 4, 8, 8, dtype=torch.float64)
    with torch.library._scoped_library("flash_attn_3", "DEF") as library:
        define_flash3(library, fake, FLASH3_SCHEMAS["flash3_in_place"])
        FlashAttn().forward(q, k, v, Band(), Scores(0.3))
    assert fake.calls == [("flash3" if capability[0] == 9 else "flash2", None)]


MISSING = (
    "neither flash-attn 2.7 or newer nor, for a Hopper GPU, flash-attn-3 can be imported: "
    'run `pip install flash-attn --no-build-isolation`, or use kernel="sdpa", which needs neither'
)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (
            Call("cpu", torch.float32, 64, 64),
            'FlashAttention runs on cuda, not cpu; kernel="sdpa" runs on cpu and cuda',
        ),
        (
            Call("cuda", torch.float32, 64, 64),
            "FlashAttention takes bfloat16 and float16, not torch.float32",
        ),
        (Call("cuda", torch.bfloat16, 64, 264), "FlashAttention takes head_dim up to 256"),
        (
            Call("cuda", torch.bfloat16, 64, 64, alibi=True),
            "a ring's tiles are not the diagonal that FlashAttention counts its linear biases from",
        ),
        (Call("cuda", torch.bfloat16, 256, 100, softcap=True), None),
    ],
)
def test_refusals(kernel: FlashAttn, call: Call, reason: str | None) -> None:
    assert kernel.refuses(call) == reason


@pytest.mark.parametrize("version", [None, "2.6.3"])
def test_a_missing_or_old_package_is_refused(monkeypatch: pytest.MonkeyPatch, fake: Fake, version: str | None) -> None:
    without_packages(monkeypatch, **(flash2_modules(fake, version) if version else {}))
    assert FlashAttn().refuses(Call("cuda", torch.bfloat16, 64, 64)) == MISSING


def test_flash_attention_3_alone_is_refused_off_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    without_packages(monkeypatch, **{name: ModuleType(name) for name in ("flash_attn_3", "flash_attn_3._C")})
    for capability, reason in (((8, 9), MISSING), ((9, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, it=capability: it)
        assert FlashAttn().refuses(Call("cuda", torch.bfloat16, 64, 64)) == reason


def test_importing_the_kernel_imports_no_package(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    for name in ("flash_attn", "flash_attn_3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("print('imported')\n")
    paths = os.pathsep.join([str(tmp_path), str(pytestconfig.rootpath)])
    environment = os.environ | {"PYTHONPATH": paths}
    code = "import usp.kernels.flash_attn"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == ""


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash_attn", "sdpa"])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (72, 40)])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_on_a_gpu(name: str, head_dims: tuple[int, int], softcap: float) -> None:
    kernel, dtype, scores = kernels.load(name), torch.bfloat16, Scores(0.1, softcap)
    if reason := kernel.refuses(Call("cuda", dtype, *head_dims, softcap=softcap > 0)):
        pytest.skip(reason)
    long = [
        (300, 300, Band(None, 0)),
        (200, 333, Band(-100, 50)),
        (700, 130, Band(-600, 20)),
        (700, 130, Band(-650, None)),
    ]
    for rows, columns, band in random_tiles(30) + long:
        q, k, v, dout = tensors(rows, columns, *head_dims, dtype=dtype, device="cuda")
        exact = [t.double() for t in (q, k, v)]
        out, lse = Reference().forward(*exact, band, scores)
        expected = out, lse, *Reference().backward(dout.double(), *exact, (out, lse), band, scores)
        output = kernel.forward(q, k, v, band, scores)
        grads = kernel.backward(dout, q, k, v, (out.to(dtype), lse.float()), band, scores)
        names = ("out", "lse", "dq", "dk", "dv")
        for which, x, reference in zip(names, (*output, *grads), expected, strict=True):
            assert relative_error(x, reference) < 2e-2, f"{which} of {rows} x {columns} under {band}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash_attn", "sdpa"])
@pytest.mark.parametrize("head_dims", [(128, 128), (72, 40)])
def test_many_on_a_gpu(name: str, head_dims: tuple[int, int]) -> None:
    """Packed documents: many short ones, single tokens and long ones under one window, and random ones beside them."""
    kernel, dtype, scores = kernels.load(name), torch.bfloat16, Scores(0.1)
    if reason := kernel.refuses(Call("cuda", dtype, *head_dims)):
        pytest.skip(reason)
    lengths = [*range(1, 60), 1, 1, 1, 300, 700]
    packed = [(n, n, Band(None, 0)) for n in lengths] + [(n, 2 * n, Band()) for n in lengths] + [(1, 1, Band())] * 9
    tiles = [(q.stop, k.stop, band) for rows, columns, wide in packed
             for q, k, band in (vars(trim(Tile(slice(0, rows), slice(0, columns), wide))).values(),)]  # fmt: skip
    tiles += random_tiles(30) + [(n, n, Band(-30, 0)) for n in (40, 80, 700)]
    given = [tensors(rows, columns, *head_dims, dtype=dtype, device="cuda") for rows, columns, _ in tiles]
    blocks = [Forward(*x[:3], band, scores) for x, (*_, band) in zip(given, tiles, strict=True)]
    results = list(kernel.forward_many(blocks))
    backwards = [
        Backward(x[3], *x[:3], result, block.band, scores)
        for x, block, result in zip(given, blocks, results, strict=True)
    ]
    for block, result, dout, grads in zip(
        blocks, results, [x[3] for x in given], kernel.backward_many(backwards), strict=True
    ):
        exact = [t.double() for t in block[:3]]
        out, lse = Reference().forward(*exact, block.band, scores)
        expected = out, lse, *Reference().backward(dout.double(), *exact, (out, lse), block.band, scores)
        for which, x, reference in zip(("out", "lse", "dq", "dk", "dv"), (*result, *grads), expected, strict=True):
            scale = max(reference.norm().item(), reference.numel() ** 0.5 * 1e-1)  # dq of a row that sees one key is 0
            assert (x.double() - reference).norm() < 2e-2 * scale, f"{which} of {block.q.shape} under {block.band}"
