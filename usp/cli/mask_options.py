"""The options of a sequence and its mask, shared by the commands that read a schedule."""

from typing import Annotated, Any

import typer

from usp.errors import InputError
from usp.mask import Mask
from usp.planner.spec import Workload, parse_size


def tokens(text: str) -> int:
    """A positive number of tokens from an option's text, such as "128K".

    Raises:
        typer.BadParameter: it is none.
    """
    try:
        size = parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not 1 <= size <= 2**40:
        raise typer.BadParameter(f"{text[:40]!r} is not between 1 and 2**40 tokens")
    return size


SeqLen = Annotated[
    int, typer.Option(parser=tokens, metavar="TOKENS", help="Global number of tokens: 131072, 128K or 1M (K is 1,024).")
]
Causal = Annotated[bool, typer.Option("--causal/--full", help="Whether a query sees only itself and what came before.")]
Window = Annotated[
    str | None, typer.Option(metavar="LEFT,RIGHT", help="Keys seen back and ahead, such as 4095,0; -1: no bound.")
]
Documents = Annotated[
    str | None, typer.Option(metavar="LENGTHS", help="Lengths of packed documents, such as 3K,5K; they add up.")
]


def mask_fields(seq_len: int, causal: bool, window: str | None, documents: str | None) -> dict[str, Any]:
    """The fields `is_causal`, `window_size` and `documents` of a `Workload` of `seq_len` tokens.

    Raises:
        typer.BadParameter: naming the option whose text is wrong.
    """
    return {
        "is_causal": causal,
        "window_size": None if window is None else _window(window),
        "documents": () if documents is None else _documents(documents, seq_len),
    }


def describe_mask(workload: Workload) -> str:
    """The mask in words: "causal, window 4095 back and 0 ahead, 2 documents"."""
    words = ["causal" if workload.is_causal else "full"]
    if workload.window_size is not None:
        left, right = ("no bound" if side in (None, -1) else f"{side:,}" for side in workload.window_size)
        words.append(f"window {left} back and {right} ahead")
    if workload.documents:
        words.append(f"{len(workload.documents):,} document{'s' * (len(workload.documents) > 1)}")
    return ", ".join(words)


def _window(text: str) -> tuple[int, int]:
    try:
        left, right = (-1 if side.strip() == "-1" else parse_size(side) for side in text.split(","))
        Mask.window(left, right)
    except InputError as error:
        raise typer.BadParameter(str(error), param_hint="--window") from None
    except ValueError:
        hint = f"{text[:40]!r} is not LEFT,RIGHT: give two counts of tokens like 4095,0 (-1 is no bound)"
        raise typer.BadParameter(hint, param_hint="--window") from None
    return left, right


def _documents(text: str, seq_len: int) -> tuple[int, ...]:
    try:
        lengths = tuple(tokens(length) for length in text.split(","))
        Mask.documents(lengths).check(seq_len)
    except (typer.BadParameter, InputError) as error:
        raise typer.BadParameter(str(error), param_hint="--documents") from None
    return lengths
