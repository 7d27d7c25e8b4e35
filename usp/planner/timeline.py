"""What ranks do when, predicted or measured, and how much of their messages they hide behind computing."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import Literal, NamedTuple


class Span(NamedTuple):
    """Something that a rank does.

    Attributes:
        rank: global rank, or of the ring where one ring is looked at; of a transfer, its sender.
        kind: "compute", "start" or "wait" of its thread, or "transfer" of its messages.
        start: seconds since the step began.
        stop: the same.
        label: which hop of the ring or which all-to-all: "forward hop 0", "backward home".
    """

    rank: int
    kind: Literal["compute", "start", "wait", "transfer"]
    start: float
    stop: float
    label: str

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.stop - self.start


@dataclass(frozen=True)
class Timeline:
    """One pass through a layer, as it was simulated.

    Attributes:
        spans: of all ranks, in the order in which they begin.
        ideal_seconds: the kernels of all ranks, dealt evenly to them.
        ranks: ranks of the ring.
    """

    spans: tuple[Span, ...]
    ideal_seconds: float
    ranks: int

    @cached_property
    def seconds(self) -> float:
        """When the last rank has done."""
        return max((span.stop for span in self.spans), default=0.0)

    @property
    def efficiency(self) -> float:
        """Share of the time that kernels would need if work were even and nothing else took time."""
        return self.ideal_seconds / self.seconds if self.seconds else 1.0

    @property
    def hidden(self) -> float:
        """Share of the transfers that computing hides: 1 - waiting / transfers, both summed over ranks; at least 0.

        A rank that waits because others have more to compute counts as waiting, too.
        """
        moving = sum(self.totals("transfer"))
        return max(0.0, 1 - sum(self.totals("wait")) / moving) if moving else 1.0

    def totals(self, kind: str) -> list[float]:
        """Seconds of one kind, of every rank."""
        found = [0.0] * self.ranks
        for span in self.spans:
            if span.kind == kind:
                found[span.rank] += span.seconds
        return found


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
