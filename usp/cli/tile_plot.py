"""Pictures of the (query x key) plane: which pair is computed at which hop, for a terminal or as a file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from usp.cli.output import picture
from usp.errors import InputError
from usp.mask import FULL
from usp.positions import Positions, take
from usp.schedule import Schedule
from usp.tiles import Tile, tiles, trim

ANCHORS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Red, green, blue of five points of matplotlib's viridis, which people of any colour vision see as an order."""
EXACT_RINGS = 32
"""Longest ring whose tiles are drawn one by one: the number of tiles grows with its square."""
LABELLED = 32
"""Most stretches of an axis that are labelled with their rank."""
CELLS = 128
"""Cells along an axis where tiles are not drawn one by one."""
SMALL = 64
"""Up to that many tokens every pair is a cell of its own, not a part of a tile with straight edges."""


@dataclass(frozen=True)
class Cell:
    """A stretch of one axis of a picture.

    Attributes:
        span: its global positions.
        rank: the ring rank that stands for it.
        held: which of the positions that rank holds, at least one.
        shared: whether other ranks hold some too.
    """

    span: range
    rank: int
    held: Positions
    shared: bool


@dataclass(frozen=True)
class Bar:
    """The work of one hop.

    Attributes:
        hop: the hop.
        width: how many hops it stands for.
        slowest: visible pairs of the slowest rank.
        mean: their mean over the ranks.
    """

    hop: int
    width: int
    slowest: int
    mean: float


def cells(schedule: Schedule, number: int) -> list[Cell]:
    """Cuts an axis into `number` stretches of at least one token, equal ones if the sequence has so many tokens.

    Where several ranks share a stretch they take turns from one to the next, so that a layout which deals single
    tokens looks the same at any scale.
    """
    found, all_held = [], [schedule.positions(rank) for rank in range(schedule.ring_degree)]
    for index in range(number):
        start = index * schedule.seq_len // number
        span = range(start, max(start + 1, (index + 1) * schedule.seq_len // number))
        present = [(rank, part) for rank, held in enumerate(all_held) if (part := _within(held, span))]
        rank, held = present[index % len(present)]
        found.append(Cell(span, rank, held, len(present) > 1))
    return found


def owner(schedule: Schedule, position: int) -> int:
    """The ring rank that holds a global position."""
    ranks = range(schedule.ring_degree)
    return next(rank for rank in ranks if any(position in run for run in schedule.positions(rank)))


def raster(schedule: Schedule, queries: Sequence[Cell], keys: Sequence[Cell]) -> list[list[int | None]]:
    """A hop that computes a visible pair of each (query stretch, key stretch), None where none is visible.

    It is the hop of the two ranks that stand for the stretches if they compute a pair of theirs, else of two that do.
    Rows are queries.
    """
    return [[_hop(schedule, q, k) for k in keys] for q in queries]


def colour(hop: int, last: int) -> str:
    """The colour of a hop, "#rrggbb": from dark for the first to light for the last at which there is work."""
    place = (len(ANCHORS) - 1) * min(1, hop / max(1, last))
    low = min(int(place), len(ANCHORS) - 2)
    mixed = (round(a + (b - a) * (place - low)) for a, b in zip(ANCHORS[low], ANCHORS[low + 1], strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def ink(hop: int, last: int) -> str:
    """What is readable on the colour of a hop: "black" or "white"."""
    return "black" if hop > 0.55 * max(1, last) else "white"


def pieces(schedule: Schedule, rank: int, at: int) -> list[Tile]:
    """The tiles of `schedule.tiles(rank, at)` in global positions, cut where the runs of either rank end.

    Only for layouts of consecutive positions: in others a tile is no rectangle of the plane.
    """
    found = []
    for tile in schedule.tiles(rank, at):
        q_runs = take(schedule.positions(rank), range(tile.q.start, tile.q.stop))
        k_runs = take(schedule.positions(at), range(tile.k.start, tile.k.stop))
        row = 0
        for q in q_runs:
            column = 0
            for k in k_runs:
                band = tile.band.shift(row - column)
                piece = trim(Tile(slice(q.start, q.stop), slice(k.start, k.stop), band))
                found += [piece] if piece else []
                column += len(k)
            row += len(q)
    return found


def outline(tile: Tile) -> list[tuple[float, float]]:
    """The corners (key, query) of a trimmed tile's visible part, its edges through the middle of the band's stairs."""
    rows, columns = tile.q.stop - tile.q.start, tile.k.stop - tile.k.start
    lo = -rows if tile.band.lo is None else tile.band.lo - 0.5
    hi = columns if tile.band.hi is None else tile.band.hi + 0.5
    ys = sorted({0, rows, *(y for y in (-lo, columns - lo, -hi, columns - hi) if 0 < y < rows)})
    left = [(min(max(0, y + lo), columns), y) for y in ys]
    right = [(max(min(columns, y + hi), 0), y) for y in ys]
    return [(tile.k.start + x, tile.q.start + y) for x, y in left + right[::-1]]


def draw(schedule: Schedule, bars: Sequence[Bar], title: str, path: Path) -> None:
    """Writes a picture: the plane coloured by hop on the left, the slowest rank and the mean of each hop on the right.

    Args:
        schedule: what is drawn.
        bars: the hops, ascending.
        title: the line above it.
        path: the file; its ending says the format.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install usp-attention[plot]") from None
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    figure.suptitle(title, fontsize=11)
    last = max((bar.hop for bar in bars if bar.slowest), default=0)
    _plane(left, schedule, last)
    _bars(right, bars, last)
    picture(figure, path, dpi=100)


def _within(positions: Positions, span: range) -> Positions:
    """The positions that lie in a span of step 1."""
    parts = (run[_first(run, span.start) : _first(run, span.stop)] for run in positions)
    return tuple(part for part in parts if part)


def _first(run: range, position: int) -> int:
    """The index of the first element of a run that is not below a position."""
    return max(0, -((run.start - position) // run.step))


def _hop(schedule: Schedule, q: Cell, k: Cell) -> int | None:
    if tiles(q.held, k.held, schedule.mask):
        return (q.rank - k.rank) % schedule.ring_degree
    found = tiles((q.span,), (k.span,), schedule.mask)
    if not found:
        return None
    tile = found[0]  # trimmed: each of its rows sees a key
    row, columns = (tile.q.stop - tile.q.start) // 2, tile.k.stop - tile.k.start
    column = 0 if tile.band.lo is None else max(0, row + tile.band.lo)
    if tile.band.hi is not None:
        column = min(columns - 1, row + tile.band.hi)
    seen = q.span[tile.q.start + row], k.span[tile.k.start + column]
    return (owner(schedule, seen[0]) - owner(schedule, seen[1])) % schedule.ring_degree


def _plane(axes: Any, schedule: Schedule, last: int) -> None:
    ring, seq_len = range(schedule.ring_degree), schedule.seq_len
    stretches = [(run, rank) for rank in ring for run in schedule.positions(rank) if run]
    consecutive = all(run.step == 1 or len(run) == 1 for run, _ in stretches)
    axis = "{}, by the ring rank that holds them"
    if consecutive and len(ring) <= EXACT_RINGS and seq_len > SMALL:
        _polygons(axes, schedule, last)
    else:
        number = CELLS if consecutive or len(ring) > LABELLED else LABELLED - LABELLED % len(ring)
        line = cells(schedule, min(seq_len, number))
        _cells(axes, schedule, line, last)
        if not consecutive:
            stretches = [(cell.span, cell.rank) for cell in line]
            axis += "; they take turns" if any(cell.shared for cell in line) else ""
    axes.set(xlim=(0, seq_len), ylim=(seq_len, 0), aspect="equal", xticks=[], yticks=[])
    if len(stretches) > LABELLED:
        axis = f"{{}}, {seq_len:,} tokens"
    else:
        middles, names = [span.start + len(span) / 2 for span, _ in stretches], [str(rank) for _, rank in stretches]
        axes.set_xticks(middles, names)
        axes.set_yticks(middles, names)
        axes.tick_params(length=0, labelsize=9 if len(stretches) <= 16 else 6)
        for span, _ in stretches:
            axes.axhline(span.start, color="0.75", linewidth=0.6, zorder=0)
            axes.axvline(span.start, color="0.75", linewidth=0.6, zorder=0)
    axes.set(xlabel=axis.format("keys"), ylabel=axis.format("queries"))


def _polygons(axes: Any, schedule: Schedule, last: int) -> None:
    """The tiles as they are, each with its outline and, where it fits, its hop."""
    from matplotlib.collections import PolyCollection

    ring, smallest, thin = schedule.ring_degree, (schedule.seq_len / 26) ** 2, schedule.seq_len / 100
    for hop in range(ring):
        found = [tile for rank in range(ring) for tile in pieces(schedule, rank, (rank - hop) % ring)]
        shapes = [outline(tile) for tile in found]
        shade, white = colour(hop, last), ("white", 0.8 if ring <= 8 else 0.3)
        lines = [  # white would cover what is hardly wider, such as a few sinks
            white if tile.area > thin * max(tile.q.stop - tile.q.start, tile.k.stop - tile.k.start) else (shade, 2)
            for tile in found
        ]
        edges, widths = zip(*lines, strict=True) if lines else ((), ())
        axes.add_collection(PolyCollection(shapes, facecolor=shade, edgecolor=edges, linewidth=widths))
        for tile, shape in zip(found, shapes, strict=True):
            if tile.area > smallest:
                x, y = _centroid(shape)
                axes.text(x, y, hop, color=ink(hop, last), ha="center", va="center", fontsize=9)


def _cells(axes: Any, schedule: Schedule, line: Sequence[Cell], last: int) -> None:
    """A raster of the plane, both axes cut into the same stretches."""
    from matplotlib.collections import PolyCollection

    shapes, shades = [], []
    for q, row in zip(line, raster(schedule, line, line), strict=True):
        for k, hop in zip(line, row, strict=True):
            if hop is not None:
                shapes.append(outline(Tile(slice(q.span.start, q.span.stop), slice(k.span.start, k.span.stop), FULL)))
                shades.append(colour(hop, last))
    few = len(line) <= SMALL
    edge = "white" if few else "face"
    axes.add_collection(PolyCollection(shapes, facecolor=shades, edgecolor=edge, linewidth=0.4 if few else 0.1))


def _bars(axes: Any, bars: Sequence[Bar], last: int) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    exponent = 3 * ((len(str(max(bar.slowest for bar in bars))) - 1) // 3)
    few, unit = len(bars) <= 16, 10**exponent
    for heights, shades in (
        ([bar.slowest / unit for bar in bars], ["0.85"] * len(bars)),
        ([bar.mean / unit for bar in bars], [colour(bar.hop, last) for bar in bars]),
    ):
        sides = [(bar.hop, bar.width * (0.42 if few else 0.5)) for bar in bars]
        shapes = [[(x - w, 0), (x - w, y), (x + w, y), (x + w, 0)] for (x, w), y in zip(sides, heights, strict=True)]
        axes.add_collection(PolyCollection(shapes, facecolor=shades, edgecolor=shades, linewidth=0.2))
    axes.autoscale()
    axes.set_ylim(0, 1.06 * max(bar.slowest / unit for bar in bars) or 1)
    if few:
        for bar in bars:
            text = f"{bar.slowest / bar.mean:.2f}" if bar.mean else "–"
            axes.annotate(
                text, (bar.hop, bar.slowest / unit), (0, 2), textcoords="offset points", ha="center", fontsize=9
            )
        axes.set_xticks([bar.hop for bar in bars])
    axes.set(xlabel="hop", ylabel=f"visible pairs, $10^{{{exponent}}}$" if exponent else "visible pairs")
    axes.spines[["top", "right"]].set_visible(False)
    waits = "waiting for the slowest rank" + " (number: slowest / mean)" * few
    axes.legend(
        handles=[Patch(color=colour(0, last)), Patch(color="0.85")],
        labels=["mean of the ranks, in the colour of the hop", waits],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        frameon=False,
        fontsize=9,
    )


def _centroid(corners: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The centre of gravity of a polygon of positive area."""
    x = y = twice = 0.0
    for (x0, y0), (x1, y1) in zip(corners, [*corners[1:], corners[0]], strict=True):
        cross = x0 * y1 - x1 * y0
        x, y, twice = x + (x0 + x1) * cross, y + (y0 + y1) * cross, twice + cross
    return x / (3 * twice), y / (3 * twice)
