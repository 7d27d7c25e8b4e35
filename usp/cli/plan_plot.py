"""The picture of a plan: for each pair of degrees, where the time goes."""

from pathlib import Path

from usp.errors import InputError
from usp.planner.plan import Plan

PARTS = {
    "compute": ("kernels", "#4477aa"),
    "merge": ("joining blocks", "#66ccee"),
    "ring": ("ring, not hidden", "#ccbb44"),
    "all_to_all": ("all-to-all", "#ee6677"),
}
"""Colours of Paul Tol's bright scheme, which colour-blind people tell apart."""


def draw(plan: Plan, path: Path) -> None:
    """Draws stacked bars, one for the best layout and transport of each pair of degrees, by Ulysses degree.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install 'usp-attention[plot]'") from None
    best = {}
    for choice in plan.choices:
        best.setdefault((choice.ulysses_degree, choice.ring_degree), choice)
    choices = [best[degrees] for degrees in sorted(best)]
    figure = Figure(figsize=(max(6.0, 2.0 + 0.9 * len(choices)), 4.2), layout="constrained")
    axes = figure.subplots()
    bottoms = [0.0] * len(choices)
    for part, (label, colour) in PARTS.items():
        heights = [getattr(choice, f"seconds_{part}") for choice in choices]
        axes.bar(range(len(choices)), heights, bottom=bottoms, label=label, color=colour, width=0.7)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for place, (choice, top) in enumerate(zip(choices, bottoms, strict=True)):
        note = f"{choice.slower:.2f} x" if choice.fits else "does not fit"
        axes.annotate(note, (place, top), ha="center", va="bottom", fontsize=8)
    names = [
        f"U={c.ulysses_degree}\nR={c.ring_degree}" + (f"\n{c.layout}" if c.ring_degree > 1 else "") for c in choices
    ]
    axes.set_xticks(range(len(choices)), names, fontsize=8)
    axes.set_ylabel("seconds of attention in a step, predicted")
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    work = plan.workload
    axes.set_title(f"{plan.model.name}, {work.seq_len:,} tokens, {plan.cluster.name}, {work.mode}", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write {path}: {error}") from None
