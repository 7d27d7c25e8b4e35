"""The `usp` command."""
