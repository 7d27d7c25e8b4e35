"""Many blocks at once: what one by one gives, in fewer launches where a kernel has them, and nothing held for long."""

import random
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import usp
from tests.dense import dense_attention, relative_error, visible
from tests.unit.strategies import examples
from tests.unit.test_kernels import MAKERS, Windows, calls, every_kernel, kernel_for, scores_of, tensors
from usp import layouts, transports
from usp.kernels import _windows
from usp.kernels.base import Backward, Forward, Scores
from usp.mask import CAUSAL, FULL, Band, Mask
from usp.ring import Ring
from usp.schedule import Schedule
from usp.tiles import Tile
from usp.transports import local

pytestmark = pytest.mark.usefixtures("one_thread")


@st.composite
def many(draw: st.DrawFn) -> list[dict]:
    """Calls of which most have heads, head_dims and scale in common, and some a window."""
    first = draw(calls())
    names = ("kv_heads", "group", "head_dim", "v_head_dim", "scale")
    common = {name: first[name] for name in names}
    found = [first]
    for call in draw(st.lists(calls(lengths=st.integers(0, 30)), max_size=7)):
        band = draw(st.sampled_from([FULL, CAUSAL, Band(-3, 0), call["band"]]))
        found.append(call | {"band": band} | (common if draw(st.integers(0, 3)) else {}))
    return found


def blocks_of(found: list[dict], kernel) -> tuple[list[Forward], list[Backward]]:
    forwards, backwards = [], []
    for call in found:
        q, k, v, dout = tensors(call, torch.float64)
        forwards.append(Forward(q, k, v, call["band"], scores_of(call, torch.float64)))
        backwards.append(Backward(dout, q, k, v, kernel.forward(*forwards[-1]), *forwards[-1][3:]))
    return forwards, backwards


@every_kernel
@examples(12)
@given(found=many())
def test_many_are_one_by_one(name, found):
    kernel = kernel_for(name, torch.float64)
    forwards, backwards = blocks_of(found, kernel)
    for together, alone, blocks in (
        (kernel.forward_many, kernel.forward, forwards),
        (kernel.backward_many, kernel.backward, backwards),
    ):
        results = list(together(iter(blocks)))
        assert len(results) == len(blocks)
        for result, expected in zip(results, (alone(*block) for block in blocks), strict=True):
            for x, reference in zip(result, expected, strict=True):
                assert (x.shape, x.dtype) == (reference.shape, reference.dtype)
                hidden = reference == -torch.inf
                assert torch.equal(x == -torch.inf, hidden)
                assert relative_error(x.masked_fill(hidden, 0.0), reference.masked_fill(hidden, 0.0)) <= 1e-12


def block(rows: int, columns: int, band: Band = CAUSAL, batch: int = 1, heads: int = 2) -> Forward:
    q, k = torch.randn(batch, rows, heads, 8), torch.randn(batch, columns, 1, 8)
    return Forward(q, k, k, band, Scores(0.3))


def test_a_launch_is_of_what_differs_in_length_alone():
    kernel = Windows()
    alike = [block(3, 3), block(5, 5, batch=2), block(1, 1), block(9, 9)]
    full = [block(4, 2, FULL), block(2, 7, FULL)]
    others = [
        block(6, 6, Band(-2, 0)),  # another window
        block(5, 5, heads=4),  # other heads
        block(5, 5)._replace(scores=Scores(0.4)),
        block(5, 5, Band(None, -2)),  # a row that sees nothing: what a launch is given is trimmed
        block(9, 3, Band(-7, 2)),  # cut in two, for FlashAttention-2
    ]
    list(kernel.forward_many([alike[0], full[0], others[0], *alike[1:], *others[1:], full[1]]))
    # alike[2] sees one key: its bounds do not bind, and its band, not trimmed, makes it like no other
    assert kernel.launches == [4, 2, 0, 0, 0, 0, 0, 0, 0]


def test_a_launch_is_bounded(monkeypatch):
    kernel, blocks = Windows(), [block(10, 10) for _ in range(11)]
    monkeypatch.setattr(_windows, "LAUNCH_ROWS", 4 * 2 * (10 + 10 + _windows.BLANK_ROWS))  # of two heads
    list(kernel.forward_many(blocks))
    assert kernel.launches == [4, 4, 3]
    kernel.launches.clear()
    list(kernel.forward_many([*blocks[:2], block(600, 600), *blocks[2:4]]))
    assert kernel.launches == [2, 0, 2]


@pytest.mark.parametrize("name", ["reference", "windows"])
def test_what_is_not_kept_is_not_held(name):
    """Blocks that share no launch are computed when they are asked for, and their results are the caller's alone."""
    kernel, asked = MAKERS[name](), []
    found = [block(n, n, Band(-n // 2, 0)) for n in (20, 30, 40, 50)]

    def give():
        for n, one in enumerate(found):
            asked.append(n)
            yield one

    results = kernel.forward_many(give())
    held = [weakref.ref(t.untyped_storage()) for t in next(results)]
    assert all(storage() is None for storage in held)
    assert asked == ([0] if name == "reference" else [0, 1, 2, 3])
    if name == "windows":
        assert kernel.launches == [0]
    assert len(list(results)) == 3


# ---- packed documents round a ring -----------------------------------------------------------------------------------


def ring_of(topology, schedule: Schedule, kernel: Windows) -> Ring:
    """Three query heads, of which one uses kv head 0 and two kv head 1."""
    return Ring((schedule,), transports.load("auto", topology.ring.group), kernel, (1, 2), Scores(0.3))


def windows(tiles: tuple[Tile, ...]) -> set[tuple[int | None, int | None]]:
    """The distinct windows, from the bottom right corner, of some tiles."""
    found = set()
    for tile in tiles:
        last = (tile.k.stop - tile.k.start) - (tile.q.stop - tile.q.start)
        lo, hi = tile.band.lo, tile.band.hi
        found.add((None if lo is None else last - lo, None if hi is None else hi - last))
    return found


def check(seq_len: int, mask: Mask, layout: str, ring_degree: int, batch: int) -> list[tuple[int, int, int]]:
    """Against the dense definition. Returns launches of forward and backward, and tiles, of every rank."""
    layout = layouts.layout_for(layout, mask)
    make = torch.Generator().manual_seed(ring_degree)
    q, k, v, dout = (torch.randn(batch, seq_len, h, 8, generator=make, dtype=torch.float64) for h in (3, 2, 2, 3))
    schedule = Schedule(mask, layout, seq_len, ring_degree)

    def work(topology):
        kernel, rank = Windows(), topology.ring.rank
        ring = ring_of(topology, schedule, kernel)
        q_r, k_r, v_r, dout_r = (usp.shard(t, topology, layout=layout) for t in (q, k, v, dout))
        out, lse = ring.forward(q_r, k_r, v_r)
        forward = len(kernel.launches)
        grads = ring.backward(dout_r, q_r, k_r, v_r, out, lse)
        how = dict(layout=layout, length=seq_len)
        tiles = sum(len(schedule.tiles(rank, owner)) for owner in range(ring_degree))
        counts = forward, len(kernel.launches) - forward, tiles
        return counts, [usp.unshard(t, topology, **how) for t in (out, lse, *grads)]

    expanded = [t[:, :, [0, 1, 1]] for t in (k, v)]
    out, lse, dq, dk, dv = dense_attention(q, *expanded, dout, visible(mask, seq_len), 0.3)
    dk, dv = (torch.stack([t[:, :, 0], t[:, :, 1] + t[:, :, 2]], 2) for t in (dk, dv))
    found = local.run(work, ring_degree=ring_degree)
    for _, results in found:
        for what, x, reference in zip(("out", "lse", "dq", "dk", "dv"), results, (out, lse, dq, dk, dv), strict=True):
            assert relative_error(x, reference) <= 1e-12, what
    return [counts for counts, _ in found]


@pytest.mark.parametrize("layout", layouts.names())
@pytest.mark.parametrize("ring_degree", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "shape",
    [Mask.causal(), Mask.full(), Mask.window(6, 0), Mask.window(5, 9)],
    ids=["causal", "full", "window", "two-sided"],
)
def test_packed_documents_are_exact(layout, ring_degree, shape):
    lengths = [1, 17, 3, 3, 40, 2, 1, 1, 25, 8, 12, 30]
    counts = check(sum(lengths), shape & Mask.documents(lengths), layout, ring_degree, batch=2)
    assert sum(forward for forward, _, _ in counts) < sum(tiles for _, _, tiles in counts) * 2  # two runs of heads


@pytest.mark.parametrize("layout", layouts.names())
def test_many_short_documents_take_a_launch_for_each_window(layout):
    rng, ring_degree = random.Random(0), 4
    lengths = [rng.randint(2, 12) for _ in range(200)]
    mask = Mask.causal() & Mask.documents(lengths)
    counts = check(sum(lengths), mask, layout, ring_degree, batch=1)
    schedule = Schedule(mask, layouts.layout_for(layout, mask), sum(lengths), ring_degree)
    for rank, (forward, backward, tiles) in enumerate(counts):
        kinds = [windows(schedule.tiles(rank, owner)) for owner in range(ring_degree)]
        assert max(map(len, kinds)) <= 3
        assert forward == backward == 2 * sum(map(len, kinds))  # a head and two heads are launches of their own
        assert tiles >= 45 and (layout != "striped" or tiles > 400)
