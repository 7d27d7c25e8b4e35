"""Inference over a sharded KV cache: `decode` for a few new tokens, `extend` for a chunk of a prompt.

Every rank attends to the keys that it holds, and partial results are merged by log-sum-exp in one small exchange along
each axis (Tree Attention, Shyam et al. 2024, arXiv 2408.04093). A chunk either does the same with its queries gathered
("pass-Q"), or has the keys come by ("pass-KV"), whichever sends less (Yang et al. 2024, arXiv 2411.01783). Nothing here
has a gradient.

B batch, N new tokens that every rank has, S_local this rank's tokens, H query heads, G kv heads, D head_dim of q and k,
E head_dim of v. A rank of a grid has the number ring rank * Ulysses degree + Ulysses rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Unpack, cast

import torch
from torch import Tensor

from usp import kernels, transports
from usp.arguments import (
    AttentionOptions,
    MaskOptions,
    check_names,
    check_options,
    check_tensors,
    masks_of,
    shape_facts,
)
from usp.errors import InputError, USPError
from usp.kernels.base import Call, Scores
from usp.kv_cache import KVCache, check_no_gradient
from usp.mask import FULL, Mask
from usp.merge import Accumulator, accumulation_dtype, merge_
from usp.positions import Positions, split, take
from usp.ring import with_biases
from usp.shard import rows_at, unshard
from usp.tiles import Tile, reach, tiles
from usp.topology import Axis
from usp.transports.base import waiting


class DecodeOptions(MaskOptions, total=False):
    """What `decode` and `extend` may be asked for. Masks are on global positions, and causal where none is given.

    Attributes:
        softcap: c of `c tanh(score / c)` (Gemma 2, 2024); 0 for none.
        sinks: (H,) logits that join every softmax of their head and have no value (gpt-oss, 2025).
        alibi_slopes: (H,) of linear biases: `-slope * |i - j|` is added to a score (Press et al. 2022).
        scale: factor on the scores; default 1 / sqrt(D).
        kernel: "auto", or a name, as in `USPAttention`.
    """

    softcap: float
    sinks: Tensor
    alibi_slopes: Tensor
    scale: float | None
    kernel: str


def decode(query: Tensor, cache: KVCache, **options: Unpack[DecodeOptions]) -> Tensor:
    """Attention of the newest tokens' queries to the whole cache. Collective over the ranks of the cache.

    Every rank attends to the tokens that it holds; then out and lse go to each peer along the Ulysses axis in one
    message, and what that gives along the ring. A rank sends `(U - 1 + R - 1) * B * N * H * (E + 1)` numbers, float32
    (float64 for float64), however long the cache is.

    Args:
        query: (B, N, H, D), of the last N positions of the cache, the same on every rank.
        cache: keys and values, those of these tokens among them.
        **options: see `DecodeOptions`; without a mask it is causal.

    Returns:
        (B, N, H, E) in query's dtype, bit for bit the same on ranks that compute alike: results are merged in the order
        of ranks.

    Raises:
        InputError: an argument that cannot be right; found before any communication.
        KernelError: no kernel takes the call; the message has each one's reason.
        AgreementError: the ranks called with different arguments.
    """
    topology, length = cache.topology, cache.length
    try:
        call = _Call.of(query, cache.shard, length, options)
        if not 0 < query.shape[1] <= length:
            raise InputError(
                f"query has {query.shape[1]} tokens and the cache {length}: they are its last ones, whose keys and "
                "values must be in it already"
            )
    except USPError as error:
        topology.object(error)
        raise
    topology.confirm({"call": "decode", **call.facts(query, cache.shard[1], query.shape[1])})
    partial = call.partial(query, (range(length - query.shape[1], length),), cache)
    for axis in (topology.ulysses, topology.ring):
        partial = _merged([partial] * axis.degree, axis)
    return call.finish(partial, query.dtype)


def extend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: KVCache,
    *,
    seq_len: int | None = None,
    layout: str = "contiguous",
    send: Literal["auto", "queries", "keys"] = "auto",
    **options: Unpack[DecodeOptions],
) -> Tensor:
    """Attention of a sharded chunk of new tokens to the cache and to itself, which joins the cache: a partial prefill.

    Collective over the ranks of the cache. With an empty cache it is a whole prefill. Token i of the C tokens of the
    chunk is at position `cache.length + i`, by the length before the call.

    Args:
        query: (B, S_local, H, D), this rank's shard of the chunk.
        key: (B, S_local, G, D).
        value: (B, S_local, G, E).
        cache: keys and values of what came before, to which those of the chunk are added.
        seq_len: global number C of tokens of the chunk; may be left out where every rank has the same number.
        layout: how the chunk, as a sequence of its own, is dealt to ring ranks.
        send: "queries" gathers the chunk's queries, and partial results go back to their owners; "keys" passes the
            cache round, as far as the chunk sees it. "auto" sends the fewer bytes, of `C H (D b + (E + 1) a)` and
            `L G (D + E) b`, with L keys that are in reach, and b and a bytes of an input and of a float32 (float64 for
            float64): a rank sends (P - 1) / P of either.
        **options: see `DecodeOptions`; without a mask it is causal.

    Returns:
        (B, S_local, H, E) in query's dtype.

    Raises:
        InputError: an argument that cannot be right; found before any communication, and the cache is as before.
        KernelError: no kernel takes the call; the message has each one's reason.
        AgreementError: the ranks called with different arguments.
    """
    topology, start = cache.topology, cache.length
    try:
        if send not in ("auto", "queries", "keys"):
            raise InputError(f"send is {send!r}: it must be 'auto', 'queries' or 'keys'")
        schedule = cache.dealt(key, value, seq_len, layout)
        length = start + schedule.seq_len
        call = _Call.of(query, (key, value), length, options)
        if query.shape[1] != key.shape[1]:
            raise InputError(f"query has {query.shape[1]} tokens and key {key.shape[1]}: both are shards of the chunk")
    except USPError as error:
        topology.object(error)
        raise
    chunk = range(start, length)
    where = {"layout": layout, "cache": start, "send": send}
    topology.confirm({"call": "extend", **where, **call.facts(query, value, len(chunk))})
    cache.add(key, value, schedule)
    seen = call.reach((chunk,))
    if send == "auto":
        send = _fewer_bytes(query, value, len(chunk), sum(map(len, cache.within(*seen))))
    if send == "queries":
        whole = unshard(query, topology, layout=layout, length=len(chunk))
        partial = call.partial(whole, (chunk,), cache)
        of_ring = [rows_at(partial, schedule.positions(rank)) for rank in range(topology.ring.degree)]
        partial = _merged(of_ring, topology.ring)
        lengths = [len(part) for part in split(partial.shape[1], topology.ulysses.degree)]
        return call.finish(_merged(partial.split(lengths, 1), topology.ulysses), query.dtype)
    rows = take(cache.held[cache.rank], cache.within(start, length)[cache.rank])
    total = Accumulator(query, value.shape[-1])
    for block, columns in _walk(cache, seen):
        call.add(total, query, rows, block, columns)
    if call.sinks is not None:
        total.add_sinks(call.sinks)
    return total.result()[0]


@dataclass(frozen=True)
class _Call:
    """How one call attends, whichever keys it is given.

    Attributes:
        masks: one for the batch or one for every row of it.
        kernel: name of the kernel.
        scores: how scores come from q and k, without linear biases.
        sinks: (H,), or None.
        slopes: (H,) of linear biases, or None.
    """

    masks: tuple[Mask, ...]
    kernel: str
    scores: Scores
    sinks: Tensor | None
    slopes: Tensor | None

    @classmethod
    def of(cls, query: Tensor, kv: tuple[Tensor, Tensor], length: int, options: DecodeOptions) -> "_Call":
        """Checks the arguments of a call on a cache that then holds `length` tokens."""
        check_names(options, DecodeOptions)
        given = cast(AttentionOptions, {name: x for name, x in options.items() if name not in ("scale", "kernel")})
        if given.get("mask") is None:
            given.setdefault("is_causal", True)
        if isinstance(boundaries := given.get("cu_seqlens"), Tensor):
            given["cu_seqlens"] = boundaries.tolist()
        key, value = kv
        check_tensors(query, key, value, 1, 1, cross=True)
        check_options(query, key, given)
        sinks, slopes, softcap = given.get("sinks"), given.get("alibi_slopes"), float(given.get("softcap") or 0.0)
        check_no_gradient(query=query, sinks=sinks)
        masks, _ = masks_of(given, query.shape[0])
        for mask in masks:
            _check_documents(mask, length)
        head_dim, scale = query.shape[-1], options.get("scale")
        asked = Call(query.device.type, query.dtype, head_dim, value.shape[-1], softcap != 0.0, slopes is not None)
        kernel = kernels.select(kernels.candidates(options.get("kernel", "auto")), asked)
        return cls(masks, kernel, Scores(head_dim**-0.5 if scale is None else float(scale), softcap), sinks, slopes)

    def facts(self, query: Tensor, value: Tensor, tokens: int) -> dict:
        """What must be equal on all ranks. Not the length of the cache: it would be compared anew at every token."""
        changes = {"sinks": self.sinks, "slopes": self.slopes}
        return {
            **shape_facts(query, value),
            "tokens": tokens,
            "mask": ";".join(map(str, self.masks)),
            "kernel": self.kernel,
            "scale": self.scores.scale,
            "softcap": self.scores.softcap,
            "more": tuple(name for name, t in changes.items() if t is not None),
        }

    def reach(self, rows: Positions) -> tuple[float, float]:
        """Where keys must lie for any of these queries to see them."""
        starts, stops = zip(*(reach(rows, mask) for mask in self.masks), strict=True)
        return min(starts), max(stops)

    def add(
        self, total: Accumulator, query: Tensor, rows: Positions, block: Sequence[Tensor], columns: Positions
    ) -> None:
        """Merges the attention of queries at `rows` to keys and values at `columns`."""
        (key, value), kernel = block, kernels.load(self.kernel)
        scores = with_biases(self.scores, self.slopes, query, rows, columns)
        for row, mask in enumerate(self.masks):
            batch = slice(None) if len(self.masks) == 1 else slice(row, row + 1)
            for tile in _tiles(rows, columns, mask):
                q, k, v = query[batch, tile.q], key[batch, tile.k], value[batch, tile.k]
                if tile.band == FULL and self.slopes is None:  # heads may be rows, and few rows read keys but once
                    rows_of = kernel.forward(_heads_as_rows(q, k.shape[2]), k, v, FULL, scores)
                    out, lse = (_rows_as_heads(t, q.shape[1]) for t in rows_of)
                else:
                    out, lse = kernel.forward(q, k, v, tile.band, scores.cut(tile.q, tile.k))
                total.add((batch, tile.q, slice(None)), out, lse)

    def partial(self, query: Tensor, rows: Positions, cache: KVCache) -> Tensor:
        """(B, N, H, E + 1): output and lse of this rank's own keys, one message, in float32 (float64 for float64)."""
        key, value = cache.shard
        total = Accumulator(query.to(accumulation_dtype(query.dtype)), value.shape[-1])
        self.add(total, query, rows, (key, value), cache.held[cache.rank])
        out, lse = total.result()
        return torch.cat([out, lse.unsqueeze(-1)], -1)

    def finish(self, merged: Tensor, dtype: torch.dtype) -> Tensor:
        """The output, once sinks have joined."""
        out, lse = merged[..., :-1], merged[..., -1]
        if self.sinks is not None:
            total = Accumulator(merged, out.shape[-1])
            total.add((slice(None), slice(None), slice(None)), out, lse)
            total.add_sinks(self.sinks)
            out, _ = total.result()
        return out.to(dtype).contiguous()


@lru_cache(maxsize=256)  # all layers of a model ask the same
def _tiles(rows: Positions, columns: Positions, mask: Mask) -> tuple[Tile, ...]:
    return tiles(rows, columns, mask)


def _heads_as_rows(x: Tensor, kv_heads: int) -> Tensor:
    """(B, N, H, D) as (B, N H / G, G, D): the query heads of a kv head as so many rows of it."""
    return x.unflatten(2, (kv_heads, -1)).transpose(2, 3).flatten(1, 2)


def _rows_as_heads(x: Tensor, tokens: int) -> Tensor:
    """The way back, of an output (B, N H / G, G, E) or an lse (B, N H / G, G)."""
    return x.unflatten(1, (tokens, -1)).transpose(2, 3).flatten(2, 3)


# ---- what travels ----------------------------------------------------------------------------------------------------


def _merged(parts: Sequence[Tensor], axis: Axis) -> Tensor:
    """Sends each rank of an axis its part (B, N, H, E + 1), and merges all ranks' results for this rank's part.

    In the order of ranks: where all parts are of the same rows, all ranks have the same bits.
    """
    own = parts[axis.rank].contiguous()
    transport = transports.load("auto", axis.group)
    peers = [rank for rank in range(axis.degree) if rank != axis.rank]
    received = {peer: torch.empty_like(own) for peer in peers}
    with waiting(f"partial results along {axis.name}"):
        flight = transport.exchange({peer: parts[peer].contiguous() for peer in peers}, received)
        flight.wait()
    total, *others = (received.get(rank, own) for rank in range(axis.degree))
    for other in others:
        merge_(total[..., :-1], total[..., -1], other[..., :-1], other[..., -1])
    return total


def _walk(cache: KVCache, seen: tuple[float, float]) -> Iterator[tuple[list[Tensor], Positions]]:
    """Every rank's keys and values in `seen`, with their positions, as they come by; this rank's own first.

    Blocks go round the ring, and at each stop round the Ulysses group: P - 1 hops, R - 1 of them between nodes.
    """
    topology, within = cache.topology, cache.within(*seen)
    own = [t[:, within[cache.rank].start : within[cache.rank].stop] for t in cache.shard]
    shapes = [[(t.shape[0], len(tokens), *t.shape[2:]) for t in own] for tokens in within]
    ring, ulysses = (transports.load("auto", axis.group) for axis in (topology.ring, topology.ulysses))
    for outer in ring.circulate(own, shapes[ulysses.rank :: ulysses.size], ring.size - 1):
        first = outer.owner * ulysses.size
        for inner in ulysses.circulate(outer.tensors, shapes[first : first + ulysses.size], ulysses.size - 1):
            owner = first + inner.owner
            yield inner.tensors, take(cache.held[owner], within[owner])


def _fewer_bytes(query: Tensor, value: Tensor, chunk: int, seen: int) -> Literal["queries", "keys"]:
    """What to send for a chunk of queries that see so many keys: see `extend`."""
    (*_, heads, head_dim), (*_, kv_heads, v_head_dim), size = query.shape, value.shape, query.element_size()
    result = (v_head_dim + 1) * accumulation_dtype(query.dtype).itemsize
    queries = chunk * heads * (head_dim * size + result)
    return "queries" if queries < seen * kv_heads * (head_dim + v_head_dim) * size else "keys"


def _check_documents(mask: Mask, length: int) -> None:
    """Documents may end beyond the tokens that there are yet, so that one mask serves for all that is generated."""
    for end in (region.boundaries[-1] for region in mask.regions if region.boundaries):
        if end < length:
            raise InputError(
                f"the documents add up to {end} tokens and the cache then has {length}: the last one must end with "
                "it, or beyond it"
            )
