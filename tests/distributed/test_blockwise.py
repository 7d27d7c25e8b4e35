"""Blockwise modules under DDP and FSDP2, with different numbers of chunks on the ranks, against one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import usp
from usp.nn import Blockwise, TransformerLayer, rope

S, DIM = 23, 16
TOKENS = (17, 6)  # of the two ranks, in chunks of 4: five against two


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, upstream = (torch.randn(1, S, DIM, dtype=torch.float64, generator=generator) for _ in range(2))
    return x, upstream


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.RMSNorm(DIM, eps=1e-6), nn.Linear(DIM, 40), nn.SiLU(), nn.Linear(40, DIM)).double()


def whole_gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Of every parameter, averaged over ranks as DDP and FSDP2 do, under the name that it has without wrappers."""
    found = {}
    for name, p in module.named_parameters():
        assert p.grad is not None
        found[name.replace("module.", "")] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return found


def trained(rank: int, how: str) -> dict[str, torch.Tensor]:
    x, upstream = (t.split(TOKENS, 1)[rank] for t in data())
    module: Any = Blockwise(mlp(), 4)
    if how == "ddp":
        module = DistributedDataParallel(module)
    else:
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    module(x).backward(upstream)
    return whole_gradients(module)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_ranks_with_different_numbers_of_chunks(pool, how):
    module, (x, upstream) = mlp(), data()
    module(x).backward(upstream)
    for found in pool(2).run(trained, how, timeout=60):
        for name, p in module.named_parameters():
            assert p.grad is not None
            assert (2 * found[name] - p.grad).norm() <= 1e-12 * p.grad.norm(), name


def layer(topology: usp.Topology | None, chunk: int) -> TransformerLayer:
    torch.manual_seed(0)
    return TransformerLayer(DIM, 4, 2, 40, usp.USPAttention(topology=topology), chunk=chunk).double()


def layer_trained(rank: int, ulysses: int, ring: int, recompute: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    topology = usp.Topology.build(ulysses, ring)
    module: Any = layer(topology, 4)
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    x, upstream = (usp.shard(t, topology, layout="contiguous") for t in data())
    cos, sin = rope(usp.positions(S, topology), (1.0, 0.1), torch.float64)
    options = {"seq_len": S, "window_size": (9, 0)}
    if recompute:
        out = torch.utils.checkpoint.checkpoint(module, x, cos, sin, use_reentrant=False, **options)
    else:
        out = module(x, cos, sin, **options)
    out.backward(upstream)
    return out.detach(), whole_gradients(module)


@pytest.mark.parametrize(("ulysses", "ring", "recompute"), [(2, 1, False), (1, 2, True)])
def test_a_layer_over_a_sharded_sequence(pool, ulysses, ring, recompute):
    module, (x, upstream) = layer(None, 100), data()
    wanted = module(x, *rope(torch.arange(S), (1.0, 0.1), torch.float64), window_size=(9, 0))
    wanted.backward(upstream)
    results = pool(2).run(layer_trained, ulysses, ring, recompute, timeout=90)
    out = torch.cat([shard for shard, _ in results], 1)
    assert (out - wanted).norm() <= 1e-12 * wanted.norm()
    for _, found in results:
        for name, p in module.named_parameters():
            assert p.grad is not None
            assert (2 * found[name] - p.grad).norm() <= 1e-12 * p.grad.norm(), name
