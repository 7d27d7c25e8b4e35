"""Every R-th token: causal work is even to within one token (Striped Attention, Brandon et al. 2023)."""

from usp.positions import Positions


def striped(seq_len: int, ring_degree: int, rank: int) -> Positions:
    """Positions of ring rank `rank`: rank, rank + R, rank + 2R, ..."""
    return (range(rank, seq_len, ring_degree),)
