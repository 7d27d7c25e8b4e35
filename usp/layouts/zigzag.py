"""Two runs a rank, one from the front and its mirror image from the back: causal work is even.

The sequence is cut into 2R chunks and rank r holds chunks r and 2R-1-r (the "head-tail" order of Llama-3's context
parallelism and of zigzag ring attention).
"""

from usp.positions import Positions, part_of


def zigzag(seq_len: int, ring_degree: int, rank: int) -> Positions:
    """Positions of ring rank `rank`: chunks `rank` and `2 * ring_degree - 1 - rank`."""
    chunks = 2 * ring_degree
    return part_of(seq_len, chunks, rank), part_of(seq_len, chunks, chunks - 1 - rank)
