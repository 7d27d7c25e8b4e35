"""How errors grow with the number of ring hops, and what accumulators of half precision would do to them.

    .venv/bin/python benchmarks/error_growth.py                  # the tables
    .venv/bin/python benchmarks/error_growth.py --write FILE     # the same in Markdown

Rings of 1 to 64 ranks, threads of one process, compute full attention, forward and backward, over the same 2,048
tokens; every rank merges as many partial results as there are ranks. Errors are norm(x - ref) / norm(ref) against
float64. The last table is not what usp does: the partial results of such a ring, exact to float64, are merged by
`usp.merge.merge_`, and the gradients added, with accumulators that are rounded to bfloat16 after every hop.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import torch
import typer
from balance import markdown
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import usp
from usp.check import definition
from usp.merge import merge_
from usp.transports import local

SEQ_LEN, HEADS, HEAD_DIM = 2048, 2, 64
RINGS = (1, 2, 4, 8, 16, 32, 64)
RESULTS = ("out", "dq", "dk", "dv")


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of out, (1, S, H, D)."""
    make = torch.Generator().manual_seed(0)
    return [torch.randn(1, SEQ_LEN, HEADS, HEAD_DIM, generator=make).to(dtype) for _ in range(4)]


def dense(tensors: list[Tensor]) -> list[Tensor]:
    """out, dq, dk and dv in float64, of the inputs as they are rounded."""
    *qkv, dout = (t.double().transpose(1, 2) for t in tensors)
    q, k, v = (t.requires_grad_() for t in qkv)
    out = definition(q, k, v, torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool))
    return [t.transpose(1, 2) for t in (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))]


def in_a_ring(tensors: list[Tensor], ring_degree: int) -> list[Tensor]:
    """out, dq, dk and dv by usp."""

    def work(topology: usp.Topology) -> list[Tensor]:
        *qkv, dout = (usp.shard(t, topology) for t in tensors)
        q, k, v = (t.requires_grad_() for t in qkv)
        out = usp.attention(q, k, v, topology=topology, seq_len=SEQ_LEN)
        assert isinstance(out, Tensor)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

    shards = local.run(work, ring_degree=ring_degree)
    return [torch.cat(parts, 1) for parts in zip(*shards, strict=True)]


def rounded_each_hop(tensors: list[Tensor], ring_degree: int, dtype: torch.dtype) -> list[Tensor]:
    """out, dq, dk and dv whose accumulators are rounded to a dtype after every hop; lse is not."""
    q, k, v, dout = (t.double().transpose(1, 2) for t in tensors)
    scale, blocks = HEAD_DIM**-0.5, torch.arange(SEQ_LEN).chunk(ring_degree)
    scores = q @ k.mT * scale
    lse = scores.logsumexp(-1, keepdim=True)
    weights = torch.exp(scores - lse)
    dscores = weights * (dout @ v.mT - (dout * (weights @ v)).sum(-1, keepdim=True)) * scale
    out, so_far = torch.zeros_like(q), torch.full_like(lse.squeeze(-1), -torch.inf)
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    for block in blocks:  # whose keys the queries meet at one hop; whose queries the travelling gradients do
        block_lse = scores[..., block].logsumexp(-1)
        merge_(out, so_far, scores[..., block].softmax(-1) @ v[..., block, :], block_lse)
        dq += dscores[..., block] @ k[..., block, :]
        dk += dscores[..., block, :].mT @ q[..., block, :]
        dv += weights[..., block, :].mT @ dout[..., block, :]
        for accumulator in (out, dq, dk, dv):
            accumulator.copy_(accumulator.to(dtype))
    return [t.transpose(1, 2) for t in (out, dq, dk, dv)]


def table(title: str, dtype: torch.dtype, compute: Callable[[list[Tensor], int], list[Tensor]]) -> Table:
    """Relative errors by ring degree."""
    found = Table("ring", *RESULTS, title=title)
    tensors = inputs(dtype)
    reference = dense(tensors)
    for ring_degree in track(RINGS, title, transient=True):
        results = zip(compute(tensors, ring_degree), reference, strict=True)
        found.add_row(
            str(ring_degree), *(f"{((x.double() - ref).norm() / ref.norm()).item():.2e}" for x, ref in results)
        )
    return found


def tables() -> Iterable[Table]:
    yield table("float32 inputs, float32 accumulators", torch.float32, in_a_ring)
    yield table("bfloat16 inputs, float32 accumulators", torch.bfloat16, in_a_ring)

    def what_if(tensors: list[Tensor], ring_degree: int) -> list[Tensor]:
        return rounded_each_hop(tensors, ring_degree, torch.bfloat16)

    yield table("Not what usp does: bfloat16 inputs, bfloat16 accumulators", torch.bfloat16, what_if)


def main(write: Annotated[Path | None, typer.Option(help="Where the Markdown goes.")] = None) -> None:
    """Prints the tables."""
    torch.set_num_threads(1)  # as many ranks as threads
    shown = list(tables())
    Console().print(*shown, sep="\n")
    if write:
        write.write_text("\n\n".join(map(markdown, shown)) + "\n")


if __name__ == "__main__":
    typer.run(main)
