"""What a command prints: with `--json` one document on standard output and what is for people on standard error."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, text on standard error.")]


def console(as_json: bool) -> Console:
    """Where what is for people goes."""
    return Console(stderr=as_json, soft_wrap=True, highlight=False, markup=False)


def document(content: Any) -> None:
    """Prints the one JSON document."""
    typer.echo(json.dumps(content, allow_nan=False))
