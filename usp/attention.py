"""USPAttention: exact attention over a sequence sharded in two dimensions (USP, Fang and Zhao 2024).

Ulysses outside, Ring inside: an all-to-all turns sequence shards into head shards, a ring of attention runs over the
sequence of the whole Ulysses group, and a second all-to-all turns the output back.

B batch, S_local this rank's tokens, K_local its keys (S_local, but in cross attention), T joint tokens, H query heads,
G kv heads, D head_dim of q and k, E head_dim of v.
"""

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from usp import kernels, layouts, transports
from usp.all_to_all import Deal, all_to_all
from usp.arguments import (
    QKV,
    AttentionOptions,
    check_joint,
    check_options,
    check_tensors,
    masks_of,
    plain_heads,
    shape_facts,
)
from usp.errors import TopologyError, USPError
from usp.finite import check_finite
from usp.heads import groups, share
from usp.kernels.base import Call
from usp.mask import Mask
from usp.positions import part_of, split
from usp.ring import Recipe, ring_attention
from usp.shard import check_length, dealt
from usp.topology import Topology

MOST_SETTLED = 256
"""Different calls that a module remembers."""
TENSORS = ("sinks", "alibi_slopes", "joint")
"""Options that are tensors, of whose values nothing depends but results."""


@dataclass(frozen=True)
class _Config:
    """`USPAttention`'s arguments with the names looked up: a wrong one is an error when the model is built."""

    topology: Topology
    layout: str
    candidates: tuple[str, ...]
    transports: tuple[str, ...]
    scale: float | None
    settled: "dict[Hashable, _Settled]" = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        topology: Topology,
        layout: str = "contiguous",
        kernel: str = "auto",
        transport: str = "auto",
        scale: float | None = None,
    ) -> "_Config":
        found = _look_up(topology, layout, kernel, transport)
        return cls(topology, layout, *found, None if scale is None else float(scale))


@torch.compiler.assume_constant_result
def _look_up(topology: Topology, layout: str, kernel: str, transport: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the kernels and of the transports to choose from. Raises InputError for one that does not fit."""
    layouts.parse(layout)
    group, inside = topology.ring.group, topology.ring_neighbours
    transports.load(transport, group)
    found = [transports.select(transport, group)]
    if transport == "auto" and inside is not None and 1 < inside < topology.ring.degree:
        found.insert(0, f"double_ring:{inside}")
    return tuple(kernels.candidates(kernel)), tuple(found)


class USPAttention(nn.Module):
    """Exact attention over a sequence sharded over `ulysses_degree` x `ring_degree` ranks. Has no parameters.

    Args:
        ulysses_degree: ranks that exchange heads for sequence; at most the number of query heads.
        ring_degree: ranks that pass keys and values round.
        topology: a grid of processes built before, instead of the degrees; otherwise one is built over the default
            process group, once for all modules of these degrees.
        layout: how positions are dealt to ring ranks: "contiguous" for shards sliced by hand; "zigzag" or "striped",
            with shards from `usp.shard`, balance causal work; `usp.layout_for("balanced", mask)` any work.
        kernel: "auto" (torch's flash attention, else the reference), or a name: "sdpa", "flash_attn", "reference".
        transport: a name: "p2p", "all_gather", or "double_ring:W" for a ring with W neighbours in each node; "auto" is
            that where every rank needs every block of such a ring (no mask, or is_causal), else "p2p".
        scale: factor on the scores; default 1 / sqrt(D).

    Raises:
        TopologyError: the degrees do not fit the processes, or contradict `topology`.
        InputError: there is no layout, kernel or transport of that name, or the transport does not run over the groups.
    """

    def __init__(
        self,
        ulysses_degree: int = 1,
        ring_degree: int = 1,
        *,
        topology: Topology | None = None,
        layout: str = "contiguous",
        kernel: str = "auto",
        transport: str = "auto",
        scale: float | None = None,
    ) -> None:
        super().__init__()
        if topology is None:
            topology = Topology.build(ulysses_degree, ring_degree)
        degrees = topology.ulysses.degree, topology.ring.degree
        if (ulysses_degree, ring_degree) not in (degrees, (1, 1)):
            raise TopologyError(
                f"ulysses_degree={ulysses_degree} and ring_degree={ring_degree} contradict the topology, which is "
                f"ulysses {degrees[0]} x ring {degrees[1]}: leave them out, or give the same"
            )
        self.config = _Config.of(topology, layout, kernel, transport, scale)

    @property
    def topology(self) -> Topology:
        """The grid of processes."""
        return self.config.topology

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        seq_len: int | None = None,
        return_lse: bool = False,
        **options: Unpack[AttentionOptions],
    ) -> Tensor | tuple[Tensor, ...]:
        """Attention of this rank's queries to the keys of the whole sequence. Collective over the ranks that share it.

        Args:
            query: (B, S_local, H, D), any floating dtype; or packed, (S_local, H, D).
            key: (B, K_local, G, D), H a multiple of G; or (K_local, G, D).
            value: (B, K_local, G, E); or (K_local, G, E).
            seq_len: global number of tokens, joint ones not counted; may be left out where every rank has the same
                number.
            return_lse: also return the log-sum-exp of the scores.
            **options: which keys a query sees, see `MaskOptions`: is_causal, window_size, cu_seqlens, or mask; changes
                of the scores, cross attention and joint tokens, see `AttentionOptions`.

        Returns:
            (B, S_local, H, E) in query's dtype, and with joint tokens (B, T, H, E), the same on every rank; with
            `return_lse` then (B, S_local, H), float32 (float64 for float64), natural log, -inf for a query that sees
            nothing, and with joint tokens (B, T, H). Without B where query has none.

        Raises:
            InputError: an argument that cannot be right; found before any communication.
            KernelError: no kernel takes the call; the message has each one's reason.
            AgreementError: the ranks called with different arguments, or one did not come.
            TransportError: a rank failed, or sent nothing within the time-out of the topology.
            NumericsError: in a topology with check="debug", a value is not finite.
        """
        return _attend((query, key, value), self.config, seq_len, return_lse, options)

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        c = self.config
        degrees = f"ulysses_degree={c.topology.ulysses.degree}, ring_degree={c.topology.ring.degree}"
        kernel, transport = " or ".join(c.candidates), " or ".join(c.transports)
        return f"{degrees}, layout={c.layout!r}, kernel={kernel!r}, transport={transport!r}, scale={c.scale}"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    topology: Topology,
    layout: str = "contiguous",
    scale: float | None = None,
    seq_len: int | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, ...]:
    """`USPAttention` as a function: see its constructor and `forward` for arguments, results and errors.

    A model asks for a particular kernel or transport through `USPAttention`.
    """
    return _attend((query, key, value), _Config.of(topology, layout, scale=scale), seq_len, return_lse, options)


@dataclass(frozen=True)
class _Tokens:
    """How the queries, or the keys, of a call are dealt.

    Attributes:
        layout: by which layout, the joint tokens included.
        seq_len: their global number, the joint tokens included.
        lengths: those of the shards of this rank's Ulysses group, without the joint tokens.
        joint: number of joint tokens.
        front: whether those come first.
    """

    layout: str
    seq_len: int
    lengths: tuple[int, ...]
    joint: int = 0
    front: bool = True


@dataclass(frozen=True)
class _Settled:
    """What shapes and arguments decide of a call, whatever the values of its tensors.

    Attributes:
        queries: how the queries are dealt.
        keys: how the keys are dealt: the same object where they are the same tokens.
        masks: one for the batch, or one for every row of it.
        boundaries: of documents that are in no mask.
        recipe: what the ring is made of.
        facts: what must be equal on all ranks. Local lengths need not be; the global ones decide them.
    """

    queries: _Tokens
    keys: _Tokens
    masks: tuple[Mask, ...]
    boundaries: Tensor | None
    recipe: Recipe
    facts: dict[str, Hashable]


@dataclass(frozen=True)
class _Like:
    """All of a tensor but its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @property
    def ndim(self) -> int:
        return len(self.shape)


def _attend(
    qkv: QKV, config: _Config, seq_len: int | None, return_lse: bool, options: AttentionOptions
) -> Tensor | tuple[Tensor, ...]:
    topology, ulysses = config.topology, config.topology.ulysses
    try:
        qkv, options, packed = _as_batch(qkv, options)
        call = _settle_once(qkv, config, seq_len, options)
        if topology.debug and not torch.compiler.is_compiling():
            check_finite(f"rank {topology.rank}", dict(zip(("query", "key", "value"), qkv, strict=True)))
    except USPError as error:
        topology.object(error)
        raise
    topology.confirm(call.facts)
    _recommend_balance(config, call.masks)

    queries, keys = call.queries, call.keys
    heads, kv_heads = plain_heads(*qkv[:2])
    if keys is queries:
        query, key, value = _to_heads(
            qkv, queries, Deal(heads, (heads, kv_heads, kv_heads), queries.lengths), options, topology
        )
    else:
        (query,) = all_to_all(qkv[:1], Deal(heads, (heads,), queries.lengths), True, ulysses.group)
        key, value = all_to_all(qkv[1:], Deal(heads, (kv_heads, kv_heads), keys.lengths), True, ulysses.group)
    mine = share(heads, heads, ulysses.degree, ulysses.rank)
    more = [t[mine.start : mine.stop] for t in _more(options).values()]
    seq_lens = [queries.seq_len] if keys is queries else [queries.seq_len, keys.seq_len]
    out, lse = ring_attention([query, key, value, *more], call.recipe, seq_lens, topology.ring.group, call.boundaries)
    results = _to_rows(out, queries, heads, topology)
    if return_lse:
        results += [part.squeeze(-1) for part in _to_rows(lse.unsqueeze(-1), queries, heads, topology)]
    results = [t.squeeze(0) for t in results] if packed else results
    return results[0] if len(results) == 1 else tuple(results)


def _settle_once(qkv: QKV, config: _Config, seq_len: int | None, options: AttentionOptions) -> _Settled:
    """`_settle`, remembered: in a small call, asking again would take longer than communicating."""
    gradients = torch.is_grad_enabled()
    if torch.compiler.is_compiling():
        return _settle(qkv, config, seq_len, options, gradients)
    given = ((name, _plain_value(x, name)) for name, x in options.items())
    call = (*map(_like, qkv), _plain_value(seq_len), tuple(given), gradients)
    try:
        if (found := config.settled.get(call)) is not None:
            return found
    except TypeError:  # of no use as a mask or a number: `_settle` says why
        return _settle(qkv, config, seq_len, options, gradients)
    if len(config.settled) >= MOST_SETTLED:
        config.settled.clear()
    return config.settled.setdefault(call, _settle(qkv, config, seq_len, options, gradients))


def _settle(qkv: QKV, config: _Config, seq_len: int | None, options: AttentionOptions, gradients: bool) -> _Settled:
    """Checks a call, and finds what it comes to. Raises USPError before any communication."""
    topology = config.topology
    check_tensors(*qkv, topology.ulysses.degree, topology.sequence_degree, "kv_seq_len" in options)
    check_options(*qkv[:2], options)
    check_joint(*qkv, options)
    masks, boundaries = masks_of(options, qkv[0].shape[0])
    queries, keys = _sides(qkv, config, seq_len, options)
    for mask in masks:
        mask.check(queries.seq_len)
    recipe = _recipe(qkv, config, (queries, keys), masks, options)
    facts = _facts(qkv, recipe, (queries, keys), topology.ulysses.degree)
    facts["requires_grad"] = gradients and any(t.requires_grad for t in (*qkv, *_more(options).values()))
    return _Settled(queries, keys, masks, boundaries, recipe, facts)


def _like(x: Tensor) -> _Like:
    return _Like(x.shape, x.dtype, x.device, x.requires_grad)


def _plain_value(option: Any, name: str = "") -> Any:
    """What an option says to `_settle`, as a key of a dictionary: a tensor's values, but where they decide nothing."""
    if isinstance(option, Tensor):
        return _like(option) if name in TENSORS else _plain_value(option.tolist())
    return tuple(_plain_value(x, name) for x in option) if isinstance(option, (list, tuple)) else option


def _as_batch(qkv: QKV, options: AttentionOptions) -> tuple[QKV, AttentionOptions, bool]:
    """Tensors that came packed, (S_local, H, D), as a batch of one; and whether they did."""
    if any(t.ndim != 3 for t in (*qkv, *options.get("joint", ()))):
        return qkv, options, False
    query, key, value = (t.unsqueeze(0) for t in qkv)
    if (joint := options.get("joint")) is not None:
        joint_query, joint_key, joint_value = (t.unsqueeze(0) for t in joint)
        options = {**options, "joint": (joint_query, joint_key, joint_value)}
    return (query, key, value), options, True


def _sides(qkv: QKV, config: _Config, seq_len: int | None, options: AttentionOptions) -> tuple[_Tokens, _Tokens]:
    """How queries and keys are dealt: one object where they are the same tokens."""
    query, key, _ = qkv
    queries = _tokens(config.topology, config.layout, seq_len, query, "query")
    if (joint := options.get("joint")) is not None:
        count, front = index(joint[0].shape[1]), options.get("joint_strategy") != "rear"
        sections = [f"contiguous:{count}", config.layout] if front else [config.layout, f"contiguous:{count}"]
        queries = _Tokens("+".join(sections), queries.seq_len + count, queries.lengths, count, front)
    if "kv_seq_len" not in options:
        return queries, queries
    layout = options.get("kv_layout") or config.layout
    return queries, _tokens(config.topology, layout, options["kv_seq_len"], key, "key")


def _tokens(topology: Topology, layout: str, seq_len: int | None, x: Tensor, name: str) -> _Tokens:
    local = x.shape[1]
    equal = local * topology.sequence_degree
    if torch.compiler.is_compiling() and (seq_len is None or seq_len == equal):
        # Both may be symbolic: one program for all lengths.
        return _Tokens(layout, equal, (local,) * topology.ulysses.degree)
    seq_len = index(equal if seq_len is None else seq_len)
    return _Tokens(layout, seq_len, _lengths(topology, layout, seq_len, index(local), name))


@torch.compiler.assume_constant_result  # arithmetic on plain values: nothing in it is for the graph
def _lengths(topology: Topology, layout: str, seq_len: int, local: int, name: str) -> tuple[int, ...]:
    """Tokens of the shards of this rank's Ulysses group. Raises InputError if its own does not have `local`."""
    check_length(local, name, seq_len, topology, layout)
    whole = dealt(seq_len, topology, layout).length(topology.ring.rank)
    return tuple(len(run) for run in split(whole, topology.ulysses.degree))


def _joint_shares(tokens: _Tokens, topology: Topology) -> list[range]:
    """Which of the joint tokens each rank of this rank's Ulysses group computes."""
    ring = part_of(tokens.joint, topology.ring.degree, topology.ring.rank)
    return [ring[run.start : run.stop] for run in split(len(ring), topology.ulysses.degree)]


def _to_heads(qkv: QKV, tokens: _Tokens, deal: Deal, options: AttentionOptions, topology: Topology) -> list[Tensor]:
    """Sequence shards, with this rank's share of the joint tokens, as head shards of the Ulysses group's tokens."""
    axis, joint = topology.ulysses, options.get("joint")
    found = all_to_all(qkv, deal, True, axis.group)
    if joint is None:
        return found
    shares = _joint_shares(tokens, topology)
    mine = slice(shares[axis.rank].start, shares[axis.rank].stop)
    deal = Deal(deal.heads, deal.totals, tuple(map(len, shares)))
    parts = all_to_all([t[:, mine] for t in joint], deal, True, axis.group)
    return [torch.cat(pair if tokens.front else pair[::-1], 1) for pair in zip(parts, found, strict=True)]


def _to_rows(x: Tensor, tokens: _Tokens, heads: int, topology: Topology) -> list[Tensor]:
    """A head shard as this rank's rows; and with joint tokens all rows of those, which every rank gets."""
    axis = topology.ulysses
    if not tokens.joint:
        return all_to_all([x], Deal(heads, (heads,), tokens.lengths), False, axis.group)
    lengths = tuple(map(len, _joint_shares(tokens, topology)))
    sizes = [sum(lengths), x.shape[1] - sum(lengths)]
    joint, rest = x.split(sizes, 1) if tokens.front else x.split(sizes[::-1], 1)[::-1]
    (rest,) = all_to_all([rest.contiguous()], Deal(heads, (heads,), tokens.lengths), False, axis.group)
    (joint,) = all_to_all([joint.contiguous()], Deal(heads, (heads,), lengths), False, axis.group)
    # A head that all ranks use goes to all of them, and comes back as a sum: here all heads are columns of one.
    rows = joint.flatten(2).unsqueeze(2)
    by_ring_rank = tuple(len(part) for part in split(tokens.joint, topology.ring.degree))
    for over, shares in ((axis, lengths), (topology.ring, by_ring_rank)):
        (rows,) = all_to_all([rows], Deal(over.degree, (1,), shares), True, over.group)
    return [rest, rows.squeeze(2).unflatten(2, (heads, x.shape[-1]))]


def _more(options: AttentionOptions) -> dict[str, Tensor]:
    """The tensors that follow q, k and v, by the names that a recipe has for them."""
    given = {"sinks": options.get("sinks"), "slopes": options.get("alibi_slopes")}
    return {name: t for name, t in given.items() if t is not None}


def _recipe(
    qkv: QKV, config: _Config, sides: tuple[_Tokens, _Tokens], masks: Sequence[Mask], options: AttentionOptions
) -> Recipe:
    query, key, value = qkv
    ulysses, ring = config.topology.ulysses, config.topology.ring
    head_dim, v_head_dim = index(query.shape[-1]), index(value.shape[-1])
    scale, softcap = config.scale, options.get("softcap") or 0.0
    changes = softcap != 0.0, options.get("alibi_slopes") is not None
    queries, keys = sides
    return Recipe(
        masks=tuple(map(str, masks)),
        layouts=(queries.layout,) if keys is queries else (queries.layout, keys.layout),
        ring_degree=ring.degree,
        transport=_transport(config, masks),
        kernel=_select(config.candidates, query.device.type, query.dtype, head_dim, v_head_dim, *changes),
        groups=groups(*plain_heads(query, key), ulysses.degree, ulysses.rank),
        scores=(head_dim**-0.5 if scale is None else _plain(scale), _plain(softcap)),
        more=tuple(_more(options)),
        finite=config.topology.debug,
    )


def _transport(config: _Config, masks: Sequence[Mask]) -> str:
    """The first of those to choose from, but a double ring moves all blocks, also where none is needed."""
    first, *others = config.transports
    return others[0] if others and any(mask not in (Mask.full(), Mask.causal()) for mask in masks) else first


def _plain(number: float) -> float:
    """A plain float, also where torch.compile(dynamic=True) would have it symbolic."""
    return float.fromhex(float(number).hex())


@torch.compiler.assume_constant_result
def _select(candidates: tuple[str, ...], *call: Any) -> str:
    return kernels.select({name: kernels.load(name) for name in candidates}, Call(*call))


def _facts(qkv: QKV, recipe: Recipe, sides: tuple[_Tokens, _Tokens], ulysses_degree: int) -> dict[str, Hashable]:
    query, _, value = qkv
    queries, keys = sides
    return {
        **shape_facts(query, value),
        "seq_len": queries.seq_len,
        "kv_seq_len": keys.seq_len,
        "mask": ";".join(recipe.masks),
        "layout": ";".join(recipe.layouts),
        "ulysses_degree": ulysses_degree,
        "ring_degree": recipe.ring_degree,
        "kernel": recipe.kernel,
        "transport": recipe.transport,
        "scale": recipe.scores[0],
        "softcap": recipe.scores[1],
        "more": recipe.more,
    }


def _recommend_balance(config: _Config, masks: Sequence[Mask]) -> None:
    ring, first = config.topology.ring, config.topology.grids[0][0][0]
    if config.layout != "contiguous" or ring.degree == 1 or config.topology.rank != first:
        return
    if masks == (Mask.causal(),) and not torch.compiler.is_compiling():
        warnings.warn(
            f"causal attention over a ring of {ring.degree} in the contiguous layout takes {2 - 1 / ring.degree:.2f} "
            'times as long as in "zigzag", as the last rank has the most work: shard with layout="zigzag"',
            stacklevel=4,
        )
