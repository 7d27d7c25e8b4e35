"""Which global token positions a rank holds: an ascending tuple of ranges.

Contiguous is one range, zigzag is two, striped is one range with a step. No tensor of indices is ever needed to
reason about a layout, so everything here costs O(ranges), not O(tokens).
"""

Positions = tuple[range, ...]


def count(positions: Positions) -> int:
    """Number of tokens in `positions`."""
    return sum(len(run) for run in positions)


def split(total: int, parts: int) -> tuple[range, ...]:
    """Cuts `range(total)` into `parts` consecutive runs whose lengths differ by at most one, longer ones first."""
    return tuple(part_of(total, parts, part) for part in range(parts))


def part_of(total: int, parts: int, part: int) -> range:
    """The run `split(total, parts)[part]`."""
    size, extra = divmod(total, parts)
    return range(part * size + min(part, extra), (part + 1) * size + min(part + 1, extra))


def take(positions: Positions, wanted: range) -> Positions:
    """The positions whose local indices lie in `wanted`, a range of step 1."""
    taken, offset = [], 0
    for run in positions:
        piece = run[max(wanted.start - offset, 0) : max(wanted.stop - offset, 0)]
        if piece:
            taken.append(piece)
        offset += len(run)
    return tuple(taken)
