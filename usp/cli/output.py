"""What a command prints: with `--json` one document on standard output and what is for people on standard error."""

import json
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from usp import files
from usp.errors import InputError

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, text on standard error.")]


def console(as_json: bool) -> Console:
    """Where what is for people goes."""
    return Console(stderr=as_json, soft_wrap=True, highlight=False, markup=False)


def document(content: Any) -> None:
    """Prints the one JSON document."""
    typer.echo(json.dumps(content, allow_nan=False))


def picture(figure: Any, path: Path, dpi: int) -> None:
    """Writes a figure of matplotlib, in the format that the name ends in; PNG where it has no ending.

    Raises:
        InputError: there is no such format, or the file cannot be written.
    """
    content = BytesIO()
    try:
        figure.savefig(content, format=path.suffix[1:] or "png", dpi=dpi)
    except ValueError as error:
        raise InputError(f"cannot write {files.named(path)}: {error}") from None
    files.write(path, content.getvalue())
