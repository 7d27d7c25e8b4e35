"""Real code on tensors without numbers: what ranks of any world send and hold, found in one process.

A rank is run on fake tensors over torch's fake process group, through the functions that the ops of `usp.attention`
call. What is handed to torch.distributed is counted there, whoever hands it over, and beside it stands the planner's
arithmetic. Of ranks that do the same one is run. Shapes, splits, groups and sizes are real; numbers and times are not.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it makes the backend known
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from usp import kernels, transports
from usp.all_to_all import Deal, exchange
from usp.attention import USPAttention
from usp.errors import InputError, USPError
from usp.heads import groups
from usp.kernels.base import Call, Kernel, Scores
from usp.placement import Grid, place
from usp.planner.messages import ALL_TO_ALLS
from usp.planner.spec import ModelSpec
from usp.planner.traffic import Layer, bytes_all_to_all, bytes_ring, transport_kind
from usp.positions import split
from usp.ring import Ring
from usp.topology import Topology

aten = torch.ops.aten

RINGS = ("forward ring", "backward ring")
MOST_STEPS = 900
"""Blocks and Ulysses peers of all ranks that are run: about 20 seconds of one core."""
MOST_BLOCKS = 2**12
"""Blocks that are looked at to tell ranks apart: about half a second."""
MOST_REFERENCE_TOKENS = 2**11
"""Tokens of a ring rank beyond which the reference kernel is too many operations: it computes 384 x 384 scores each."""


class Sent(NamedTuple):
    """What a rank hands to torch.distributed in one part of a pass.

    Attributes:
        messages: point-to-point sends.
        collectives: all-gathers.
        bytes_inside: to ranks of its node.
        bytes_across: to ranks of other nodes.
    """

    messages: int
    collectives: int
    bytes_inside: int
    bytes_across: int

    @property
    def bytes_sent(self) -> int:
        """To anyone."""
        return self.bytes_inside + self.bytes_across


@dataclass(frozen=True)
class Run:
    """What one rank did.

    Attributes:
        rank: its global rank.
        stands_for: ranks that do the same, itself among them.
        sent: by part of a pass, "forward ring" or one of `planner.messages.ALL_TO_ALLS`, what it sent.
        planned_bytes: by the same, what the planner says that it sends.
        peak_bytes: of tensors that were alive at once: its shards, and what attention makes of them.
    """

    rank: int
    stands_for: int
    sent: Mapping[str, Sent]
    planned_bytes: Mapping[str, int]
    peak_bytes: int

    @property
    def equal(self) -> bool:
        """Whether every part sent as many bytes as planned."""
        return all(sent.bytes_sent == self.planned_bytes[part] for part, sent in self.sent.items())


@dataclass(frozen=True)
class How:
    """What is run.

    Attributes:
        dtype: name of q, k and v's dtype.
        device: where the tensors pretend to be, "cuda" or "cpu"; neither is needed.
        kernel: name of a kernel, or "auto".
        backward: whether the backward pass is run too.
    """

    dtype: str = "bfloat16"
    device: str = "cuda"
    kernel: str = "auto"
    backward: bool = True

    def choose(self, layer: Layer) -> str:
        """The name of the kernel.

        Raises:
            InputError: there is no such kernel or device, or it would take hours.
            KernelError: no kernel takes the call.
        """
        if self.device not in ("cuda", "cpu"):
            raise InputError(f"device is {self.device!r}: fake tensors pretend to be on cuda or cpu")
        call = Call(self.device, getattr(torch, self.dtype), layer.shape.head_dim, layer.shape.value_dim)
        name, tokens = kernels.select(kernels.candidates(self.kernel), call), max(layer.schedule.lengths)
        if name == "reference" and tokens > MOST_REFERENCE_TOKENS:
            raise InputError(
                f"the kernel for {call} is the reference, which takes {tokens:,} tokens a ring rank in too many "
                f"operations for a dry run: use {MOST_REFERENCE_TOKENS:,} or fewer, or what flash attention takes: "
                "bfloat16 with head_dim up to 256"
            )
        return name


@dataclass(frozen=True)
class DryRun:
    """One attention layer on a world of ranks.

    Attributes:
        kernel: what computed it.
        ranks: how many there are.
        classes: how many kinds of ranks.
        hops: by which blocks kinds were told apart: as far as any rank sees, or a sample.
        runs: one rank of each kind, or of those with most to do.
    """

    kernel: str
    ranks: int
    classes: int
    hops: Sequence[int]
    runs: Sequence[Run]


def dry_run(layer: Layer, nodes: Sequence[str], how: How, most_steps: int | None = MOST_STEPS) -> DryRun:
    """Runs one rank of each kind: the busiest that the planner counts first, the first and the last, then by bytes.

    Args:
        layer: the attention layer.
        nodes: the node of every global rank; the rest of the world is data parallel.
        how: what is run.
        most_steps: where to stop, in blocks and Ulysses peers of the ranks run, but for the first; None: nowhere.

    Raises:
        USPError: something is not possible, as in `usp.attention`; or as for `run`.
    """
    name = how.choose(layer)
    grids = place(nodes, layer.ulysses_degree, layer.schedule.ring_degree, allow_cross_node=True)
    classes = rank_classes(layer, grids, nodes)
    steps = layer.schedule.hops + 1 + layer.ulysses_degree
    most = len(classes) if most_steps is None else max(1, most_steps // steps)
    runs = []
    for ranks in classes[:most]:
        with world(ranks[0], nodes, layer.ulysses_degree, layer.schedule.ring_degree) as topology, fakes():
            try:
                _call(layer, topology, how)
                runs.append(run(layer, topology, kernels.load(name), how, len(ranks)))
            except RuntimeError as error:
                error.add_note(f"in the dry run of rank {ranks[0]} of {layer}")
                raise
    return DryRun(name, len(nodes), len(classes), looked_at(layer), runs)


@contextmanager
def world(rank: int, nodes: Sequence[str], ulysses_degree: int, ring_degree: int) -> Iterator[Topology]:
    """The real topology as a rank of a fake world sees it: the groups are there, the other ranks are not.

    Raises:
        InputError: there is a process group already.
    """
    if dist.is_initialized():
        raise InputError("a dry run makes a process group of its own, and there is one: run it in another process")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(nodes))
    try:
        yield Topology.build(ulysses_degree, ring_degree, nodes=nodes, check="off", allow_cross_node=True)
    finally:
        dist.destroy_process_group()


def run(layer: Layer, topology: Topology, kernel: Kernel, how: How, stands_for: int = 1) -> Run:
    """One rank's forward and backward pass; inside `fakes` without numbers, outside with whatever memory holds.

    Below autograd, as a fake CUDA tensor that requires a gradient ends Python: what is called is what the ops of
    `usp.attention` call, in their order.

    Args:
        layer: the attention layer.
        topology: the world as that rank sees it.
        kernel: what computes tiles.
        how: the dtype, the device, and whether the backward pass is run.
        stands_for: how many ranks do the same.

    Raises:
        USPError: a result has another shape, dtype or device than it must, or what was sent cannot be counted.
    """
    shape, schedule, where = layer.shape, layer.schedule, (topology.ring.rank, topology.ulysses.rank)
    lengths = _lengths(layer, where[0])
    deal = Deal(shape.heads, (shape.heads, shape.kv_heads, shape.kv_heads), lengths)
    of_out = Deal(shape.heads, (shape.heads,), lengths)
    own = groups(shape.heads, shape.kv_heads, layer.ulysses_degree, where[1])
    end = transports.load(layer.transport, topology.ring.group)
    ring = Ring((schedule,), end, kernel, own, Scores(shape.head_dim**-0.5))
    ulysses = transports.load("auto", topology.ulysses.group)
    sent: dict[str, Sent] = {}

    def swap(part: str, tensors: list[Tensor], deal: Deal, to_heads: bool) -> list[Tensor]:
        found = exchange(tensors, deal, to_heads, ulysses) if layer.ulysses_degree > 1 else tensors
        sent[part] = meter.take(topology)
        return found

    with Meter() as meter:
        shards = _qkv(layer, topology, how)
        like = [_Like.of(t) for t in shards]
        q, k, v = swap(ALL_TO_ALLS[0], shards, deal, True)
        out, lse = ring.forward(q, k, v)
        sent[RINGS[0]] = meter.take(topology)
        rows = swap(ALL_TO_ALLS[1], [out], of_out, False)
        _check("output", rows, [like[0].as_wide_as(like[2])], topology)
        if how.backward:
            del shards  # what the model computed for attention is not saved
            (dout,) = swap(ALL_TO_ALLS[2], [torch.empty_like(rows[0])], of_out, True)
            gradients = list(ring.backward(dout, q, k, v, out, lse))
            sent[RINGS[1]] = meter.take(topology)
            del dout, q, k, v, out, lse  # as autograd lets go of what a node has saved
            gradients = swap(ALL_TO_ALLS[3], gradients, deal, False)
            _check("gradients", gradients, like, topology)
    return Run(topology.rank, stands_for, sent, planned_bytes(layer, *where, how.backward), meter.peak_bytes)


def _call(layer: Layer, topology: Topology, how: How) -> None:
    """`usp.USPAttention` itself: its checks, and the shapes that its ops tell torch.compile. Nothing is sent."""
    schedule, transport = layer.schedule, layer.transport if topology.ring.degree > 1 else "auto"
    attention = USPAttention(topology=topology, layout=schedule.layout, kernel=how.kernel, transport=transport)
    shards = _qkv(layer, topology, how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that another layout balances: the plan knows
        out = attention(*shards, mask=schedule.mask, seq_len=schedule.seq_len)
    assert isinstance(out, Tensor)  # no lse was asked for
    _check("output for torch.compile", [out], [_Like.of(shards[0]).as_wide_as(_Like.of(shards[2]))], topology)


def _qkv(layer: Layer, topology: Topology, how: How) -> list[Tensor]:
    """A rank's shards, (B, S, H, D), (B, S, G, D) and (B, S, G, E)."""
    shape, local = layer.shape, _lengths(layer, topology.ring.rank)[topology.ulysses.rank]
    widths = (shape.heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.value_dim)
    like: dict[str, Any] = {"dtype": getattr(torch, how.dtype), "device": how.device}
    return [torch.empty(shape.batch, local, *width, **like) for width in widths]


class _Like(NamedTuple):
    """All of a tensor but its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, x: Tensor) -> "_Like":
        return cls(tuple(x.shape), x.dtype, x.device.type)

    def as_wide_as(self, other: "_Like") -> "_Like":
        """With the head_dim of another."""
        return self._replace(shape=(*self.shape[:-1], other.shape[-1]))


def _check(what: str, found: Sequence[Tensor], wanted: Sequence[_Like], topology: Topology) -> None:
    if (given := [_Like.of(t) for t in found]) != list(wanted):
        told, must = (", ".join(f"{tuple(x)}" for x in side) for side in (given, wanted))
        raise USPError(f"rank {topology.rank}: {what} came out as {told} and must be {must}")


# ---- what the planner says -------------------------------------------------------------------------------------------


def planned_bytes(layer: Layer, ring_rank: int, ulysses_rank: int, backward: bool) -> dict[str, int]:
    """What a rank sends in each part of its passes, by the planner."""
    found: dict[str, int] = {}
    for back in (False, True)[: 1 + backward]:
        parts = ALL_TO_ALLS[2 * back], ALL_TO_ALLS[2 * back + 1]
        found |= zip(parts, bytes_all_to_all(layer, ring_rank, ulysses_rank, back), strict=True)
        found[RINGS[back]] = bytes_ring(layer, ring_rank, ulysses_rank, back)
    return found


def attention_alone(model: ModelSpec, windowed: bool = False) -> ModelSpec:
    """A model whose memory is that of one attention layer: all the rest is one element wide."""
    rest = dict.fromkeys(("layers", "hidden", "intermediate", "experts", "active_experts", "parameters"), 1)
    return model.model_copy(update={**rest, "vocab": 0, "windowed_layers": int(windowed)})


# ---- kinds of ranks --------------------------------------------------------------------------------------------------


def rank_classes(layer: Layer, grids: Sequence[Grid], nodes: Sequence[str]) -> list[list[int]]:
    """The global ranks of each kind, the one to run first: of the first kind the planner's busiest, else one amidst.

    Ranks are of one kind that have as many tokens, heads that use each kv head, peers in their node and bytes to send,
    and of whose blocks of the ring the tiles are alike. In what order these come may differ, and with it what a rank
    holds: those amidst others have blocks of all kinds early and late.
    """
    schedule, degree = layer.schedule, layer.ulysses_degree
    hops, ring = looked_at(layer), schedule.ring_degree
    own = [groups(layer.shape.heads, layer.shape.kv_heads, degree, rank) for rank in range(degree)]
    found: dict[Hashable, list[int]] = defaultdict(list)
    order: dict[Hashable, tuple[int, int]] = {}
    for r in range(ring):
        lengths, peers = _lengths(layer, r), ring_peers(layer, r)
        blocks = [schedule.tiles(r, (r - hop) % ring) for hop in hops]
        area = sum(tile.area for block in blocks for tile in block)
        passed_on = bytes_ring(layer, r, 0), bytes_ring(layer, r, 0, True)
        around = schedule.length(r), frozenset(map(str, blocks)), passed_on
        for grid in grids:
            row = [nodes[rank] for rank in grid[r]]
            for u, rank in enumerate(grid[r]):
                near = Counter((row[p] == row[u], own[p], lengths[p]) for p in range(degree) if p != u)
                links = tuple(nodes[grid[p][u]] == row[u] for p in peers)
                kind = around, lengths[u], own[u], frozenset(near.items()), links
                found[kind].append(rank)
                if kind not in order:
                    order[kind] = sum(planned_bytes(layer, r, u, True).values()), area * sum(own[u])
    busiest = grids[0][0][layer.busiest_ulysses_rank]
    ends = grids[0][0][0], grids[-1][-1][-1]

    def first(kind: Hashable) -> tuple:
        ranks = found[kind]
        bytes_sent, work = order[kind]
        return busiest not in ranks, not any(rank in ranks for rank in ends), -bytes_sent, -work

    kinds = [sorted(found[kind]) for kind in sorted(found, key=first)]
    chosen = [busiest, *(ranks[len(ranks) // 2] for ranks in kinds[1:])]
    return [[one, *(rank for rank in ranks if rank != one)] for one, ranks in zip(chosen, kinds, strict=True)]


def looked_at(layer: Layer) -> list[int]:
    """The hops by whose blocks ranks are told apart: all, or of a long ring the first, the last and some between."""
    last = layer.schedule.hops
    number = max(8, MOST_BLOCKS // layer.schedule.ring_degree)
    if last < number:
        return list(range(last + 1))
    return sorted({1, last - 1, *(round(i * last / (number - 3)) for i in range(number - 2))})


def ring_peers(layer: Layer, ring_rank: int) -> list[int]:
    """The ring ranks that a rank sends to, each once: by what lies on its node ranks are told apart."""
    ring, hops, width = layer.schedule.ring_degree, layer.schedule.hops, layer.width
    if not hops:
        return []
    if transport_kind(layer.transport) == "all_gather":
        return [(ring_rank + distance) % ring for distance in range(1, ring)]
    if width < ring:
        node, place = divmod(ring_rank, width)
        return [node * width + (place + 1) % width, (ring_rank + width) % ring]
    return list(dict.fromkeys([(ring_rank + 1) % ring, (ring_rank - hops) % ring]))


def _lengths(layer: Layer, ring_rank: int) -> tuple[int, ...]:
    """Tokens of the sequence shards of a Ulysses group."""
    return tuple(len(run) for run in split(layer.schedule.length(ring_rank), layer.ulysses_degree))


# ---- tensors without numbers -----------------------------------------------------------------------------------------


@contextmanager
def fakes() -> Iterator[None]:
    """Tensors that are made inside have no numbers, and may be on a device that is not there."""
    with FakeTensorMode(), _ByOps():
        yield


def _part(x: Tensor, index: Any) -> Tensor:
    """`x[index]` for slices and an ellipsis."""
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = index[:at] + (slice(None),) * (x.ndim - len(index) + 1) + index[at + 1 :]
    for dim, part in enumerate(index):
        if part != slice(None):
            x = aten.slice.Tensor(x, dim, part.start, part.stop)
    return x


class _ByOps(TorchFunctionMode):
    """Calls ops in place of methods whose Python bindings ask for a CUDA device guard, which a CPU build lacks."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in BY_OPS and isinstance(args[0], FakeTensor):
            return BY_OPS[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


BY_OPS = {
    Tensor.__getitem__: _part,
    Tensor.__setitem__: lambda x, index, value: aten.copy_.default(_part(x, index), value),
    Tensor.copy_: aten.copy_.default,
    Tensor.contiguous: aten.contiguous.default,
}


@dataclass
class _Count:
    """What has been sent since the last look."""

    messages: int = 0
    collectives: int = 0
    bytes_to: Counter[int] = field(default_factory=Counter)


class Meter(TorchDispatchMode):
    """Counts what is handed to torch.distributed, and the bytes of tensors that operations made and that are alive.

    Attributes:
        live_bytes: of storages that are alive.
        peak_bytes: the most that they were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._seen: set[int] = set()
        self._count = _Count()

    def take(self, topology: Topology) -> Sent:
        """What a rank sent since this was last asked for."""
        count, self._count = self._count, _Count()
        here = topology.nodes[topology.rank]
        inside = sum(size for rank, size in count.bytes_to.items() if topology.nodes[rank] == here)
        return Sent(count.messages, count.collectives, inside, count.bytes_to.total() - inside)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._send(func.overloadpacket.__name__, args)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self._seen:
                self._seen.add(key)
                self.live_bytes += tensor.untyped_storage().nbytes()
                finalize(tensor.untyped_storage(), self._free, key, tensor.untyped_storage().nbytes())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _send(self, op: str, args: Any) -> None:
        """Notes a call of torch.distributed. A collective's bytes are those that the others must get from this rank."""
        if op == "recv_":
            return
        if op not in ("send", "allgather_"):
            raise USPError(f"torch.distributed.{op.strip('_')} was called, which a dry run does not know how to count")
        if op == "send":
            tensors, group, target, *_ = args
            receivers = [dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))[target]]
            self._count.messages += 1
        else:
            _, tensors, group, *_ = args
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
            receivers = [rank for rank in ranks if rank != dist.get_rank()]
            self._count.collectives += 1
        for rank in receivers:
            self._count.bytes_to[rank] += sum(t.numel() * t.element_size() for t in tensors)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live_bytes -= size
