"""Cutting tensors along the sequence, and joining them, in the order of a layout.

Ring rank r owns `layout(S, R, r)`; inside a Ulysses group those positions are cut into U consecutive runs.
"""

import torch
from torch import Tensor

from usp import transports
from usp.errors import InputError, USPError
from usp.mask import Mask
from usp.positions import Positions, split, take
from usp.schedule import Schedule
from usp.topology import Axis, Topology
from usp.transports.base import waiting


def local_positions(seq_len: int, topology: Topology, layout: str) -> Positions:
    """Global positions of this rank's shard."""
    owned = dealt(seq_len, topology, layout)
    run = split(owned.length(topology.ring.rank), topology.ulysses.degree)[topology.ulysses.rank]
    return take(owned.positions(topology.ring.rank), run)


def positions(
    seq_len: int, topology: Topology, layout: str = "contiguous", *, device: torch.device | str | None = None
) -> Tensor:
    """Global token positions of this rank's shard, as RoPE needs them.

    Args:
        seq_len: global number of tokens.
        topology: the grid of processes.
        layout: name of the layout.
        device: where the result lives.

    Returns:
        int64 tensor (S_local,).

    Raises:
        InputError: no layout has that name.
    """
    return as_tensor(local_positions(seq_len, topology, layout), device, torch.int64)


def as_tensor(positions: Positions, device: torch.device | str | None, dtype: torch.dtype) -> Tensor:
    """Positions one by one, in the order in which they are held."""
    runs = [torch.arange(run.start, run.stop, run.step, device=device, dtype=dtype) for run in positions]
    return torch.cat(runs) if runs else torch.empty(0, device=device, dtype=dtype)


def shard(x: Tensor, topology: Topology, dim: int = 1, layout: str = "contiguous") -> Tensor:
    """This rank's part of a tensor that every rank holds whole.

    Args:
        x: any tensor with a sequence dimension.
        topology: the grid of processes.
        dim: its sequence dimension.
        layout: name of the layout.

    Returns:
        A contiguous copy of the rows at `positions(x.shape[dim], topology, layout)`.

    Raises:
        InputError: no layout has that name, or `dim` is not a dimension of `x`.
    """
    dim = _dimension(x, dim)
    return rows_at(x, local_positions(x.shape[dim], topology, layout), dim)


def rows_at(x: Tensor, positions: Positions, dim: int = 1) -> Tensor:
    """The rows of a tensor at some positions along a dimension, a contiguous copy."""
    before = (slice(None),) * dim
    pieces = [x[(*before, slice(run.start, run.stop, run.step))] for run in positions]
    return torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0).clone()


@torch.no_grad()
def unshard(
    x: Tensor, topology: Topology, dim: int = 1, layout: str = "contiguous", *, length: int | None = None
) -> Tensor:
    """The whole tensor, on every rank: `unshard(shard(x)) == x` bit by bit. Collective over the ranks of a sequence.

    It has no gradient: the loss of a sharded model is a sum over shards, and does not need the whole.

    Args:
        x: this rank's shard.
        topology: the grid of processes.
        dim: its sequence dimension.
        layout: name of the layout.
        length: global number of tokens; may be left out where every shard is of the same length.

    Raises:
        InputError: the shard is not as long as the layout makes it, or it requires a gradient.
    """
    try:
        dim = _dimension(x, dim)
        if x.requires_grad:
            raise InputError("unshard has no gradient and x requires one: pass x.detach()")
        seq_len = topology.sequence_degree * x.shape[dim] if length is None else length
        check_length(x.shape[dim], "x", seq_len, topology, layout)
    except USPError as error:
        topology.object(error)
        raise
    others = (*x.shape[:dim], *x.shape[dim + 1 :])
    topology.confirm(dict(unshard=others, dim=dim, length=seq_len, layout=layout, dtype=x.dtype, device=x.device.type))
    schedule = dealt(seq_len, topology, layout)
    rows = x.movedim(dim, 0).contiguous()
    lengths = [len(run) for run in split(schedule.length(topology.ring.rank), topology.ulysses.degree)]
    rows = torch.cat(_gather(rows, topology.ulysses, lengths))
    blocks = _gather(rows, topology.ring, list(schedule.lengths))
    whole = rows.new_empty(seq_len, *rows.shape[1:])
    for rank, block in enumerate(blocks):
        start = 0
        for run in schedule.positions(rank):
            whole[run.start : run.stop : run.step] = block[start : start + len(run)]
            start += len(run)
    return whole.movedim(0, dim).contiguous()


def check_length(given: int, name: str, seq_len: int, topology: Topology, layout: str) -> None:
    """Raises InputError if a shard of `seq_len` tokens, called `name`, does not have `given` of them."""
    expected = sum(len(run) for run in local_positions(seq_len, topology, layout))
    if given == expected:
        return
    u, r = topology.ulysses, topology.ring
    hint = "; this looks like the whole sequence: cut it with usp.shard" if given == seq_len else ""
    raise InputError(
        f"{name} has {given} tokens on rank {topology.rank} (ulysses {u.rank} of {u.degree}, ring {r.rank} of "
        f"{r.degree}), and the {layout} layout of a sequence of {seq_len} gives that rank {expected}{hint}"
    )


def dealt(seq_len: int, topology: Topology, layout: str) -> Schedule:
    """How a layout deals a sequence to the ring ranks of a topology."""
    return Schedule(Mask.full(), layout, seq_len, topology.ring.degree)


def _dimension(x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise InputError(f"dim {dim} is not a dimension of a tensor of shape {tuple(x.shape)}")
    return dim % x.ndim


def _gather(rows: Tensor, axis: Axis, lengths: list[int]) -> list[Tensor]:
    """Every rank's rows along an axis."""
    transport = transports.load("auto", axis.group)
    blocks = [
        rows if rank == axis.rank else rows.new_empty(length, *rows.shape[1:]) for rank, length in enumerate(lengths)
    ]
    peers = [rank for rank in range(axis.degree) if rank != axis.rank]
    with waiting(f"unshard along {axis.name}"):
        flight = transport.exchange({peer: rows for peer in peers}, {peer: blocks[peer] for peer in peers})
        flight.wait()
    return blocks
