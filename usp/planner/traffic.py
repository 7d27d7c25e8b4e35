"""How many bytes a rank sends in one attention layer: exactly what the code puts on the wire, counted by arithmetic.

The all-to-all sends each peer the heads that it computes, of q, k and v, and the output back; the ring passes k and v
on, and in the backward pass the gradients of both in float32 (USP, Fang and Zhao 2024, table 1: here with shares that
may differ, with kv heads that go to several ranks, and without the hops that the mask makes needless).
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from usp.heads import share
from usp.planner.spec import ModelSpec, Workload
from usp.positions import split
from usp.schedule import Schedule

TRANSPORTS = ("p2p", "all_gather", "double_ring")
"""The kinds of transports between processes that the planner knows the traffic of."""


def transport_kind(transport: str) -> str:
    """The name of a transport without what it has after a colon."""
    return transport.partition(":")[0]


@dataclass(frozen=True)
class Shape:
    """The tensors of an attention layer before they are sharded.

    Attributes:
        batch: sequences.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: size of a query and key head.
        value_dim: size of a value head.
        dtype_bytes: bytes of an element.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype_bytes: int

    @classmethod
    def of(cls, model: ModelSpec, workload: Workload) -> "Shape":
        """The tensors of one tensor-parallel rank: whole kv heads with all their query heads, where they do not divide.

        More tensor-parallel ranks than kv heads hold one each, some the same.
        """
        tensor = workload.tensor_parallel
        kv_heads = -(-model.kv_heads // tensor)
        heads = kv_heads * -(-model.heads // (tensor * kv_heads))
        return cls(workload.batch, heads, kv_heads, model.head_dim, model.value_dim, model.dtype_bytes)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of a gradient that travels round the ring: it accumulates in float32 or wider."""
        return max(4, self.dtype_bytes)


@dataclass(frozen=True)
class Layer:
    """An attention layer as one sequence-parallel group runs it.

    Attributes:
        shape: its tensors.
        schedule: mask, layout, global length and ring degree.
        ulysses_degree: ranks of a Ulysses group.
        transport: what moves the blocks of the ring: "p2p", "all_gather", or "double_ring:W" with W ranks in each node.
    """

    shape: Shape
    schedule: Schedule
    ulysses_degree: int
    transport: str = "p2p"

    def q_heads(self, ulysses_rank: int) -> int:
        """Query heads that a Ulysses rank computes."""
        return len(share(self.shape.heads, self.shape.heads, self.ulysses_degree, ulysses_rank))

    @property
    def width(self) -> int:
        """Ring ranks of a node that form a ring of their own: all of them, but in a double ring."""
        return int(self.transport.partition(":")[2] or self.schedule.ring_degree)

    def kv_heads(self, ulysses_rank: int) -> int:
        """Key/value heads that a Ulysses rank needs for them."""
        return len(share(self.shape.heads, self.shape.kv_heads, self.ulysses_degree, ulysses_rank))

    @property
    def busiest_ulysses_rank(self) -> int:
        """The Ulysses rank with most query heads, and of those with most kv heads."""
        return max(range(self.ulysses_degree), key=lambda rank: (self.q_heads(rank), self.kv_heads(rank)))

    @property
    def kv_copies(self) -> int:
        """The most Ulysses ranks that one kv head goes to."""
        shape, ranks = self.shape, range(self.ulysses_degree)
        held = Counter(kv for rank in ranks for kv in share(shape.heads, shape.kv_heads, self.ulysses_degree, rank))
        return max(held.values())

    def token_elements(self, ulysses_rank: int) -> int:
        """Elements of the keys and values of a token, of all sequences, as a Ulysses rank holds them."""
        return self.shape.batch * self.kv_heads(ulysses_rank) * (self.shape.head_dim + self.shape.value_dim)


def bytes_all_to_all(layer: Layer, ring_rank: int, ulysses_rank: int, backward: bool = False) -> tuple[int, int]:
    """What a rank sends to the others of its Ulysses group: (before, after) the attention.

    Forward is q, k, v and then the output; backward is the output's gradient and then those of q, k, v.
    """
    shape, degree = layer.shape, layer.ulysses_degree
    lengths = [len(run) for run in split(layer.schedule.length(ring_rank), degree)]
    all_kv = _held(shape.heads, shape.kv_heads, degree)
    q, kv = layer.q_heads(ulysses_rank), layer.kv_heads(ulysses_rank)
    width = shape.head_dim + shape.value_dim
    # In sequence shards this rank holds `mine` tokens of all heads; in head shards, its heads of all tokens.
    mine, others = lengths[ulysses_rank], sum(lengths) - lengths[ulysses_rank]
    if backward:
        before = mine * (shape.heads - q) * shape.value_dim
        after = others * (q * shape.head_dim + kv * width)
    else:
        before = mine * ((shape.heads - q) * shape.head_dim + (all_kv - kv) * width)
        after = others * q * shape.value_dim
    return before * shape.batch * shape.dtype_bytes, after * shape.batch * shape.dtype_bytes


def bytes_ring(layer: Layer, ring_rank: int, ulysses_rank: int, backward: bool = False) -> int:
    """What a rank sends to the others of its ring: blocks of k and v, and in the backward pass their gradients."""
    ring, hops, shape = layer.schedule.ring_degree, layer.schedule.hops, layer.shape
    if not hops:
        return 0
    lengths, width = layer.schedule.lengths, layer.width
    node, place = divmod(ring_rank, width)
    steps = range(hops + 1 if width == ring else width)
    rounds = [[lengths[(node - turn) * width + (place - s) % width] for s in steps] for turn in range(ring // width)]
    across = [passing[0] for passing in rounds]
    # All-gather pads to the longest block. A double ring's blocks go round nodes, and each round all of a node.
    tokens = (ring - 1) * max(lengths)
    if layer.transport != "all_gather":
        tokens = sum(sum(passing[:-1]) for passing in rounds) + sum(across[:-1])
    # Its own share of its own block stays here. The others follow the blocks, or go straight to the owners.
    gradient_tokens = sum(sum(passing[1:]) for passing in rounds) + sum(across[1:]) if backward else 0
    sent = tokens * shape.dtype_bytes + gradient_tokens * shape.gradient_bytes
    return sent * layer.token_elements(ulysses_rank)


@lru_cache(maxsize=256)
def _held(heads: int, kv_heads: int, degree: int) -> int:
    """KV heads that all ranks of a Ulysses group hold together: some are held by several."""
    return sum(len(share(heads, kv_heads, degree, rank)) for rank in range(degree))
