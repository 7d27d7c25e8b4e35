"""From the whole batch of a data loader to this rank's shard of it, with targets shifted before the cut.

Everything that depends on a token's neighbours is settled on the whole batch: the next token, positions, documents and
padding. After the cut a rank sees only its own tokens, whose neighbours may be on any other rank.

B batch, S tokens of the whole sequence, S_local this rank's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from usp.errors import InputError
from usp.mask import Mask
from usp.shard import shard
from usp.topology import Topology

_TOKENS = ("input_ids", "inputs_embeds")
_TARGETS = ("labels", "shift_labels")
_ROWS = (*_TOKENS, *_TARGETS, "loss_weights", "attention_mask")  # (B, S, ...)
_BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
_KNOWN = (*_ROWS, "position_ids", *_BOUNDARIES)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def shard_batch(
    batch: Mapping[str, Any],
    topology: Topology,
    layout: str = "contiguous",
    *,
    sequence_dims: Mapping[str, int | None] | None = None,
    ignore_index: int = -100,
) -> dict[str, Any]:
    """This rank's part of a batch that every rank of a sequence holds whole. Does not communicate.

    It may run in a data loader's worker. `check_batch` finds ranks that hold different batches.

    Args:
        batch: a dict, or transformers' BatchEncoding. An entry that is None counts as absent. It understands

            - input_ids (B, S), or inputs_embeds (B, S, width)
            - labels (B, S): the tokens themselves, shifted here; or shift_labels (B, S): shifted already
            - loss_weights (B, S): the weight of every label, shifted along with labels
            - position_ids (S,), (B, S), or (3, B, S) and (4, B, S) of M-RoPE
            - cu_seqlens, or transformers' cu_seq_lens_q and cu_seq_lens_k: boundaries of packed documents over the
              whole sequence, (0, ..., S), or a list of such, one for each row. Without them, documents begin where
              position_ids restart at 0.
            - attention_mask (B, S): 1, and 0 for padding on either side.
        topology: the grid of processes.
        layout: name of the layout.
        sequence_dims: the sequence dimension of every other entry that is to be cut; None for one that is passed on
            whole although one of its dimensions happens to be S.
        ignore_index: the label that stands for no target.

    Returns:
        What a model and `USPAttention` take. Cut to S_local: input_ids or inputs_embeds; position_ids, made if absent,
        counting over the whole sequence and from 0 in every document; shift_labels, and the same tensor as labels, as
        transformers computes no loss without; loss_weights; whatever `sequence_dims` names. The target of a document's
        last token is ignore_index and its weight 0, and so for all padding. Whole: seq_len (S) and, where there is more
        than one document, cu_seqlens as a tuple of ints, or where rows differ a tuple of such for each row; padding is
        a document of its own there. attention_mask is left out. The rest is passed on.

    Raises:
        InputError: the batch is a shard already, a mask is not padding on either side, an entry's shape does not fit,
            or one has a dimension of S and is not in `sequence_dims`.
    """
    batch = {name: value for name, value in batch.items() if value is not None}
    rows, seq_len = _size(batch)
    dims = _dims(batch, sequence_dims or {}, rows, seq_len)
    mask = batch.pop("attention_mask", None)
    real = [range(seq_len)] * rows if mask is None else [_real(mask, row) for row in range(rows)]
    boundaries = _boundaries(batch, real, seq_len)
    batch |= _targets(batch, boundaries, real, ignore_index)
    if "position_ids" not in batch:
        position_ids = torch.stack([_counting(row) for row in boundaries])
        batch["position_ids"] = position_ids.to(_tokens(batch).device)
    cut = {
        name: shard(value, topology, dims[name], layout) if name in dims else value
        for name, value in batch.items()
        if name not in _BOUNDARIES
    }
    if "shift_labels" in cut:
        cut["labels"] = cut["shift_labels"]
    cut["seq_len"] = seq_len
    if any(len(row) > 2 for row in boundaries):
        cut["cu_seqlens"] = boundaries[0] if len(set(boundaries)) == 1 else tuple(boundaries)
    return cut


def check_batch(batch: Mapping[str, Any], topology: Topology) -> None:
    """Compares the whole batch with the other ranks of this sequence. Collective over them; for the first few steps.

    Ranks that share a sequence must cut the same samples: a loader that deals by global rank mixes shards of different
    ones, of which the loss shows nothing. Does nothing where the topology was built with check="off".

    Args:
        batch: as `shard_batch` takes it.
        topology: the grid of processes.

    Raises:
        AgreementError: a rank has another batch; the message names the rank and each entry that differs.
    """
    facts = {
        name: f"{tuple(value.shape)} of checksum {_checksum(value)}"
        for name, value in batch.items()
        if isinstance(value, Tensor)
    }
    topology.confirm(facts)


def _tokens(batch: Mapping[str, Any]) -> Tensor:
    return next(batch[name] for name in _TOKENS if name in batch)


def _size(batch: Mapping[str, Any]) -> tuple[int, int]:
    """(B, S)."""
    if "seq_len" in batch:
        raise InputError(
            f"the batch has seq_len={batch['seq_len']}, so shard_batch has cut it already: give the whole batch, once"
        )
    if not any(name in batch for name in _TOKENS):
        raise InputError(f"the batch has neither input_ids nor inputs_embeds, it has {', '.join(batch) or 'nothing'}")
    for name in (*_ROWS, "position_ids"):
        if not isinstance(batch.get(name, torch.empty(0)), Tensor):
            raise InputError(f"{name} must be a tensor, got {type(batch[name]).__name__}: use return_tensors='pt'")
    tokens = _tokens(batch)
    if tokens.ndim < 2 or tokens.numel() == 0:
        raise InputError(f"input_ids must be (B, S) with B and S above 0, got {tuple(tokens.shape)}")
    return tokens.shape[0], tokens.shape[1]


def _dims(batch: Mapping[str, Any], sequence_dims: Mapping[str, int | None], rows: int, seq_len: int) -> dict[str, int]:
    """The sequence dimension of every entry that is cut, after a look at all shapes."""
    dims: dict[str, int] = {"position_ids": -1, **{name: 1 for name in _ROWS}}
    for name in sequence_dims:
        if name in _KNOWN or name not in batch:
            why = "shard_batch knows its dimensions" if name in _KNOWN else f"the batch has {', '.join(batch)}"
            raise InputError(f"sequence_dims names {name!r}: {why}; leave it out")
    for name, value in batch.items():
        shape = _shape(value)
        if name == "attention_mask" and len(shape) != 2:
            raise InputError(
                f"attention_mask has shape {shape}: only (B, S) can be sharded exactly; causal masks and windows are "
                "arguments of the attention, documents are cu_seqlens"
            )
        if name in _ROWS and (shape[:2] if name in _TOKENS else shape) != (rows, seq_len):
            raise InputError(f"{name} has shape {shape}, and the tokens are {rows} rows of {seq_len}")
        if name == "position_ids" and (
            shape[-1:] != (seq_len,) or len(shape) > 3 or (len(shape) > 1 and shape[-2] not in (1, rows))
        ):
            raise InputError(
                f"position_ids has shape {shape}, and the tokens are {rows} rows of {seq_len}: give ({seq_len},), "
                f"({rows}, {seq_len}), or (3, {rows}, {seq_len}) for M-RoPE"
            )
        if name in sequence_dims:
            dim = sequence_dims[name]
            if dim is None:
                continue
            if not isinstance(value, Tensor) or not -len(shape) <= dim < len(shape) or shape[dim] != seq_len:
                raise InputError(
                    f"sequence_dims has {name!r}: {dim}, which is no dimension of {seq_len} tokens: {name} is a "
                    f"{type(value).__name__} of shape {shape}"
                )
            dims[name] = dim
        elif name not in _KNOWN and seq_len in shape:
            raise InputError(
                f"{name} has shape {shape}, of which dimension {shape.index(seq_len)} may be the sequence: cut it with "
                f"sequence_dims={{{name!r}: {shape.index(seq_len)}}}, or pass it on whole with {{{name!r}: None}}"
            )
    return dims


def _shape(value: Any) -> tuple[int, ...]:
    """Of a tensor, an array, or a list of lists; () for everything else."""
    if isinstance(value, list | tuple):
        return (len(value), *(_shape(value[0]) if value else ()))
    return tuple(getattr(value, "shape", ()))


def _real(attention_mask: Tensor, row: int) -> range:
    """The tokens of a row that are not padding."""
    mask = attention_mask[row]
    wrong = (mask != 0) & (mask != 1)
    if wrong.any():
        raise InputError(
            f"attention_mask holds {mask[wrong][0].item()} where it must be 1, or 0 for padding: "
            "give the boundaries of packed documents as cu_seqlens"
        )
    kept = mask.nonzero().flatten()
    if kept.numel() == 0:
        raise InputError(f"attention_mask hides every token of row {row}")
    real = range(int(kept[0]), int(kept[-1]) + 1)
    if len(real) != kept.numel():
        raise InputError(
            f"attention_mask hides {len(real) - kept.numel()} tokens between others in row {row}: it may hide padding "
            "on either side; take the hidden tokens out of the batch"
        )
    return real


def _boundaries(batch: Mapping[str, Any], real: Sequence[range], seq_len: int) -> list[tuple[int, ...]]:
    """Document boundaries of every row, (0, ..., S); padding on either side is a document."""
    given = {name: _integers(name, batch[name], len(real)) for name in _BOUNDARIES if name in batch}
    found = list(given.values())
    if any(other != found[0] for other in found):
        shown = "; ".join(f"{name} is {_brief(rows[0])}" for name, rows in given.items())
        raise InputError(f"document boundaries differ: {shown}")
    inner = found[0] if found else [()] * len(real)
    if not found and "position_ids" in batch:
        inner = [_restarts(batch["position_ids"], row, tokens) for row, tokens in enumerate(real)]
    for row in inner if found else ():
        Mask.cu_seqlens(row).check(seq_len)
    return [
        tuple(sorted({0, tokens.start, *(b for b in row if b in tokens), tokens.stop, seq_len}))
        for row, tokens in zip(inner, real, strict=True)
    ]


def _integers(name: str, boundaries: Any, rows: int) -> list[tuple[int, ...]]:
    """Boundaries of every row, from one list for all of them or one for each."""
    values = boundaries.tolist() if hasattr(boundaries, "tolist") else list(boundaries)
    lists = [isinstance(value, Sequence) for value in values]
    if not any(lists):
        values = [values] * rows
    elif not all(lists) or len(values) != rows:
        raise InputError(
            f"{name} must be boundaries (0, ..., S), or a list of such for each of the {rows} rows, got "
            f"{len(values)} entries"
        )
    return [tuple(map(int, row)) for row in values]


def _counting(boundaries: Sequence[int]) -> Tensor:
    """Positions (S,) that count from 0 in every document."""
    ends = torch.tensor(boundaries)
    return torch.arange(boundaries[-1]) - ends[:-1].repeat_interleave(ends.diff())


def _restarts(position_ids: Tensor, row: int, real: range) -> tuple[int, ...]:
    """Where a row's documents begin: at position 0, in all axes of M-RoPE. Positions that don't count are refused.

    A jump is no boundary that one may guess: it is one to some attention functions and not to others, and a shard of a
    zigzag layout has one too.
    """
    whole = torch.atleast_2d(position_ids)
    whole = whole[..., row if whole.shape[-2] > 1 else 0, :]  # (S,), or (axes, S)
    positions = whole[..., real.start : real.stop]
    zero = (positions == 0).all(0) if positions.ndim == 2 else positions == 0
    index = torch.arange(len(real), device=positions.device)
    if positions.ndim == 2:
        wrong = (index == 0) & ~zero
    else:
        wrong = positions != index - torch.where(zero, index, 0).cummax(0).values
    if wrong.any():
        first = max(int(wrong.nonzero()[0]) + real.start - 1, 0)
        shown = _brief(torch.atleast_2d(whole)[0, first:].tolist())
        raise InputError(
            f"position_ids are {shown} from token {first} of row {row} on, and documents are read from positions that "
            "start at 0 and count by one: give cu_seqlens too, (0, S) for one document; if this batch was cut already, "
            "give the whole one"
        )
    return tuple((zero.nonzero().flatten() + real.start).tolist())


def _targets(
    batch: Mapping[str, Any], boundaries: Sequence[Sequence[int]], real: Sequence[range], ignore_index: int
) -> dict[str, Tensor]:
    """shift_labels and loss_weights (B, S): of the token that comes next."""
    given = [name for name in _TARGETS if name in batch]
    if len(given) == 2:
        raise InputError("the batch has labels, which are shifted here, and shift_labels, which are not: give one")
    if not given:
        if "loss_weights" in batch:
            raise InputError("the batch has loss_weights and no labels to weigh: give labels or shift_labels too")
        return {}
    labels = batch[given[0]]
    ignored = torch.ones(labels.shape, dtype=torch.bool)
    shifted = given == ["labels"]
    for row, (tokens, ends) in enumerate(zip(real, boundaries, strict=True)):
        ignored[row, tokens.start : tokens.stop] = False
        if shifted:
            ignored[row, torch.tensor(ends[1:]) - 1] = True

    def align(x: Tensor, fill: int) -> Tensor:
        return (x.roll(-1, 1) if shifted else x).masked_fill(ignored.to(x.device), fill)

    weights = {"loss_weights": align(batch["loss_weights"], 0)} if "loss_weights" in batch else {}
    return {"shift_labels": align(labels, ignore_index), **weights}


def _checksum(x: Tensor) -> int:
    """Depends on every element and its place. Sums of integers are the same in any order."""
    bits = x.detach().contiguous().view(_INTEGERS[x.element_size()]).flatten().long()
    return int((bits * torch.arange(1, 1 + bits.numel(), device=x.device)).sum())


def _brief(values: Any) -> str:
    shown = ", ".join(map(str, values[:8]))
    return f"({shown}, ...)" if len(values) > 8 else f"({shown})"
