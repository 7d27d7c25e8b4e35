"""The ring and the whole attention over threads of one process: no process group, seconds."""

import pytest
import torch

import usp
from tests.cases import Case, failures, run, variants
from tests.dense import dense_attention, relative_error, visible
from usp import kernels, layouts, transports
from usp.kernels.base import Scores
from usp.mask import Mask
from usp.ring import Recipe, Ring
from usp.schedule import Schedule
from usp.transports import local

pytestmark = pytest.mark.filterwarnings("ignore:causal attention over a ring")


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (1, 5), (3, 2), (2, 4)], ids=str)
def test_every_layout_and_mask(ulysses, ring):
    for case in variants(ulysses, ring):
        if case.transport != "auto":
            continue  # a transport of processes
        results = local.run(lambda topology, case=case: run(case, topology), ulysses_degree=ulysses, ring_degree=ring)
        for rank, result in enumerate(results):
            assert failures(case, result) == [], f"rank {rank} of {case}"


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ring_degree", [1, 2, 3, 4, 5])
def test_the_functions_below_autograd(layout, ring_degree):
    """`Ring.forward` and `Ring.backward` called by hand, as one would to learn how they work."""
    seq_len, mask = 61, Mask.window(17, 2) & Mask.cu_seqlens((0, 20, 23, 61))
    make = torch.Generator().manual_seed(ring_degree)
    q, k, v, dout = (torch.randn(2, seq_len, h, 8, generator=make, dtype=torch.float64) for h in (3, 2, 2, 3))
    schedule = Schedule(mask, layout, seq_len, ring_degree)

    def work(topology):
        transport = transports.load("auto", topology.ring.group)
        ring = Ring(
            (schedule,), transport, kernels.load("sdpa"), (1, 2), Scores(0.3)
        )  # head 0 uses kv head 0, the others kv head 1
        q_r, k_r, v_r, dout_r = (usp.shard(t, topology, layout=layout) for t in (q, k, v, dout))
        out, lse = ring.forward(q_r, k_r, v_r)
        return [
            usp.unshard(t, topology, layout=layout, length=seq_len)
            for t in (out, *ring.backward(dout_r, q_r, k_r, v_r, out, lse))
        ]

    expanded = [t[:, :, [0, 1, 1]] for t in (k, v)]
    out, _, dq, dk, dv = dense_attention(q, *expanded, dout, visible(mask, seq_len), 0.3)
    dk, dv = (torch.stack([t[:, :, 0], t[:, :, 1] + t[:, :, 2]], 2) for t in (dk, dv))
    for results in local.run(work, ring_degree=ring_degree):
        for x, reference in zip(results, (out, dq, dk, dv), strict=True):
            assert relative_error(x, reference) < 1e-12


def test_the_example_of_the_module():
    """What the docstring of usp.transports.local shows."""
    query, key, value = (torch.randn(1, 40, 2, 8, dtype=torch.float64) for _ in range(3))

    def attend(topology):
        q, k, v = (usp.shard(x, topology, layout="zigzag") for x in (query, key, value))
        return usp.attention(q, k, v, topology=topology, layout="zigzag", is_causal=True)

    shards = local.run(attend, ulysses_degree=2, ring_degree=2)
    assert [tuple(s.shape) for s in shards] == [(1, 10, 2, 8)] * 4


def test_shard_and_unshard_are_inverse_bit_by_bit():
    x = torch.randint(0, 1000, (3, 53, 2))

    def work(topology, layout, dim):
        y = x.movedim(1, dim).contiguous()
        positions = usp.positions(53, topology, layout)
        part = usp.shard(y, topology, dim=dim, layout=layout)
        assert torch.equal(part, y.index_select(dim, positions))
        assert positions.dtype == torch.int64
        return torch.equal(usp.unshard(part, topology, dim=dim, layout=layout, length=53), y)

    for layout in ("contiguous", "zigzag", "striped"):
        for dim in (0, 1, -1):
            for degrees in ((1, 1), (2, 2), (3, 1), (1, 5)):
                how = dict(ulysses_degree=degrees[0], ring_degree=degrees[1])
                assert all(local.run(lambda t, a=layout, d=dim: work(t, a, d), **how)), (layout, dim, degrees)


def test_more_ranks_than_tokens():
    """Empty shards: a rank without tokens takes part and returns nothing."""
    case = Case(2, 3, 4, ":0", "contiguous", dtype=torch.float64)
    for result in local.run(lambda topology: run(case, topology), ulysses_degree=2, ring_degree=3):
        assert failures(case, result) == []


def test_ranks_that_disagree_are_told_in_threads_too():
    def work(topology):
        q, k, v = (torch.randn(1, 4 + (topology.rank == 1), 2, 8) for _ in range(3))
        return usp.attention(q, k, v, topology=topology)

    with pytest.raises(usp.AgreementError, match="rank 1 has seq_len 10 where rank 0 has 8"):
        local.run(work, ring_degree=2)


def test_equal_shards_in_a_layout_that_does_not_deal_equally(monkeypatch):
    """Without seq_len every rank has as many tokens; a layout that would not give them is found before any message."""

    def lopsided(seq_len, ring_degree, rank):
        cut = 3 * seq_len // 4
        return (range(cut) if rank == 0 else range(cut, seq_len),)

    monkeypatch.setattr(layouts, "load", lambda name: lopsided)

    def work(topology):
        q, expected = torch.zeros(1, 8, 2, 8), (12, 4)[topology.rank]
        with pytest.raises(usp.InputError, match=f"the lopsided layout of a sequence of 16 gives that rank {expected}"):
            usp.attention(q, q, q, topology=topology, layout="lopsided")

    local.run(work, ring_degree=2)


def test_a_recipe_reads_back():
    recipe = Recipe(
        ("-7:0@0,5,9", ":"), ("zigzag", "striped"), 3, "p2p", "sdpa", (1, 4, 2), (0.1, 0.0), ("sinks", "slopes")
    )
    assert Recipe.parse(str(recipe)) == recipe
