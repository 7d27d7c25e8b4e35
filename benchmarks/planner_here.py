"""The planner against measurements on this machine: every (U, R), timed in turn, beside what was predicted.

    torchrun --nproc-per-node 4 -m usp.cli probe --output cluster.yaml
    torchrun --nproc-per-node 4 benchmarks/planner_here.py --cluster cluster.yaml

and with two hosts made of network namespaces, joined by a slow link (as root)

    python benchmarks/two_hosts.py --rate 1gbit --nproc-per-node 2 -- -m usp.cli probe --output slow.yaml
    python benchmarks/two_hosts.py --rate 1gbit --nproc-per-node 2 -- benchmarks/planner_here.py --cluster slow.yaml

A time is that of the slowest rank for one forward and backward pass of attention, the median of rounds in which all
choices take their turn. Two choices are compared where their measured times differ by more than 10 %: the predicted
ones should then be in the same order. `--write FILE` appends the tables as Markdown.
"""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import usp
from usp.planner.cost import Machine, seconds
from usp.planner.problem import locate
from usp.planner.spec import ClusterSpec
from usp.planner.traffic import Layer, Shape
from usp.schedule import Schedule

CLEAR = 1.10
"""Choices whose measured times differ by that factor are compared."""


@dataclass(frozen=True)
class Job:
    """An attention layer, float32, causal or not."""

    seq_len: int
    heads: int
    kv_heads: int
    causal: bool
    head_dim: int = 64

    @property
    def mask(self) -> usp.Mask:
        return usp.Mask.causal() if self.causal else usp.Mask.full()

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.seq_len} tokens, {self.heads}:{self.kv_heads} heads of {self.head_dim}, {mask}, float32"


@dataclass(frozen=True)
class Setting:
    """A way to run it."""

    ulysses_degree: int
    ring_degree: int
    layout: str

    def __str__(self) -> str:
        return f"U{self.ulysses_degree} R{self.ring_degree}" + f" {self.layout}" * (self.ring_degree > 1)


JOBS = (
    Job(1024, 8, 8, True), Job(4096, 8, 8, True), Job(8192, 8, 8, True), Job(4096, 8, 8, False), Job(4096, 8, 2, True),
    Job(8192, 8, 2, True),
)  # fmt: skip


def settings(world: int) -> Iterator[Setting]:
    """Every (U, R) in the zigzag layout; uneven layouts too where each process has a core of its own.

    Where processes share cores, one that waits for a slower rank leaves it its core, as no GPU does.
    """
    own_cores = world <= len(os.sched_getaffinity(0))
    for ulysses_degree in range(1, world + 1):
        if world % ulysses_degree == 0:
            for layout in ("zigzag", "contiguous") if own_cores and ulysses_degree < world else ("zigzag",):
                yield Setting(ulysses_degree, world // ulysses_degree, layout)


def layer_on(job: Job, setting: Setting, cluster: ClusterSpec) -> tuple[Layer, Machine]:
    """The job as the planner sees it, and what it runs on."""
    shape = Shape(1, job.heads, job.kv_heads, job.head_dim, job.head_dim, 4)
    schedule = Schedule(job.mask, setting.layout, job.seq_len, setting.ring_degree)
    machine = locate(cluster, setting.ulysses_degree, setting.ring_degree, 1, cluster.gpus)
    return Layer(shape, schedule, setting.ulysses_degree), machine


def predict(job: Job, setting: Setting, cluster: ClusterSpec) -> float:
    """Predicted seconds of a forward and a backward pass."""
    return sum(seconds(*layer_on(job, setting, cluster), backward).total for backward in (False, True))


class Runner:
    """One setting of a job on this rank, ready to be timed."""

    def __init__(self, job: Job, setting: Setting) -> None:
        topology = usp.Topology.build(setting.ulysses_degree, setting.ring_degree, allow_cross_node=True)
        self.attn, self.job = usp.USPAttention(topology=topology, layout=setting.layout), job
        local = usp.positions(job.seq_len, topology, layout=setting.layout).numel()
        self.q, self.k, self.v = (
            torch.randn(1, local, heads, job.head_dim, requires_grad=True)
            for heads in (job.heads, job.kv_heads, job.kv_heads)
        )
        self.dout = torch.randn_like(self.q)

    def __call__(self) -> float:
        """Seconds of one forward and backward pass on the slowest rank."""
        dist.barrier()
        start = time.perf_counter()
        self.attn(self.q, self.k, self.v, mask=self.job.mask).backward(self.dout)
        taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item()


def measure(job: Job, rounds: int) -> dict[Setting, float]:
    runners = {setting: Runner(job, setting) for setting in settings(dist.get_world_size())}
    times: dict[Setting, list[float]] = {setting: [] for setting in runners}
    for turn in range(rounds + 1):
        for setting, run in runners.items():
            taken = run()
            if turn:  # the first round warms up
                times[setting].append(taken)
    return {setting: median(of_setting) for setting, of_setting in times.items()}


def table(job: Job, measured: dict[Setting, float], predicted: dict[Setting, float]) -> list[str]:
    ordered = sorted(measured, key=lambda setting: measured[setting])
    clear = [(a, b) for a, b in combinations(ordered, 2) if measured[b] > CLEAR * measured[a]]
    wrong = [(a, b) for a, b in clear if predicted[a] >= predicted[b]]
    lines = [f"{job}", "", "| setting | measured ms | predicted ms | measured / best | predicted / best |"]
    lines.append("|---|---|---|---|---|")
    best, hoped = min(measured.values()), min(predicted.values())
    for setting in ordered:
        m, p = measured[setting], predicted[setting]
        lines.append(f"| {setting} | {m * 1e3:.1f} | {p * 1e3:.1f} | {m / best:.2f} | {p / hoped:.2f} |")
    chosen = min(predicted, key=lambda setting: predicted[setting])
    order = f"{len(clear) - len(wrong)} of {len(clear)} pairs that differ by more than 10 % are predicted in that order"
    faults = "".join(f"; not {a} before {b}" for a, b in wrong)
    return [*lines, "", f"Regret of the choice ({chosen}): {measured[chosen] / best:.2f}; {order}{faults}.", ""]


def options(description: str) -> argparse.ArgumentParser:
    """The options of every comparison with this machine."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cluster", type=Path, required=True, help="what `usp probe` wrote")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, nargs="*", default=range(len(JOBS)), help="numbers of jobs, from 0")
    return parser


def main() -> None:
    parser = options("The planner against measurements on this machine.")
    parser.add_argument("--write", type=Path, help="append to a page of Markdown")
    arguments = parser.parse_args()
    cluster = ClusterSpec.read(arguments.cluster)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        for job in (JOBS[number] for number in arguments.jobs):
            measured = measure(job, arguments.rounds)
            lines = table(job, measured, {setting: predict(job, setting, cluster) for setting in measured})
            if dist.get_rank() == 0:
                print("\n".join(lines), flush=True)
                if arguments.write:
                    with arguments.write.open("a") as page:
                        page.write("\n".join(lines) + "\n")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
