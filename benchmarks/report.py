"""docs/benchmarks.md and its picture, from what attention.py measured.

python benchmarks/attention.py && python benchmarks/report.py      # or: make bench
"""

import json
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.figure import Figure

HERE = Path(__file__).parent
SDPA, USP, PEER = "#bbbbbb", "#4477aa", "#ee6677"
"""Colours of Paul Tol's bright scheme, which colour-blind people tell apart."""
WRONG = {"float32": 1e-4, "bfloat16": 0.1}
"""Relative errors above are no rounding."""
INTRODUCTION = """# Benchmarks

Made by `benchmarks/report.py` from a run of `benchmarks/attention.py`; do not edit.

{machine}. Everything runs on gloo and on the same {cores} cores; ranks share them where there are more. Peers: {peers}.
[benchmarks/peers.py](../benchmarks/peers.py) shows how each is called, and
[benchmarks/README.md](../benchmarks/README.md) how times are taken.

A **ratio** is the time of torch's attention (SDPA) in one process with a thread for each core over that of a side, both
from the same round, and its median over rounds; `range` is the least and the largest. 1.00 is the limit of sending
nothing, 0.50 is twice SDPA's time. Seconds are medians of one forward and backward pass of the slowest rank. Errors are
the largest of out, dq, dk and dv, `norm(x - ref) / norm(ref)` against float64; **wrong** means that it is no rounding.
A peer that takes more than 4 times SDPA's time gets 2 rounds and no longer sequence; one that fails is not asked for
a longer one. Beyond {limit:,} tokens only sides with a target are measured.

![ratios](img/benchmarks.png)
"""


def page(data: dict[str, Any]) -> str:
    """The Markdown."""
    machine = data["machine"]
    described = f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, Python {machine['python']}"
    versions = ", ".join(f"{name} {version}" for name, version in data["settings"]["peers"].items()) or "none"
    limit = data["settings"]["all_sides_up_to"]
    text = INTRODUCTION.format(machine=described, cores=machine["cores"], peers=versions, limit=limit)
    sections = [section(title, rows, data["settings"]["quiet"]) for title, rows in problems(data)]
    return "\n".join([text, *sections])


def problems(data: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Title and rows of each."""
    return [(title, list(rows)) for title, rows in groupby(data["results"], title_of)]


def title_of(row: dict[str, Any]) -> str:
    problem = row["problem"]
    mask = "causal" if problem["causal"] else "full"
    heads = f"{problem['heads']}:{problem['kv_heads']} heads of {problem['head_dim']}"
    return f"{problem['seq_len']:,} tokens, {mask}, {heads}, {problem['dtype']} {row['environment']}".rstrip()


def section(title: str, rows: list[dict[str, Any]], quiet: float) -> str:
    """A table of the sides that ran, and a list of the others."""
    ran = [row for row in rows if not row["reason"]]
    lines = [f"## {title}", "", "| side | seconds | ratio | range | rounds | target | forward ratio | error |"]
    lines += ["|---|---|---|---|---|---|---|---|", *map(line, ran), ""]
    if (noise := max(row["disturbance"] for row in ran)) > quiet:
        lines += [f"Up to {noise:.0%} of the cores went to other programs: not a measurement to quote.", ""]
    lines += [f"- {row['side']} {reason(row)}" for row in rows if row["reason"]]
    return "\n".join(lines).rstrip() + "\n"


def line(row: dict[str, Any]) -> str:
    accuracy = f"{max(row['errors'].values()):.1e}" + " **wrong**" * is_wrong(row)
    seconds = f"{row['seconds_forward_backward']:.3f}"
    if row["grid"] is None:
        return f"| {row['side']} | {seconds} | 1.00 | | {len(row['ratios'])} | | 1.00 | {accuracy} |"
    spread = f"{min(row['ratios']):.2f}-{max(row['ratios']):.2f}"
    aim = f">= {row['target']:.2f}" if row["target"] else ""
    cells = seconds, f"{row['ratio']:.2f}", spread, len(row["ratios"]), aim, f"{row['ratio_forward']:.2f}", accuracy
    return f"| {row['side']} | " + " | ".join(map(str, cells)) + " |"


def is_wrong(row: dict[str, Any]) -> bool:
    """NaN is wrong too."""
    return not all(error <= WRONG[row["problem"]["dtype"]] for error in row["errors"].values())


def reason(row: dict[str, Any]) -> str:
    """As Markdown: what a library says is code."""
    kind, separator, said = row["reason"].partition("fails: ")
    return f"fails: `{said}`" if separator else kind


def draw(data: dict[str, Any], path: Path) -> None:
    """Horizontal bars of the ratios, a panel for each problem."""
    panels = [(title, [row for row in rows if row["grid"] and not row["reason"]]) for title, rows in problems(data)]
    columns = 2
    heights = [max(len(rows) for _, rows in panels[i : i + columns]) for i in range(0, len(panels), columns)]
    size = 13, sum(0.19 * height + 0.8 for height in heights)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
    for axes, (title, rows) in zip(grid.flat, panels, strict=False):
        colours = [PEER if row["is_peer"] else USP for row in rows]
        names = [row["side"] for row in rows]
        bars = axes.barh(range(len(rows)), [row["ratio"] for row in rows], color=colours)
        labels = [f"{row['ratio']:.2f}" + ", wrong" * is_wrong(row) for row in rows]
        axes.bar_label(bars, labels, fontsize=6, padding=2)
        axes.set_yticks(range(len(rows)), names, fontsize=7)
        axes.invert_yaxis()
        axes.axvline(1.0, color=SDPA, zorder=0)
        axes.set_title(title, fontsize=8)
        axes.tick_params(axis="x", labelsize=7)
        axes.margins(x=0.1)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel("SDPA's time in one process / time, forward and backward: usp blue, others red", fontsize=8)
    figure.savefig(path, dpi=110)


def main(
    results: Annotated[Path, typer.Option(help="what attention.py wrote")] = HERE / "results" / "attention.json",
    docs: Annotated[Path, typer.Option(help="the folder of the page")] = HERE.parent / "docs",
) -> None:
    """Writes benchmarks.md and img/benchmarks.png."""
    data = json.loads(results.read_text())
    (docs / "benchmarks.md").write_text(page(data))
    draw(data, docs / "img" / "benchmarks.png")


if __name__ == "__main__":
    typer.run(main)
