"""How much of the ring's messages is hidden behind computing, on two hosts made of network namespaces (as root).

    python benchmarks/overlap.py                               # all cases; writes benchmarks/results/overlap.json
    python benchmarks/overlap.py --seq-lens 4096 --page docs/overlap.md --plot docs/img/overlap.png

The link is shaped and unshaped in turn, by the same processes, for forward and backward passes of attention, H8 D64
float32 zigzag; each time the step of median length is read by `usp.trace`. Between them rank 0 runs torch's attention
alone with two threads, while the others sleep in a barrier. `late` is the part of the exposed time in which a rank
waits because its peer began to send later than it did itself, which is no transfer; "peers not late" is the hidden
share without it. The bound is what the measured computing and transfers would take with perfect overlap: the longer of
both at each hop of the ring, and the all-to-all.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from machine import describe
from problem import Problem, Side, measure, sdpa
from team import machine_seconds
from two_hosts import shape

import usp
from usp.cli import timeline_plot
from usp.placement import columns
from usp.planner.timeline import hidden, hops
from usp.planner.traffic import Layer, Shape
from usp.trace import Trace, trace

RATE, CORES = "1gbit", os.cpu_count() or 1
SDPA = Side("SDPA, 2 threads", None, sdpa)
DRAWN = (Problem(4096, True), 2)
"""Of which there is a picture, and processes on each host."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Link:
    """A case over one link: seconds but for shares."""

    step: float
    hidden: float
    exposed: float
    late: float
    transfer: float
    covered: bool
    bound: float
    clock_error: float
    hops: list[Row]

    @classmethod
    def of(cls, found: Trace, topology: usp.Topology) -> "Link":
        rows = hops(found.spans, found.transfers)
        ring = [hop for hop in rows if hop.transfer_seconds and hop.ring]
        return cls(
            step=found.step_seconds,
            hidden=hidden(ring) or 0.0,
            exposed=sum(hop.start_seconds + hop.wait_seconds for hop in ring),
            late=sum(late(found, topology, hop.label) for hop in ring),
            transfer=sum(hop.transfer_seconds for hop in ring),
            covered=all(hop.compute_seconds >= hop.transfer_seconds for hop in ring),
            bound=sum(
                max(hop.compute_seconds, hop.transfer_seconds)
                if hop.ring
                else hop.compute_seconds + hop.transfer_seconds
                for hop in rows
            ),
            clock_error=found.clock_error_seconds,
            hops=[asdict(hop) for hop in rows],
        )


def late(found: Trace, topology: usp.Topology, label: str) -> float:
    """Seconds of a rank's wait, in the mean, by which its peer was late to start the exchange. For rings of two."""
    spans = [span for span in found.spans if span.label == label]
    began = {span.rank: span.start for span in spans if span.kind == "transfer"}
    waits = {rank: sum(s.stop - s.start for s in spans if (s.rank, s.kind) == (rank, "wait")) for rank in began}
    pairs = [pair for ring in columns(topology.grids) for pair in (ring, ring[::-1])]
    return sum(min(waits[me], max(0.0, began[peer] - began[me])) for me, peer in pairs) / len(pairs)


def work(problems: Sequence[Problem], rounds: int, target: Path, plot: Path | None) -> None:
    """Measures in a process that torchrun started."""
    dist.init_process_group("gloo")
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    topology, rows = usp.Topology.build(local, 2), []
    for problem in problems:
        shape_ = Shape(1, problem.heads, problem.kv_heads, problem.head_dim, problem.head_dim, 4)
        mask = usp.Mask.causal() if problem.causal else usp.Mask.full()
        layer = Layer(shape_, usp.Schedule(mask, "zigzag", problem.seq_len, 2), local)
        links: dict[str, list[Link]] = {RATE: [], "none": []}
        alone: list[float] = []
        began = time.perf_counter(), machine_seconds(), time.process_time()
        for _ in range(rounds):
            for rate, seen in links.items():
                if os.environ["LOCAL_RANK"] == "0":
                    shape(rate)
                found = trace(layer, topology, torch.float32, warm_up=1)
                seen.append(Link.of(found, topology))
                if plot and (problem, local, rate) == (*DRAWN, RATE) and dist.get_rank() == 0:
                    timeline_plot.draw(
                        found.spans, plot, f"{problem}, U{local} R2, {RATE}: {seen[-1].hidden:.0%} hidden"
                    )
            alone += one_process(problem)
        wall, machine, mine = (
            now - then
            for now, then in zip((time.perf_counter(), machine_seconds(), time.process_time()), began, strict=True)
        )
        own = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(own)
        if dist.get_rank() == 0:
            foreign = (machine - own.item()) / wall / CORES
            row: Row = {"case": f"{problem}", "ranks": f"2 x {local}", "sdpa": median(alone), "foreign": foreign}
            rows.append(row | {rate: [asdict(link) for link in seen] for rate, seen in links.items()})
            print(line(rows[-1]), flush=True)
            target.write_text(json.dumps(rows))
    dist.destroy_process_group()


def one_process(problem: Problem) -> list[float]:
    """Seconds of torch's attention on rank 0 with two threads; other ranks sleep. The first call warms up."""
    seconds = []
    if dist.get_rank() == 0:
        torch.set_num_threads(2)
        seconds = [measure(0, problem, SDPA).both for _ in range(4)][1:]
        torch.set_num_threads(1)
    dist.barrier()
    return seconds


HEAD = (
    "| hosts x ranks | case | hidden, target 0.95 | peers not late | computing covers every transfer | step s | "
    "/ unshaped, target 1.05 | / bound, target 1.10 | SDPA / step, target 0.90 | foreign load |\n" + "|---" * 10 + "|"
)


def line(row: Row) -> str:
    """A row of the table: medians over rounds."""

    def middle(link: str, read: Callable[[Row], float]) -> float:
        return median(map(read, row[link]))

    step, free = (middle(link, lambda r: r["step"]) for link in (RATE, "none"))
    punctual = middle(RATE, lambda r: 1 - (r["exposed"] - r["late"]) / r["transfer"])
    cells = (
        row["ranks"], row["case"], f"{middle(RATE, lambda r: r['hidden']):.3f}", f"{punctual:.3f}",
        "yes" if all(r["covered"] for r in row[RATE]) else "no", f"{step:.3f}", f"{step / free:.3f}",
        f"{middle(RATE, lambda r: r['step'] / r['bound']):.2f}", f"{row['sdpa'] / step:.2f}", f"{row['foreign']:.0%}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main(
    seq_lens: Annotated[str, typer.Option(help="Sequence lengths.")] = "2048,4096,8192,16384",
    kv_heads: Annotated[str, typer.Option(help="KV heads.")] = "8,2",
    masks: Annotated[str, typer.Option(help="causal, full or both.")] = "causal,full",
    ranks: Annotated[str, typer.Option(help="Processes on each host.")] = "1,2",
    rounds: Annotated[int, typer.Option(help="How often links and torch's attention take their turns.")] = 3,
    output: Annotated[Path, typer.Option(help="Where the numbers go.")] = Path("benchmarks/results/overlap.json"),
    page: Annotated[Path | None, typer.Option(help="A page of Markdown to append the table to.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A picture of one case.")] = None,
) -> None:
    """How much of the ring's messages is hidden behind computing."""
    if "WORLD_SIZE" in os.environ:
        lists = (map(int, seq_lens.split(",")), map(int, kv_heads.split(",")), masks.split(","))
        problems = [Problem(length, mask == "causal", kv_heads=kv) for length, kv, mask in product(*lists)]
        work(problems, rounds, output, plot)
        return
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "part.json"
        for each in ranks.split(","):
            own = ["--seq-lens", seq_lens, "--kv-heads", kv_heads, "--masks", masks, "--rounds", str(rounds)]
            own += ["--output", str(part), *(["--plot", str(plot)] if plot else [])]
            here = Path(__file__)
            start = [sys.executable, str(here.with_name("two_hosts.py")), "--rate", "none", "--timeout", "7200"]
            subprocess.run([*start, "--nproc-per-node", each, "--", str(here), *own], check=True)
            rows += json.loads(part.read_text())
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps({"machine": describe(), "rate": RATE, "cases": rows}, indent=1) + "\n")
    table = "\n".join((HEAD, *map(line, rows)))
    print(table)
    if page:
        with page.open("a") as file:
            file.write(table + "\n")


if __name__ == "__main__":
    typer.run(main)
