"""Pictures of a timeline, what every rank does when: a file, or events for a viewer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from usp import files
from usp.cli.output import picture
from usp.errors import InputError
from usp.planner.timeline import Span

KINDS = {
    "compute": ("computing", "#4477aa", 0),
    "start": ("starting an exchange", "#aa3377", 0),
    "wait": ("waiting", "#ee6677", 0),
    "transfer": ("messages", "#ccbb44", 1),
}
"""Name, colour of Paul Tol's bright scheme, which colour-blind people tell apart, and lane of a rank."""
ROWS = {"compute": ("compute",), "wait": ("start", "wait"), "transfer": ("transfer",)}
"""Rows of a viewer, and the kinds in them."""
SHOWN = 16
"""Most ranks that are drawn: of more, as many at even distances."""


def draw(spans: Sequence[Span], path: Path, title: str) -> None:
    """Draws two lanes for every rank: its thread, and its messages.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install 'usp-attention[plot]'") from None
    ranks = sorted({span.rank for span in spans})
    if len(ranks) > SHOWN:
        ranks = [ranks[round(place * (len(ranks) - 1) / (SHOWN - 1))] for place in range(SHOWN)]
    figure = Figure(figsize=(11, 1.6 + 0.8 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    for kind, (name, colour, lane) in KINDS.items():
        for place, rank in enumerate(ranks):
            bars = [(s.start * 1e3, s.seconds * 1e3) for s in spans if (s.rank, s.kind) == (rank, kind)]
            edge = {"edgecolor": "white", "linewidth": 0.5} if kind == "transfer" else {}
            axes.broken_barh(bars, (place + 0.45 * lane, 0.4), color=colour, label=name * (place == 0), **edge)
    axes.set_yticks([place + 0.4 for place in range(len(ranks))], [f"rank {rank}" for rank in ranks], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10)
    handles, labels = axes.get_legend_handles_labels()
    shown = [(handle, label) for handle, label in zip(handles, labels, strict=True) if label]
    figure.legend(*zip(*shown, strict=True), loc="outside lower center", ncols=len(KINDS), frameon=False, fontsize=8)
    picture(figure, path, dpi=110)


def chrome_events(spans: Sequence[Span]) -> dict[str, Any]:
    """Spans as Chrome trace events: a process for each rank, a row for computing, waiting and messages."""
    names = [("process_name", rank, 0, f"rank {rank}") for rank in sorted({span.rank for span in spans})]
    names += [("thread_name", rank, row, name) for _, rank, *_ in names for row, name in enumerate(ROWS)]
    about = [{"ph": "M", "name": name, "pid": rank, "tid": row, "args": {"name": to}} for name, rank, row, to in names]
    row_of = {kind: row for row, kinds in enumerate(ROWS.values()) for kind in kinds}
    events = [
        {"ph": "X", "name": s.label, "cat": s.kind, "pid": s.rank, "tid": row_of[s.kind]}
        | {"ts": s.start * 1e6, "dur": s.seconds * 1e6}
        for s in spans
    ]
    return {"traceEvents": about + events, "displayTimeUnit": "ms"}


def write_events(spans: Sequence[Span], path: Path) -> None:
    """Writes `chrome_events`. Raises InputError if it cannot."""
    files.write(path, json.dumps(chrome_events(spans)))
