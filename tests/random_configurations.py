"""A seeded random search over configurations, for as long as one likes.

    python -m tests.random_configurations --count 20000          # threads in place of processes
    python -m tests.random_configurations --only 1234            # one of them again

Degrees, heads, lengths, layouts, masks, dtypes, kernels and transports are drawn; out, lse, dq, dk and dv are compared
with dense attention in float64. CI runs the first 300 over gloo, and 200 more here.
"""

import multiprocessing as mp
import random
import sys
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated

import torch
import typer
from rich.progress import track

from tests.cases import Case, failures, run
from usp import layouts
from usp.mask import Band, Mask
from usp.transports import local


def draw(seed: int) -> tuple[int, Case]:
    """(world size, case) of a seed."""
    pick = random.Random(seed)
    world = pick.choice([2, 3, 4, 4, 6, 6, 8])
    degrees = [(u, r) for u in range(1, 5) for r in range(1, 6) if world % (u * r) == 0 and u * r > 1]
    ulysses, ring = pick.choice(degrees)
    p = ulysses * ring
    dtype = pick.choice([torch.float64, torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16])
    half = dtype.itemsize == 2
    seq_len = pick.choice([p, pick.randint(p, 3 * p), pick.randint(10, 150), pick.randint(100, 400)])
    seq_len = max(seq_len, 256) if half else seq_len  # of few numbers, one rounding is a large share
    kv_heads = pick.randint(1, 5)
    heads = kv_heads * pick.randint(-(-ulysses // kv_heads), 5)
    mask = pick.choice(
        [
            Mask.full(),
            Mask.causal(),
            Mask.window(pick.randint(0, seq_len), 0),
            Mask.window(pick.randint(0, seq_len), pick.randint(0, seq_len)),
            Mask.window(None, pick.randint(0, 9)),
            Mask.offsets(Band(None, -pick.randint(1, 20)), Band(0, pick.randint(0, 5))),  # a gap beside the diagonal
        ]
    )
    if pick.random() < 0.4:
        mask &= Mask.cu_seqlens(sorted({0, seq_len, *(pick.randint(1, seq_len) for _ in range(pick.randint(1, 9)))}))
    head_dim = pick.choice([8, 16, 24])
    return world, Case(
        ulysses,
        ring,
        seq_len,
        str(mask),
        layouts.layout_for(pick.choice(["contiguous", "zigzag", "striped", "balanced"]), mask),
        heads,
        kv_heads,
        head_dim,
        head_dim if half else pick.choice([head_dim, 8, 40]),
        pick.randint(1, 3),
        dtype,
        pick.choice(["auto", "auto", "sdpa", "reference"]),
        pick.choice(["auto", "p2p", "all_gather", f"double_ring:{ring // 2}" if ring in (4, 6, 8) else "p2p"]),
        pick.random() < 0.2,
        seed,
    )


def failing(seed: int) -> str:
    """What is wrong with the configuration of a seed, over threads; "" if nothing is."""
    warnings.filterwarnings("ignore", "causal attention over a ring")
    torch.set_num_threads(1)
    _, case = draw(seed)
    if not case.transport.startswith("double_ring"):
        case = replace(case, transport="auto")  # the other ones are of processes
    try:
        results = local.run(lambda t: run(case, t), ulysses_degree=case.ulysses, ring_degree=case.ring)[0]
        wrong = failures(case, results)
    except Exception as error:
        wrong = [f"{type(error).__name__}: {error}"]
    return f"seed {seed}: {case}: {'; '.join(wrong)}" if wrong else ""


def search(seeds: Iterable[int], jobs: int) -> list[str]:
    """All that is wrong, printed as it is found."""
    found, seeds = [], list(seeds)
    # Every run leaves the arenas of its threads behind.
    with mp.get_context("forkserver").Pool(jobs, maxtasksperchild=50) as pool:
        for wrong in track(pool.imap_unordered(failing, seeds, chunksize=8), "searching", len(seeds)):
            if wrong:
                print(wrong, flush=True)
                found.append(wrong)
    return found


def main(
    count: Annotated[int, typer.Option(help="Configurations.")] = 20_000,
    seed: Annotated[int, typer.Option(help="The first one; the others follow it.")] = 0,
    only: Annotated[int | None, typer.Option(help="Run this seed alone.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
) -> None:
    """Search, and exit with 1 if anything is wrong."""
    seeds = range(seed, seed + count) if only is None else [only]
    found = search(seeds, jobs)
    print(
        f"{len(found)} of {len(seeds)} are wrong; `--only SEED` runs one again" if found else f"{len(seeds)} are right"
    )
    sys.exit(bool(found))


if __name__ == "__main__":
    typer.run(main)
