"""What the fullest rank holds at the fullest moment of a step, term by term.

Some memory stands all through a step: the states of the model, the activations kept for the backward pass. The rest
comes and goes, and not all at once: when the logits are there, no layer is at work; when the MLP of a layer is, its
attention is not. So the rows of an estimate are the standing ones and those of the one moment that needs most, and
their sum is the peak.

Assumed: a pre-norm transformer with fused norms; mixed precision with Adam (ZeRO, Rajbhandari et al. 2020); tensor
parallelism that splits heads, MLP and vocabulary and leaves the residual stream whole on every rank (no Megatron
sequence parallelism); torch's cross_entropy on all logits, or on those of a chunk of the loss; FlashAttention-2.
For attention the terms are what `usp.all_to_all`, `usp.ring`, `usp.merge` and the transports hold.
"""

from dataclasses import dataclass
from functools import cached_property

from usp import layouts
from usp.errors import InputError
from usp.heads import groups, runs
from usp.planner.spec import ModelSpec, Workload
from usp.planner.traffic import TRANSPORTS, Layer, Shape, bytes_all_to_all, transport_kind
from usp.schedule import Schedule

FRAMEWORK_BYTES = 3 * 2**29
"""Assumed, not derived: 1.5 GiB for the CUDA context, the buffers of NCCL and what the allocator cannot use."""

Rows = list[tuple[str, int]]


@dataclass(frozen=True)
class Memory:
    """A table of memory.

    Attributes:
        rows: (name, bytes on the fullest rank), none of them 0.
    """

    rows: tuple[tuple[str, int], ...]

    @property
    def total_bytes(self) -> int:
        """Sum of the rows: the peak."""
        return _total(self.rows)


def estimate(
    model: ModelSpec,
    workload: Workload,
    ulysses_degree: int,
    ring_degree: int,
    layout: str = "zigzag",
    transport: str = "p2p",
) -> Memory:
    """Peak memory of the fullest rank.

    Args:
        model: the model.
        workload: what it is run on.
        ulysses_degree: ranks of a Ulysses group.
        ring_degree: ranks of a ring.
        layout: how positions are dealt to the ranks of the ring, if need be by the mask of the workload.
        transport: what moves the blocks of the ring, "p2p", "all_gather" or "double_ring:W".

    Raises:
        InputError: a degree is not a positive integer, there are more Ulysses ranks than query heads, or there is no
            layout or transport of that name.
    """
    rank = _Rank(model, workload, _layer(model, workload, (ulysses_degree, ring_degree), layout, transport))
    standing = [*_states(model, workload, ulysses_degree * ring_degree), *_kept(rank)]
    moments = _training(rank) if workload.mode == "train" else _inference(rank)
    rows = [*standing, *max(moments, key=_total), ("framework", FRAMEWORK_BYTES)]
    return Memory(tuple(row for row in rows if row[1]))


def _layer(model: ModelSpec, workload: Workload, degrees: tuple[int, int], layout: str, transport: str) -> Layer:
    """The attention layer that needs most, as one tensor-parallel rank sees it."""
    for name, degree in zip(("ulysses_degree", "ring_degree"), degrees, strict=True):
        if not isinstance(degree, int) or degree < 1:
            raise InputError(f"{name} must be a positive integer, got {degree!r}")
    if transport_kind(transport) not in TRANSPORTS:
        raise InputError(f"there is no transport {transport!r} to plan with: there are {', '.join(TRANSPORTS)}")
    shape = Shape.of(model, workload)
    if degrees[0] > shape.heads:
        raise InputError(
            f"ulysses_degree={degrees[0]} is more than the {shape.heads} query heads of a tensor-parallel rank "
            f"({model.heads} heads, tensor_parallel={workload.tensor_parallel}): use {shape.heads} or fewer"
        )
    mask = workload.mask
    dealt = layouts.layout_for(layout, mask)
    if model.windowed_layers == model.layers:
        mask &= model.window_mask
    return Layer(shape, Schedule(mask, dealt, workload.seq_len, degrees[1]), degrees[0], transport)


@dataclass(frozen=True)
class _Rank:
    """The fullest rank: sizes of what it holds of one layer, in bytes unless they say otherwise.

    Attributes:
        model: the model.
        workload: what it is run on.
        layer: the attention layer.
    """

    model: ModelSpec
    workload: Workload
    layer: Layer

    # ---- counts ------------------------------------------------------------------------------------------------------

    @cached_property
    def places(self) -> tuple[int, int]:
        """The ring rank with the most tokens, and the Ulysses rank with the most heads of q and of k."""
        layer, lengths = self.layer, self.layer.schedule.lengths
        most_tokens = lengths.index(max(lengths))
        most_heads = max(
            range(layer.ulysses_degree), key=lambda u: (layer.q_heads(u) + layer.kv_heads(u), layer.kv_heads(u))
        )
        return most_tokens, most_heads

    @property
    def rows(self) -> int:
        """Tokens of the ring rank: what this rank has of its share of the heads."""
        return self.workload.batch * self.layer.schedule.length(self.places[0])

    @property
    def tokens(self) -> int:
        """Tokens of the sequence shard: what this rank has of everything but attention."""
        length = self.layer.schedule.length(self.places[0])
        return self.workload.batch * _ceil(length, self.layer.ulysses_degree)

    @property
    def q_heads(self) -> int:
        """Query heads that this rank computes."""
        return self.layer.q_heads(self.places[1])

    @property
    def kv_heads(self) -> int:
        """Key/value heads that this rank computes with."""
        return self.layer.kv_heads(self.places[1])

    @property
    def hops(self) -> int:
        """How often blocks move round the ring."""
        return self.layer.schedule.hops

    # ---- tensors -----------------------------------------------------------------------------------------------------

    @property
    def wide(self) -> int:
        """Bytes of an element that is accumulated: float32, or float64 for float64."""
        return self.layer.shape.gradient_bytes

    @property
    def stream(self) -> int:
        """One tensor as wide as the residual stream."""
        return self.tokens * self.model.hidden * self.model.dtype_bytes

    @property
    def q(self) -> int:
        """Queries of this rank's heads."""
        return self.rows * self.q_heads * self.model.head_dim * self.model.dtype_bytes

    @property
    def kv(self) -> int:
        """Keys and values of this rank's heads: one block of the ring."""
        return self.rows * self.kv_heads * (self.model.head_dim + self.model.value_dim) * self.model.dtype_bytes

    @property
    def output(self) -> int:
        """Attention's output of this rank's heads."""
        return self.rows * self.q_heads * self.model.value_dim * self.model.dtype_bytes

    @property
    def lse(self) -> int:
        """The log-sum-exp of this rank's heads, float32 or wider."""
        return self.rows * self.q_heads * self.wide

    @property
    def shards(self) -> int:
        """q, k and v of all heads, before they are exchanged; without a Ulysses group they are the q and kv above."""
        shape = self.layer.shape
        per_token = shape.heads * shape.head_dim + shape.kv_heads * (shape.head_dim + shape.value_dim)
        return self.tokens * per_token * shape.dtype_bytes if self.layer.ulysses_degree > 1 else 0

    @property
    def exchanged(self) -> int:
        """The output of all heads, after its exchange; without a Ulysses group it is the output above."""
        shape = self.layer.shape
        return self.tokens * shape.heads * shape.value_dim * shape.dtype_bytes if self.layer.ulysses_degree > 1 else 0

    @property
    def units(self) -> int:
        """One tensor as wide as the MLP, for all the experts that a token goes through."""
        width = self.model.active_experts * _ceil(self.model.intermediate, self.workload.tensor_parallel)
        return self.tokens * width * self.model.dtype_bytes

    # ---- what autograd saves in a pre-norm block, besides its input --------------------------------------------------

    @property
    def attention_saved(self) -> int:
        """Normed input, q, k, v, output, lse, and the output again as the projection's input."""
        return self.stream + self.q + self.kv + self.output + self.lse + self.exchanged

    @property
    def mlp_saved(self) -> int:
        """Input, normed input, gate, its activation, up and their product, and with experts what goes in and out."""
        dispatched = 2 * self.model.active_experts * self.stream if self.model.experts > 1 else 0
        return 2 * self.stream + (4 if self.model.gated else 2) * self.units + dispatched

    # ---- what attention holds besides --------------------------------------------------------------------------------

    @property
    def one_call(self) -> bool:
        """Whether attention is one kernel call, whose result needs no accumulator."""
        shape, ulysses_degree = self.layer.shape, self.layer.ulysses_degree
        pieces = runs(groups(shape.heads, shape.kv_heads, ulysses_degree, self.places[1]))
        return not self.hops and len(self.layer.schedule.tiles(0, 0)) == 1 and len(pieces) == 1

    @property
    def messages(self) -> int:
        """Send and receive copies of the all-to-all of q, k and v (received forward is what is sent backward)."""
        return bytes_all_to_all(self.layer, *self.places)[0] + bytes_all_to_all(self.layer, *self.places, True)[1]

    @property
    def forward_buffers(self) -> int:
        """The accumulator, a block's output and its copy as wide as the accumulator; four of lse.

        Where there is nothing to widen, the last block's output is there instead, until the next one has come.
        """
        return 0 if self.one_call else 2 * self._widened(self.output) + self.output + 4 * self.lse

    @property
    def backward_buffers(self) -> int:
        """The output's gradient, and dq, dk and dv of one block, while they are computed or while they are added up.

        FlashAttention-2 accumulates dq in float32 itself, has dk and dv for every query head where kv heads are shared,
        and three tensors like lse.
        """
        expanded = self.rows * self.q_heads * (self.model.head_dim + self.model.value_dim) * self.model.dtype_bytes
        kernel = self._widened(self.q) + 3 * self.lse + (expanded if self.q_heads > self.kv_heads else 0)
        computed = kernel + (0 if self.one_call else self._widened(self.q))
        return self.output + self.q + self.kv + max(computed, self._widened(self.q + self.kv))

    @property
    def forward_flight(self) -> int:
        """Blocks of k and v: the present and the next one; of a double ring those of the round, too."""
        return self._blocks(min(self.hops + 1, 2)) * self.kv

    @property
    def backward_flight(self) -> int:
        """The present and the next block, and float32 gradients: of the block that leaves and of that to come.

        Until its own comes again, those of half of its kv heads, too. With "all_gather", for each of the others what
        this rank keeps, sends and receives, in place of what leaves and comes. In a double ring those of the round's
        block, too, and across more than two nodes what leaves and comes there.
        """
        if not self.hops:
            return 0
        pair, blocks = self._widened(self.kv), self._blocks(2) * self.kv
        own = pair // self.kv_heads * _ceil(self.kv_heads, 2)
        if self.layer.transport == "p2p" and self.hops == 1:  # gradients leave when no block is left
            return max(blocks + own, 3 * pair)
        others = 3 * self.hops if self.layer.transport == "all_gather" else 2
        across = 1 + 2 * (self._rounds > 2) if self._rounds > 1 else 0
        return blocks + own + (others + across) * pair

    def _blocks(self, passing: int) -> int:
        """Blocks of k and v besides this rank's own: with "all_gather" those of all ranks, and its own once more."""
        if not self.hops:
            return 0
        if self._rounds > 1:
            return 4
        return self.layer.schedule.ring_degree + 1 if self.layer.transport == "all_gather" else passing

    @property
    def _rounds(self) -> int:
        """Rounds inside nodes of a double ring; otherwise 1."""
        return self.layer.schedule.ring_degree // self.layer.width

    def _widened(self, size: int) -> int:
        """Bytes of a tensor of the model's dtype after it was widened for accumulation."""
        return size // self.model.dtype_bytes * self.wide


# ---- what stands -----------------------------------------------------------------------------------------------------


def _states(model: ModelSpec, workload: Workload, sequence_degree: int) -> Rows:
    """Parameters and, in training, their gradients and Adam's states, by ZeRO stage.

    What a stage shards is gathered where it is used: with stage 3 the parameters of two layers, the one at work and the
    next, and of the embeddings; with stage 2 and 3 the gradients of one layer and of the embeddings are whole before
    they are reduced. Never more is gathered than the rank does not hold anyway.
    """
    stage, tensor_parallel, size = workload.zero_stage, workload.tensor_parallel, model.dtype_bytes
    total = _ceil(model.parameter_count, tensor_parallel)
    shard = _ceil(total, workload.data_parallel * sequence_degree)
    embeddings = min(total, _ceil((1 if model.tied_embeddings else 2) * model.vocab * model.hidden, tensor_parallel))
    of_layer = _ceil(total - embeddings, model.layers)
    parameters, gradients, states = (shard if stage >= least else total for least in (3, 2, 1))
    rows = [
        ("parameters", parameters * size),
        ("gathered parameters", min(2 * of_layer + embeddings, total - parameters) * size),
    ]
    if workload.mode == "inference":
        return rows
    adam = 2 * max(4, size) + (4 if size < 4 else 0)  # two moments, and a float32 copy of half-precision parameters
    return [
        *rows,
        ("gradients", gradients * size),
        ("unreduced gradients", min(of_layer + embeddings, total - gradients) * size),
        ("optimizer states", states * adam),
    ]


def _kept(rank: _Rank) -> Rows:
    """What stays of all layers: for the backward pass, or of a language model's prefill for the tokens to come."""
    model, workload = rank.model, rank.workload
    if workload.mode == "train":
        return [("activations", model.layers * _saved_of_layer(rank))]
    shape = rank.layer.shape
    of_token = shape.kv_heads * (shape.head_dim + shape.value_dim) * shape.dtype_bytes
    generates = model.vocab > 0 and workload.is_causal
    return [("kv cache", model.layers * rank.tokens * of_token if generates else 0)]


def _saved_of_layer(rank: _Rank) -> int:
    """What one layer keeps for the backward pass."""
    more = {
        "none": rank.attention_saved + rank.mlp_saved,
        "selective": rank.output + rank.lse,  # the results of the op `usp::attention`; q, k and v are computed again
        "full": 0,
    }
    return rank.stream + more[rank.workload.checkpointing]


# ---- what comes and goes ---------------------------------------------------------------------------------------------


def _training(rank: _Rank) -> tuple[Rows, ...]:
    """The loss; a layer's MLP; the all-to-all of its attention; its ring: what the backward pass holds, which is more.

    The layer at work has all its saved tensors, those of the MLP until its gradients are through, and the gradient of
    the residual stream.
    """
    # a chunk's logits, and in float32 their log-softmax, its gradient and theirs: the peak of cross_entropy
    tokens = _ceil(rank.tokens, rank.workload.loss_chunks)
    loss = _vocab(rank) * tokens * (rank.model.dtype_bytes + 3 * rank.wide)
    missing = rank.attention_saved + rank.stream - _saved_of_layer(rank)  # negative where the MLP's are kept too
    attention = rank.stream + max(0, missing)
    mlp = rank.stream + max(0, missing + rank.mlp_saved) + (3 if rank.model.gated else 2) * rank.units
    return [("logits", loss)], [("layer at work", mlp)], *_attention(rank, attention)


def _inference(rank: _Rank) -> tuple[Rows, ...]:
    """The logits of the last position; a layer's MLP; the all-to-all before its attention; its ring."""
    loss = _vocab(rank) * rank.workload.batch * (rank.model.dtype_bytes + rank.wide)
    return (
        [("logits", loss)],
        [("layer at work", rank.mlp_saved)],
        *_attention(rank, rank.stream + rank.attention_saved),
    )


def _attention(rank: _Rank, layer: int) -> tuple[Rows, Rows]:
    """The all-to-all, with its inputs and messages, and the ring; `layer` is what the layer holds besides."""
    training = rank.workload.mode == "train"
    ring = rank.backward_buffers if training else rank.shards + rank.forward_buffers
    flight = rank.backward_flight if training else rank.forward_flight
    return (
        [("layer at work", layer), ("attention buffers", rank.shards + rank.messages)],
        [("layer at work", layer), ("attention buffers", ring), ("kv in flight", flight)],
    )


def _vocab(rank: _Rank) -> int:
    return _ceil(rank.model.vocab, rank.workload.tensor_parallel)


def _total(rows: Rows | tuple[tuple[str, int], ...]) -> int:
    return sum(size for _, size in rows)


def _ceil(amount: int, parts: int) -> int:
    return -(-amount // parts)
