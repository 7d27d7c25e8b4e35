"""What a small call costs besides its kernels and its messages: 128 tokens a rank, two ranks, forward.

    python benchmarks/overhead.py

Three things take turns, each between barriers: the call, its kernel calls alone on tensors of the same shapes, and bare
collectives of the same bytes (for a ring irecv and isend of the keys and values, for Ulysses two all_to_all_single).
`overhead` is (call - kernels) / collectives, of medians over rounds of the slowest rank: 1.00 would be free. "always"
and "debug" are the same call with that `check`: what comparing every call costs, and looking at every number.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from machine import describe
from problem import Grid
from rich.console import Console
from rich.table import Table
from team import Team

import usp
from usp import kernels
from usp.kernels.base import Scores

HEADS, HEAD_DIM, LOCAL, ROUNDS = 8, 64, 128, 300


def measure(rank: int, grid: Grid) -> dict[str, float]:
    """Median seconds of the call, of its kernels and of bare collectives, on the slowest rank."""
    topology = usp.Topology.build(grid.ulysses, grid.ring)
    attend, always, debug = (
        usp.USPAttention(topology=usp.Topology.build(grid.ulysses, grid.ring, check=check), layout="zigzag")
        for check in ("first", "always", "debug")
    )
    q, k, v = (torch.randn(1, LOCAL, HEADS, HEAD_DIM) for _ in range(3))
    works: dict[str, Callable[[], Any]] = {
        "call": lambda: attend(q, k, v, is_causal=True),
        "always": lambda: always(q, k, v, is_causal=True),
        "debug": lambda: debug(q, k, v, is_causal=True),
        "kernels": kernel_calls(topology),
        "collectives": ring_messages(rank) if grid.ring > 1 else ulysses_messages(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    with torch.no_grad():
        for turn in range(ROUNDS + 20):
            for name, work in works.items():
                dist.barrier()
                start = time.perf_counter()
                work()
                if turn >= 20:
                    seconds[name].append(time.perf_counter() - start)
    slowest = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {name: median(row.tolist()) for name, row in zip(works, slowest, strict=True)}


def kernel_calls(topology: usp.Topology) -> Callable[[], None]:
    """The tiles of a call, by the kernel that it chooses."""
    ring, kernel = topology.ring, kernels.load("sdpa")
    heads = HEADS // topology.ulysses.degree
    schedule = usp.Schedule(usp.Mask.causal(), "zigzag", LOCAL * topology.sequence_degree, ring.degree)
    q, k, v = (torch.randn(1, schedule.length(ring.rank), heads, HEAD_DIM) for _ in range(3))
    q, k, v = map(kernel.arrange, (q, k, v))
    tiles = [tile for hop in range(ring.degree) for tile in schedule.tiles(ring.rank, (ring.rank - hop) % ring.degree)]

    def run() -> None:
        for tile in tiles:
            kernel.forward(q[:, tile.q], k[:, tile.k], v[:, tile.k], tile.band, Scores(HEAD_DIM**-0.5))

    return run


def ring_messages(rank: int) -> Callable[[], None]:
    sent = torch.zeros(2 * LOCAL * HEADS * HEAD_DIM)
    received = torch.empty_like(sent)

    def run() -> None:
        pair = [dist.P2POp(dist.irecv, received, 1 - rank), dist.P2POp(dist.isend, sent, 1 - rank)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    return run


def ulysses_messages() -> Callable[[], None]:
    qkv, out = torch.zeros(3 * LOCAL * HEADS * HEAD_DIM), torch.zeros(LOCAL * HEADS * HEAD_DIM)
    targets = torch.empty_like(qkv), torch.empty_like(out)

    def run() -> None:
        for target, source in zip(targets, (qkv, out), strict=True):
            dist.all_to_all_single(target, source)

    return run


def main(
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path(__file__).parent / "results/overhead.json",
) -> None:
    """What a small call costs besides its kernels and its messages."""
    names = ("call", "always", "debug", "kernels", "collectives")
    table, results = Table("us", *names, "overhead, target <= 1.30"), {}
    with Team(2) as team:
        for grid in (Grid(2, 1), Grid(1, 2)):
            found = results[str(grid)] = team.run(measure, grid)[0]
            found["overhead"] = (found["call"] - found["kernels"]) / found["collectives"]
            cells = (f"{found[name] * 1e6:.0f}" for name in names)
            table.add_row(str(grid), *cells, f"{found['overhead']:.2f}")
    Console().print(table)
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"machine": describe(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
