"""Other libraries' attention, on CPU and gloo, behind the interface that the benchmark times: `Shards`.

    pip install --no-deps -r benchmarks/requirements-peers.txt    # into an environment of its own

A peer is imported when it is asked for, and called in the fastest of its ways that run on a CPU: with torch's fused
attention where it takes any, in the zigzag order for a causal mask where its ring has one. Nothing is mended: what it
cannot do, it raises.
"""
# pyright: reportMissingImports=false

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from problem import Grid, Problem, Shards, Side
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import usp


def yunchang(problem: Problem, grid: Grid | None) -> Shards:
    """long-context-attention: `LongContextAttention` with the only kernel type that does not need a GPU."""
    from yunchang import LongContextAttention, set_seq_parallel_pg
    from yunchang.kernels import AttnType

    assert grid is not None
    set_seq_parallel_pg(grid.ulysses, grid.ring, dist.get_rank(), grid.ranks)
    layer = LongContextAttention(ring_impl_type="basic", attn_type=AttnType.TORCH_MATH)
    return Shards(_positions(problem, grid, "contiguous"), partial(layer, causal=problem.causal))


def ringmaster(problem: Problem, grid: Grid | None) -> Shards:
    """axolotl-ringmaster: Ulysses around transformers' SDPA; rings of its explicit softmax, the block that runs here.

    Its zigzag ring needs flash-attn, so the ring is contiguous.
    """
    import ringmaster as rm
    from ringmaster.strategies.ring import make_ring_attention
    from ringmaster.strategies.usp import make_usp_attention
    from transformers import AttentionInterface

    assert grid is not None
    config = rm.RingmasterConfig(
        size=grid.ranks, ulysses_size=grid.ulysses, ring_size=grid.ring, rotate_method=rm.RotateMethod.ALLTOALL
    )
    if grid.ring == 1:
        runtime = rm.setup(config, num_kv_heads=problem.kv_heads, device_type="cpu", inner_attn="sdpa")
        attention = AttentionInterface()[runtime.attn_implementation]
    else:  # `setup` has no name for the block of explicit softmax
        config.normalize(num_kv_heads=problem.kv_heads, intra_node_size=grid.ranks)
        runtime = rm.build_runtime(config, device_type="cpu")
        make = make_ring_attention if grid.ulysses == 1 else make_usp_attention
        attention = make("math", "math", config.rotate_method)
    module: Any = nn.Module()  # what they read from an attention layer of transformers
    module.num_key_value_groups, module.is_causal = problem.heads // problem.kv_heads, problem.causal

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rm.set_runtime(runtime)  # one for each process
        return attention(module, q, k, v, None, dropout=0.0, scaling=None, is_causal=problem.causal)[0]

    return Shards(_positions(problem, grid, "contiguous"), attend, heads_first=(True, False))


def ring_attention_pytorch(problem: Problem, grid: Grid | None) -> Shards:
    """ring-attention-pytorch: its ring in plain PyTorch. Every block is computed, so no order of tokens is faster."""
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    assert grid is not None
    ring, group = grid.ring, problem.heads // problem.kv_heads

    def regrouped(x: Tensor, count: int) -> Tensor:
        """Its query head h uses kv head h % kv_heads, ours h // group."""
        return x.unflatten(2, (count, -1)).transpose(2, 3).flatten(2, 3)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if problem.is_grouped:
            q = regrouped(q, problem.kv_heads)
        out = ring_flash_attn(q, k, v, causal=problem.causal, ring_reduce_col=True, ring_size=ring)
        return regrouped(out, group) if problem.is_grouped else out

    return Shards(_positions(problem, grid, "contiguous"), attend)


def deepspeed(problem: Problem, grid: Grid | None) -> Shards:
    """DeepSpeed-Ulysses: `DistributedAttention` around torch's SDPA."""
    import deepspeed.comm
    from deepspeed.sequence.layer import DistributedAttention

    assert grid is not None
    deepspeed.comm.init_distributed("gloo", dist_init_required=False)

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return _sdpa(problem)(q, k, v).transpose(1, 2)

    layer = DistributedAttention(local, _mesh(grid)["ulysses"].get_group(), scatter_idx=2, gather_idx=1)  # pyright: ignore[reportArgumentType]
    return Shards(_positions(problem, grid, "contiguous"), partial(layer, batch_dim_idx=0))


def para_attention(problem: Problem, grid: Grid | None) -> Shards:
    """ParaAttention: its Ulysses around torch's SDPA; its modes where there is a ring."""
    from para_attn.para_attn_interface import UnifiedAttnMode, ulysses_attn_func

    assert grid is not None
    mesh = _mesh(grid)

    def ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = partial(F.scaled_dot_product_attention, enable_gqa=problem.is_grouped)
        return ulysses_attn_func(q, k, v, is_causal=problem.causal, mesh=mesh["ulysses"], attn_func=grouped)

    def unified(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with UnifiedAttnMode(mesh):
            return F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal)

    return Shards(
        _positions(problem, grid, "contiguous"), ulysses if grid.ring == 1 else unified, heads_first=(True, True)
    )


def context_parallel(problem: Problem, grid: Grid | None) -> Shards:
    """torch's public way: SDPA inside the context `context_parallel`."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    assert grid is not None
    set_rotate_method("alltoall")
    mesh = _mesh(grid)["ring"]

    @contextmanager
    def around() -> Iterator[None]:
        with (
            _balanced(problem.causal),
            context_parallel(mesh, buffers=[torch.zeros(problem.seq_len)], buffer_seq_dims=[0]),
        ):
            yield

    return Shards(_positions(problem, grid, _balanced_layout(problem)), _sdpa(problem), (True, True), around)


def torch_template(problem: Problem, grid: Grid | None) -> Shards:
    """torch's private ring loop, `_templated_ring_attention`, around the operator that its SDPA runs on CPUs."""
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.distributed.tensor.experimental._context_parallel import _attention

    assert grid is not None
    set_rotate_method("alltoall")
    private: Any = _attention
    aten, causal = torch.ops.aten, problem.causal
    group, shared = _mesh(grid)["ring"].get_group(), problem.heads // problem.kv_heads

    def repeated(x: Tensor) -> Tensor:
        return x.repeat_interleave(shared, 1) if problem.is_grouped else x

    def summed(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, shared)).sum(2) if problem.is_grouped else x

    def forward(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, dropout_p: float) -> Any:
        k, v = repeated(k), repeated(v)
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal)

    def backward(
        *,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool,
        dropout_p: float,
        **saved: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = grad_out, query, repeated(key), repeated(value), saved["out"], saved["logsumexp"]
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, dropout_p, is_causal)
        return dq, summed(dk), summed(dv)

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with _balanced(causal):
                out, lse = private._templated_ring_attention(
                    group, 2, forward, q, k, v, is_causal=causal, dropout_p=0.0
                )[:2]
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
            with _balanced(causal):
                return private._templated_ring_attention_backward(
                    group, 2, backward, *grad_outputs, "grad_out", *ctx.saved_tensors, causal, dropout_p=0.0
                )[:3]

    return Shards(_positions(problem, grid, _balanced_layout(problem)), Ring.apply, heads_first=(True, True))


@dataclass(frozen=True)
class Peer:
    """A library, the distribution that brings its package, and the grids that it is asked for."""

    name: str
    distribution: str
    package: str
    cut: Callable[[Problem, Grid | None], Shards]
    ulysses: bool = True
    ring: bool = True

    def solves_on(self, grid: Grid) -> bool:
        return (self.ulysses or grid.ulysses == 1) and (self.ring or grid.ring == 1)

    @property
    def is_installed(self) -> bool:
        return find_spec(self.package) is not None


PEERS = (
    Peer("DeepSpeed", "deepspeed", "deepspeed", deepspeed, ring=False),
    Peer("ParaAttention", "para-attn", "para_attn", para_attention),
    Peer("ringmaster", "axolotl-ringmaster", "ringmaster", ringmaster),
    Peer("torch's private loop", "torch", "torch", torch_template, ulysses=False),
    Peer(
        "ring-attention-pytorch",
        "ring-attention-pytorch",
        "ring_attention_pytorch",
        ring_attention_pytorch,
        ulysses=False,
    ),
    Peer("torch context_parallel", "torch", "torch", context_parallel, ulysses=False),
    Peer("yunchang", "yunchang", "yunchang", yunchang),
)
INSTALL = "pip install --no-deps -r benchmarks/requirements-peers.txt"


def versions() -> dict[str, str]:
    """Of the peers that are installed, by the package's name."""
    return {peer.distribution: version(peer.distribution) for peer in PEERS if peer.is_installed}


def sides(grids: Sequence[Grid]) -> list[Side]:
    """What is installed, on those of the grids that it knows."""
    return [
        Side(peer.name, grid, peer.cut, is_peer=True)
        for grid in grids
        for peer in PEERS
        if peer.is_installed and peer.solves_on(grid)
    ]


def _positions(problem: Problem, grid: Grid, layout: str) -> Tensor:
    return usp.positions(problem.seq_len, usp.Topology.build(grid.ulysses, grid.ring), layout)


def _balanced_layout(problem: Problem) -> str:
    return "zigzag" if problem.causal else "contiguous"


@contextmanager
def _balanced(enable: bool) -> Iterator[None]:
    """torch's switch for the zigzag order, one for each process; its ring refuses it without a causal mask."""
    from torch.distributed.tensor.experimental._context_parallel._attention import _cp_options

    before, _cp_options.enable_load_balance = _cp_options.enable_load_balance, enable
    try:
        yield
    finally:
        _cp_options.enable_load_balance = before


def _sdpa(problem: Problem) -> Callable[..., Tensor]:
    """Looked up at each call: the peers put theirs in the place of `F.scaled_dot_product_attention`."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=problem.is_grouped)

    return attend


@lru_cache
def _mesh(grid: Grid) -> DeviceMesh:
    return init_device_mesh("cpu", (grid.ring, grid.ulysses), mesh_dim_names=("ring", "ulysses"))
