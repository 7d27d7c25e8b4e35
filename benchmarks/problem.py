"""One attention problem, solved by torch's attention in one process or in several by usp or a peer, and the errors.

B batch, S sequence, H query heads, G kv heads, D head_dim. Functions with `rank` first run in the processes of a team.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import usp

RESULTS = ("out", "dq", "dk", "dv")


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
        heads = f" kv_heads {self.kv_heads}" if self.is_grouped else ""
        return f"S {self.seq_len} {'causal' if self.causal else 'full'} {self.dtype}{heads}"

    @property
    def is_grouped(self) -> bool:
        return self.kv_heads != self.heads


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
class Shards:
    """A rank's part of a problem.

    Attributes:
        positions: the global positions of its tokens, (S_local,).
        attend: out from q, k and v.
        heads_first: whether q, k and v are (B, H, S_local, D) rather than (B, S_local, H, D), and whether out is.
        around: entered around each forward and backward pass, outside the clock.
    """

    positions: Tensor
    attend: Callable[[Tensor, Tensor, Tensor], Any]
    heads_first: tuple[bool, bool] = (False, False)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Side:
    """One way to solve a problem; without a grid, in one process. `cut` runs in each process, once for a problem."""

    name: str
    grid: Grid | None
    cut: Callable[[Problem, Grid | None], Shards]
    note: str = ""
    is_peer: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.grid or ''}".rstrip() + f", {self.note}" * bool(self.note)


@dataclass(frozen=True)
class Seconds:
    """From the start to the output, and on to the gradients."""

    forward: float
    both: float


def sdpa(problem: Problem, grid: Grid | None) -> Shards:
    """torch's attention, over all tokens in each process."""
    attend = partial(F.scaled_dot_product_attention, is_causal=problem.causal, enable_gqa=problem.is_grouped)
    return Shards(torch.arange(problem.seq_len), attend, heads_first=(True, True))


def with_usp(problem: Problem, grid: Grid | None) -> Shards:
    return _with_usp(problem, grid, "zigzag" if problem.causal else "contiguous")


def with_usp_striped(problem: Problem, grid: Grid | None) -> Shards:
    return _with_usp(problem, grid, "striped")


def with_usp_contiguous(problem: Problem, grid: Grid | None) -> Shards:
    return _with_usp(problem, grid, "contiguous")


def _with_usp(problem: Problem, grid: Grid | None, layout: str) -> Shards:
    assert grid is not None
    topology = usp.Topology.build(grid.ulysses, grid.ring)
    attend = partial(usp.attention, topology=topology, layout=layout, is_causal=problem.causal)
    return Shards(usp.positions(problem.seq_len, topology, layout), attend)


def measure(rank: int, problem: Problem, side: Side) -> Seconds:
    """One call, forward and backward. Inputs exist, shards are cut and nothing is gathered while the clock runs."""
    return _solve(problem, side)[0]


def compare(rank: int, problem: Problem, side: Side, path: Path) -> list[tuple[float, float]]:
    """Squared norms of difference and reference over this rank's rows, for each of `RESULTS`."""
    shards = _task(problem, side)[0]
    reference = torch.load(path, mmap=True)
    found = []
    for name, result in zip(RESULTS, _solve(problem, side)[1], strict=True):
        expected = reference[name][:, shards.positions]
        found.append(((result.double() - expected).square().sum().item(), expected.square().sum().item()))
    return found


def save_reference(rank: int, problem: Problem, path: Path) -> None:
    """Writes what `compare` compares with: `RESULTS` in float64."""
    torch.save(dict(zip(RESULTS, (t.contiguous() for t in _float64(problem)), strict=True)), path)


def capabilities(rank: int) -> dict[str, bool]:
    """What decides the speed of half precision in this process."""
    return {
        "amx": torch.cpu._is_amx_tile_supported(),
        "onednn_bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    }


def _solve(problem: Problem, side: Side) -> tuple[Seconds, list[Tensor]]:
    """The time of one call, and this rank's rows of `RESULTS`, (B, S_local, heads, D)."""
    shards, qkv, dout = _task(problem, side)
    with shards.around():
        if side.grid is not None:  # torch alone may run beside ranks that wait
            dist.barrier()
        start = time.perf_counter()
        out = shards.attend(*qkv)
        middle = time.perf_counter()
        gradients = torch.autograd.grad(out, qkv, dout)
        seconds = Seconds(middle - start, time.perf_counter() - start)
    inner, outer = shards.heads_first
    return seconds, [_ordered(out.detach(), outer), *(_ordered(x, inner) for x in gradients)]


@lru_cache(maxsize=16)
def _task(problem: Problem, side: Side) -> tuple[Shards, tuple[Tensor, Tensor, Tensor], Tensor]:
    """The rank's part, its q, k and v, and the gradient of its out."""
    shards = side.cut(problem, side.grid)
    *qkv, dout = (x[:, shards.positions] for x in _inputs(problem))
    inner, outer = shards.heads_first
    q, k, v = (_ordered(x, inner).contiguous().requires_grad_() for x in qkv)
    return shards, (q, k, v), _ordered(dout, outer).contiguous()


def _ordered(x: Tensor, heads_first: bool) -> Tensor:
    """(B, S, H, D) as (B, H, S, D), or back."""
    return x.transpose(1, 2) if heads_first else x


def _inputs(problem: Problem) -> list[Tensor]:
    """The global q, k, v and the gradient of out; the same in every process."""
    random = torch.Generator().manual_seed(0)
    heads = (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    shapes = ((1, problem.seq_len, h, problem.head_dim) for h in heads)
    return [torch.randn(shape, generator=random).to(getattr(torch, problem.dtype)) for shape in shapes]


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
