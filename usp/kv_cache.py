"""A KV cache that is sharded by tokens, and whose ranks know without asking where each token lies.

B batch, N new tokens that every rank has, S_local this rank's tokens, G kv heads, D head_dim of keys, E head_dim of
values.
"""

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from usp.errors import InputError, USPError
from usp.positions import Positions, count, split, take
from usp.schedule import Schedule
from usp.shard import check_length, dealt, rows_at
from usp.topology import Topology


class KVCache:
    """Keys and values of one layer, sharded by tokens over all ranks of a topology; every rank holds all kv heads.

    It starts empty. Every rank knows which positions every other one holds, without asking. Buffers grow by a quarter
    more than what is needed, so that a token is copied four times at most, on average.

    Args:
        topology: the grid of processes.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.rank = topology.ring.rank * topology.ulysses.degree + topology.ulysses.rank
        self._held: list[Positions] = [()] * topology.sequence_degree
        self._counts = [0] * topology.sequence_degree
        self._buffers: list[Tensor] = []

    @classmethod
    def from_shards(
        cls,
        key: Tensor,
        value: Tensor,
        topology: Topology,
        *,
        seq_len: int | None = None,
        layout: str = "contiguous",
    ) -> "KVCache":
        """A cache of what a prefill computed; the shards are copied. No communication.

        Args:
            key: (B, S_local, G, D), this rank's shard.
            value: (B, S_local, G, E).
            topology: the grid of processes.
            seq_len: global number of tokens; may be left out where every rank has the same number.
            layout: how tokens were dealt to ring ranks.

        Raises:
            InputError: the shards are not those of the layout, or do not fit each other.
        """
        cache = cls(topology)
        try:
            schedule = cache.dealt(key, value, seq_len, layout)
        except USPError as error:
            topology.object(error)
            raise
        cache.add(key, value, schedule)
        return cache

    @property
    def length(self) -> int:
        """Global number of tokens, which is the position of the next one."""
        return sum(self._counts)

    @property
    def held(self) -> tuple[Positions, ...]:
        """Global positions of the tokens of every rank, in the order in which it holds them."""
        return tuple(self._held)

    def within(self, start: float, stop: float) -> list[range]:
        """Which of the tokens of every rank lie at positions from `start` to before `stop`, as local indices."""
        bounds = ((sum(bisect_left(run, x) for run in held) for x in (start, stop)) for held in self._held)
        return [range(*pair) for pair in bounds]

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's buffers, room to grow included."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def shard(self) -> tuple[Tensor, Tensor]:
        """This rank's keys (B, S_local, G, D) and values (B, S_local, G, E), at the positions `held[rank]`.

        Raises:
            InputError: nothing was ever added.
        """
        if not self._buffers:
            raise InputError("the cache is empty: add the keys and values of the queries' own tokens first")
        key, value = (buffer[:, : self._counts[self.rank]] for buffer in self._buffers)
        return key, value

    def append(self, key: Tensor, value: Tensor) -> None:
        """Adds tokens that every rank has, as each computes the same new ones. No communication.

        Each token goes to the rank with the fewest, of several to the first: shares even out, and stay even.

        Args:
            key: (B, N, G, D), the same on every rank.
            value: (B, N, G, E), likewise.

        Raises:
            InputError: the tensors do not fit each other, or the tokens held.
        """
        try:
            self.check(key, value)
        except USPError as error:
            self.topology.object(error)
            raise
        counts = list(self._counts)
        dealt: list[Positions] = [()] * len(counts)
        for i in range(key.shape[1]):
            target = counts.index(min(counts))
            counts[target] += 1
            dealt[target] = _join(dealt[target], range(i, i + 1))
        own = dealt[self.rank]
        self._add(rows_at(key, own), rows_at(value, own), dealt)

    def dealt(self, key: Tensor, value: Tensor, seq_len: int | None, layout: str) -> Schedule:
        """How a sequence of new tokens is dealt of which these are this rank's shards.

        Raises:
            InputError: they are not, or cannot join what is held.
        """
        self.check(key, value)
        seq_len = key.shape[1] * self.topology.sequence_degree if seq_len is None else seq_len
        check_length(key.shape[1], "key", seq_len, self.topology, layout)
        return dealt(seq_len, self.topology, layout)

    def add(self, key: Tensor, value: Tensor, schedule: Schedule) -> None:
        """Adds this rank's shards of a sequence that follows what is held, dealt as `dealt` says."""
        dealt = [
            take(whole, part)
            for whole in map(schedule.positions, range(schedule.ring_degree))
            for part in split(count(whole), self.topology.ulysses.degree)
        ]
        self._add(key, value, dealt)

    def check(self, key: Tensor, value: Tensor) -> None:
        """Raises InputError if tokens cannot join those that are held."""
        if key.ndim != 4 or value.ndim != 4 or value.shape[:3] != key.shape[:3]:
            raise InputError(
                "key and value must be (batch, sequence, kv heads, head_dim) and agree in all but head_dim: got key "
                f"{tuple(key.shape)}, value {tuple(value.shape)}"
            )
        check_no_gradient(key=key, value=value)
        for name, t, kept in zip(("key", "value"), (key, value), self._buffers, strict=False):
            given, holds = ((x.shape[0], *x.shape[2:], x.dtype, x.device) for x in (t, kept))
            if given != holds:
                raise InputError(
                    f"{name} has batch, kv heads, head_dim, dtype and device {given}, and the cache holds {holds}"
                )

    def _add(self, key: Tensor, value: Tensor, dealt: Sequence[Positions]) -> None:
        """Takes this rank's share of new tokens, and which of them each rank has, counted from the first."""
        length = self.length
        start = self._counts[self.rank]
        stop = start + key.shape[1]
        if not self._buffers or stop > self._buffers[0].shape[1]:
            with torch.inference_mode(False):  # a buffer made inside could not be written to outside
                grown = [t.new_empty(t.shape[0], stop + stop // 4, *t.shape[2:]) for t in (key, value)]
            for buffer, old in zip(grown, self._buffers, strict=False):
                buffer[:, :start] = old[:, :start]
            self._buffers = grown
        for buffer, new in zip(self._buffers, (key, value), strict=True):
            buffer[:, start:stop] = new
        for rank, runs in enumerate(dealt):
            for run in runs:
                moved = range(run.start + length, run.stop + length, run.step)
                self._held[rank] = _join(self._held[rank], moved)
                self._counts[rank] += len(run)


def check_no_gradient(**tensors: Tensor | None) -> None:
    """Raises InputError if gradients are on and one of the tensors, by the name it has for the caller, wants one."""
    wanted = [name for name, t in tensors.items() if t is not None and t.requires_grad]
    if wanted and torch.is_grad_enabled():
        raise InputError(
            f"{wanted[0]} requires a gradient, and inference has none: call inside torch.no_grad() or pass "
            f"{wanted[0]}.detach()"
        )


def _join(positions: Positions, run: range) -> Positions:
    """Positions and a later run, which is made one with the last where a step leads from one to the other."""
    if positions:
        last = positions[-1]
        step = run.start - last[-1]
        if all(len(part) == 1 or part.step == step for part in (last, run)):
            return (*positions[:-1], range(last.start, run[-1] + 1, step))
    return (*positions, run)
