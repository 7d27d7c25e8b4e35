"""Every block to every rank at once: fewer, larger messages for memory of the whole sequence's keys and values.

Worth it when kv is small beside q (GQA with few kv heads, short sequences); the first block is used while the others
arrive. Gradient shares go straight to their owners, as a reduce-scatter does.
"""

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from usp.transports.p2p import P2P


class AllGather(P2P):
    """One all-gather in place of the hops; the same blocks in the same order."""

    @override
    def circulate(
        self, block: Tensor, numels: Sequence[int], hops: int, gradient: Tensor | None = None
    ) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        padded = block.new_zeros(max(numels))  # the collective wants equal sizes
        padded[: block.numel()] = block
        gathered = list(block.new_empty(self.size, len(padded)))
        work = dist.all_gather(gathered, padded, group=self.group, async_op=True) if hops else None
        owners = [(self.rank - hop) % self.size for hop in range(hops + 1)]
        shares = {owner: None if gradient is None else gradient.new_zeros(numels[owner]) for owner in owners}
        yield self.rank, block, shares[self.rank]
        if work is not None:
            work.wait()
        for owner in owners[1:]:
            yield owner, gathered[owner][: numels[owner]], shares[owner]
        if gradient is not None:
            users = [(self.rank + hop) % self.size for hop in range(1, hops + 1)]
            received = {user: gradient.new_empty(len(gradient)) for user in users}
            sent = {owner: share for owner, share in shares.items() if share is not None}
            gradient += sent.pop(self.rank)
            self.exchange(sent, received).wait()
            for share in received.values():
                gradient += share
