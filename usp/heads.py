"""How heads are dealt to Ulysses ranks: contiguous shares of the query heads, and the kv heads those use.

Query head h uses kv head h // G with G = heads // kv_heads (grouped-query attention). With more Ulysses ranks than kv
heads, a kv head goes to several ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from usp.positions import part_of


def share(heads: int, total: int, degree: int, rank: int) -> range:
    """Which of a tensor's heads rank `rank` of `degree` receives.

    Args:
        heads: number of query heads.
        total: number of heads of the tensor itself: `heads` for queries and outputs, the kv heads for keys and values.
        degree: the Ulysses degree.
        rank: the Ulysses rank.
    """
    queries, group = part_of(heads, degree, rank), heads // total
    return range(queries.start // group, (queries.stop - 1) // group + 1)


def groups(heads: int, kv_heads: int, degree: int, rank: int) -> tuple[int, ...]:
    """How many of rank `rank`'s query heads use each of its kv heads, in order."""
    queries, group = part_of(heads, degree, rank), heads // kv_heads
    return tuple(
        min(queries.stop, (kv + 1) * group) - max(queries.start, kv * group)
        for kv in share(heads, kv_heads, degree, rank)
    )


@dataclass(frozen=True)
class HeadRun:
    """Query heads `q` and kv heads `kv` of one rank that form a uniform group: a kernel call of their own."""

    q: slice
    kv: slice


def runs(groups: Sequence[int]) -> tuple[HeadRun, ...]:
    """Cuts a rank's heads into uniform groups. A contiguous share needs at most three: partial, whole, partial."""
    found: list[HeadRun] = []
    q = kv = 0
    while kv < len(groups):
        size, start = groups[kv], kv
        while kv < len(groups) and groups[kv] == size:
            kv += 1
        found.append(HeadRun(slice(q, q + size * (kv - start)), slice(start, kv)))
        q += size * (kv - start)
    return tuple(found)


def halves(runs: Sequence[HeadRun]) -> tuple[list[HeadRun], list[HeadRun]]:
    """The same heads in two parts of about as many query heads; a kv head may be used by both."""
    middle = (runs[-1].q.stop + 1) // 2
    first, rest = [], []
    for run in runs:
        q, kv = run.q, run.kv
        group = (q.stop - q.start) // (kv.stop - kv.start)
        cut = min(max(middle - q.start, 0), q.stop - q.start)
        if kv.stop - kv.start > 1:
            cut -= cut % group
        whole, partial = divmod(cut, group)
        if cut:
            first.append(HeadRun(slice(q.start, q.start + cut), slice(kv.start, kv.start + whole + bool(partial))))
        if q.start + cut < q.stop:
            rest.append(HeadRun(slice(q.start + cut, q.stop), slice(kv.start + whole, kv.stop)))
    return first, rest
