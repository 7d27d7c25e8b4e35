"""Layouts: one function a file, `name(seq_len, ring_degree, rank) -> Positions`, found by the name of its file.

One that deals tokens by the mask takes that as its fourth parameter. A sequence may be dealt by sections, joined by
"+", of which all but one have a length: "contiguous:77+zigzag" deals the first 77 tokens, and then the rest.
"""

import inspect
from collections.abc import Callable
from functools import cache
from itertools import accumulate

from usp import plugins
from usp.errors import InputError
from usp.mask import Mask
from usp.positions import Positions

Layout = Callable[..., Positions]


def names() -> list[str]:
    """The layouts in this folder."""
    return plugins.names(__name__)


def load(name: str) -> Layout:
    """The layout called `name`.

    Raises:
        InputError: no file of this folder has that name.
    """
    return getattr(plugins.load(__name__, name), name)


@cache
def needs_mask(name: str) -> bool:
    """Whether the layout called `name` deals tokens by the mask."""
    return "mask" in inspect.signature(load(name)).parameters


def positions(name: str, seq_len: int, ring_degree: int, rank: int, mask: Mask) -> Positions:
    """Global positions of ring rank `rank`, by the layout or the sections called `name`.

    Raises:
        InputError: no layout has that name, or the sections are longer than the sequence.
    """
    if "+" in name:
        return _by_sections(name, seq_len, ring_degree, rank)
    return load(name)(seq_len, ring_degree, rank, *([mask] if needs_mask(name) else []))


def _by_sections(name: str, seq_len: int, ring_degree: int, rank: int) -> Positions:
    sections = [
        (layout, int(length) if length else None) for layout, _, length in (s.partition(":") for s in name.split("+"))
    ]
    rest = seq_len - sum(length or 0 for _, length in sections)
    if rest < 0 or sum(length is None for _, length in sections) != 1:
        raise InputError(
            f"{seq_len} tokens cannot be dealt by {name}: one section has no length, and gets what is left"
        )
    lengths = [rest if length is None else length for _, length in sections]
    return tuple(
        range(start + run.start, start + run.stop, run.step)
        for (layout, _), length, start in zip(sections, lengths, accumulate(lengths, initial=0), strict=False)
        for run in load(layout)(length, ring_degree, rank)
    )
