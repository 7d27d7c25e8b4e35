"""The planner's bytes are those that the code sends: real attention, forward and backward, over counting wires.

The process group is torch's fake one, so that any rank of up to 512 can be run in one process. What it receives is
never filled in: numbers mean nothing here, sizes do.
"""

import math
import random

import pytest
import torch
import torch.distributed as dist

import usp
from usp.dry_run import world
from usp.mask import Mask
from usp.planner.traffic import Layer, Shape, bytes_all_to_all, bytes_ring
from usp.schedule import Schedule
from usp.shard import positions as shard_positions

pytestmark = pytest.mark.filterwarnings("ignore:causal attention over a ring:UserWarning")
LAYOUTS = ("contiguous", "zigzag", "striped")
MASKS = {
    "full": lambda s: Mask.full(),
    "causal": lambda s: Mask.causal(),
    "window": lambda s: Mask.window(s // 9, 0),
    "narrow": lambda s: Mask.window(1, 1),
    "documents": lambda s: Mask.causal() & Mask.documents([s // 3, s - s // 3 - s // 5, s // 5]),
}


class Wires:
    """Counts what is sent, by process group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: dict[str, int] = {}
        monkeypatch.setattr(dist, "batch_isend_irecv", self.batch)
        monkeypatch.setattr(dist, "all_gather", self.all_gather)

    def batch(self, messages):
        for message in messages:
            if message.op is dist.isend:
                self.count(message.group, message.tensor.numel() * message.tensor.element_size())
        return []

    def all_gather(self, outputs, tensor, group, async_op):
        self.count(group, (len(outputs) - 1) * tensor.numel() * tensor.element_size())
        return dist.barrier(group=group, async_op=async_op)

    def count(self, group, size):
        self.sent[group.group_name] = self.sent.get(group.group_name, 0) + size

    def take(self, group) -> int:
        return 0 if group is None else self.sent.pop(group.group_name, 0)


def assert_equal_bytes(monkeypatch, rank: int, layer: Layer, dtype: torch.dtype) -> None:
    """One rank's forward and backward pass against the planner's arithmetic."""
    schedule, shape = layer.schedule, layer.shape
    degrees = layer.ulysses_degree, schedule.ring_degree
    with world(rank, ["n"] * math.prod(degrees), *degrees) as topology:
        wires = Wires(monkeypatch)
        attn = usp.USPAttention(
            topology=topology, layout=schedule.layout, transport=layer.transport if topology.ring.degree > 1 else "auto"
        )
        local = shard_positions(schedule.seq_len, topology, layout=schedule.layout).numel()
        q, k, v = (
            torch.randn(shape.batch, local, heads, dim, dtype=dtype, requires_grad=True)
            for heads, dim in (
                (shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.value_dim)
            )
        )  # fmt: skip
        out = attn(q, k, v, mask=schedule.mask, seq_len=schedule.seq_len)
        for backward in (False, True):
            if backward:
                out.backward(torch.randn_like(out))
            place = topology.ring.rank, topology.ulysses.rank
            counted = wires.take(topology.ulysses.group), wires.take(topology.ring.group)
            predicted = sum(bytes_all_to_all(layer, *place, backward)), bytes_ring(layer, *place, backward)
            assert counted == predicted, (rank, backward, layer)


@pytest.mark.parametrize("transport", ["p2p", "all_gather"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("degrees", "heads", "kv_heads"),
    [((1, 4), 4, 2), ((4, 1), 8, 2), ((2, 3), 4, 4), ((3, 2), 7, 7), ((4, 3), 8, 2), ((5, 2), 10, 2), ((8, 2), 28, 4)],
)
def test_a_grid_of_choices(monkeypatch, degrees, heads, kv_heads, mask, layout, transport):
    rng = random.Random(f"{degrees}{heads}{mask}{layout}{transport}")
    seq_len = rng.choice([61, 96, 120])
    shape = Shape(rng.choice([1, 2]), heads, kv_heads, 8, rng.choice([8, 16]), 4)
    layer = Layer(shape, Schedule(MASKS[mask](seq_len), layout, seq_len, degrees[1]), degrees[0], transport)
    for rank in rng.sample(range(degrees[0] * degrees[1]), 2):
        assert_equal_bytes(monkeypatch, rank, layer, torch.float32)


@pytest.mark.parametrize(("ring", "width"), [(4, 2), (6, 2), (6, 3)])
@pytest.mark.parametrize("mask", MASKS)
def test_double_rings(monkeypatch, ring, width, mask):
    """Blocks of different lengths, seen from ranks of different nodes."""
    shape, seq_len = Shape(1, 4, 2, 8, 16, 4), 13 * ring + ring // 2
    layer = Layer(shape, Schedule(MASKS[mask](seq_len), "contiguous", seq_len, ring), 2, f"double_ring:{width}")
    for ring_rank in range(0, ring, width - 1 or 1):
        assert_equal_bytes(monkeypatch, 2 * ring_rank, layer, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(monkeypatch, dtype):
    shape = Shape(1, 6, 3, 8, 8, dtype.itemsize)
    layer = Layer(shape, Schedule(Mask.causal(), "zigzag", 75, 3), 2)
    assert_equal_bytes(monkeypatch, 4, layer, dtype)


@pytest.mark.parametrize(
    ("degrees", "heads", "kv_heads", "layout", "mask"),
    [
        ((8, 64), 32, 8, "zigzag", "causal"),
        ((16, 32), 40, 8, "zigzag", "full"),
        ((32, 16), 32, 8, "striped", "causal"),
        ((64, 8), 64, 8, "contiguous", "window"),
        ((2, 256), 4, 2, "contiguous", "narrow"),
        ((512, 1), 512, 8, "contiguous", "causal"),
    ],
)
def test_a_world_of_512(monkeypatch, degrees, heads, kv_heads, layout, mask):
    seq_len = 2050  # ranks differ by a token
    shape = Shape(1, heads, kv_heads, 8, 8, 4)
    layer = Layer(shape, Schedule(MASKS[mask](seq_len), layout, seq_len, degrees[1]), degrees[0])
    for rank in (0, 511):
        assert_equal_bytes(monkeypatch, rank, layer, torch.float32)
