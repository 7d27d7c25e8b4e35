"""The picture of a plan: for each pair of degrees, where the time goes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from usp.cli.output import picture
from usp.errors import InputError
from usp.planner.plan import Choice, Plan

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
    figure = Figure(figsize=(max(8.0, 3.0 + 1.4 * len(choices)), 4.2), layout="constrained")
    whole, rest = figure.subplots(1, 2)
    _stack(whole, choices, list(PARTS))
    _stack(rest, choices, list(PARTS)[1:])
    for place, choice in enumerate(choices):
        note = f"{choice.slower:.2f} x" if choice.fits else "does not fit"
        whole.annotate(note, (place, choice.seconds), ha="center", va="bottom", fontsize=8)
    whole.set_title("all of it", fontsize=9)
    rest.set_title("all but the kernels", fontsize=9)
    whole.set_ylabel("seconds of attention in a step, predicted")
    work = plan.workload
    figure.suptitle(f"{plan.model.name}, {work.seq_len:,} tokens, {plan.cluster.name}, {work.mode}", fontsize=10)
    handles, labels = whole.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PARTS), frameon=False, fontsize=8)
    picture(figure, path, dpi=110)


def _stack(axes: Any, choices: Sequence[Choice], parts: Sequence[str]) -> None:
    """A bar for each choice, of the seconds of some parts."""
    bottoms = [0.0] * len(choices)
    for part in parts:
        label, colour = PARTS[part]
        heights = [getattr(choice, f"seconds_{part}") for choice in choices]
        axes.bar(range(len(choices)), heights, bottom=bottoms, label=label, color=colour, width=0.7)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    names = [f"U={c.ulysses_degree}\nR={c.ring_degree}\n{c.layout * (c.ring_degree > 1)}" for c in choices]
    axes.set_xticks(range(len(choices)), names, fontsize=7)
    axes.set_ylim(0, 1.1 * max(bottoms) or 1)
    axes.spines[["top", "right"]].set_visible(False)
