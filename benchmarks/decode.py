"""Seconds and bytes of a token: attention to a cache sharded over 4 ranks, beside one process.

    python benchmarks/decode.py

A step is what one layer does for a token: its key and value join the cache, and its query attends to all of it. The
sharded cache is `usp.KVCache` over ulysses 2 x ring 2, a thread a rank, by gloo. One process has a thread for each
core, and either the same cache on a grid of one rank, or torch's scaled_dot_product_attention over a buffer with room
for the steps. The sides take turns, in alternating order, while the others' processes sleep; a turn is the median of
some steps of the slowest rank, and what is shown the median over turns. Bytes are counted where messages are handed to
torch, over all ranks.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from machine import describe
from rich.console import Console
from rich.table import Table
from team import Load, Team

import usp
from usp.transports.p2p import P2P

CORES = os.cpu_count() or 1
ULYSSES, RING, HEADS, KV_HEADS, HEAD_DIM = 2, 2, 8, 2, 64

console = Console(width=None if sys.stdout.isatty() else 110)


# ---- in the processes of a team --------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def by_usp(length: int) -> Callable[[], object]:
    """A step on a cache of `length` tokens over all processes there are; it grows by the steps that are made."""
    topology = usp.Topology.build(*((ULYSSES, RING) if dist.is_initialized() else (1, 1)))
    make = torch.Generator().manual_seed(topology.rank)
    shard = torch.randn(1, length // topology.sequence_degree, KV_HEADS, HEAD_DIM, generator=make)
    cache = usp.KVCache.from_shards(shard, shard, topology)
    query, token = (torch.ones(1, 1, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS))

    def step() -> object:
        cache.append(token, token)
        return usp.decode(query, cache)

    return step


@lru_cache(maxsize=1)
def by_torch(length: int) -> Callable[[], object]:
    """The same by torch's attention."""
    key, value = torch.randn(2, 1, KV_HEADS, length + length // 4, HEAD_DIM)
    query, token = (torch.ones(1, heads, 1, HEAD_DIM) for heads in (HEADS, KV_HEADS))
    held = [length]

    def step() -> object:
        for cache in (key, value):
            cache[:, :, held[0] : held[0] + 1] = token
        held[0] += 1
        return F.scaled_dot_product_attention(query, key[:, :, : held[0]], value[:, :, : held[0]], enable_gqa=True)

    return step


def seconds(rank: int, side: Callable[[int], Callable[[], object]], length: int, steps: int) -> float:
    """The median step of this rank; all begin a step together."""
    step = side(length)
    taken = []
    for _ in range(steps):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def bytes_sent(rank: int, length: int) -> int:
    """What this rank hands to torch in one step."""
    exchange, sizes = P2P.exchange, []

    def counting(self, sends, receives):
        sizes.extend(t.nbytes for t in sends.values())
        return exchange(self, sends, receives)

    P2P.exchange = counting
    try:
        by_usp(length)()
    finally:
        P2P.exchange = exchange
    return sum(sizes)


# ---- in front of them ------------------------------------------------------------------------------------------------


def main(
    length: Annotated[list[int] | None, typer.Option(help="tokens cached [default: 4096, 16384, 65536]")] = None,
    turns: Annotated[int, typer.Option(help="of each side")] = 6,
    steps: Annotated[int, typer.Option(help="in a turn")] = 20,
    out: Annotated[Path, typer.Option(help="where the JSON goes")] = Path(__file__).parent / "results" / "decode.json",
) -> None:
    """Times a token against a sharded cache and against one in one process, and counts its bytes."""
    info, results = describe(), []
    console.print(" | ".join(f"{name} {value}" for name, value in info.items()))
    names = f"{ULYSSES * RING} ranks", f"one process, {CORES} threads", f"torch, {CORES} threads"
    table = Table("tokens cached", *(f"{name}, ms" for name in names), "bytes a token")
    with Team(ULYSSES * RING) as team, Team(1, CORES) as single:
        sides = dict(zip(names, ((team, by_usp), (single, by_usp), (single, by_torch)), strict=True))
        for tokens in length or [4096, 16384, 65536]:
            taken: dict[str, list[float]] = {name: [] for name in names}
            foreign = []
            for side, step in sides.values():
                side.run(seconds, step, tokens, 3)  # caches are made, ranks agree
            for turn in range(turns):
                for name in names[:: 1 if turn % 2 else -1]:
                    side, step = sides[name]
                    load = Load(side, [team, single])
                    taken[name].append(max(side.run(seconds, step, tokens, steps)))
                    load.stop()
                    foreign.append(load.foreign)
            row = {
                "tokens_cached": tokens,
                "seconds": {name: statistics.median(times) for name, times in taken.items()},
                "range_seconds": {name: [min(times), max(times)] for name, times in taken.items()},
                "bytes_per_token": sum(team.run(bytes_sent, tokens)),
                "foreign_load": [min(foreign), max(foreign)],
            }
            results.append(row)
            columns = (
                f"{1e3 * statistics.median(times):.2f} ({1e3 * min(times):.2f}-{1e3 * max(times):.2f})"
                for times in taken.values()
            )
            table.add_row(str(tokens), *columns, str(row["bytes_per_token"]))
    console.print(table)
    console.print(f"other programs used {max(max(r['foreign_load']) for r in results):.0%} of the cores at most")
    settings = {"turns": turns, "steps": steps, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": info, "settings": settings, "results": results}, indent=2) + "\n")
    console.print(f"written: {os.path.relpath(out)}")


if __name__ == "__main__":
    typer.run(main)
