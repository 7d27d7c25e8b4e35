"""Even work for any mask, packed documents above all: equal chunks, dealt to the ring ranks by what their queries see.

The heaviest chunk left goes to the rank of least work: longest processing time first (Graham 1969, "Bounds on
Multiprocessing Timing Anomalies"), here among the ranks with room for it, as in the dispatch of MagiAttention (Tao et
al. 2025). A full mask alone gives contiguous, a causal one zigzag.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from heapq import heappop, heappush, heapreplace

from usp.mask import Mask
from usp.positions import Positions, split
from usp.tiles import pairs, reach

EVEN = 1.02
"""Work of the busiest rank over the mean that is good enough: finer chunks mean more tiles, each a kernel call."""
CHUNKS_EACH = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Chunks a rank that are tried, in steps of about a quarter."""
FEW_CHUNKS = 4
"""Up to that many a rank, chunks may be as short as they come."""
SHORTEST_CHUNK = 64
"""Tokens of a chunk where ranks have more than a few: kernels compute in blocks of about that many."""


def balanced(seq_len: int, ring_degree: int, rank: int, mask: Mask) -> Positions:
    """Positions of ring rank `rank`: as many tokens as `contiguous` gives it, with about as much to see as any rank's.

    Takes the fewest chunks a rank (`CHUNKS_EACH`) that make the work even to within `EVEN`. Where none do, because
    chunks would be too many or too short, it is the most even of what was tried, the coarsest of about equal ones.
    """
    return _dealt(seq_len, ring_degree, mask)[rank]


@lru_cache(maxsize=64)
def _dealt(seq_len: int, ring_degree: int, mask: Mask) -> tuple[Positions, ...]:
    """The positions of all ranks."""
    tried = []
    for each in CHUNKS_EACH:
        if each > FEW_CHUNKS and seq_len < each * ring_degree * SHORTEST_CHUNK:
            break
        chunks = split(seq_len, each * ring_degree)
        work = _work(chunks, mask)
        held = _deal(work, seq_len % len(chunks), ring_degree)
        loads = [sum(work[chunk] for chunk in own) for own in held]
        unevenness = round(max(loads) * ring_degree / max(1, sum(loads)), 2)
        tried.append((unevenness, tuple(_joined(chunks[chunk] for chunk in own) for own in held)))
        if unevenness <= EVEN:
            break
    return min(tried, key=lambda attempt: attempt[0])[1]


def _work(chunks: Sequence[range], mask: Mask) -> list[int]:
    """Visible pairs of each chunk's queries.

    Looked up among the keys that a region lets them reach, so all chunks together cost O(documents), not each.
    """
    work = [0] * len(chunks)
    for region in (Mask((region,)) for region in mask.regions):
        for index, chunk in enumerate(chunks):
            start, stop = reach((chunk,), region)
            keys = range(int(max(start, 0)), int(min(stop, chunks[-1].stop)))
            work[index] += pairs((chunk,), (keys,), region)
    return work


def _deal(work: Sequence[int], longer: int, ring_degree: int) -> list[list[int]]:
    """The chunks of each rank: equally many, and of the first `longer` ones, of one token more, as in an even split.

    So ranks hold as many tokens as with one run each; those of equally many are in the order of their first chunks, as
    windows like it. For either length of chunk there is a queue of the ranks with room for one, each under the work it
    had when it was put there: that is brought up to date when it comes to the front, so the whole is O(n log n).
    """
    loads, held = [0] * ring_degree, [[] for _ in range(ring_degree)]
    longs = [len(own) for own in split(longer, ring_degree)]
    room = longs, [len(work) // ring_degree - long for long in longs]
    queues = [[(0, rank) for rank in range(ring_degree) if left[rank]] for left in room]
    for chunk in sorted(range(len(work)), key=lambda chunk: -work[chunk]):
        left, queue = room[chunk >= longer], queues[chunk >= longer]
        while queue[0][0] < loads[rank := queue[0][1]]:
            heapreplace(queue, (loads[rank], rank))
        heappop(queue)
        held[rank].append(chunk)
        loads[rank] += work[chunk]
        left[rank] -= 1
        if left[rank]:
            heappush(queue, (loads[rank], rank))
    return sorted(map(sorted, held), key=lambda own: (sum(chunk >= longer for chunk in own), own))


def _joined(chunks: Iterable[range]) -> Positions:
    """Ascending chunks as few runs, none of them empty."""
    runs: list[range] = []
    for chunk in filter(None, chunks):
        start = runs.pop().start if runs and runs[-1].stop == chunk.start else chunk.start
        runs.append(range(start, chunk.stop))
    return tuple(runs)
