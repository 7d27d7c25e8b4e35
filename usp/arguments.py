"""What attention is called with, and what can be wrong with it: found before any communication.

B batch, S_local this rank's tokens, H query heads, G kv heads, T joint tokens, D head_dim of q and k, E head_dim of v.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from operator import index
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from usp.errors import InputError
from usp.mask import Band, Mask, Region

QKV = tuple[Tensor, Tensor, Tensor]


class MaskOptions(TypedDict, total=False):
    """Which keys a query sees, in the words of SDPA and flash-attention, or as a `usp.Mask`.

    Attributes:
        is_causal: hide later keys.
        window_size: (left, right) keys that are seen on either side; -1 or None for no bound.
        cu_seqlens: cumulative boundaries of packed documents over the GLOBAL sequence, (0, ..., seq_len); or a list of
            such, one for each batch row.
        mask: the general form, instead of the three above; or a list of masks, one for each batch row.
        dropout_p: refused unless 0.
        enable_gqa: grouped-query attention follows from the shapes; False refuses kv heads that differ from the heads.
    """

    is_causal: bool
    window_size: tuple[int | None, int | None]
    cu_seqlens: Sequence[int] | Tensor | Sequence[Sequence[int]]
    mask: Mask | Sequence[Mask]
    dropout_p: float
    enable_gqa: bool


class AttentionOptions(MaskOptions, total=False):
    """What else attention may be asked for.

    Attributes:
        softcap: c of `c tanh(score / c)` (Gemma 2, 2024); 0 for none.
        sinks: (H,) learned logits that join every softmax of their head and have no value (gpt-oss, 2025). A rank's
            gradient is that of its queries and heads: averaged over ranks like that of every parameter, it is exact. An
            lse that is returned counts them.
        alibi_slopes: (H,) of linear biases: `-slope * |i - j|` is added to a score (Press et al. 2022). No gradient.
        kv_seq_len: global number of keys, where they are other tokens than the queries (cross attention).
        kv_layout: how those are dealt to ring ranks; default the layout of the queries.
        joint: query (B, T, H, D), key (B, T, G, D) and value (B, T, G, E) of T tokens that EVERY rank holds, such as
            the text of an image or video model, and that attend, and are attended to, together with the sharded ones.
            Each rank computes a share of their queries; the gradients of all ranks add up to theirs.
        joint_strategy: whether joint tokens come before the sharded ones ("front", the default) or after ("rear").
    """

    softcap: float
    sinks: Tensor
    alibi_slopes: Tensor
    kv_seq_len: int
    kv_layout: str
    joint: QKV
    joint_strategy: Literal["front", "rear"]


def plain_heads(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Numbers of query and kv heads: plain ints, also where torch.compile(dynamic=True) would have them symbolic."""
    return index(query.shape[2]), index(key.shape[2])


def shape_facts(query: Tensor, value: Tensor) -> dict[str, object]:
    """What must be equal on all ranks of tensors (B, S, H, D) and (B, K, G, E), whose lengths need not be."""
    return {
        "batch": query.shape[0],
        "heads": query.shape[2],
        "kv_heads": value.shape[2],
        "head_dim": query.shape[3],
        "v_head_dim": value.shape[3],
        "dtype": query.dtype,
        "device": query.device.type,
    }


def check_tensors(query: Tensor, key: Tensor, value: Tensor, ulysses_degree: int, ranks: int, cross: bool) -> None:
    """Raises InputError if query, key and value cannot belong to one call over `ranks` ranks."""
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
    if key.shape[0] != batch or value.shape[:3] != key.shape[:3] or key.shape[3] != head_dim:
        raise InputError(
            "query, key and value must agree in batch and sequence, query and key in head_dim, key and value in heads: "
            f"got query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        )
    if not cross and key.shape[1] != length:
        raise InputError(
            f"query has {length} tokens and key {key.shape[1]}: both must be shards of one sequence; if keys are those "
            "of another sequence, give its global length as kv_seq_len"
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


def check_names(options: Mapping[str, object], kind: type) -> None:
    """Raises TypeError for an option that a kind of them does not have."""
    unknown = sorted(set(options) - set(kind.__annotations__))
    if unknown:
        raise TypeError(f"unknown argument {', '.join(unknown)}: there are {', '.join(kind.__annotations__)}")


def check_options(query: Tensor, key: Tensor, options: AttentionOptions) -> None:
    """Raises InputError for an option that cannot be right; TypeError for one that does not exist."""
    check_names(options, AttentionOptions)
    if options.get("dropout_p", 0.0) != 0.0:
        raise InputError(
            f"dropout_p is {options.get('dropout_p')}: attention dropout is not supported (its random numbers would "
            "have to follow the blocks round the ring); pass 0"
        )
    heads, kv_heads = plain_heads(query, key)
    if options.get("enable_gqa") is False and heads != kv_heads:
        raise InputError(f"enable_gqa is False, and query has {heads} heads where key/value have {kv_heads}")
    _check_scores(heads, query, options)
    if "kv_seq_len" in options:
        _check_cross(options)
    elif options.get("kv_layout") is not None:
        raise InputError("kv_layout was given without kv_seq_len, the global number of keys of cross attention")


def _check_scores(heads: int, query: Tensor, options: AttentionOptions) -> None:
    softcap = options.get("softcap") or 0.0
    if not (isfinite(softcap) and softcap >= 0):
        raise InputError(f"softcap is {softcap}: it must be a positive number, or 0 for none")
    for name in ("sinks", "alibi_slopes"):
        t = options.get(name)
        if t is None:
            continue
        if t.shape != (heads,) or not t.dtype.is_floating_point or t.device != query.device:
            raise InputError(
                f"{name} must hold a floating number for each of the {heads} query heads, on {query.device}: got shape "
                f"{tuple(t.shape)}, {t.dtype} on {t.device}"
            )
    slopes = options.get("alibi_slopes")
    if slopes is not None and slopes.requires_grad:
        raise InputError("alibi_slopes requires a gradient, and there is none for slopes: pass alibi_slopes.detach()")


def _check_cross(options: AttentionOptions) -> None:
    """Queries and keys of two sequences have no common positions, unless a mask says that they have."""
    clash = [
        name for name in ("is_causal", "window_size", "cu_seqlens", "alibi_slopes", "joint") if _given(options, name)
    ]
    if clash:
        raise InputError(
            f"{', '.join(clash)} with kv_seq_len: queries and keys of different sequences have no distance; if they "
            "do, say by mask= which keys at j a query at i sees, both counted from 0"
        )


def check_joint(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> None:
    """Raises InputError if the joint tokens do not fit the sharded ones, or come without a place."""
    joint, strategy = options.get("joint"), options.get("joint_strategy")
    if joint is None:
        if strategy is not None:
            raise InputError(f"joint_strategy={strategy!r} was given without joint tokens")
        return
    if strategy not in (None, "front", "rear"):
        raise InputError(f"joint_strategy is {strategy!r}: it must be 'front' or 'rear'")
    for name, t, like in zip(("query", "key", "value"), joint, (query, key, value), strict=True):
        expected = like.shape[:1] + joint[0].shape[1:2] + like.shape[2:]
        if t.shape != expected or (t.dtype, t.device) != (like.dtype, like.device):
            raise InputError(
                f"the joint {name} must be like {name} but for its length, which is one for all three: got shape "
                f"{tuple(t.shape)}, {t.dtype} on {t.device}, where {name} has {tuple(like.shape)}, {like.dtype} on "
                f"{like.device}"
            )


def masks_of(options: MaskOptions, batch: int) -> tuple[tuple[Mask, ...], Tensor | None]:
    """The mask of the batch, or one for every row of it; and cu_seqlens apart where compilation hides its values.

    Raises:
        InputError: masks are given twice, are no masks, or are not one for each row.
    """
    mask, window, cu_seqlens = options.get("mask"), options.get("window_size"), options.get("cu_seqlens")
    if mask is not None:
        also = [name for name in ("is_causal", "window_size", "cu_seqlens") if _given(options, name)]
        if also:
            raise InputError(f"mask and {', '.join(also)} were both given: combine them into one mask with &")
        return _of_rows([mask] if isinstance(mask, Mask) else mask, batch), None
    mask = Mask.causal() if options.get("is_causal") else Mask.full()
    if window is not None:
        mask &= Mask.window(*map(_plain, window))
    if isinstance(cu_seqlens, Tensor):
        if torch.compiler.is_compiling():
            return (mask,), cu_seqlens
        cu_seqlens = cu_seqlens.tolist()
    if cu_seqlens is None:
        return (mask,), None
    rows: Any = cu_seqlens if len(cu_seqlens) and isinstance(cu_seqlens[0], Sequence) else [cu_seqlens]
    return _of_rows([mask & Mask.cu_seqlens(list(map(index, row))) for row in rows], batch), None


def _given(options: MaskOptions, name: str) -> bool:
    return options.get(name) is not None and options.get(name) is not False


def _of_rows(masks: Sequence[Mask], batch: int) -> tuple[Mask, ...]:
    wrong = next((mask for mask in masks if not isinstance(mask, Mask)), None) if isinstance(masks, Sequence) else masks
    if wrong is not None:
        raise InputError(f"mask must be a usp.Mask, got {type(wrong).__name__}: a dense mask cannot be sharded exactly")
    if len(masks) not in (1, batch):
        raise InputError(f"there are {len(masks)} masks for a batch of {batch}: give one, or one for each row")
    if torch.compiler.is_compiling():  # with dynamic=True their numbers may be symbolic
        masks = [Mask(tuple(map(_plain_region, mask.regions))) for mask in masks]
    return (masks[0],) if all(mask == masks[0] for mask in masks) else tuple(masks)


def _plain(bound: int | None) -> int | None:
    return None if bound is None else index(bound)


def _plain_region(region: Region) -> Region:
    *bands, queries, keys = (
        Band(_plain(band.lo), _plain(band.hi)) for band in (*region.bands, region.queries, region.keys)
    )
    return Region(tuple(bands), tuple(map(index, region.boundaries)), queries, keys)
