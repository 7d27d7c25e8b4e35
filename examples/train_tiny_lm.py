"""Trains a small Llama-style byte-level language model whose sequences are sharded over several processes.

    torchrun --standalone --nproc-per-node 4 examples/train_tiny_lm.py --check

What sequence parallelism asks of a training script is marked (1) to (4) below. With --check the same steps run once
more in one process, with torch's own attention on whole sequences and nothing from usp, and the losses must agree.
The text is the source of Python's standard library, which is on every machine. Runs on CPUs (gloo).

B batch, S tokens of this process, H query heads, G key/value heads, D head_dim.
"""

import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

import usp

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (B, S, H, D), (B, S, G, D), (B, S, G, D) -> (B, S, H, D)
Batches = Iterator[tuple[Tensor, Tensor]]  # inputs and targets, (samples, context) each
TOLERANCE = 1e-5  # of a loss in float32, relative


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, attend: Attend) -> None:
        super().__init__()
        self.attend, self.head_dim, self.shares = attend, dim // heads, (heads, kv_heads, kv_heads)
        hidden = 8 * dim // 3  # SwiGLU has three matrices: as many parameters as two of 4 * dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, sum(self.shares) * self.head_dim, bias=False)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=False)
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, self.head_dim))
        q_BSHD, k_BSGD, v_BSGD = qkv.split(self.shares, dim=2)
        x = x + self.out(self.attend(rotate(q_BSHD, cos, sin), rotate(k_BSGD, cos, sin), v_BSGD).flatten(2))
        hidden = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class TinyLM(nn.Module):
    def __init__(self, dim: int, layers: int, heads: int, kv_heads: int, attend: Attend) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, attend) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, 256, bias=False)
        self.head_dim = dim // heads

    def forward(self, tokens_BS: Tensor, positions_S: Tensor) -> Tensor:
        frequencies = 10_000.0 ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.outer(positions_S, frequencies).unsqueeze(1)
        x = self.embedding(tokens_BS)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))


def rotate(x_BSHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding."""
    a, b = x_BSHD.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attend_whole(q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> Tensor:
    """What --check compares with: torch's attention over the whole sequence."""
    group = q_BSHD.shape[2] // k_BSGD.shape[2]
    k, v = (x.repeat_interleave(group, dim=2).transpose(1, 2) for x in (k_BSGD, v_BSGD))
    return F.scaled_dot_product_attention(q_BSHD.transpose(1, 2), k, v, is_causal=True).transpose(1, 2)


def read_text() -> Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray().join(file.read_bytes() for file in files), dtype=torch.uint8)


def draw_batches(text: Tensor, steps: int, samples: int, context: int, seed: int) -> Batches:
    """The samples of all processes. Every process draws them all, the same, and takes its part."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - context, (samples, 1), generator=generator)
        window = text[starts + torch.arange(context + 1)].long()
        # Shifted here, before sharding: the target of a shard's last token is on another process.
        yield window[:, :-1], window[:, 1:]


def train(
    model: nn.Module, batches: Batches, part: Callable[[Tensor], Tensor], positions: Tensor, lr: float
) -> Iterator[tuple[float, float]]:
    """Trains on this process's part of every batch; yields the loss and the gradient's norm over the whole of it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    for inputs, targets in batches:
        logits = model(part(inputs), positions)
        # (3) Each process adds up the losses of its own tokens and divides by the number of targets on ALL processes.
        loss = F.cross_entropy(logits.flatten(0, 1), part(targets).flatten(), reduction="sum") / targets.numel()
        optimizer.zero_grad()
        loss.backward()
        # (4) The sum over all processes, whether or not they share a sequence, is then what one process would have.
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        bucket, total = parameters_to_vector(grads), loss.detach()
        if dist.is_initialized():
            dist.all_reduce(bucket)
            dist.all_reduce(total)
        vector_to_parameters(bucket, grads)
        norm = clip_grad_norm_(model.parameters(), 1.0)  # after the sum: the parts of a gradient have other norms
        optimizer.step()
        yield total.item(), norm.item()


def relative(xs: list[float], ys: list[float]) -> list[float]:
    return [abs(x - y) / abs(y) for x, y in zip(xs, ys, strict=True)]


def draw(
    losses: list[float], reference: list[float], differences: dict[str, list[float]], title: str, out: Path
) -> None:
    from matplotlib.figure import Figure  # here, because only one process draws
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 6 if reference else 4), layout="constrained")
    axes = figure.subplots(2, sharex=True, height_ratios=[2, 1]) if reference else [figure.subplots()]
    steps = range(1, len(losses) + 1)
    axes[0].plot(steps, losses, lw=2, label="sharded with usp")
    axes[0].set(title=title, ylabel="loss (nats per byte)")
    if reference:
        axes[0].plot(steps, reference, "o", mfc="none", ms=8, label="one process, torch's attention")
        for name, values in differences.items():
            axes[1].plot(steps, values, ".-", label=name)
        axes[1].axhline(TOLERANCE, color="tab:red", ls="--", lw=1, label="allowed")
        axes[1].set_yscale("symlog", linthresh=1e-8)  # some differences are 0
        axes[1].set(ylabel="relative difference", ylim=(-2e-9, 1e-4))
        axes[0].legend(frameon=False)
        axes[1].legend(frameon=False, ncols=3, loc="upper right")
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150)


def main(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 20,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence; need not divide by the ranks.")] = 8192,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of each data-parallel replica.")] = 1,
    dim: Annotated[int, typer.Option(help="Width of the model.")] = 128,
    layers: Annotated[int, typer.Option(help="Transformer blocks.")] = 2,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads; divides the query heads.")] = 4,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 5e-3,
    ulysses_degree: Annotated[int, typer.Option(help="Processes that exchange heads for sequence.")] = 2,
    ring_degree: Annotated[int, typer.Option(help="Processes that pass keys and values round.")] = 2,
    layout: Annotated[str, typer.Option(help="How positions are dealt to the ring.")] = "zigzag",
    seed: Annotated[int, typer.Option(help="Of the weights and of the samples.")] = 0,
    check: Annotated[bool, typer.Option("--check", help="Rerun in one process and compare the losses.")] = False,
    out: Annotated[Path, typer.Option(help="Where the picture of the losses goes.")] = Path("train_tiny_lm.png"),
) -> None:
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    try:
        topology = usp.Topology.build(ulysses_degree, ring_degree)
    except usp.TopologyError as error:
        raise typer.BadParameter(str(error)) from None
    samples, text = batch * topology.data_degree, read_text()

    # (1) Attention is the only layer that looks at other tokens, so it is the only one that changes.
    attention = usp.USPAttention(topology=topology, layout=layout)

    def attend_sharded(q_BSHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> Tensor:
        return attention(q_BSHD, k_BSGD, v_BSGD, is_causal=True, seq_len=context)

    # (2) Inputs, targets and positions are cut in the same layout. Who shares a sequence takes the same samples.
    def part(x: Tensor) -> Tensor:
        first = topology.data_rank * batch
        return usp.shard(x[first : first + batch], topology, dim=1, layout=layout)

    positions = usp.positions(context, topology, layout=layout)

    def run(title: str, attend: Attend, part: Callable[[Tensor], Tensor], positions: Tensor) -> list[list[float]]:
        """The losses, and the norms of the gradients."""
        torch.manual_seed(seed)  # the same weights everywhere
        model = TinyLM(dim, layers, heads, kv_heads, attend)
        batches = draw_batches(text, steps, samples, context, seed)
        columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "{task.fields[note]}"
        start, losses, norms = time.perf_counter(), [], []
        with Progress(*columns, disable=topology.rank != 0) as progress:
            task = progress.add_task(title, total=steps, note="")
            for loss, norm in train(model, batches, part, positions, lr):
                losses.append(loss)
                norms.append(norm)
                speed = len(losses) * samples * context / (time.perf_counter() - start)
                progress.update(task, advance=1, note=f"loss {loss:.3f}  {speed:,.0f} tokens/s")
        return [losses, norms]

    if topology.rank == 0:
        print(topology.describe())
    losses, norms = run("sharded    ", attend_sharded, part, positions)

    # From here on one process goes on alone, with the threads that all of them had.
    threads = topology.sequence_degree * topology.data_degree * torch.get_num_threads()
    if dist.is_initialized():
        dist.destroy_process_group()
    if topology.rank != 0:
        return
    reference, differences = [], {}
    if check:
        torch.set_num_threads(min(threads, os.cpu_count() or 1))
        reference, norms_whole = run("one process", attend_whole, lambda x: x, torch.arange(context))
        # The norms too: AdamW would hide a gradient that is wrong by a factor.
        differences = {"loss": relative(losses, reference), "gradient norm": relative(norms, norms_whole)}
    degrees = f"ulysses {ulysses_degree} x ring {ring_degree} x data {topology.data_degree}"
    draw(losses, reference, differences, f"Byte-level language model, {context:,} tokens, {degrees}", out)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps; picture in {out}")
    if check:
        found = ", ".join(f"{name} {max(values):.1e}" for name, values in differences.items())
        agrees = all(d <= TOLERANCE for values in differences.values() for d in values)  # so that NaN fails too
        verdict = "agrees with" if agrees else "DIFFERS from"
        print(f"{verdict} one process: largest relative difference: {found}; allowed {TOLERANCE:g}")
        if not agrees:
            raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
