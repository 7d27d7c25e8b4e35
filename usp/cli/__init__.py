"""The `usp` command."""

from usp.cli.app import main

__all__ = ["main"]
