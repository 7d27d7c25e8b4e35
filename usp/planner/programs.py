"""What every rank of a ring does, as steps that wait for one another: a program for each way to move the blocks.

`p2p`, `all_gather` and `double_ring` are what the transports of these names do. A step is a kernel call, an exchange of
the Ulysses group or a message; which of them may run at the same time, and how fast, is `usp.planner.simulate`'s
business.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from usp.planner.cost import Machine, Seconds, all_to_all_seconds, block_seconds, kernel_heads, message_seconds
from usp.planner.traffic import Layer

Kind = Literal["compute", "exchange", "message"]
After = tuple[int, ...]
"""Indices of the steps that a step waits for."""
SAMPLED = 32
"""Ranks of a long ring whose tiles are looked at; each of the others takes as long as the nearest of them."""


class Step(NamedTuple):
    """One thing that a rank does.

    Attributes:
        rank: the ring rank; of a message, its sender.
        kind: a kernel call, an exchange of the Ulysses group, or a message round the ring.
        seconds: how long a call or an exchange takes alone.
        target: who receives a message.
        bytes_sent: its size.
        label: what to call it.
        after: what must be over before.
        onward: whether a message is a part of a collective that has begun, and has no latency of its own.
    """

    rank: int
    kind: Kind
    seconds: float
    target: int
    bytes_sent: float
    label: str
    after: After
    onward: bool = False


class Program:
    """The steps of all ranks, each after those that it waits for."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.steps: list[Step] = []
        self._latest: list[After] = [()] * ranks

    def compute(self, rank: int, seconds: float, label: str, after: After) -> After:
        """Adds a kernel call of a rank, which also waits for the rank's previous one."""
        self._latest[rank] = self._add(Step(rank, "compute", seconds, rank, 0, label, after + self._latest[rank]))
        return self._latest[rank]

    def exchange(self, rank: int, seconds: float, label: str, after: After) -> After:
        """Adds a rank's share of an all-to-all."""
        return self._add(Step(rank, "exchange", seconds, rank, 0, label, after)) if seconds else after

    def send(self, rank: int, target: int, sent: float, label: str, after: After, onward: bool = False) -> After:
        """Adds a message of so many bytes."""
        return self._add(Step(rank, "message", 0.0, target, sent, label, after, onward))

    def _add(self, step: Step) -> After:
        self.steps.append(step)
        return (len(self.steps) - 1,)


@dataclass(frozen=True)
class Work:
    """One pass through a layer, as the ranks of one ring see it: those of the busiest Ulysses rank.

    Attributes:
        layer: the layer.
        machine: what it runs on.
        backward: which pass.
    """

    layer: Layer
    machine: Machine
    backward: bool = False

    @property
    def ranks(self) -> range:
        """The ranks of the ring."""
        return range(self.layer.schedule.ring_degree)

    @property
    def hops(self) -> int:
        """How often blocks move."""
        return self.layer.schedule.hops

    @property
    def keeps(self) -> bool:
        """Whether half of a rank's own block is computed at the end, while the last gradients come home."""
        return self.backward and self.hops > 0

    @cached_property
    def tokens_bytes(self) -> list[int]:
        """Bytes of every rank's keys and values."""
        each = self.layer.token_elements(self.layer.busiest_ulysses_rank) * self.layer.shape.dtype_bytes
        return [length * each for length in self.layer.schedule.lengths]

    @cached_property
    def gradient_bytes(self) -> list[int]:
        """Bytes of the gradients of every rank's keys and values; zeros in the forward pass."""
        each = self.layer.token_elements(self.layer.busiest_ulysses_rank) * self.layer.shape.gradient_bytes
        return [length * each * self.backward for length in self.layer.schedule.lengths]

    @property
    def ideal_seconds(self) -> float:
        """The kernels of all ranks, dealt evenly to them."""
        ring = len(self.ranks)
        found = (self.parts(r, (r - hop) % ring).compute for r in self.ranks for hop in range(self.hops + 1))
        return sum(found) / ring

    def seconds(self, rank: int, owner: int) -> float:
        """Time of a rank with the block of an owner."""
        spent = self.parts(rank, owner)
        return spent.compute + (spent.merge if len(self.ranks) > 1 else 0.0)  # a single block is merged into nothing

    def parts(self, rank: int, owner: int) -> Seconds:
        """The same by what it is spent on."""
        ring, layer, device = len(self.ranks), self.layer, self.machine.cluster.device
        if ring > SAMPLED:
            near = round(round(rank * (SAMPLED - 1) / (ring - 1)) * (ring - 1) / (SAMPLED - 1))
            rank, owner = near, (near - rank + owner) % ring
        pair = rank, owner
        if pair not in self._known:
            tiles = layer.schedule.tiles(*pair)
            self._known[pair] = block_seconds(layer.shape, tiles, self._heads, device, self.backward)
        return self._known[pair]

    @cached_property
    def _known(self) -> dict[tuple[int, int], Seconds]:
        return {}

    @cached_property
    def _heads(self) -> list[int]:
        return kernel_heads(self.layer)


Generator = Callable[[Program, Work, Sequence[After]], list[After]]
"""Adds the steps of a ring to a program: from what every rank waits for first, to what it has done last."""


def nothing(ranks: int) -> list[After]:
    """Of every rank: nothing to wait for."""
    return [()] * ranks


def p2p(program: Program, work: Work, begin: Sequence[After]) -> list[After]:
    """The ring of `Transport.circulate`."""
    ring = len(work.ranks)

    def along(rank: int, places: int) -> int:
        return (rank + places) % ring

    def visit(hop: int, here: list[After]) -> list[After]:
        owners = [along(r, -hop) for r in work.ranks]
        return _stop(program, work, owners, f"hop {hop}", here, half=work.keeps and not hop)

    done, home = _circulate(program, work, work.hops, along, lambda r, hop: along(r, -hop), visit, begin)
    return _home(program, work, done, home)


def double_ring(program: Program, work: Work, begin: Sequence[After]) -> list[After]:
    """Rings inside nodes, and one across: a block crosses during a whole round inside (LoongTrain, Gu et al. 2024).

    What a node adds to the gradients of its round's blocks comes together there, and follows them across.
    """
    ring, width = len(work.ranks), work.layer.width
    if not work.hops:
        return p2p(program, work, begin)

    def inside(rank: int, places: int) -> int:
        return rank - rank % width + (rank + places) % width

    def across(rank: int, places: int) -> int:
        return (rank + places * width) % ring

    def round_inside(turn: int, here: list[After]) -> list[After]:
        def owner(rank: int, step: int) -> int:
            return across(inside(rank, -step), -turn)

        def visit(step: int, here: list[After]) -> list[After]:
            owners = [owner(r, step) for r in work.ranks]
            return _stop(program, work, owners, f"hop {turn}.{step}", here, half=work.keeps and not step)

        done, home = _circulate(program, work, width - 1, inside, owner, visit, here)
        if turn and work.keeps:
            done = _stop(program, work, [owner(r, 0) for r in work.ranks], f"home {turn}", done, half=True)
        return [done[r] + home[r] for r in work.ranks]

    rounds = ring // width
    done, home = _circulate(program, work, rounds - 1, across, lambda r, turn: across(r, -turn), round_inside, begin)
    return _home(program, work, done, home)


def all_gather(program: Program, work: Work, begin: Sequence[After]) -> list[After]:
    """All blocks go round at once, as a collective; gradients go straight to their owners when all is computed."""
    ring, last, size = len(work.ranks), work.hops, max(work.tokens_bytes)
    here = list(begin)
    for hop in range(ring - 1 if last else 0):
        sent = [
            program.send(r, (r + 1) % ring, size, f"k, v of {(r - hop) % ring}", here[r], onward=hop > 0)
            for r in work.ranks
        ]
        here = [sent[r - 1] for r in work.ranks]
    done = _stop(program, work, work.ranks, "hop 0", begin, half=work.keeps)
    for hop in range(1, last + 1):
        done = _stop(program, work, [(r - hop) % ring for r in work.ranks], f"hop {hop}", here)
    link, devices = work.machine.path(work.machine.ring)
    home, everyone = nothing(ring), sum(done, ())
    for r in work.ranks if work.keeps else ():
        sent = sum(work.gradient_bytes[r - hop] for hop in range(1, last + 1))
        home[r] = program.exchange(r, message_seconds(link, "ring", devices, sent), "dk, dv home", everyone)
    return _home(program, work, done, home)


def _circulate(
    program: Program,
    work: Work,
    hops: int,
    along: Callable[[int, int], int],
    owner: Callable[[int, int], int],
    visit: Callable[[int, list[After]], list[After]],
    begin: Sequence[After],
) -> tuple[list[After], list[After]]:
    """`Transport.circulate` at all ranks: each block moves on when both ends have come to the hop.

    In the backward pass the gradients of others' blocks follow one hop behind, and go home from the last hop. Nothing
    is computed before those that were awaited are here.

    Args:
        program: what steps are added to.
        work: the pass.
        hops: how often blocks move.
        along: the rank so many places ahead on a rank's ring.
        owner: whose block a rank has at a hop.
        visit: adds what ranks do with the blocks of a hop.
        begin: what every rank waits for.

    Returns:
        What every rank has done when it has left its last stop, and the messages that bring its gradients home.
    """
    here, behind = list(begin), nothing(len(work.ranks))
    for hop in range(hops + 1):
        coming, sent = nothing(len(work.ranks)), nothing(len(work.ranks))
        for r in work.ranks if hop < hops else ():
            block, target = owner(r, hop), along(r, 1)
            coming[target] = program.send(
                r, target, work.tokens_bytes[block], f"k, v of {block}", here[r] + here[target]
            )
        done = visit(hop, here)
        left = [done[r] + behind[r] for r in work.ranks]
        for r in work.ranks if work.backward and hop else ():
            block, target = owner(r, hop), along(r, 1 if hop < hops else -hops)
            sent[target] = program.send(
                r, target, work.gradient_bytes[block], f"dk, dv of {block}", left[r] + left[target]
            )
        here, behind = [left[r] + coming[r] for r in work.ranks], sent
    return here, behind


def _stop(
    program: Program, work: Work, owners: Sequence[int], label: str, here: Sequence[After], half: bool = False
) -> list[After]:
    """Every rank computes with the block of an owner, or with half of it where the rest is kept."""
    seconds = [work.seconds(r, owners[r]) / (1 + half) for r in work.ranks]
    return [program.compute(r, seconds[r], label, here[r]) for r in work.ranks]


def _home(program: Program, work: Work, done: list[After], home: list[After]) -> list[After]:
    """The kept half, while the last gradients come home."""
    if not work.keeps:
        return done
    kept = _stop(program, work, work.ranks, "home", done, half=True)
    return [kept[r] + home[r] for r in work.ranks]


def build(work: Work, generator: Generator) -> Program:
    """The program of one pass: the exchange before, the ring, the exchange after."""
    program = Program(len(work.ranks))
    before, after = all_to_all_seconds(work.layer, work.machine, work.backward)
    done = generator(program, work, [program.exchange(r, before, "exchange before", ()) for r in work.ranks])
    for r in work.ranks:
        program.exchange(r, after, "exchange after", done[r])
    return program
