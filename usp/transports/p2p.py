"""Point-to-point messages over a torch process group: a ring proper, any sizes, gloo and NCCL."""

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from typing_extensions import override

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
        messages = [(dist.irecv, receives), (dist.isend, sends)]
        batch = [
            dist.P2POp(op, tensor, group=self.group, group_peer=peer)
            for op, tensors in messages
            for peer, tensor in tensors.items()
            if tensor.numel()
        ]
        return Works(dist.batch_isend_irecv(batch) if batch else [], list(sends.values()))


class Works:
    """Several pieces of c10d work as one, keeping what is being sent alive."""

    def __init__(self, works: Sequence[dist.Work], sent: list[Tensor]) -> None:
        self._works, self._sent = works, sent

    def wait(self) -> None:
        """Waits for all of it."""
        for work in self._works:
            work.wait()
        self._sent.clear()


def resolve(name: str) -> dist.ProcessGroup | None:
    """The process group with this name; None for "", an axis of size 1."""
    return _resolve_process_group(name) if name else None  # pyright: ignore[reportArgumentType]
