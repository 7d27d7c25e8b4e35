"""What ranks do when, predicted or measured, and how much of their messages they hide behind computing."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean


@dataclass(frozen=True)
class Span:
    """Something that a rank does.

    Attributes:
        rank: global rank.
        kind: "compute", "start" or "wait" of its thread, or "transfer" of its messages.
        start: seconds since the step began.
        stop: the same.
        label: which hop of the ring or which all-to-all: "forward hop 0", "backward home".
    """

    rank: int
    kind: str
    start: float
    stop: float
    label: str


@dataclass(frozen=True)
class Hop:
    """A hop of the ring, or an all-to-all: means over ranks.

    Attributes:
        label: as of its spans.
        compute_seconds: computing while its messages are under way.
        start_seconds: starting to send and receive them.
        wait_seconds: waiting for them.
        transfer_seconds: what they take alone; 0: there are none.
        longest_seconds: the longest wait of a rank.
        slowest: that rank.
    """

    label: str
    compute_seconds: float
    start_seconds: float
    wait_seconds: float
    transfer_seconds: float
    longest_seconds: float
    slowest: int

    @property
    def ring(self) -> bool:
        """Whether it is a hop of the ring, which computes meanwhile."""
        return "all-to-all" not in self.label


def hops(spans: Iterable[Span], transfers: Mapping[str, float]) -> list[Hop]:
    """The hops of some spans in the order in which they began; `transfers` are seconds by their labels."""
    spans = sorted(spans, key=lambda span: span.start)
    ranks, found = sorted({span.rank for span in spans}), []
    for label in dict.fromkeys(span.label for span in spans):
        total = {(rank, kind): 0.0 for rank in ranks for kind in ("compute", "start", "wait", "transfer")}
        for span in spans:
            if span.label == label:
                total[span.rank, span.kind] += span.stop - span.start
        compute, start, wait = (mean(total[rank, kind] for rank in ranks) for kind in ("compute", "start", "wait"))
        longest, slowest = max((total[rank, "wait"], -rank) for rank in ranks)
        found.append(Hop(label, compute, start, wait, transfers.get(label, 0.0), longest, -slowest))
    return found


def hidden(hops: Sequence[Hop]) -> float | None:
    """Share of some hops' transfers that costs their ranks nothing: 1 - (start + wait) / transfer.

    Below 0 where ranks wait for each other longer than for messages; None where there are none.
    """
    moving = [hop for hop in hops if hop.transfer_seconds]
    exposed = sum(hop.start_seconds + hop.wait_seconds for hop in moving)
    return 1 - exposed / sum(hop.transfer_seconds for hop in moving) if moving else None
