"""USPAttention: exact attention over a sequence sharded in two dimensions (USP, Fang and Zhao 2024).

Ulysses outside, Ring inside: an all-to-all turns sequence shards into head shards, a ring of attention runs over the
sequence of the whole Ulysses group, and a second all-to-all turns the output back.

B batch, S_local this rank's tokens, H query heads, G kv heads, D head_dim of q and k, E head_dim of v.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from usp import kernels, layouts, transports
from usp.all_to_all import Deal, all_to_all
from usp.errors import InputError, TopologyError, USPError
from usp.heads import groups
from usp.kernels.base import Call
from usp.mask import Band, Mask, Region
from usp.positions import split
from usp.ring import Recipe, ring_attention
from usp.schedule import Schedule
from usp.shard import check_length
from usp.topology import Topology


class MaskOptions(TypedDict, total=False):
    """Which keys a query sees, in the words of SDPA and flash-attention, or as a `usp.Mask`.

    Attributes:
        is_causal: hide later keys.
        window_size: (left, right) keys that are seen on either side; -1 or None for no bound.
        cu_seqlens: cumulative boundaries of packed documents over the GLOBAL sequence, (0, ..., seq_len).
        mask: the general form, instead of the three above.
        dropout_p: refused unless 0.
        enable_gqa: grouped-query attention follows from the shapes; False refuses kv heads that differ from the heads.
    """

    is_causal: bool
    window_size: tuple[int | None, int | None]
    cu_seqlens: Sequence[int] | Tensor
    mask: Mask
    dropout_p: float
    enable_gqa: bool


@dataclass(frozen=True)
class _Config:
    """`USPAttention`'s arguments with the names looked up: a wrong one is an error when the model is built."""

    topology: Topology
    layout: str
    candidates: tuple[str, ...]
    transport: str
    scale: float | None

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
def _look_up(topology: Topology, layout: str, kernel: str, transport: str) -> tuple[tuple[str, ...], str]:
    """The names of the kernels to choose from and of the transport. Raises InputError for a name without a file."""
    layouts.load(layout)
    return tuple(kernels.candidates(kernel)), transports.select(transport, topology.ring.group)


class USPAttention(nn.Module):
    """Exact attention over a sequence sharded over `ulysses_degree` x `ring_degree` ranks. Has no parameters.

    Args:
        ulysses_degree: ranks that exchange heads for sequence; at most the number of query heads.
        ring_degree: ranks that pass keys and values round.
        topology: a grid of processes built before, instead of the degrees; otherwise one is built over the default
            process group, once for all modules of these degrees.
        layout: how positions are dealt to ring ranks: "contiguous" for shards sliced by hand; "zigzag" or "striped",
            with shards from `usp.shard`, balance causal work.
        kernel: "auto" (torch's flash attention, else the reference), or a name: "sdpa", "flash_attn", "reference".
        transport: "auto" ("p2p"), or a name: "p2p", "all_gather".
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
        **which: Unpack[MaskOptions],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of this rank's queries to the keys of the whole sequence. Collective over the ranks that share it.

        Args:
            query: (B, S_local, H, D), any floating dtype.
            key: (B, S_local, G, D), H a multiple of G.
            value: (B, S_local, G, E).
            seq_len: global number of tokens; may be left out where every rank has the same number.
            return_lse: also return the log-sum-exp of the scores.
            **which: which keys a query sees, see `MaskOptions`: is_causal, window_size, cu_seqlens, or mask.

        Returns:
            (B, S_local, H, E) in query's dtype; with `return_lse` also (B, S_local, H), float32 (float64 for float64),
            natural log, -inf for a query that sees nothing.

        Raises:
            InputError: an argument that cannot be right; found before any communication.
            KernelError: no kernel takes the call; the message has each one's reason.
            AgreementError: the ranks called with different arguments.
        """
        return _attend((query, key, value), self.config, seq_len, return_lse, which)

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        c = self.config
        degrees = f"ulysses_degree={c.topology.ulysses.degree}, ring_degree={c.topology.ring.degree}"
        kernel = " or ".join(c.candidates)
        return f"{degrees}, layout={c.layout!r}, kernel={kernel!r}, transport={c.transport!r}, scale={c.scale}"


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
    **which: Unpack[MaskOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`USPAttention` as a function: see its constructor and `forward` for arguments, results and errors.

    A model asks for a particular kernel or transport through `USPAttention`.
    """
    return _attend((query, key, value), _Config.of(topology, layout, scale=scale), seq_len, return_lse, which)


def _attend(
    qkv: tuple[Tensor, Tensor, Tensor], config: _Config, seq_len: int | None, return_lse: bool, which: MaskOptions
) -> Tensor | tuple[Tensor, Tensor]:
    topology, ulysses, ring = config.topology, config.topology.ulysses, config.topology.ring
    try:
        _check_tensors(*qkv, ulysses.degree, topology.sequence_degree)
        _check_options(qkv, which)
        local, compiling = qkv[0].shape[1], torch.compiler.is_compiling()
        equal = local * topology.sequence_degree
        if compiling and (seq_len is None or seq_len == equal):  # both may be symbolic: one program for all lengths
            seq_len, lengths = equal, (local,) * ulysses.degree
        else:
            seq_len = index(equal if seq_len is None else seq_len)
            lengths = _lengths(topology, config.layout, seq_len, index(local))
        mask, boundaries = _mask(which)
        mask.check(seq_len)
        recipe = _recipe(qkv, config, mask)
    except USPError as error:
        topology.object(error)
        raise
    topology.confirm(_facts(qkv, recipe, seq_len, ulysses.degree))
    _recommend_balance(config, mask)

    heads, kv_heads = _heads(qkv)
    query, key, value = all_to_all(qkv, Deal(heads, (heads, kv_heads, kv_heads), lengths), True, ulysses.group)
    out, lse = ring_attention(query, key, value, recipe, seq_len, ring.group, boundaries)
    back = Deal(heads, (heads,), lengths)
    (out,) = all_to_all([out], back, False, ulysses.group)
    if not return_lse:
        return out
    (lse,) = all_to_all([lse.unsqueeze(-1)], back, False, ulysses.group)
    return out, lse.squeeze(-1)


@torch.compiler.assume_constant_result  # arithmetic on plain values: nothing in it is for the graph
def _lengths(topology: Topology, layout: str, seq_len: int, local: int) -> tuple[int, ...]:
    """Tokens of the shards of this rank's Ulysses group. Raises InputError if its own does not have `local`."""
    check_length(local, seq_len, topology, layout, "query")
    whole = Schedule(Mask.full(), layout, seq_len, topology.ring.degree).length(topology.ring.rank)
    return tuple(len(run) for run in split(whole, topology.ulysses.degree))


def _recipe(qkv: tuple[Tensor, Tensor, Tensor], config: _Config, mask: Mask) -> Recipe:
    query, _, value = qkv
    ulysses, ring = config.topology.ulysses, config.topology.ring
    head_dim, v_head_dim = index(query.shape[-1]), index(value.shape[-1])
    return Recipe(
        mask=str(mask),
        layout=config.layout,
        ring_degree=ring.degree,
        transport=config.transport,
        kernel=_select(config.candidates, query.device.type, query.dtype, head_dim, v_head_dim),
        groups=groups(*_heads(qkv), ulysses.degree, ulysses.rank),
        scale=head_dim**-0.5 if config.scale is None else float.fromhex(config.scale.hex()),
    )


@torch.compiler.assume_constant_result
def _select(candidates: tuple[str, ...], *call: Any) -> str:
    return kernels.select({name: kernels.load(name) for name in candidates}, Call(*call))


def _heads(qkv: tuple[Tensor, Tensor, Tensor]) -> tuple[int, int]:
    """Numbers of query and kv heads: plain ints, also where torch.compile(dynamic=True) would have them symbolic."""
    return index(qkv[0].shape[2]), index(qkv[1].shape[2])


def _facts(qkv: tuple[Tensor, Tensor, Tensor], recipe: Recipe, seq_len: int, ulysses_degree: int) -> dict:
    """What must be equal on all ranks. Local lengths need not be; `seq_len` decides them."""
    query, key, value = qkv
    return {
        "batch": query.shape[0],
        "seq_len": seq_len,
        "heads": query.shape[2],
        "kv_heads": key.shape[2],
        "head_dim": query.shape[3],
        "v_head_dim": value.shape[3],
        "dtype": query.dtype,
        "device": query.device.type,
        "mask": recipe.mask,
        "layout": recipe.layout,
        "ulysses_degree": ulysses_degree,
        "ring_degree": recipe.ring_degree,
        "kernel": recipe.kernel,
        "transport": recipe.transport,
        "scale": recipe.scale,
        "requires_grad": torch.is_grad_enabled() and any(t.requires_grad for t in qkv),
    }


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, ulysses_degree: int, ranks: int) -> None:
    shapes = {"query": query, "key": key, "value": value}
    for name, t in shapes.items():
        if t.ndim != 4:
            raise InputError(f"{name} must be (batch, sequence, heads, head_dim), got shape {tuple(t.shape)}")
        if not t.dtype.is_floating_point:
            raise InputError(f"{name} must have a floating dtype, got {t.dtype}")
        if (t.dtype, t.device) != (query.dtype, query.device):
            raise InputError(
                f"query, key and value must share dtype and device: query has {query.dtype} on {query.device}, "
                f"{name} has {t.dtype} on {t.device}"
            )
    batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    if batch == 0:
        raise InputError(f"the batch is empty: query has shape {tuple(query.shape)}")
    if key.shape[:2] != (batch, length) or value.shape[:3] != key.shape[:3] or key.shape[3] != head_dim:
        raise InputError(
            "query, key and value must agree in batch and sequence, query and key in head_dim, key and value in heads: "
            f"got query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        )
    if min(heads, kv_heads, head_dim, value.shape[3]) == 0 or heads % kv_heads:
        raise InputError(
            f"query has {heads} heads and key/value {kv_heads}: heads must be a multiple of kv heads, above 0"
        )
    if heads < ulysses_degree:
        fits = max(u for u in range(1, heads + 1) if ranks % u == 0)
        raise InputError(
            f"query has {heads} heads and ulysses_degree={ulysses_degree} needs one head a rank at least: use "
            f"ulysses_degree <= {heads}, such as ulysses_degree={fits} with ring_degree={ranks // fits}"
        )


def _check_options(qkv: tuple[Tensor, Tensor, Tensor], which: MaskOptions) -> None:
    unknown = sorted(set(which) - set(MaskOptions.__annotations__))
    if unknown:
        raise TypeError(f"unknown argument {', '.join(unknown)}: there are {', '.join(MaskOptions.__annotations__)}")
    if which.get("dropout_p", 0.0) != 0.0:
        raise InputError(
            f"dropout_p is {which.get('dropout_p')}: attention dropout is not supported (its random numbers would "
            "have to follow the blocks round the ring); pass 0"
        )
    heads, kv_heads = _heads(qkv)
    if which.get("enable_gqa") is False and heads != kv_heads:
        raise InputError(f"enable_gqa is False, and query has {heads} heads where key/value have {kv_heads}")


def _mask(which: MaskOptions) -> tuple[Mask, Tensor | None]:
    """The mask; and cu_seqlens apart from it where it is a tensor whose values are not known while compiling."""
    mask, window, cu_seqlens = which.get("mask"), which.get("window_size"), which.get("cu_seqlens")
    if mask is not None:
        also = [
            name
            for name in ("is_causal", "window_size", "cu_seqlens")
            if which.get(name) is not None and which.get(name) is not False
        ]
        if also:
            raise InputError(f"mask and {', '.join(also)} were both given: combine them into one mask with &")
        if not isinstance(mask, Mask):
            raise InputError(
                f"mask must be a usp.Mask, got {type(mask).__name__}: a dense mask cannot be sharded exactly"
            )
        if torch.compiler.is_compiling():  # with dynamic=True its numbers may be symbolic
            mask = Mask(tuple(map(_plain_region, mask.regions)))
        return mask, None
    mask = Mask.causal() if which.get("is_causal") else Mask.full()
    if window is not None:
        mask &= Mask.window(*map(_plain, window))
    if isinstance(cu_seqlens, Tensor):
        if torch.compiler.is_compiling():
            return mask, cu_seqlens
        cu_seqlens = cu_seqlens.tolist()
    if cu_seqlens is not None:
        mask &= Mask.cu_seqlens(tuple(map(index, cu_seqlens)))
    return mask, None


def _plain(bound: int | None) -> int | None:
    return None if bound is None else index(bound)


def _plain_region(region: Region) -> Region:
    *bands, queries, keys = (
        Band(_plain(band.lo), _plain(band.hi)) for band in (*region.bands, region.queries, region.keys)
    )
    return Region(tuple(bands), tuple(map(index, region.boundaries)), queries, keys)


def _recommend_balance(config: _Config, mask: Mask) -> None:
    ring, first = config.topology.ring, config.topology.grids[0][0][0]
    if config.layout != "contiguous" or ring.degree == 1 or mask != Mask.causal() or config.topology.rank != first:
        return
    if not torch.compiler.is_compiling():
        warnings.warn(
            f"causal attention over a ring of {ring.degree} in the contiguous layout takes {2 - 1 / ring.degree:.2f} "
            'times as long as in "zigzag", as the last rank has the most work: shard with layout="zigzag"',
            stacklevel=4,
        )
