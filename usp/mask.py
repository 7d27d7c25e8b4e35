"""Which keys a query sees, as arithmetic on positions.

Band: an interval of offsets `key position - query position`. Region: bands, of some queries and keys, inside documents.
Mask: disjoint regions, closed under `&` and `|`. All are values: frozen, hashable, printable.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from usp.errors import InputError

Bound = int | None
"""An end of a band: an offset `key - query`, or None for "no bound"."""


def _lower(a: Bound, b: Bound) -> Bound:
    """The tighter of two lower bounds."""
    return b if a is None else a if b is None else max(a, b)


def _upper(a: Bound, b: Bound) -> Bound:
    """The tighter of two upper bounds."""
    return b if a is None else a if b is None else min(a, b)


def _shift(bound: Bound, by: int) -> Bound:
    return None if bound is None else bound + by


@dataclass(frozen=True)
class Band:
    """Query i sees key j iff `lo <= j - i <= hi`. Full is (None, None), causal (None, 0), a sliding window (-w, 0)."""

    lo: Bound = None
    hi: Bound = None

    def __and__(self, other: "Band") -> "Band":
        return Band(_lower(self.lo, other.lo), _upper(self.hi, other.hi))

    def __bool__(self) -> bool:
        """Whether any offset satisfies the band."""
        return self.lo is None or self.hi is None or self.lo <= self.hi

    def shift(self, by: int) -> "Band":
        """The same band after keys were renumbered by `+by` relative to the queries."""
        return Band(_shift(self.lo, by), _shift(self.hi, by))

    def __str__(self) -> str:
        return f"{'' if self.lo is None else self.lo}:{'' if self.hi is None else self.hi}"


FULL = Band()
CAUSAL = Band(None, 0)


@dataclass(frozen=True)
class Region:
    """Pairs of some queries and some keys, whose offset lies in one of some bands, inside documents.

    Attributes:
        bands: of offsets; overlapping or touching ones given to the constructor are united, so they are disjoint.
        boundaries: cumulative document boundaries `(0, ..., seq_len)`, empty for one document of any length.
        queries: first and last position of the queries, None for no bound.
        keys: first and last position of the keys, None for no bound.
    """

    bands: tuple[Band, ...]
    boundaries: tuple[int, ...]
    queries: Band
    keys: Band

    def __post_init__(self) -> None:
        object.__setattr__(self, "bands", _unite(self.bands))
        ascending = all(a < b for a, b in pairwise(self.boundaries))
        if self.boundaries and (self.boundaries[0] != 0 or not ascending):
            raise InputError(
                f"document boundaries must start at 0 and ascend, got {_brief(self.boundaries)}; "
                "they are cumulative, like cu_seqlens: lengths 3, 5 give 0, 3, 8"
            )

    def __bool__(self) -> bool:
        """Whether it may hold a pair; of one that is `tight`, whether it does, documents aside."""
        return all((self.bands, self.queries & Band(0, None), self.keys & Band(0, None)))

    def __and__(self, other: "Region") -> "Region":
        """The pairs of both.

        Raises:
            InputError: both have documents, of different total length.
        """
        ends = {region.boundaries[-1] for region in (self, other) if region.boundaries}
        if len(ends) > 1:
            raise InputError(f"masks with documents of different total length cannot be combined: {sorted(ends)}")
        bands = tuple(both for a in self.bands for b in other.bands if (both := a & b))
        boundaries = tuple(sorted({*self.boundaries, *other.boundaries}))
        return Region(bands, boundaries, self.queries & other.queries, self.keys & other.keys)

    def tight(self) -> "Region":
        """The same pairs, without bands that hold none, bounds that never bind, and documents if there is but one."""
        queries, keys, boundaries = _from_zero(self.queries), _from_zero(self.keys), self.boundaries
        if boundaries and queries and queries != FULL and (document := _only_document(queries, boundaries)):
            keys, boundaries = keys & document, ()
        if boundaries and keys and keys != FULL and (document := _only_document(keys, boundaries)):
            queries, boundaries = queries & document, ()
        lowest = None if queries.hi is None else (keys.lo or 0) - queries.hi
        highest = None if keys.hi is None else keys.hi - (queries.lo or 0)
        bands = tuple(
            Band(
                None if band.lo is None or (lowest is not None and band.lo <= lowest) else band.lo,
                None if band.hi is None or (highest is not None and band.hi >= highest) else band.hi,
            )
            for band in self.bands
            if band & Band(lowest, highest)
        )
        return Region(bands, boundaries, queries, keys)

    def minus(self, other: "Region") -> Iterator["Region"]:
        """Disjoint regions that together are what `other` does not hold of this one."""
        queries, keys = self.queries & other.queries, self.keys & other.keys
        if not (self & other).tight():
            yield self
            return
        for outside in _complement([other.queries]):
            yield replace(self, queries=self.queries & outside)
        for outside in _complement([other.keys]):
            yield replace(self, queries=queries, keys=self.keys & outside)
        hidden = tuple(a & b for a in self.bands for b in _complement(other.bands))
        yield Region(hidden, self.boundaries, queries, keys)
        if set(other.boundaries) <= {*self.boundaries}:
            return
        seen = tuple(a & b for a in self.bands for b in other.bands)
        for start, stop in pairwise(other.boundaries):
            document = _span(start, stop)
            for outside in _complement([document]):
                yield Region(seen, self.boundaries, queries & document, keys & outside)

    def __str__(self) -> str:
        parts = ["+".join([str(band) for band in self.bands])]  # of these forms, as torch.compile traces no others
        if self.queries != FULL:
            parts += ["q", str(self.queries)]
        if self.keys != FULL:
            parts += ["k", str(self.keys)]
        if self.boundaries:
            parts += ["@", ",".join([str(boundary) for boundary in self.boundaries])]
        return "".join(parts)

    @classmethod
    def parse(cls, text: str) -> "Region":
        """Reads `str(region)` back."""
        limits, _, boundaries = text.partition("@")
        limits, _, keys = limits.partition("k")
        bands, _, queries = limits.partition("q")
        return cls(
            tuple(map(_parse_band, bands.split("+"))),
            tuple(map(int, boundaries.split(","))) if boundaries else (),
            _parse_band(queries or ":"),
            _parse_band(keys or ":"),
        )


@dataclass(frozen=True)
class Mask:
    """Disjoint regions of (query, key) pairs: those that see each other.

    `a & b` sees what both see and `a | b` what either sees. One set of pairs may be cut into regions in several ways,
    which are different values.

    Attributes:
        regions: disjoint; empty ones given to the constructor are dropped, and neighbours joined.
    """

    regions: tuple[Region, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "regions", _join_regions(region.tight() for region in self.regions))

    @classmethod
    def full(cls) -> "Mask":
        """Every query sees every key."""
        return cls.offsets(Band(None, None))

    @classmethod
    def causal(cls) -> "Mask":
        """A query sees itself and what came before."""
        return cls.offsets(Band(None, 0))

    @classmethod
    def offsets(cls, *bands: Band) -> "Mask":
        """A query at i sees the keys at j whose offset j - i lies in one of the bands."""
        return cls((Region(bands, (), Band(None, None), Band(None, None)),))

    @classmethod
    def window(cls, left: Bound, right: Bound) -> "Mask":
        """A query sees `left` keys back and `right` keys ahead; None or -1 is "no bound", as in flash-attention.

        Raises:
            InputError: a bound is below -1.
        """
        for side, reach in (("left", left), ("right", right)):
            if reach is not None and reach < -1:
                raise InputError(f"window {side} is {reach}: it must be >= 0, or -1 or None for no bound")
        return cls.offsets(Band(None if left in (None, -1) else -left, None if right == -1 else right))

    @classmethod
    def documents(cls, lengths: Iterable[int]) -> "Mask":
        """Packed documents by their lengths, in the order of the GLOBAL sequence; a query sees its own document only.

        Raises:
            InputError: there is no document, or a length is not positive.
        """
        return cls.cu_seqlens(tuple(accumulate(lengths, initial=0)))

    @classmethod
    def cu_seqlens(cls, boundaries: Sequence[int]) -> "Mask":
        """Packed documents by cumulative boundaries over the GLOBAL sequence, `(0, ..., seq_len)`.

        Raises:
            InputError: the boundaries do not start at 0, do not ascend, or hold no document.
        """
        if len(boundaries) < 2:
            raise InputError(f"document boundaries hold no document, got {_brief(boundaries)}: give (0, ..., seq_len)")
        return cls((Region((Band(None, None),), tuple(map(int, boundaries)), Band(None, None), Band(None, None)),))

    @classmethod
    def chunks(cls, size: int, seq_len: int) -> "Mask":
        """A query sees the keys of its own chunk of `size` tokens; with `causal`, Llama 4's chunked local attention.

        Chunks count from position 0. In packed sequences where they count from each document's start, give the chunks
        of all documents to `documents`.

        Raises:
            InputError: `size` or `seq_len` is not positive.
        """
        if size < 1 or seq_len < 1:
            raise InputError(f"chunks need a positive size and seq_len, got size={size} and seq_len={seq_len}")
        return cls.cu_seqlens((*range(0, seq_len, size), seq_len))

    @classmethod
    def keys(cls, start: int, stop: int | None) -> "Mask":
        """Every query sees the keys at start <= j < stop (None: to the end): what is left of padding on either side.

        Raises:
            InputError: `start` is negative, or `stop` lies before it.
        """
        return cls((Region((Band(None, None),), (), Band(None, None), _span(start, stop)),))

    @classmethod
    def queries(cls, start: int, stop: int | None) -> "Mask":
        """The queries at start <= i < stop (None: to the end) see every key, and others nothing.

        Raises:
            InputError: `start` is negative, or `stop` lies before it.
        """
        return cls((Region((Band(None, None),), (), _span(start, stop), Band(None, None)),))

    @classmethod
    def prefix_lm(cls, prefix: int) -> "Mask":
        """The first `prefix` tokens see each other in both directions, and the rest is causal (Raffel et al. 2020).

        Raises:
            InputError: `prefix` is negative.
        """
        return cls.keys(0, prefix) | cls.causal()

    @classmethod
    def streaming(cls, sinks: int, window: int) -> "Mask":
        """A query sees the first `sinks` tokens and, back from itself, `window` keys (StreamingLLM, Xiao et al. 2024).

        Raises:
            InputError: a number is negative.
        """
        return cls.window(window, 0) | cls.keys(0, sinks) & cls.causal()

    @classmethod
    def longformer(cls, global_tokens: int, window: int) -> "Mask":
        """A query sees `window` keys on either side; the first `global_tokens` see, and are seen by, all.

        The sliding window with global attention of Longformer (Beltagy et al. 2020).

        Raises:
            InputError: a number is negative.
        """
        return cls.window(window, window) | cls.keys(0, global_tokens) | cls.queries(0, global_tokens)

    def __and__(self, other: "Mask") -> "Mask":
        """Sees what both see.

        Raises:
            InputError: both have documents, of different total length.
        """
        return Mask(tuple(a & b for a in self.regions for b in other.regions))

    def __or__(self, other: "Mask") -> "Mask":
        """Sees what either sees.

        Raises:
            InputError: both have documents, of different total length.
        """
        regions = list(self.regions)
        for added in other.regions:
            rest = [added]
            for region in self.regions:
                rest = [tight for part in rest for piece in part.minus(region) if (tight := piece.tight())]
            regions += rest
        return Mask(tuple(regions))

    def check(self, seq_len: int) -> None:
        """Raises InputError if the documents do not add up to `seq_len`."""
        for boundaries in (region.boundaries for region in self.regions if region.boundaries):
            if boundaries[-1] != seq_len:
                raise InputError(
                    f"the documents add up to {boundaries[-1]} tokens and the global sequence has {seq_len}; "
                    "boundaries are GLOBAL and the last document ends with the sequence (padding is a document too)"
                )

    @property
    def relative(self) -> bool:
        """Whether the offset alone decides who sees whom: no documents, and all queries and keys alike."""
        return all(not r.boundaries and (r.queries, r.keys) == (FULL, FULL) for r in self.regions)

    def __str__(self) -> str:
        """The canonical text, without spaces, which `parse` reads back."""
        return "|".join([str(region) for region in self.regions]) or "nothing"

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, text: str) -> "Mask":
        """Reads `str(mask)` back.

        Raises:
            InputError: no mask is written like that.
        """
        try:
            return cls(() if text == "nothing" else tuple(map(Region.parse, text.split("|"))))
        except ValueError as error:
            raise InputError(f"{text[:60]!r} is not how a mask is written, as in ':0' or ':@0,4,9': {error}") from None


def _complement(bands: Iterable[Band]) -> list[Band]:
    """What ascending, disjoint bands leave out."""
    found, start = [], None
    for band in bands:
        if band.lo is not None:
            found.append(Band(start, band.lo - 1))
        if band.hi is None:
            return found
        start = band.hi + 1
    return [*found, Band(start, None)]


def _unite(bands: Iterable[Band]) -> tuple[Band, ...]:
    """The same offsets as ascending, disjoint bands that do not touch."""
    united: list[Band] = []
    for band in sorted(filter(None, bands), key=lambda b: (b.lo is not None, b.lo or 0)):
        last = united[-1] if united else None
        if last and (last.hi is None or band.lo is None or band.lo <= last.hi + 1):
            hi = None if last.hi is None or band.hi is None else max(last.hi, band.hi)
            united[-1] = Band(last.lo, hi)
        else:
            united.append(band)
    return tuple(united)


def _join_regions(regions: Iterable[Region]) -> tuple[Region, ...]:
    """The same pairs as fewer regions: those that differ in one of bands, queries and keys only, and touch, are one."""
    found = tuple(region for region in regions if region)
    count = 0
    while len(found) > 1 and count != len(found):
        count = len(found)
        for field in ("bands", "queries", "keys"):
            alike: dict[Region, list[Region]] = defaultdict(list)
            for region in found:
                alike[replace(region, **{field: (FULL,) if field == "bands" else FULL})].append(region)
            found = tuple(joined for group in alike.values() for joined in _join_alike(group, field))
    return found if len(found) < 2 else tuple(sorted(found, key=_order))


def _order(region: Region) -> tuple[object, ...]:
    """What regions are sorted by."""
    spans = region.queries, region.keys, *region.bands
    return tuple([(s.lo is not None, s.lo or 0, s.hi is not None, s.hi or 0) for s in spans]), region.boundaries


def _join_alike(group: Sequence[Region], field: str) -> Iterator[Region]:
    """Regions that differ in a field only, as few as that can be."""
    if field == "bands":
        yield replace(group[0], bands=tuple(band for region in group for band in region.bands))
    else:
        yield from (replace(group[0], **{field: span}) for span in _unite(getattr(region, field) for region in group))


def _only_document(span: Band, boundaries: tuple[int, ...]) -> Band | None:
    """The document that holds a whole span of positions, if one does. Beyond the last boundary there are none."""
    first = bisect_right(boundaries, span.lo or 0)
    last = len(boundaries) - 1 if span.hi is None else bisect_right(boundaries, span.hi)
    if first != min(last, len(boundaries) - 1):
        return None
    return _span(boundaries[first - 1], boundaries[first])


def _from_zero(span: Band) -> Band:
    """The same positions, which are not negative."""
    return Band(span.lo if span.lo and span.lo > 0 else None, span.hi)


def _span(start: int, stop: int | None) -> Band:
    if start < 0 or (stop is not None and stop < start):
        raise InputError(f"positions start <= i < stop need 0 <= start <= stop, got start={start} and stop={stop}")
    return Band(start or None, None if stop is None else stop - 1)


def _parse_band(text: str) -> Band:
    lo, hi = text.split(":")
    return Band(int(lo) if lo else None, int(hi) if hi else None)


def _brief(values: Sequence[int]) -> str:
    shown = ", ".join(map(str, values[:8]))
    return f"({shown}, ... {len(values)} in all)" if len(values) > 8 else f"({shown})"
