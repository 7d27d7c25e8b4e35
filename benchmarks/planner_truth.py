"""The planner against published measurements: does it choose the degrees that were measured to be the fastest?

    .venv/bin/python benchmarks/planner_truth.py                  # every comparison and the scores
    .venv/bin/python benchmarks/planner_truth.py --write FILE     # the same as a page of Markdown

A group of `data/planner_truth.csv` is one job measured at several (U, R, layout). Regret is the measured time of what
the planner chooses among them over the best measured time; 1 is perfect. Scored are the groups of more than one (U, R)
whose confidence is not low and whose best (U, R) beats the next by 5 % or more. Left out are rows of another transport:
all-gather, pass-Q, and double rings where a plain ring was measured beside.

The planner is given the machine class, the shape and the lengths of a row, nothing else. Two translations: documents of
unknown lengths ("varlen", at most a quarter of the sequence) are taken as eight equal ones, each sharded by itself as
the measured code does; what depends on the model beside attention is left out, since all choices share it.
"""

import argparse
import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from usp.planner import hardware
from usp.planner.cost import seconds
from usp.planner.problem import Problem, locate
from usp.planner.spec import ModelSpec, Workload

TRUTH = Path(__file__).parent / "data" / "planner_truth.csv"
FITTED = {
    "yunchang README media/benchmark_results.png",
    "yunchang README media/pcie_machine.jpg",
    "MagiAttention docs cp_benchmark",
    "xDiT flux.md",
    "xDiT scalability Flux-16L40",
    "xDiT scalability Pixart-16L40",
    "xDiT scalability Pixart-A100",
    "xDiT cogvideo.md 2b",
    "xDiT legacy latency-A100-PCIe.png",
    "github notes id36898429914 (8x4090D)",
    "maxtext PR #4687",
}
"""Sources that the constants of `usp/planner/hardware.py` were fitted to: every machine class is among them."""
DEVICES = {
    "GB200": "gb200", "B200": "b200", "H200": "h200", "H100": "h100", "H20": "h20", "L20": "l20", "L40": "l40",
    "4090": "rtx4090", "TPU": "tpu-v5p", "A100": "a100",
}  # fmt: skip
LINKS = {
    "2 sockets": "pcie4-two-sockets", "PCIe": "pcie4", "NVLink5": "nvlink5", "NVLink4": "nvlink4", "NVLink": "nvlink3",
    "ICI": "ici",
}  # fmt: skip
LAYOUTS = {"basic": "contiguous", "contiguous": "contiguous", "zigzag": "zigzag", "stripe": "striped"}
OTHER_TRANSPORTS = ("gather", "pass-Q")
DOCUMENTS = 8
CLEAR = 1.05
"""By that factor the best (U, R) of a scored group beats the next one."""

Row = dict[str, str]
Setting = tuple[int, int, str]
"""(ulysses degree, ring degree, layout), the layout "any" for a ring of one."""


@dataclass(frozen=True)
class Comparison:
    """One job, measured and predicted at several settings. Times are relative to the best measured and predicted one.

    Attributes:
        rows: of the file.
        measured: time of each setting.
        predicted: time of each setting.
    """

    rows: Sequence[Row]
    measured: dict[Setting, float]
    predicted: dict[Setting, float]

    @property
    def chosen(self) -> Setting:
        return min(self.predicted, key=lambda setting: self.predicted[setting])

    @property
    def regret(self) -> float:
        return self.measured[self.chosen]

    def by_rule(self, rule: Callable[[list[int], Row], int]) -> float:
        """Regret of a rule that chooses a Ulysses degree, with the best layout."""
        degree = rule(sorted({u for u, _, _ in self.measured}), self.rows[0])
        return min(time for (u, _, _), time in self.measured.items() if u == degree)

    @property
    def scored(self) -> bool:
        best: dict[tuple[int, int], float] = {}
        for (u, r, _), time in self.measured.items():
            best[u, r] = min(time, best.get((u, r), time))
        trusted = all(row["confidence"] != "low" for row in self.rows)
        return trusted and len(best) > 1 and sorted(best.values())[1] >= CLEAR

    @property
    def source(self) -> str:
        return self.rows[0]["source"]

    @property
    def name(self) -> str:
        row = self.rows[0]
        mask = row["extra"] if "varlen" in row["extra"] else "causal" if row["causal"] == "1" else "full"
        return (
            f"{row['source']}: {row['nodes']} x {row['gpus_per_node']} {row['gpu']}, {row['task']} {mask}, "
            f"B{row['batch'] or 1} S{row['seq']} H{row['heads']}:{row['kv_heads']} D{row['head_dim']} {row['extra']}"
        )


def naive(degrees: list[int], row: Row) -> int:
    """The largest Ulysses degree that fits the node and divides the kv heads."""
    fitting = [u for u in degrees if int(row["gpus_per_node"]) % u == 0 and int(row["kv_heads"]) % u == 0]
    return max(fitting or degrees[:1])


RULES: dict[str, Callable[[list[int], Row], int]] = {
    "largest U that fits the node and divides kv_heads": naive,
    "always Ulysses": lambda degrees, _: max(degrees),
    "always ring": lambda degrees, _: min(degrees),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="The planner against published measurements.")
    parser.add_argument("--truth", type=Path, default=TRUTH, help="the measurements, as CSV")
    parser.add_argument("--write", type=Path, help="write a page of Markdown")
    arguments = parser.parse_args()
    comparisons = compare(read(arguments.truth))
    print("\n".join(listing(comparisons)))
    print("\n" + "\n".join(summary(comparisons)))
    if arguments.write:
        arguments.write.write_text(page(comparisons))


def read(path: Path) -> list[list[Row]]:
    """The rows of each group."""
    groups: dict[str, list[Row]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            groups.setdefault(row["group"], []).append(row)
    return list(groups.values())


def compare(groups: Iterable[list[Row]]) -> list[Comparison]:
    """Every group of at least one row of a ring that the planner knows."""
    found = []
    for rows in groups:
        times: dict[Setting, list[tuple[float, Row]]] = {}
        for row in of_plain_rings(rows):
            value = float(row["value"])
            times.setdefault(setting(row), []).append((value if row["better"] == "lower" else 1 / value, row))
        if not times:
            continue
        # A ring of one was measured once under the name of every layout: the same thing, so their median counts.
        measured = {key: median(time for time, _ in of_setting) for key, of_setting in times.items()}
        predicted = {key: predict(of_setting[0][1]) for key, of_setting in times.items()}
        found.append(Comparison(rows, relative(measured), relative(predicted)))
    return found


def relative(times: dict[Setting, float]) -> dict[Setting, float]:
    return {key: time / min(times.values()) for key, time in times.items()}


def of_plain_rings(rows: list[Row]) -> list[Row]:
    kept = [row for row in rows if not any(word in row["layout"] + row["extra"] for word in OTHER_TRANSPORTS)]
    plain = {(row["ulysses"], row["ring"]) for row in kept if "double" not in row["layout"]}
    return [row for row in kept if "double" not in row["layout"] or (row["ulysses"], row["ring"]) not in plain]


def setting(row: Row) -> Setting:
    ring = int(row["ring"])
    return int(row["ulysses"]), ring, layout(row) if ring > 1 else "any"


def layout(row: Row) -> str:
    return LAYOUTS.get(row["layout"].split()[0], "contiguous")


def predict(row: Row) -> float:
    """Predicted seconds of one attention layer."""
    problem, u, r = problem_of(row), int(row["ulysses"]), int(row["ring"])
    machine = locate(problem.cluster, u, r, problem.workload.tensor_parallel, u * r)
    [(_, layer)] = problem.layers(u, r, layout(row), "p2p")
    passes = {"fwd": (False,), "bwd": (True,)}.get(row["task"].split()[0], (False, True))
    return sum(seconds(layer, machine, backward).total for backward in passes)


def problem_of(row: Row) -> Problem:
    tensor = 8 if row["extra"].startswith("TP8") else 1
    ranks, seq_len, batch = int(row["ulysses"]) * int(row["ring"]) * tensor, int(row["seq"]), int(row["batch"] or 1)
    if row["source"].startswith("maxtext"):
        batch //= 128 // ranks  # of the whole machine, which is several groups
    if "varlen" in row["extra"]:
        seq_len, batch = seq_len // DOCUMENTS, batch * DOCUMENTS
    heads, kv_heads, head_dim = int(row["heads"]), int(row["kv_heads"]), int(row["head_dim"])
    intra = "pcie4-no-p2p" if "4090" in row["gpu"] else first(LINKS, row["intra_link"], "pcie4")
    per_node = int(row["gpus_per_node"])
    gpus = -(-ranks // per_node) * per_node
    return Problem(
        ModelSpec(heads=heads, kv_heads=kv_heads, head_dim=head_dim, hidden=1, intermediate=1),
        hardware.cluster(first(DEVICES, row["gpu"], "a100"), gpus, per_node, intra),
        Workload(seq_len=seq_len, batch=batch, is_causal=row["causal"] == "1", tensor_parallel=tensor),
    )


def first(names: dict[str, str], text: str, default: str) -> str:
    return next((name for word, name in names.items() if word in text), default)


# ---- what is printed -------------------------------------------------------------------------------------------------


def shown(setting: Setting) -> str:
    u, r, layout = setting
    return f"U{u} R{r}" + ("" if layout == "any" else f" {layout}")


def listing(comparisons: Sequence[Comparison]) -> list[str]:
    lines = []
    for one in comparisons:
        best = min(one.measured, key=lambda setting: one.measured[setting])
        mark = "scored" if one.scored else "      "
        lines.append(
            f"{mark}  regret {one.regret:.2f}  measured {shown(best)}  predicted {shown(one.chosen)}  {one.name}"
        )
    return lines


def scores(regrets: Sequence[float]) -> str:
    ordered = sorted(regrets)
    within = sum(regret <= 1.05 for regret in ordered) / len(ordered)
    ninth = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return (
        f"{len(ordered)} | {median(ordered):.3f} | {ninth:.2f} | {within:.0%} | {mean(ordered):.3f} | {ordered[-1]:.2f}"
    )


def summary(comparisons: Sequence[Comparison]) -> list[str]:
    scored = [one for one in comparisons if one.scored]
    open_ones = [one for one in comparisons if len({key[:2] for key in one.measured}) > 1]
    halves = {
        "the planner": scored,
        "the planner, sources it was fitted to": [one for one in scored if one.source in FITTED],
        "the planner, sources it was not fitted to": [one for one in scored if one.source not in FITTED],
        "the planner, all groups with a choice, scored or not": open_ones,
    }
    lines = ["| rule | groups | median regret | 90th percentile | within 5 % of the best | mean | worst |"]
    lines.append("|---|---|---|---|---|---|---|")
    lines += [f"| {name} | {scores([one.regret for one in some])} |" for name, some in halves.items()]
    lines += [f"| {name} | {scores([one.by_rule(rule) for one in scored])} |" for name, rule in RULES.items()]
    return lines


def page(comparisons: Sequence[Comparison]) -> str:
    """The results as a page of Markdown."""
    misses = sorted((one for one in comparisons if one.scored and one.regret > 1.05), key=lambda one: -one.regret)
    lines = [
        "# The planner against published measurements",
        "",
        "Made by `benchmarks/planner_truth.py --write`, which says what is compared and how.",
        "",
        *summary(comparisons),
        "",
        "## Misses: scored groups where the choice was more than 5 % slower than the best",
        "",
        "Times are relative to the best measured and to the best predicted one.",
        "",
        "| regret | job | chosen | setting: measured / predicted |",
        "|---|---|---|---|",
    ]
    for one in misses:
        times = ", ".join(f"{shown(key)}: {one.measured[key]:.2f} / {one.predicted[key]:.2f}" for key in one.measured)
        lines.append(f"| {one.regret:.2f} | {one.name} | {shown(one.chosen)} | {times} |")
    lines += [
        "",
        "## All groups with a choice",
        "",
        "| scored | regret | measured best | predicted best | job |",
        "|---|---|---|---|---|",
    ]
    for one in comparisons:
        if len({key[:2] for key in one.measured}) > 1:
            best = min(one.measured, key=lambda setting: one.measured[setting])
            cells = ["yes" if one.scored else "", f"{one.regret:.2f}", shown(best), shown(one.chosen), one.name]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
