"""One attention problem, solved by torch's attention in one process or by usp in several, and the error of either.

B batch, S sequence, H query heads, G kv heads, D head_dim. Functions with `rank` first run in the processes of a team.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import usp

RESULTS = ("out", "dq", "dk", "dv")
EXACT_UP_TO = 4096
"""Longest sequence that is compared with a float64 reference; beyond, with torch's attention in float32."""


@dataclass(frozen=True)
class Problem:
    """The global problem."""

    seq_len: int
    causal: bool
    dtype: str = "float32"
    kv_heads: int = 8
    heads: int = 8
    head_dim: int = 64

    def __str__(self) -> str:
        heads = "" if self.kv_heads == self.heads else f" kv_heads {self.kv_heads}"
        return f"S {self.seq_len} {'causal' if self.causal else 'full'} {self.dtype}{heads}"

    @property
    def layout(self) -> str:
        return "zigzag" if self.causal else "contiguous"


@dataclass(frozen=True)
class Grid:
    """How many ranks solve it."""

    ulysses: int
    ring: int

    def __str__(self) -> str:
        if 1 in (self.ulysses, self.ring):
            return f"ring {self.ring}" if self.ulysses == 1 else f"ulysses {self.ulysses}"
        return f"ulysses {self.ulysses} x ring {self.ring}"

    @property
    def ranks(self) -> int:
        return self.ulysses * self.ring

    @classmethod
    def parse(cls, text: str) -> "Grid":
        return cls(*map(int, text.split("x")))


@dataclass(frozen=True)
class Seconds:
    """From the start to the output, and on to the gradients."""

    forward: float
    both: float


def measure(rank: int, problem: Problem, grid: Grid | None) -> Seconds:
    """One call, forward and backward. Inputs exist, shards are cut and nothing is gathered while the clock runs."""
    attend, (q, k, v), dout = _task(problem, grid)
    if grid is not None:
        dist.barrier()
    start = time.perf_counter()
    out = attend(q, k, v)
    middle = time.perf_counter()
    torch.autograd.grad(out, (q, k, v), dout)
    return Seconds(middle - start, time.perf_counter() - start)


def solve(problem: Problem, grid: Grid | None) -> list[Tensor]:
    """This rank's rows (B, S, H, D) of out, dq, dk and dv."""
    attend, qkv, dout = _task(problem, grid)
    out = attend(*qkv)
    results = [out.detach(), *torch.autograd.grad(out, qkv, dout)]
    return [t.transpose(1, 2) for t in results] if grid is None else results


def save_reference(rank: int, problem: Problem, path: Path) -> None:
    """Writes what `errors` compares with."""
    exact = problem.seq_len <= EXACT_UP_TO
    results = _float64(problem) if exact else solve(problem, None)
    torch.save(dict(zip(RESULTS, (t.contiguous() for t in results), strict=True)), path)


def errors(rank: int, problem: Problem, grid: Grid | None, path: Path) -> list[tuple[float, float]]:
    """Squared norms of difference and reference over this rank's rows, for each of `RESULTS`."""
    reference = torch.load(path)
    found = []
    for name, result in zip(RESULTS, solve(problem, grid), strict=True):
        expected = _cut(reference[name], problem, grid).double()
        found.append(((result.double() - expected).square().sum().item(), expected.square().sum().item()))
    return found


def capabilities(rank: int) -> dict[str, bool]:
    """What decides the speed of half precision in this process."""
    return {
        "amx": torch.cpu._is_amx_tile_supported(),
        "onednn_bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    }


@lru_cache(maxsize=4)
def _task(
    problem: Problem, grid: Grid | None
) -> tuple[Callable[[Tensor, Tensor, Tensor], Tensor], tuple[Tensor, Tensor, Tensor], Tensor]:
    """A function of q, k and v, their values, and the gradient of its output."""
    whole = _inputs(problem)
    if grid is None:
        q, k, v, dout = (t.transpose(1, 2).contiguous() for t in whole)
    else:
        q, k, v, dout = (_cut(t, problem, grid) for t in whole)
    qkv = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

    def one_process(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = problem.heads != problem.kv_heads
        return F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=grouped)

    def sharded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert grid is not None
        topology = usp.Topology.build(grid.ulysses, grid.ring)
        out = usp.attention(q, k, v, topology=topology, layout=problem.layout, is_causal=problem.causal)
        assert isinstance(out, Tensor)
        return out

    return one_process if grid is None else sharded, qkv, dout


def _inputs(problem: Problem) -> list[Tensor]:
    """The global q, k, v and the gradient of out; the same in every process."""
    random = torch.Generator().manual_seed(0)
    heads = (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    shapes = ((1, problem.seq_len, h, problem.head_dim) for h in heads)
    return [torch.randn(shape, generator=random).to(getattr(torch, problem.dtype)) for shape in shapes]


def _cut(x: Tensor, problem: Problem, grid: Grid | None) -> Tensor:
    return x if grid is None else usp.shard(x, usp.Topology.build(grid.ulysses, grid.ring), layout=problem.layout)


def _float64(problem: Problem, block: int = 512) -> list[Tensor]:
    """Out, dq, dk and dv from the definition, a block of rows at a time."""
    causal, group = problem.causal, problem.heads // problem.kv_heads
    q, k, v, dout = (t.double().transpose(1, 2).squeeze(0) for t in _inputs(problem))
    k, v = (t.repeat_interleave(group, 0) for t in (k, v))
    out, dq, dk, dv = (torch.zeros_like(t) for t in (q, q, k, v))
    scale = q.shape[-1] ** -0.5
    for start in range(0, q.shape[1], block):
        stop = min(start + block, q.shape[1])
        rows, columns = slice(start, stop), slice(0, stop if causal else k.shape[1])
        scores = q[:, rows] @ k[:, columns].mT * scale
        if causal:
            hidden = torch.arange(stop) > torch.arange(start, stop).unsqueeze(-1)
            scores.masked_fill_(hidden, -torch.inf)
        weights = scores.softmax(-1)
        out[:, rows] = weights @ v[:, columns]
        dweights = dout[:, rows] @ v[:, columns].mT
        dscores = weights * (dweights - (dout[:, rows] * out[:, rows]).sum(-1, keepdim=True)) * scale
        dq[:, rows] = dscores @ k[:, columns]
        dk[:, columns] += dscores.mT @ q[:, rows]
        dv[:, columns] += weights.mT @ dout[:, rows]
    dk, dv = (t.unflatten(0, (-1, group)).sum(1) for t in (dk, dv))
    return [t.unsqueeze(0).transpose(1, 2) for t in (out, dq, dk, dv)]
