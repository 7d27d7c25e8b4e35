"""Peak memory of a rank over one forward and backward, beside what the algorithm must hold.

    python benchmarks/memory.py

Every number comes from fresh processes. A rank first makes a small call, so that libraries are loaded; then it notes
its resident memory, has the kernel forget the peak, makes its shards, calls, and reads the peak. Freed memory goes back
to the system at once, so that nothing hides in a cache. Needs /proc, thus Linux.

The ideal counts q, k, v, out, dout, dq, dk, dv and lse of the rank's shard, and two buffers for the keys and values
that pass by: the one in use and the one on its way.
"""

import gc
import json
import os
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from machine import describe
from rich.console import Console
from rich.progress import track
from rich.table import Table
from team import Team

import usp

HEADS, HEAD_DIM, BYTES = 8, 64, 4
EAGER_FREE = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc: each large tensor is a mapping of its own, unmapped when it is freed."""

console = Console()


def peak_bytes(rank: int, seq_len: int, ring: int) -> int:
    """Resident memory that one call adds at its peak, its inputs included."""
    topology = usp.Topology.build(1, ring)
    _call(128 * ring, topology)
    gc.collect()
    dist.barrier()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident now
    _call(seq_len, topology)
    return _status("VmHWM") - before


def ideal_bytes(seq_len: int, ring: int) -> int:
    """q, k, v, out, dout, dq, dk, dv; lse; two buffers of k and v."""
    rows = seq_len // ring
    tensor = rows * HEADS * HEAD_DIM * BYTES
    return 8 * tensor + rows * HEADS * BYTES + 2 * 2 * tensor


def _call(seq_len: int, topology: usp.Topology) -> None:
    shape = (1, seq_len // topology.ring.degree, HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    dout = torch.randn(shape)
    out = usp.attention(q, k, v, topology=topology, layout="zigzag", is_causal=True)
    assert isinstance(out, torch.Tensor)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    del gradients


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def main(
    seq_len: Annotated[
        list[int] | None, typer.Option(help="global tokens; again for more [default: 8192, 16384, 32768]")
    ] = None,
    ring: Annotated[list[int] | None, typer.Option(help="ring degree; again for more [default: 2, 4]")] = None,
    out: Annotated[Path, typer.Option(help="where the JSON goes")] = Path(__file__).parent / "results" / "memory.json",
) -> None:
    """Measures peak memory of a rank: causal, zigzag, float32, 8 heads of 64."""
    cases = [(tokens, degree) for degree in ring or [2, 4] for tokens in seq_len or [8192, 16384, 32768]]
    results = []
    table = Table(title="Peak memory of a rank over forward and backward, MiB", title_justify="left")
    for heading in ("S", "ring", "S / P", "measured", "ideal", "measured / ideal", "bytes a local token"):
        table.add_column(heading, justify="right")
    for tokens, degree in track(cases, "measuring", console=console, transient=True):
        with Team(degree, 1, EAGER_FREE) as team:
            measured = max(team.run(peak_bytes, tokens, degree))
        ideal, local = ideal_bytes(tokens, degree), tokens // degree
        results.append({"seq_len": tokens, "ring_degree": degree, "peak_bytes": measured, "ideal_bytes": ideal})
        table.add_row(
            str(tokens), str(degree), str(local), f"{measured / 2**20:.1f}", f"{ideal / 2**20:.1f}",
            f"{measured / ideal:.2f}", str(measured // local),
        )  # fmt: skip
    console.print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": describe(), "results": results}, indent=2) + "\n")
    console.print(f"written: {os.path.relpath(out)}")


if __name__ == "__main__":
    typer.run(main)
