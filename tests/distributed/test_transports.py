"""Transports on real processes: what is sent, and that what no rank needs is not."""

import pytest
import torch
import torch.distributed as dist

import usp
from usp import kernels, transports
from usp.kernels.base import Scores
from usp.mask import Mask
from usp.ring import Ring
from usp.schedule import Schedule


def circulated(rank, name, hops, numels):
    transport = transports.load(name, dist.group.WORLD)
    shapes = [((n, 2), (n,)) for n in numels]
    own = [torch.full(shape, float(rank), dtype=torch.float32) for shape in shapes[rank]]
    seen, first = [], None
    for stop in transport.circulate(own, shapes, hops):
        first = first or stop
        assert [t.shape for t in stop.tensors] == [torch.Size(s) for s in shapes[stop.owner]]
        assert all((t == stop.owner).all() for t in stop.tensors)
        seen.append(stop.owner)
        stop.gradients = [torch.full(s, 10.0**rank, dtype=torch.float64) for s in shapes[stop.owner]]
    return seen, [g.flatten().tolist() for g in first.gradients]


@pytest.mark.parametrize("name", ["p2p", "all_gather"])
@pytest.mark.parametrize("numels", [(3, 3, 3, 3), (4, 0, 2, 1)], ids=str)
@pytest.mark.parametrize("hops", [0, 1, 2, 3])
def test_blocks_come_by_and_gradients_come_home(pool, name, numels, hops):
    for rank, (seen, gradients) in enumerate(pool(4).run(circulated, name, hops, numels)):
        assert seen == [(rank - hop) % 4 for hop in range(hops + 1)] + [rank] * (hops > 0)
        total = sum(10.0 ** ((rank + hop) % 4) for hop in range(hops + 1))
        assert gradients == [[total] * (2 * numels[rank]), [total] * numels[rank]]


@pytest.mark.parametrize("numels", [(3, 3, 3, 3), (4, 0, 2, 1)], ids=str)
def test_a_double_ring_goes_round_the_node_first(pool, numels):
    orders = [[0, 1, 2, 3, 2], [1, 0, 3, 2, 3], [2, 3, 0, 1, 0], [3, 2, 1, 0, 1]]  # a round's first comes again
    for rank, (seen, gradients) in enumerate(pool(4).run(circulated, "double_ring:2", 3, numels)):
        assert seen == [*orders[rank], rank]
        assert gradients == [[1111.0] * (2 * numels[rank]), [1111.0] * numels[rank]]


class Counting(transports.load("p2p", None).__class__):
    """Counts the elements that leave this rank, exchange by exchange."""

    def __init__(self, group):
        super().__init__(group)
        self.sent = []

    def exchange(self, sends, receives):
        self.sent.append(sum(t.numel() for t in sends.values()))
        return super().exchange(sends, receives)


def sent(rank, mask, layout, seq_len):
    counting = Counting(dist.group.WORLD)
    schedule = Schedule(Mask.parse(mask), layout, seq_len, 4)
    ring = Ring((schedule,), counting, kernels.load("sdpa"), (2,), Scores(0.3))
    q, k, v = (torch.randn(1, schedule.length(rank), heads, 8) for heads in (2, 1, 1))
    out, lse = ring.forward(q, k, v)
    forward, counting.sent = counting.sent, []
    ring.backward(torch.randn_like(out), q, k, v, out, lse)
    return forward, counting.sent


def test_k_and_v_travel_in_one_message_a_hop(pool):
    for forward, backward in pool(4).run(sent, ":0", "zigzag", 64):
        assert forward == [16 * 16] * 3
        assert backward == [16 * 16] * 6  # 3 of k and v, and 3 of their gradients: the last brings them home


def test_hops_that_no_rank_needs_are_not_made(pool):
    for forward, backward in pool(4).run(sent, "-9:0", "contiguous", 64):
        assert forward == [16 * 16]
        assert backward == [16 * 16] * 2
    for forward, backward in pool(4).run(sent, ":0@0,16,32,48,64", "contiguous", 64):
        assert (forward, backward) == ([], [])  # every document lies on one rank


def chosen(rank, nodes, mask):
    """The transport that a ring of four on some nodes takes, and how far its results are from those of a plain ring."""
    topology = usp.Topology.build(1, 4, nodes=nodes, allow_cross_node=True)
    draw = torch.Generator().manual_seed(5)
    q, k, v, dout = (torch.randn(1, 31, h, 8, dtype=torch.float64, generator=draw) for h in (4, 2, 2, 4))
    dout, found = usp.shard(dout, topology, layout="zigzag"), []
    for transport in ("auto", "p2p"):
        attn = usp.USPAttention(topology=topology, layout="zigzag", transport=transport)
        qkv = [usp.shard(x, topology, layout="zigzag").requires_grad_() for x in (q, k, v)]
        out = attn(*qkv, mask=mask, seq_len=31)
        found.append([out, *torch.autograd.grad(out, qkv, dout)])
        if transport == "auto":
            (call,) = attn.config.settled.values()
    return call.recipe.transport, max(((a - b).norm() / b.norm()).item() for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("nodes", "mask", "expected"),
    [
        ("aabb", Mask.full(), "double_ring:2"),
        ("aabb", Mask.causal(), "double_ring:2"),
        ("aabb", Mask.window(5, 0), "p2p"),  # a double ring moves all blocks, needed or not
        ("aaaa", Mask.full(), "p2p"),
        ("abcd", Mask.full(), "p2p"),
        ("aaab", Mask.full(), "p2p"),
    ],
)
def test_auto_is_a_double_ring_where_nodes_hold_parts_of_a_ring(pool, nodes, mask, expected):
    for transport, error in pool(4).run(chosen, tuple(nodes), mask):
        assert transport == expected
        assert error < 1e-14
