"""One run a rank, in order: what slicing by hand gives. Causal work grows with the rank."""

from usp.positions import Positions, part_of


def contiguous(seq_len: int, ring_degree: int, rank: int) -> Positions:
    """Positions of ring rank `rank`: the rank-th of `ring_degree` consecutive runs."""
    return (part_of(seq_len, ring_degree, rank),)
