"""The planner's memory against what the code holds: live bytes, counted at every operation."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from usp.dry_run import How, Meter, run, world
from usp.kernels.base import Call, Kernel, Result, Scores
from usp.mask import Band
from usp.merge import accumulation_dtype
from usp.planner import memory
from usp.planner.spec import ModelSpec, Workload
from usp.planner.traffic import Layer, Shape
from usp.schedule import Schedule


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
    schedule = Schedule(workload.mask, layout, workload.seq_len, degrees[1])
    layer = Layer(Shape.of(model, workload), schedule, degrees[0], transport)
    how, nodes, held = How(model.dtype, "cpu", backward=workload.mode == "train"), ["node"] * math.prod(degrees), []
    for rank in range(len(nodes)):
        with world(rank, nodes, *degrees) as topology:
            held.append(run(layer, topology, Holds(), how).peak_bytes)
    return max(held)


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
    transports = ["p2p"] + ["all_gather"] * (degrees[1] > 1) + ["double_ring:2"] * (degrees[1] > 2)
    for layout, transport, window in itertools.product(("zigzag", "contiguous"), transports, (None, (150, 0))):
        if transport.startswith("double_ring") and window is not None:
            continue  # it moves every block, and is planned only where every block is needed
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
    with Meter() as peak:
        logits = hidden @ matrix.T
        F.cross_entropy(logits.float(), torch.zeros(tokens, dtype=torch.long)).backward()
    model = ModelSpec(heads=1, kv_heads=1, head_dim=1, hidden=1, intermediate=1, vocab=vocab, parameters=1)
    rows = dict(memory.estimate(model, Workload(seq_len=tokens), 1, 1).rows)
    assert rows["logits"] == 14 * tokens * vocab
    assert rows["logits"] <= peak.peak_bytes <= 1.02 * rows["logits"]
