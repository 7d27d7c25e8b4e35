"""Packing documents into sequences of one length, without cutting or losing a token in silence."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from usp.errors import InputError

Document = str | bytes | Sequence[int] | Tensor
"""A text, or its tokens."""


class Packed(NamedTuple):
    """What became of the documents of one call.

    tokens (with separators) + padded == len(batches) * length + dropped + carried, where `tokens` are those that the
    call was given and those that the call before had carried over.

    Attributes:
        batches: one a sequence, each a batch of one row for `usp.shard_batch`: input_ids, labels and position_ids,
            int64 (1, length), and cu_seqlens, the boundaries of documents and of padding.
        padded: padding tokens in `batches`.
        dropped: tokens of documents that are in no sequence.
        carried: tokens of documents that wait for the next call.
    """

    batches: list[dict[str, Any]]
    padded: int
    dropped: int
    carried: int

    def __str__(self) -> str:
        """One line for a log."""
        return f"{len(self.batches)} sequences: {self.padded} padding, {self.dropped} dropped, {self.carried} carried"


class LongContextCollator:
    """Packs whole documents into sequences of `length` tokens: a DataLoader's `collate_fn`. Deterministic.

    Documents go, in the order given, into the first sequence of the call that has room (first fit). Room that is left
    is padded; the tail is the last sequence, where it is not full. Packed sequences hold different documents, so each
    is a batch of its own; accumulate gradients over several.

    The number of sequences depends on the documents. Data-parallel ranks must all run the same number of steps: let
    every rank pack the same documents and take `batches[data_rank::data_size]` of a number they all have.

    Args:
        length: tokens of a sequence, padding included.
        tokenizer: any callable from a text to its tokens, or to a mapping with input_ids; needed for texts.
        separator: token that ends every document (that does not end with it already), such as EOS; None for none.
        tail: "pad" the tail, "drop" its documents, or "carry" them over to the next call; `flush` gives the last ones.
        long_documents: "error", or "split" those that are longer than a sequence into pieces. A piece is a document of
            its own: attention does not look back over the cut, and the target across it is lost.
        pad: token of the padding; its labels are `ignore_index`.
        ignore_index: the label that stands for no target.

    Attributes:
        carried: documents that wait for the next call, in order.

    Raises:
        InputError: an argument that cannot be right.
    """

    def __init__(
        self,
        length: int,
        tokenizer: Callable[[str], Any] | None = None,
        *,
        separator: int | None = None,
        tail: str = "pad",
        long_documents: str = "error",
        pad: int = 0,
        ignore_index: int = -100,
    ) -> None:
        _whole("length", length, 1, 2**40)
        for name, token in (
            ("separator", 0 if separator is None else separator),
            ("pad", pad),
            ("ignore_index", ignore_index),
        ):
            _whole(name, token, -(2**63), 2**63 - 1)
        if tail not in ("pad", "drop", "carry"):
            raise InputError(f"tail is {tail!r}: it must be 'pad', 'drop' or 'carry'")
        if long_documents not in ("error", "split"):
            raise InputError(f"long_documents is {long_documents!r}: it must be 'error' or 'split'")
        self.length, self.tokenizer, self.separator = length, tokenizer, separator
        self.tail, self.long_documents = tail, long_documents
        self.pad, self.ignore_index = pad, ignore_index
        self.carried: list[Tensor] = []

    def __call__(self, documents: Iterable[Document]) -> Packed:
        """Packs what was carried over, then these documents. Empty documents are left out.

        Raises:
            InputError: a document is too long and may not be split, or is not tokens, or tail="carry" in a DataLoader's
                worker process, which ends with what it carries.
        """
        if isinstance(documents, str | bytes):
            raise InputError("one document was given where a sequence of documents is expected: give [document]")
        try:
            iterator = iter(documents)
        except TypeError:
            raise InputError(f"documents are {type(documents).__name__}: give a sequence of documents") from None
        if self.tail == "carry" and get_worker_info() is not None:
            raise InputError(
                "tail='carry' in a worker process of a DataLoader would lose what is carried when the worker ends: use "
                "num_workers=0, or tail='pad' with larger batches"
            )
        pieces = [piece for i, document in enumerate(iterator) for piece in self._pieces(i, document)]
        sequences = self._fit([*self.carried, *pieces])
        tail = sequences.pop() if self.tail != "pad" and sequences and _size(sequences[-1]) < self.length else []
        self.carried = tail if self.tail == "carry" else []
        return self._packed(sequences, 0 if self.tail == "carry" else _size(tail))

    def flush(self) -> Packed:
        """Pads and gives what is carried; nothing is carried any more. At most one sequence."""
        sequences, self.carried = [self.carried] if self.carried else [], []
        return self._packed(sequences, 0)

    def _pieces(self, index: int, document: Document) -> tuple[Tensor, ...]:
        """The tokens of a document with its separator, no piece longer than a sequence."""
        tokens = self._tokens(index, document)
        if tokens.numel() == 0:
            return ()
        if self.separator is not None and int(tokens[-1]) != self.separator:
            tokens = torch.cat((tokens, tokens.new_tensor([self.separator])))
        if len(tokens) > self.length and self.long_documents == "error":
            raise InputError(
                f"document {index} has {len(tokens)} tokens and a sequence {self.length}: raise length, or cut such "
                "documents into pieces with long_documents='split'"
            )
        return tokens.split(self.length)

    def _tokens(self, index: int, document: Document) -> Tensor:
        tokens: Any = document
        if isinstance(document, str):
            if self.tokenizer is None:
                raise InputError(f"document {index} is a text and there is no tokenizer: give one, or give tokens")
            tokens = self.tokenizer(document)
            tokens = tokens.get("input_ids") if isinstance(tokens, Mapping) else tokens
        try:
            tokens = torch.as_tensor(list(tokens) if isinstance(tokens, bytes | range) else tokens)
        except (TypeError, ValueError, RuntimeError):  # the last for numbers that are too large, and for dicts
            raise InputError(
                f"document {index} is {' '.join(repr(tokens).split())[:60]}: its tokens must be integers (n,)"
            ) from None
        whole = not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype is torch.bool)
        if tokens.ndim != 1 or (tokens.numel() and not whole):
            raise InputError(
                f"document {index} is {tokens.dtype} of shape {tuple(tokens.shape)}: its tokens must be integers (n,)"
            )
        return tokens.to("cpu", torch.int64)

    def _fit(self, pieces: Iterable[Tensor]) -> list[list[Tensor]]:
        """Which pieces share a sequence: each goes into the first with room (first fit; Johnson 1973)."""
        sequences: list[list[Tensor]] = []
        room: list[int] = []
        for piece in pieces:
            fits = next((i for i, free in enumerate(room) if len(piece) <= free), len(room))
            if fits == len(room):
                sequences.append([])
                room.append(self.length)
            sequences[fits].append(piece)
            room[fits] -= len(piece)
        return sequences

    def _packed(self, sequences: Sequence[Sequence[Tensor]], dropped: int) -> Packed:
        padded = sum(self.length - _size(sequence) for sequence in sequences)
        return Packed([self._batch(sequence) for sequence in sequences], padded, dropped, _size(self.carried))

    def _batch(self, pieces: Sequence[Tensor]) -> dict[str, Any]:
        missing = self.length - _size(pieces)
        padding = [torch.full((missing,), self.pad)] if missing else []
        labels = [*pieces, *(torch.full_like(p, self.ignore_index) for p in padding)]
        documents = [*pieces, *padding]
        return {
            "input_ids": torch.cat(documents).unsqueeze(0),
            "labels": torch.cat(labels).unsqueeze(0),
            "position_ids": torch.cat([torch.arange(len(d)) for d in documents]).unsqueeze(0),
            "cu_seqlens": tuple(accumulate(map(len, documents), initial=0)),
        }


def _size(pieces: Iterable[Tensor]) -> int:
    return sum(map(len, pieces))


def _whole(name: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) <= most:
        raise InputError(f"{name} is {repr(value)[:60]}: it must be a whole number from {least} to {most}")
