"""The planner's memory against what the code holds: live bytes, counted at every operation."""

import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

import usp
from usp import transports
from usp.all_to_all import Deal, exchange
from usp.heads import groups
from usp.kernels.base import Call, Kernel, Result, Scores
from usp.mask import Band
from usp.merge import accumulation_dtype
from usp.planner import memory
from usp.planner.spec import ModelSpec, Workload
from usp.positions import split
from usp.ring import Ring
from usp.schedule import Schedule


class Peak(TorchDispatchMode):
    """Counts the bytes of the storages that operations made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._seen: set[int] = set()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self._seen:
                self._seen.add(key)
                self.live_bytes += tensor.untyped_storage().nbytes()
                weakref.finalize(tensor.untyped_storage(), self._free, key, tensor.untyped_storage().nbytes())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live_bytes -= size


class Holds(Kernel):
    """Computes nothing, and holds what FlashAttention-2 does."""

    @override
    def refuses(self, call: Call) -> str | None:
        return None

    @override
    def tile_forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band, scores: Scores) -> tuple[Tensor, Tensor]:
        return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))

    @override
    def tile_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Result, band: Band, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        workspace = [torch.empty_like(q, dtype=accumulation_dtype(q.dtype)), *map(torch.empty_like, result[1:] * 2)]
        if q.shape[2] > k.shape[2]:
            workspace += [t.new_empty(*t.shape[:2], q.shape[2], t.shape[3]) for t in (k, v)]
        gradients = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        assert workspace  # alive until here
        return gradients


def measured(model: ModelSpec, workload: Workload, degrees: tuple[int, int], layout: str, transport: str) -> int:
    """Peak bytes of attention, with its inputs and what it saves, on the fullest of all ranks."""
    return max(_measured(model, workload, degrees, layout, transport, rank) for rank in range(degrees[0] * degrees[1]))


def _measured(
    model: ModelSpec, workload: Workload, degrees: tuple[int, int], layout: str, transport: str, rank: int
) -> int:
    """What `usp.attention` does, below its checks and its ops: inside an op nothing can be counted."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=degrees[0] * degrees[1])
    try:
        topology = usp.Topology.build(*degrees, nodes=["node"] * degrees[0] * degrees[1], check="off")
        ulysses = transports.load("auto", topology.ulysses.group)
        schedule = Schedule(workload.mask, layout, workload.seq_len, degrees[1])
        lengths = tuple(len(run) for run in split(schedule.length(topology.ring.rank), degrees[0]))
        heads, kv_heads = model.heads, model.kv_heads
        there = Deal(heads, (heads, kv_heads, kv_heads), lengths)
        back = Deal(heads, (heads,), lengths)
        own = groups(heads, kv_heads, degrees[0], topology.ulysses.rank)
        ring = Ring((schedule,), transports.load(transport, topology.ring.group), Holds(), own, Scores(1.0))
        shape, dtype = (workload.batch, lengths[topology.ulysses.rank]), getattr(torch, model.dtype)
        widths = ((heads, model.head_dim), (kv_heads, model.head_dim), (kv_heads, model.value_dim))

        def swap(tensors: list[Tensor], deal: Deal, to_heads: bool) -> list[Tensor]:
            return exchange(tensors, deal, to_heads, ulysses) if degrees[0] > 1 else tensors

        with Peak() as peak:
            shards = [torch.empty(*shape, *width, dtype=dtype) for width in widths]
            q, k, v = swap(shards, there, True)
            out, lse = ring.forward(q, k, v)
            returned = swap([out], back, False)
            if workload.mode == "inference":
                return peak.peak_bytes
            del shards  # what the model computed for attention is not saved
            (dout,) = swap([torch.empty_like(returned[0])], back, True)
            gradients = list(ring.backward(dout, q, k, v, out, lse))
            del dout, q, k, v, out, lse  # as autograd lets go of what a node has saved
            swap(gradients, there, False)
        return peak.peak_bytes
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("degrees", [(1, 1), (4, 1), (1, 4), (3, 2)], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2)])
def test_attention_holds_what_is_estimated(degrees, heads, kv_heads, dtype, mode):
    """Never more than that, and at least two thirds: whole tiles are planned for, and some masks and layouts have none.

    The residual stream and the MLP are one element wide, so that attention is all there is.
    """
    model = ModelSpec(
        heads=heads, kv_heads=kv_heads, head_dim=32, v_head_dim=16, hidden=1, intermediate=1, dtype=dtype, parameters=1
    )
    ways = itertools.product(("zigzag", "contiguous"), ("p2p", "all_gather")) if degrees[1] > 1 else [("zigzag", "p2p")]
    for (layout, transport), window in itertools.product(ways, (None, (150, 0))):
        workload = Workload(seq_len=128 * degrees[1] + 5, batch=2, mode=mode, window_size=window)
        held = measured(model, workload, degrees, layout, transport)
        estimated = memory.estimate(model, workload, *degrees, layout=layout, transport=transport)
        planned = estimated.total_bytes - memory.FRAMEWORK_BYTES
        assert held <= planned <= 1.5 * held, (layout, transport, window, planned / held, estimated)


def test_the_loss_holds_what_is_estimated():
    """torch's cross_entropy of half-precision logits, forward and backward: 14 bytes a logit."""
    tokens, vocab = 512, 1000
    hidden, matrix = (torch.randn(n, 8, dtype=torch.bfloat16) for n in (tokens, vocab))
    hidden.requires_grad_()
    with Peak() as peak:
        logits = hidden @ matrix.T
        F.cross_entropy(logits.float(), torch.zeros(tokens, dtype=torch.long)).backward()
    model = ModelSpec(heads=1, kv_heads=1, head_dim=1, hidden=1, intermediate=1, vocab=vocab, parameters=1)
    rows = dict(memory.estimate(model, Workload(seq_len=tokens), 1, 1).rows)
    assert rows["logits"] == 14 * tokens * vocab
    assert rows["logits"] <= peak.peak_bytes <= 1.02 * rows["logits"]
