"""Which global token positions a rank holds: an ascending tuple of ranges.

Contiguous is one range, zigzag is two, striped is one range with a step. No tensor of indices is ever needed to
reason about a layout, so everything here costs O(ranges), not O(tokens).
"""

from itertools import pairwise

Positions = tuple[range, ...]


def count(positions: Positions) -> int:
    """Number of tokens in `positions`."""
    return sum(len(run) for run in positions)


def split(total: int, parts: int) -> tuple[range, ...]:
    """Cuts `range(total)` into `parts` consecutive runs whose lengths differ by at most one, longer ones first."""
    size, extra = total // parts, total % parts
    starts = [part * size + min(part, extra) for part in range(parts + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def take(positions: Positions, wanted: range) -> Positions:
    """The positions whose local indices lie in `wanted`, a range of step 1."""
    taken, offset = [], 0
    for run in positions:
        piece = run[max(wanted.start - offset, 0) : max(wanted.stop - offset, 0)]
        if piece:
            taken.append(piece)
        offset += len(run)
    return tuple(taken)
