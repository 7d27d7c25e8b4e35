"""Memory of token-wise modules, plain and in chunks of the sequence.

    python benchmarks/blockwise.py

`kept` is what a forward pass keeps for the backward pass beside parameters, counted exactly; `peak` is the resident
memory that forward and backward add at most, the input and its gradient included, measured in a fresh process for every
row as in `memory.py`. Needs /proc, thus Linux.
"""

import gc
import json
import multiprocessing
import os
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from machine import describe
from memory import EAGER_FREE, _status
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from usp.nn import Blockwise

DIM, HIDDEN, VOCAB, CHUNK = 128, 512, 2048, 1024

console = Console()


class FeedForward(nn.Module):
    """Norm, SwiGLU and residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.gate, self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class LossHead(nn.Module):
    """The loss of every token; the target is always token 0."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(x).flatten(0, 1)
        return F.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.long), reduction="none").view(
            x.shape[:2]
        )


MODULES = {"norm + SwiGLU": FeedForward, "head + loss": LossHead}


def measure(name: str, tokens: int, cut: bool) -> tuple[int, int]:
    """Bytes kept for the backward pass, and resident bytes added at the peak."""
    torch.set_num_threads(1)
    module = MODULES[name]()
    module = Blockwise(module, CHUNK) if cut else module
    run(module, 2 * CHUNK)
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is resident now
    run(module, tokens)
    peak = _status("VmHWM") - before
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = module(torch.randn(1, tokens, DIM, requires_grad=True))
    for p in module.parameters():
        kept.pop(p.untyped_storage().data_ptr(), None)
    del out
    return sum(kept.values()), peak


def run(module: nn.Module, tokens: int) -> None:
    x = torch.randn(1, tokens, DIM, requires_grad=True)
    module(x).sum().backward()


def main(
    tokens: Annotated[
        list[int] | None, typer.Option(help="tokens of a rank; again for more [default: 8192, 16384, 32768, 65536]")
    ] = None,
    out: Annotated[Path, typer.Option(help="where the JSON goes")] = Path(__file__).parent
    / "results"
    / "blockwise.json",
) -> None:
    """Measures memory of a feed-forward branch and of a head with its loss, float32, in chunks of 1,024 tokens."""
    os.environ.update(EAGER_FREE)  # before a process starts: its allocator reads them then
    sizes = tokens or [8192, 16384, 32768, 65536]
    cases = [(name, size, cut) for name in MODULES for size in sizes for cut in (False, True)]
    context, results = multiprocessing.get_context("spawn"), []
    for case in track(cases, "measuring", console=console, transient=True):
        with context.Pool(1) as pool:
            kept, peak = pool.apply(measure, case)
        name, size, cut = case
        results.append({"module": name, "tokens": size, "blockwise": cut, "kept_bytes": kept, "peak_bytes": peak})

    table = Table(title=f"Memory of a rank, MiB; the input is tokens x {DIM} x 4 bytes", title_justify="left")
    for heading in (
        "module",
        "tokens",
        "input",
        "kept, plain",
        "blockwise",
        "peak, plain",
        "blockwise",
        "ratio",
    ):
        table.add_column(heading, justify="left" if heading == "module" else "right")
    for plain, cut in zip(results[::2], results[1::2], strict=True):
        numbers = (
            plain["tokens"] * DIM * 4,
            plain["kept_bytes"],
            cut["kept_bytes"],
            plain["peak_bytes"],
            cut["peak_bytes"],
        )
        ratio = f"{plain['peak_bytes'] / cut['peak_bytes']:.1f}"
        table.add_row(plain["module"], str(plain["tokens"]), *(f"{n / 2**20:.1f}" for n in numbers), ratio)
    console.print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    settings = {"dim": DIM, "hidden": HIDDEN, "vocab": VOCAB, "chunk": CHUNK}
    out.write_text(json.dumps({"machine": describe(), "settings": settings, "results": results}, indent=2) + "\n")
    console.print(f"written: {os.path.relpath(out)}")


if __name__ == "__main__":
    typer.run(main)
