"""Layouts: one function a file, `name(seq_len, ring_degree, rank) -> Positions`, found by the name of its file."""

from collections.abc import Callable

from usp import plugins
from usp.positions import Positions

Layout = Callable[[int, int, int], Positions]


def names() -> list[str]:
    """The layouts in this folder."""
    return plugins.names(__name__)


def load(name: str) -> Layout:
    """The layout called `name`.

    Raises:
        InputError: no file of this folder has that name.
    """
    return getattr(plugins.load(__name__, name), name)
