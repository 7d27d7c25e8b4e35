"""Where the ranks of each axis lie: Ulysses groups inside nodes, rings across them. Arithmetic, no processes."""

from collections import defaultdict
from collections.abc import Sequence
from math import gcd

from usp.errors import TopologyError

Grid = tuple[tuple[int, ...], ...]
"""One sequence-parallel group as global ranks, `grid[ring_rank][ulysses_rank]`."""


def place(
    nodes: Sequence[str], ulysses_degree: int, ring_degree: int, allow_cross_node: bool = False
) -> tuple[Grid, ...]:
    """Deals ranks to grids of `ring_degree` x `ulysses_degree`; grids are data-parallel replicas of each other.

    Ranks are taken node by node, however the launcher numbered them, so that every Ulysses group lies inside one node
    and a ring crosses between nodes as seldom as it can.

    Args:
        nodes: the node of every global rank.
        ulysses_degree: ranks of a Ulysses group.
        ring_degree: ranks of a ring.
        allow_cross_node: accept Ulysses groups that span nodes.

    Raises:
        TopologyError: a degree is not a positive integer, their product does not divide the world, or a Ulysses group
            would span nodes and that was not allowed.
    """
    for name, degree in (("ulysses_degree", ulysses_degree), ("ring_degree", ring_degree)):
        if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
            raise TopologyError(f"{name} must be a positive integer, got {degree!r}")
    world, size = len(nodes), ulysses_degree * ring_degree
    if world % size:
        fitting = ", ".join(f"{u} x {world // u}" for u in _divisors(world))
        raise TopologyError(
            f"ulysses_degree x ring_degree = {ulysses_degree} x {ring_degree} = {size} does not divide the "
            f"{world} ranks there are; over all of them {fitting} would (smaller products that divide {world} "
            "leave the rest to data parallelism)"
        )
    members: dict[str, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        members[node].append(rank)
    if not allow_cross_node and any(len(ranks) % ulysses_degree for ranks in members.values()):
        raise TopologyError(_straddles(members, ulysses_degree, size))
    order = [rank for ranks in members.values() for rank in ranks]
    groups = [tuple(order[i : i + ulysses_degree]) for i in range(0, world, ulysses_degree)]
    return tuple(tuple(groups[i : i + ring_degree]) for i in range(0, len(groups), ring_degree))


def rows(grids: Sequence[Grid]) -> list[tuple[int, ...]]:
    """The Ulysses groups of all grids."""
    return [row for grid in grids for row in grid]


def columns(grids: Sequence[Grid]) -> list[tuple[int, ...]]:
    """The rings of all grids."""
    return [column for grid in grids for column in zip(*grid, strict=True)]


def crossing(groups: Sequence[tuple[int, ...]], nodes: Sequence[str]) -> list[tuple[int, ...]]:
    """Those of some groups of ranks that span several nodes."""
    return [group for group in groups if len({nodes[rank] for rank in group}) > 1]


def describe(grids: Sequence[Grid], nodes: Sequence[str]) -> str:
    """A table of nodes and their ranks with everyone's coordinates, and which groups cross nodes."""
    cells = {
        rank: f"{rank}: d{d} r{r} u{u}"
        for d, grid in enumerate(grids)
        for r, row in enumerate(grid)
        for u, rank in enumerate(row)
    }
    width, ring = max(map(len, cells.values())), len(grids[0])
    lines = [f"ring {ring} x ulysses {len(grids[0][0])} x data {len(grids)} (rank: d data, r ring, u ulysses)"]
    for node in dict.fromkeys(nodes[rank] for rank in sorted(cells)):
        line = (text.ljust(width) for rank, text in sorted(cells.items()) if nodes[rank] == node)
        lines.append(f"  node {node} | " + " | ".join(line))
    for name, groups in (("ulysses", rows(grids)), ("ring", columns(grids))):
        lines.append(f"  {name} groups that cross nodes: {crossing(groups, nodes) or 'none'}")
    return "\n".join(lines)


def _straddles(members: dict[str, list[int]], ulysses_degree: int, size: int) -> str:
    table = "\n".join(f"  {node}: {len(ranks)} ranks ({_ranks(ranks)})" for node, ranks in members.items())
    common = gcd(*(len(ranks) for ranks in members.values()))
    fitting = ", ".join(f"{u} x {size // u}" for u in _divisors(common) if size % u == 0)
    return (
        f"ulysses_degree={ulysses_degree} does not divide the ranks of every node, so a Ulysses group would span "
        f"nodes, where its all-to-all is slow:\n{table}\n"
        f"ulysses_degree x ring_degree of {fitting} would fit; allow_cross_node=True accepts it as it is"
    )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown + (", ..." if len(ranks) > 8 else "")


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
