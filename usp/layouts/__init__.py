"""Layouts: one function a file, `name(seq_len, ring_degree, rank) -> Positions`, found by the name of its file.

One that deals tokens by a mask takes that as its fourth parameter, and is named with it: "balanced[:0@0,5,9]", as
`layout_for` writes it. All layers of a model then share a layout, whatever masks of their own they have.

A sequence may be dealt by sections, joined by "+", of which all but one have a length: "contiguous:77+zigzag" deals the
first 77 tokens, and then the rest.
"""

import inspect
import re
from collections.abc import Callable
from functools import cache, lru_cache, partial
from itertools import accumulate

from usp import plugins
from usp.errors import InputError
from usp.mask import Mask
from usp.positions import Positions

Layout = Callable[[int, int, int], Positions]

SECTION = re.compile(r"(?P<name>\w+)(?:\[(?P<mask>[^\]]*)\])?(?::(?P<length>\d{1,15}))?")


def names() -> list[str]:
    """The layouts in this folder: first those that need no mask."""
    return sorted(plugins.names(__name__), key=needs_mask)


def load(name: str) -> Callable[..., Positions]:
    """The function of the file called `name`.

    Raises:
        InputError: no file of this folder has that name.
    """
    return getattr(plugins.load(__name__, name), name)


@cache
def needs_mask(name: str) -> bool:
    """Whether the layout called `name` deals tokens by a mask.

    Raises:
        InputError: no layout has that name.
    """
    return "mask" in inspect.signature(load(name)).parameters


def layout_for(name: str, mask: Mask) -> str:
    """The layout called `name` for sequences under a mask: the name itself, or with the mask where it is needed.

    ```python
    layout = usp.layout_for("balanced", usp.Mask.causal() & usp.Mask.documents(lengths))
    attn, tokens = usp.USPAttention(layout=layout, ...), usp.shard(tokens, topology, layout=layout)
    ```

    Raises:
        InputError: no layout has that name.
    """
    return f"{name}[{mask}]" if needs_mask(name) else name


def positions(name: str, seq_len: int, ring_degree: int, rank: int) -> Positions:
    """Global positions of ring rank `rank`, by a layout or by sections.

    Raises:
        InputError: there is no such layout, its mask does not fit the sequence, or sections are longer than that.
    """
    sections = parse(name)
    rest = seq_len - sum(length or 0 for _, length in sections)
    if rest < 0:
        raise InputError(f"a sequence of {seq_len} tokens is shorter than the sections of {name}")
    lengths = [rest if length is None else length for _, length in sections]
    return tuple(
        range(start + run.start, start + run.stop, run.step)
        for (layout, _), length, start in zip(sections, lengths, accumulate(lengths, initial=0), strict=False)
        for run in layout(length, ring_degree, rank)
    )


@lru_cache(maxsize=256)
def parse(name: str) -> tuple[tuple[Layout, int | None], ...]:
    """The layout and the length of every section of a name; the one without a length gets what is left.

    Raises:
        InputError: a layout does not exist, lacks its mask or has one that it does not need, or not exactly one
            section is without a length.
    """
    sections = list(SECTION.finditer(name))
    if not sections or "+".join(section[0] for section in sections) != name:
        load(name)  # which it is not: the error says what there is
    found = [(_with_mask(s["name"], s["mask"]), int(s["length"]) if s["length"] else None) for s in sections]
    if sum(length is None for _, length in found) != 1:
        raise InputError(f"layout {name[:200]!r}: one section must have no length, and gets what the others leave")
    return tuple(found)


def _with_mask(name: str, mask: str | None) -> Layout:
    if needs_mask(name) != (mask is not None):
        wanted = f'deals tokens by a mask: give usp.layout_for("{name}", mask)' if mask is None else "takes no mask"
        raise InputError(f"the {name} layout {wanted}")
    return load(name) if mask is None else partial(_deal, load(name), Mask.parse(mask))


def _deal(layout: Callable[..., Positions], mask: Mask, seq_len: int, ring_degree: int, rank: int) -> Positions:
    mask.check(seq_len)
    return layout(seq_len, ring_degree, rank, mask)
