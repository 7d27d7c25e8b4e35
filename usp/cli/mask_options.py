"""The options of a sequence and its mask, shared by the commands that read a schedule."""

from dataclasses import dataclass
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


def _tokens(text: str) -> Any:
    """A typer option of tokens, explained by `text`."""
    return typer.Option(parser=tokens, metavar="TOKENS", help=text)


@dataclass(frozen=True)
class MaskOptions:
    """A sequence, and which of its keys a query sees: the fields of a `Workload` as text."""

    seq_len: Annotated[int, _tokens("Global number of tokens: 131072, 128K or 1M (K is 1,024).")]
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--full",
            help="Whether a query sees only itself and what came before; causal, unless a model has no vocabulary.",
        ),
    ] = None
    window: Annotated[
        str | None, typer.Option(metavar="LEFT,RIGHT", help="Keys seen back and ahead, such as 4095,0; -1: no bound.")
    ] = None
    chunk: Annotated[int | None, _tokens("Tokens of a chunk, outside of which nothing is seen.")] = None
    sinks: Annotated[int | None, _tokens("First tokens, seen besides window and chunk.")] = None
    prefix: Annotated[int | None, _tokens("First tokens, which all see, those before them too.")] = None
    documents: Annotated[
        str | None, typer.Option(metavar="LENGTHS", help="Lengths of packed documents, such as 3K,5K; they add up.")
    ] = None

    def fields(self, causal: bool = True) -> dict[str, Any]:
        """The fields of a `Workload`.

        Args:
            causal: whether the mask is, where the options do not say.

        Raises:
            typer.BadParameter: naming the option whose text is wrong.
        """
        return {
            "seq_len": self.seq_len,
            "is_causal": causal if self.causal is None else self.causal,
            "window_size": None if self.window is None else _window(self.window),
            "chunk": self.chunk,
            "sinks": self.sinks or 0,
            "prefix": self.prefix or 0,
            "documents": () if self.documents is None else _documents(self.documents, self.seq_len),
        }


def describe_mask(workload: Workload) -> str:
    """The mask in words: "causal, window 4095 back and 0 ahead, 4 sinks, 2 documents"."""
    words = ["causal" if workload.is_causal else "full"]
    if workload.window_size is not None:
        left, right = ("no bound" if side in (None, -1) else f"{side:,}" for side in workload.window_size)
        words.append(f"window {left} back and {right} ahead")
    if workload.chunk is not None:
        words.append(f"chunks of {workload.chunk:,}")
    if workload.sinks:
        words.append(_counted(workload.sinks, "sink"))
    if workload.prefix:
        words.append(f"prefix of {workload.prefix:,}")
    if workload.documents:
        words.append(_counted(len(workload.documents), "document"))
    return ", ".join(words)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number > 1)}"


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
