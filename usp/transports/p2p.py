"""Point-to-point messages over a torch process group: a ring proper, any sizes, gloo and NCCL."""

import re
from collections.abc import Mapping, Sequence
from textwrap import shorten

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from typing_extensions import override

from usp.agreement import first_silent
from usp.errors import TransportError
from usp.transports.base import Flight, Transport


class P2P(Transport):
    """Batched isend and irecv. Receives are posted first: with sends first, gloo over TCP may run half duplex."""

    group_types = (dist.ProcessGroup, type(None))

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    @override
    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> Flight:
        batch = [
            dist.P2POp(op, tensor, group=self.group, group_peer=peer)
            for op, tensors in ((dist.irecv, receives), (dist.isend, sends))
            for peer, tensor in tensors.items()
            if tensor.numel()
        ]
        peers = [(op.op is dist.irecv, op.group_peer) for op in batch]
        try:
            works = dist.batch_isend_irecv(batch) if batch else []
        except RuntimeError as error:
            raise TransportError(explain(self.group, peers, error)) from error
        return Works(self.group, works, peers, list(sends.values()))

    @override
    def name(self, rank: int) -> str:
        return "rank 0" if self.group is None else _members(self.group)[rank]


class Works:
    """Several pieces of c10d work as one, keeping what is being sent alive.

    Args:
        group: of the works.
        works: one for each of `peers`, or one for all of them, as NCCL has it.
        peers: whether each is a receive, and of whom or to whom, by rank of the group.
        sent: what is being sent.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        works: Sequence[dist.Work],
        peers: Sequence[tuple[bool, int]],
        sent: list[Tensor],
    ) -> None:
        self._group, self._works, self._peers, self._sent = group, works, peers, sent

    def wait(self) -> None:
        """Waits for all of it."""
        for i, work in enumerate(self._works):
            try:
                work.wait()
            except RuntimeError as error:
                peers = self._peers[i : i + 1] if len(self._works) == len(self._peers) else self._peers
                raise TransportError(explain(self._group, peers, error)) from error
        self._sent.clear()


def resolve(name: str) -> dist.ProcessGroup | None:
    """The process group with this name; None for "", an axis of size 1."""
    return _resolve_process_group(name) if name else None  # pyright: ignore[reportArgumentType]


def label(axis: str, ranks: Sequence[int], nodes: Sequence[str]) -> str:
    """The description of a process group from which errors take the hosts of its ranks."""
    return f"usp {axis} " + " ".join(f"{rank}@{nodes[rank]}" for rank in ranks)


def explain(group: dist.ProcessGroup | None, peers: Sequence[tuple[bool, int]], error: RuntimeError) -> str:
    """Who waited for whom in which group, why that ended, and whose fault it may be: a peer may have waited too."""
    assert group is not None  # an axis of one rank sends nothing
    names, ranks = _members(group), dist.get_process_group_ranks(group)
    waited = " and ".join(f"{'receive from' if receives else 'send to'} {names[peer]}" for receives, peer in peers)
    reason = re.sub(r"^\[[^\]]*\] ", "", str(error)).split(". This is typically")[0]
    store = dist.distributed_c10d._get_default_store()
    silent = first_silent(store, dist.get_rank(), [ranks[peer] for _, peer in peers])
    return f"{names[group.rank()]} waited to {waited}: {reason}{silent} ({shorten(group.group_desc, 200)})"


def _members(group: dist.ProcessGroup) -> list[str]:
    """The ranks of a group by their global ranks, with their hosts where it has a `label`."""
    hosts = dict(member.split("@", 1) for member in group.group_desc.split() if "@" in member)
    ranks = dist.get_process_group_ranks(group)
    return [f"rank {rank} on {hosts[str(rank)]}" if str(rank) in hosts else f"rank {rank}" for rank in ranks]
