"""Peak memory of a rank over one forward and backward: of attention alone, and of a training step.

    python benchmarks/memory.py

Every number comes from fresh processes. A rank first makes a small call, so that libraries are loaded; then it notes
its resident memory, has the kernel forget the peak, makes its shards, calls, and reads the peak. Freed memory goes back
to the system at once, so that nothing hides in a cache. Needs /proc, thus Linux.

Attention is shown beside what must live at the same time: q, k, v, out, dout, dq, dk, dv and lse of the rank's shard,
two buffers for the keys and values that pass by (the one in use and the one on its way), the float32 gradients that
follow a block, and of one tile what its kernel returns: shares of dq, dk and dv.

The step is a language model of one layer (width 128, 2 heads, 8,192 words), from tokens to the gradients of its
parameters, in three variants: plain; with `usp.linear_cross_entropy` in place of a linear layer and
`usp.cross_entropy`; and with `usp.nn.TransformerLayer` in place of the same layer uncut. Chunks are 128 tokens. The
small call leaves parameters and their gradients behind, so neither is counted: the result is what tokens cost, and
gradients of parameters on their way to be added.
"""

import gc
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer
from machine import describe
from problem import Grid
from rich.console import Console
from rich.progress import track
from rich.table import Table
from team import Team
from torch import Tensor, nn

import usp
from usp.nn import Blockwise, TransformerLayer, rope

HEADS, HEAD_DIM, BYTES = 8, 64, 4
DIM, INTERMEDIATE, VOCAB, CHUNK = 128, 512, 8192, 128
VARIANTS = {"plain": (False, False), "chunked loss": (True, False), "blockwise": (True, True)}
"""Whether the loss is computed in chunks, and whether the layer is."""
EAGER_FREE = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc: each large tensor is a mapping of its own, unmapped when it is freed."""

console = Console()


# ---- in the processes of a team --------------------------------------------------------------------------------------


def attention_bytes(rank: int, seq_len: int, grid: Grid) -> int:
    """What attention adds at its peak, its inputs included."""
    topology = usp.Topology.build(grid.ulysses, grid.ring)

    def call(seq_len: int) -> None:
        shape = (1, seq_len // grid.ranks, HEADS, HEAD_DIM)
        q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
        dout = torch.randn(shape)
        out = usp.attention(q, k, v, topology=topology, layout="zigzag", is_causal=True)
        assert isinstance(out, Tensor)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        del gradients

    return added_bytes(call, seq_len, grid)[0]


def step_bytes(rank: int, seq_len: int, grid: Grid, variant: str) -> tuple[int, float]:
    """What a training step adds at its peak, and this rank's part of its loss."""
    topology = usp.Topology.build(grid.ulysses, grid.ring)
    torch.manual_seed(0)
    model = Model(topology, *VARIANTS[variant])

    def call(seq_len: int) -> float:
        tokens = torch.randint(VOCAB, (1, seq_len), generator=torch.Generator().manual_seed(1))
        loss = model(usp.shard_batch({"input_ids": tokens, "labels": tokens}, topology, "zigzag"))
        loss.backward()
        return loss.item()

    return added_bytes(call, seq_len, grid)


def added_bytes(call: Callable[[int], Any], seq_len: int, grid: Grid) -> tuple[int, Any]:
    """Resident memory that `call(seq_len)` adds at its peak, and what it returns."""
    call(128 * grid.ranks)
    gc.collect()
    dist.barrier()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident now
    result = call(seq_len)
    return _status("VmHWM") - before, result


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


class Model(nn.Module):
    """A language model of the Llama shape, and its loss on a shard."""

    def __init__(self, topology: usp.Topology, chunked_loss: bool, blockwise: bool) -> None:
        super().__init__()
        self.chunked_loss, self.blockwise = chunked_loss, blockwise
        attend = usp.USPAttention(topology=topology, layout="zigzag")
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.norm = Blockwise(nn.RMSNorm(DIM), CHUNK) if blockwise else nn.RMSNorm(DIM)
        heads = DIM // HEAD_DIM
        self.layer = TransformerLayer(DIM, heads, heads, INTERMEDIATE, attend, chunk=CHUNK)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """W * sum / N, as `usp.cross_entropy` gives it."""
        x, targets = self.embedding(batch["input_ids"]), batch["shift_labels"]
        cos, sin = rope(batch["position_ids"], [10_000 ** (-i / HEAD_DIM) for i in range(0, HEAD_DIM, 2)])
        if self.blockwise:
            x = self.layer(x, cos, sin, is_causal=True)
        else:
            x = self.layer.after(x, self.layer.attend(*self.layer.before(x, cos, sin), is_causal=True))
        x, total = self.norm(x), usp.count_targets(targets)
        if self.chunked_loss:
            return usp.linear_cross_entropy(x, self.head.weight, targets, total, chunk=CHUNK)
        return usp.cross_entropy(self.head(x), targets, total)


# ---- in the parent ---------------------------------------------------------------------------------------------------


def living_bytes(seq_len: int, ring: int) -> int:
    """What must live: see above."""
    rows = seq_len // ring
    schedule = usp.Schedule(usp.Mask.causal(), "zigzag", seq_len, ring)
    tiles = (tile for rank in range(ring) for owner in range(ring) for tile in schedule.tiles(rank, owner))
    scratch = max(tile.q.stop - tile.q.start + 2 * (tile.k.stop - tile.k.start) for tile in tiles)
    shard, buffers, gradients = 8 * rows, 2 * 2 * rows, 2 * rows
    return (shard + buffers + gradients + scratch) * HEADS * HEAD_DIM * BYTES + rows * HEADS * BYTES


def in_fresh_processes(work: Callable[..., Any], seq_len: int, grid: Grid, *options: Any) -> list[Any]:
    """`work` on every rank."""
    with Team(grid.ranks, 1, EAGER_FREE) as team:
        return team.run(work, seq_len, grid, *options)


def measure_attention(seq_lens: list[int]) -> list[dict[str, Any]]:
    """Every case; prints them as a table."""
    results = []
    headings = "S", "ring", "S / P", "measured", "must live", "measured / must live", "bytes a local token"
    table = _table("Attention", *headings)
    cases = [(tokens, Grid(1, ring)) for ring in (2, 4) for tokens in seq_lens]
    for tokens, grid in track(cases, "attention", console=console, transient=True):
        measured = max(in_fresh_processes(attention_bytes, tokens, grid))
        living, local = living_bytes(tokens, grid.ring), tokens // grid.ranks
        results.append({"seq_len": tokens, "ring_degree": grid.ring, "peak_bytes": measured, "living_bytes": living})
        ratio = f"{measured / living:.2f}"
        table.add_row(
            str(tokens), str(grid.ring), str(local), _mib(measured), _mib(living), ratio, str(measured // local)
        )
    console.print(table)
    return results


def measure_step(seq_lens: list[int]) -> list[dict[str, Any]]:
    """Every case; prints them as a table, with the growth from the first length to the last."""
    results = []
    headings = "S", "S / P", *VARIANTS, "plain / blockwise", "bytes a local token, blockwise"
    table = _table("Training step", "UxR", *headings)
    for grid in Grid(1, 4), Grid(2, 2):
        degrees = {"ulysses_degree": grid.ulysses, "ring_degree": grid.ring}
        name = f"{grid.ulysses}x{grid.ring}"
        peaks: list[dict[str, int]] = []
        for tokens in track(seq_lens, f"training step, {name}", console=console, transient=True):
            peaks.append(step_peaks(tokens, grid))
            results.append({"seq_len": tokens, **degrees, "peak_bytes": peaks[-1]})
            local, plain, blockwise = tokens // grid.ranks, peaks[-1]["plain"], peaks[-1]["blockwise"]
            ratios = f"{plain / blockwise:.1f}", str(blockwise // local)
            table.add_row(name, str(tokens), str(local), *map(_mib, peaks[-1].values()), *ratios)
        grown = f"x {seq_lens[-1] / seq_lens[0]:g}"
        table.add_row(name, grown, grown, *(f"x {peaks[-1][v] / peaks[0][v]:.2f}" for v in VARIANTS), end_section=True)
    console.print(table)
    return results


def step_peaks(seq_len: int, grid: Grid) -> dict[str, int]:
    """Peak bytes by variant. Raises RuntimeError if their losses differ: then they do not compute the same."""
    found = {variant: in_fresh_processes(step_bytes, seq_len, grid, variant) for variant in VARIANTS}
    losses = [sum(loss for _, loss in ranks) / grid.ranks for ranks in found.values()]
    if not all(math.isclose(loss, losses[0], rel_tol=1e-6) for loss in losses):
        raise RuntimeError(f"S {seq_len}, {grid}: the losses of {', '.join(VARIANTS)} differ: {losses}")
    return {variant: max(peak for peak, _ in ranks) for variant, ranks in found.items()}


def _table(title: str, *headings: str) -> Table:
    table = Table(title=f"{title}: peak memory of a rank over forward and backward, MiB", title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f}"


def main(
    seq_len: Annotated[
        list[int] | None,
        typer.Option(help="global tokens; again for more [default: 8192, 16384, 32768, and for the step 65536]"),
    ] = None,
    only: Annotated[
        Literal["attention", "step"] | None, typer.Option(help="in the JSON the other one stays as it was")
    ] = None,
    out: Annotated[Path, typer.Option(help="where the JSON goes")] = Path(__file__).parent / "results" / "memory.json",
) -> None:
    """Measures attention (8 heads of 64) and a training step, both causal, zigzag and float32."""
    results = json.loads(out.read_text()) if only is not None and out.exists() else {}
    if only != "step":
        cases = measure_attention(seq_len or [8192, 16384, 32768])
        results["attention"] = {"machine": describe(), "cases": cases}
    if only != "attention":
        cases = measure_step(seq_len or [8192, 16384, 32768, 65536])
        results["step"] = {"machine": describe(), "cases": cases}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n")
    console.print(f"written: {os.path.relpath(out)}")


if __name__ == "__main__":
    typer.run(main)
