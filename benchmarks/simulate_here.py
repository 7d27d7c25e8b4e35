"""`usp simulate` against measurements on this machine: every (U, R), timed in turn, beside what was simulated.

    torchrun --nproc-per-node 4 -m usp.cli probe --output cluster.yaml
    torchrun --nproc-per-node 4 benchmarks/simulate_here.py --cluster cluster.yaml

and over slow links between two hosts as in `planner_here.py`, whose jobs, settings and timing these are. A time is that
of the slowest rank for one forward and backward pass.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from planner_here import JOBS, Job, Setting, layer_on, measure, options

from usp.planner.programs import Work
from usp.planner.simulate import simulate
from usp.planner.spec import ClusterSpec

NEAR = 0.15
"""A simulated time this near to the measured one, relative to that, is counted as right."""


def simulated(job: Job, setting: Setting, cluster: ClusterSpec) -> float:
    """Simulated seconds of a forward and a backward pass."""
    return sum(simulate(Work(*layer_on(job, setting, cluster), backward)).seconds for backward in (False, True))


def table(job: Job, measured: dict[Setting, float], cluster: ClusterSpec) -> tuple[list[str], list[float]]:
    """Lines of Markdown, and simulated over measured time of every setting."""
    lines = [f"{job}", "", "| setting | measured ms | simulated ms | simulated / measured |", "|---|---|---|---|"]
    ratios = []
    for setting, seconds in measured.items():
        found = simulated(job, setting, cluster)
        ratios.append(found / seconds)
        lines.append(f"| {setting} | {seconds * 1e3:.1f} | {found * 1e3:.1f} | {ratios[-1]:.2f} |")
    return [*lines, ""], ratios


def summary(ratios: Sequence[float]) -> str:
    near = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
    return f"{near} of {len(ratios)} times ({near / len(ratios):.0%}) are within {NEAR:.0%} of the measured ones."


def main() -> None:
    parser = options("The simulation against measurements on this machine.")
    parser.add_argument("--seq-len", type=int, help="tokens, in place of those of the jobs")
    arguments = parser.parse_args()
    cluster = ClusterSpec.read(arguments.cluster)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        all_ratios: list[float] = []
        for job in (JOBS[number] for number in arguments.jobs):
            shown = job if arguments.seq_len is None else replace(job, seq_len=arguments.seq_len)
            lines, ratios = table(shown, measure(shown, arguments.rounds), cluster)
            all_ratios += ratios
            if dist.get_rank() == 0:
                print("\n".join(lines), flush=True)
        if dist.get_rank() == 0:
            print(summary(all_ratios))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
