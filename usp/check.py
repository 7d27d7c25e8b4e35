"""Compares sharded attention with its definition in float64, on a problem like the user's and where the user runs it.

The reference is a dense softmax and its gradients by autograd, a block of query rows at a time; which keys a row sees
is read from the mask pair by pair. No tile, schedule, kernel or merge of the library is in it. Every rank computes a
share of the rows, whatever the layout deals to it, and sums over the ranks make the whole.

The same blocks by torch's `scaled_dot_product_attention`, in the dtype of the problem, are what one device would get:
"single device". An error is `norm(x - reference) / norm(reference)` over all ranks.

B batch, S sequence, H query heads, G kv heads, D head_dim; of one kv head at a time, N = H / G query heads, or 1.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from math import inf, isnan, sqrt
from typing import Any, Required, TypedDict, Unpack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from usp.attention import USPAttention
from usp.errors import InputError
from usp.mask import Band, Mask
from usp.positions import part_of, split
from usp.shard import positions, shard
from usp.topology import Topology

NAMES = ("out", "dq", "dk", "dv")
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}
"""What an error may be whatever single-device attention has."""
SHARE = 1.5
"""What an error may be of single-device attention's, in float32 and below."""
BLOCK = 2**23
"""Scores at once: 64 MiB of them in float64."""

MOST_ELEMENTS = 2**36
"""Of q: 128 GiB in half precision."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(N, M, D) of q (N, M, D), k and v (1, K, D), and who sees whom (M, K)."""
Track = Callable[[Sequence[Any], str], Iterable[Any]]
"""Wraps what is done one after the other, with what it is: a progress bar, say."""


class Fields(TypedDict, total=False):
    """The fields of a `Problem`, as arguments."""

    seq_len: Required[int]
    batch: int
    heads: int
    kv_heads: int | None
    head_dim: int
    dtype: torch.dtype
    mask: Mask
    layout: str
    kernel: str
    transport: str
    device: torch.device | str


@dataclass(frozen=True)
class Problem:
    """The attention that is checked, on random numbers.

    Attributes:
        seq_len: global number of tokens; any, also one that the ranks do not divide.
        batch: sequences.
        heads: query heads.
        kv_heads: key/value heads; None: as many as query heads.
        head_dim: of q, k and v.
        dtype: of q, k, v and the gradient of out: float64, float32, bfloat16 or float16.
        mask: which keys a query sees.
        layout: as in `usp.USPAttention`.
        kernel: as there.
        transport: as there.
        device: this rank's.
    """

    seq_len: int
    batch: int = 1
    heads: int = 8
    kv_heads: int | None = None
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    mask: Mask = field(default_factory=Mask.full)
    layout: str = "contiguous"
    kernel: str = "auto"
    transport: str = "auto"
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        """Raises InputError: a number is below 1 or too large, heads do not divide, no such dtype, wrong documents."""
        for name in ("seq_len", "batch", "heads", "head_dim"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if (size := self.batch * self.seq_len * self.heads * self.head_dim) > MOST_ELEMENTS:
            raise InputError(f"q would have {size:.3g} elements: every rank holds it whole, up to {MOST_ELEMENTS:,}")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise InputError(
                f"heads is {self.heads} and kv_heads {self.kv_heads}: heads must be a multiple of kv_heads"
            )
        if self.dtype not in BOUNDS:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in BOUNDS)
            raise InputError(f"dtype is {self.dtype}: there is a bound for {known}")
        self.mask.check(self.seq_len)

    def tensors(self) -> list[Tensor]:
        """q, k, v and the gradient of out, (B, S, H or G, D): whole, and the same on every rank."""
        make = torch.Generator().manual_seed(0)
        kv_heads = self.kv_heads or self.heads
        shapes = [(self.batch, self.seq_len, h, self.head_dim) for h in (self.heads, kv_heads, kv_heads, self.heads)]
        return [torch.randn(shape, generator=make, dtype=self.dtype).to(self.device) for shape in shapes]


@dataclass(frozen=True)
class Comparison:
    """One result.

    Attributes:
        name: "out", "dq", "dk" or "dv".
        error: relative error.
        single_device: that of torch's attention on one device in the same dtype.
        bound: what the error may be.
        bound_from: where the bound comes from, in words.
    """

    name: str
    error: float
    single_device: float
    bound: float
    bound_from: str

    @classmethod
    def of(cls, name: str, error: float, single_device: float, dtype: torch.dtype) -> "Comparison":
        """With the bound of a dtype: absolute or, but in float64, a share of single-device attention's error."""
        absolute, share = BOUNDS[dtype], 0.0 if dtype == torch.float64 else SHARE * single_device
        fixed = absolute, f"fixed for {str(dtype).removeprefix('torch.')}"
        return cls(name, error, single_device, *max(fixed, (share, f"{SHARE} x single device")))

    @property
    def of_bound(self) -> float:
        """The error as a share of its bound; infinite where it is NaN."""
        return inf if isnan(self.error) else self.error / self.bound

    @property
    def passed(self) -> bool:
        """Whether the error keeps its bound."""
        return self.of_bound <= 1


@dataclass(frozen=True)
class CheckReport:
    """What `usp.check` found; the same on every rank.

    Attributes:
        problem: what was computed.
        ulysses_degree: ranks that swap heads.
        ring_degree: ranks of a ring.
        results: out, dq, dk and dv.
    """

    problem: Problem
    ulysses_degree: int
    ring_degree: int
    results: tuple[Comparison, ...]

    @property
    def worst(self) -> Comparison:
        """The result that is nearest to its bound, or furthest beyond."""
        return max(self.results, key=lambda result: result.of_bound)

    @property
    def passed(self) -> bool:
        """Whether every error keeps its bound."""
        return self.worst.passed

    def __str__(self) -> str:
        """In one line: "ulysses 2 x ring 2 zigzag: out 3.1e-07 <= 2.0e-06, dq 4.0e-07 <= 2.0e-06, ..."."""
        shown = (f"{r.name} {r.error:.1e} {'<=' if r.passed else '>'} {r.bound:.1e}" for r in self.results)
        return f"ulysses {self.ulysses_degree} x ring {self.ring_degree} {self.problem.layout}: {', '.join(shown)}"


def untracked(items: Sequence[Any], what: str) -> Iterable[Any]:
    """A `Track` that shows nothing."""
    return items


@torch.enable_grad()
def check(topology: Topology, *, track: Track = untracked, **problem: Unpack[Fields]) -> CheckReport:
    """Runs attention, forward and backward, and compares with dense attention in float64. Collective over a sequence.

    ```python
    report = usp.check(
        topology,
        seq_len=8192,
        heads=32,
        kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        mask=usp.Mask.causal(),
        layout="zigzag",
        device="cuda",
    )
    assert report.passed, report
    ```

    It takes S^2 / (U R) pairs a rank in float64, so a long sequence takes a while; memory is that of the whole q, k, v
    and gradient of out in their dtype, of some copies in float64 of one kv head's, and of a block of scores.

    Args:
        topology: the grid of processes, or of one without a process group.
        track: told what is done; by default nothing is shown.
        **problem: see `Problem`; only seq_len is without a default.

    Raises:
        InputError: an argument that cannot be right, or a topology of threads; before any communication.
        USPError: as `usp.attention`.
    """
    given = Problem(**problem)
    if any(not isinstance(axis.group, dist.ProcessGroup | None) for axis in (topology.ulysses, topology.ring)):
        raise InputError("usp.check adds up over processes, and this topology is of threads: start it with torchrun")
    whole = given.tensors()
    mine = _attend(given, topology, whole)
    errors, single = _compare(given, topology, (whole, mine), track)
    results = (Comparison.of(*found, given.dtype) for found in zip(NAMES, errors, single, strict=True))
    return CheckReport(given, topology.ulysses.degree, topology.ring.degree, tuple(results))


def visible(mask: Mask, rows: Tensor, seq_len: int) -> Tensor:
    """Boolean (M, S): whether the queries at some positions (M,) see each key, from what a mask means."""
    keys = torch.arange(seq_len, device=rows.device)
    rows = rows.unsqueeze(-1)
    seen = torch.zeros(len(rows), seq_len, dtype=torch.bool, device=rows.device)
    for region in mask.regions:
        here = _inside(rows, region.queries) & _inside(keys, region.keys)
        if region.boundaries:
            boundaries = torch.tensor(region.boundaries, device=rows.device)
            here = here & (
                torch.bucketize(rows, boundaries, right=True) == torch.bucketize(keys, boundaries, right=True)
            )
        for band in region.bands:
            seen |= here & _inside(keys - rows, band)
    return seen


def definition(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Softmax attention as it is defined: an `Attend`."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def single_device(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention by torch: an `Attend`."""
    k, v = (t.expand(len(q), -1, -1).unsqueeze(0) for t in (k, v))
    mask = None if seen.all() else seen
    return F.scaled_dot_product_attention(q.unsqueeze(0), k, v, attn_mask=mask).squeeze(0)


def _inside(x: Tensor, band: Band) -> Tensor:
    inside = torch.ones_like(x, dtype=torch.bool)
    if band.lo is not None:
        inside &= x >= band.lo
    if band.hi is not None:
        inside &= x <= band.hi
    return inside


def _attend(problem: Problem, topology: Topology, whole: list[Tensor]) -> list[Tensor]:
    """This rank's rows of out, dq, dk and dv, by the library."""
    layout = problem.layout
    attention = USPAttention(topology=topology, layout=layout, kernel=problem.kernel, transport=problem.transport)
    q, k, v, dout = (shard(t, topology, layout=layout) for t in whole)
    qkv = [t.requires_grad_() for t in (q, k, v)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "causal attention over a ring")  # of numbers, not of time, is the question
        out = attention(q, k, v, seq_len=problem.seq_len, mask=problem.mask)
    return [out.detach(), *torch.autograd.grad(out, qkv, dout)]


def _compare(
    problem: Problem, topology: Topology, tensors: tuple[list[Tensor], list[Tensor]], track: Track
) -> list[list[float]]:
    """Relative errors of the library and of single-device attention, from q, k, v, dout and this rank's results."""
    (whole, mine), kv_heads = tensors, tensors[0][1].shape[2]
    held = positions(problem.seq_len, topology, problem.layout, device=problem.device)
    rank = topology.ring.rank * topology.ulysses.degree + topology.ulysses.rank
    share = part_of(problem.seq_len, topology.sequence_degree, rank)
    blocks = -(-len(share) * problem.seq_len * (problem.heads // kv_heads) // BLOCK)
    runs = split(len(share), min(max(blocks, 1), max(len(share), 1)))  # one at least: every rank adds up every head
    parts = list(product(range(problem.batch), range(kv_heads), runs))
    squares = torch.zeros(3, len(NAMES), dtype=torch.float64, device=problem.device)
    for (row, head), of_head in groupby(track(parts, "comparing"), key=lambda part: part[:2]):
        given = [_of_head(t, row, head, kv_heads) for t in whole]
        exact = [t.double() for t in given]
        reference, single = _zeros(exact), _zeros(given)
        for *_, run in of_head:
            rows = torch.arange(share.start + run.start, share.start + run.stop, device=problem.device)
            seen = visible(problem.mask, rows, problem.seq_len)
            _add(reference, definition, exact, rows, seen)
            _add(single, single_device, given, rows, seen)
        ours = _zeros(exact)
        for total, part in zip(ours, mine, strict=True):
            total[:, held] = _of_head(part, row, head, kv_heads).double()
        _add_up([*reference, *single, *ours], topology)
        for i, (truth, one, our) in enumerate(zip(reference, single, ours, strict=True)):
            for j, x in enumerate((our - truth, one.to(problem.dtype).double() - truth, truth)):
                squares[j, i] += x.square().sum()
    sizes = [t.numel() for t in (whole[0], *whole[:3])]
    *differences, norms = squares.sqrt().tolist()
    return [
        [_relative(difference, norm, size) for difference, norm, size in zip(found, norms, sizes, strict=True)]
        for found in differences
    ]


def _of_head(x: Tensor, row: int, head: int, kv_heads: int) -> Tensor:
    """(N, S, D), a view: what belongs to one kv head of (B, S, H or G, D)."""
    return x[row].unflatten(1, (kv_heads, -1))[:, head].transpose(0, 1)


def _zeros(head: Sequence[Tensor]) -> list[Tensor]:
    """For out, dq, dk and dv of a kv head whose q, k and v are given: float32, or float64 for float64."""
    q, k, v, _ = head
    return [t.new_zeros(t.shape, dtype=torch.promote_types(t.dtype, torch.float32)) for t in (q, q, k, v)]


def _add(totals: Sequence[Tensor], attend: Attend, head: Sequence[Tensor], rows: Tensor, seen: Tensor) -> None:
    """Adds what some query rows (M,) of a kv head give to out, dq, dk and dv, where `seen` is (M, S)."""
    alive = seen.any(-1)  # a row that sees nothing gives nothing
    if not alive.any():
        return
    rows, seen = rows[alive], seen[alive]
    reach = seen.any(0).nonzero().flatten()
    keys = slice(int(reach[0]), int(reach[-1]) + 1)
    q, k, v, dout = head
    q, k, v = inputs = [t.detach().requires_grad_() for t in (q[:, rows], k[:, keys], v[:, keys])]
    out = attend(q, k, v, seen[:, keys])
    gradients = torch.autograd.grad(out, inputs, dout[:, rows])
    for total, where, part in zip(totals, (rows, rows, keys, keys), (out.detach(), *gradients), strict=True):
        total[:, where] += part


def _add_up(tensors: Sequence[Tensor], topology: Topology) -> None:
    """Sums over the ranks of a sequence, in place."""
    for x, axis in product(tensors, (topology.ulysses, topology.ring)):
        if axis.group is not None:
            dist.all_reduce(x, group=axis.group)


def _relative(difference: float, norm: float, size: int) -> float:
    """norm(x - reference) / norm(reference), from norms of tensors of a size.

    Where the reference is zero but for rounding (queries that see one key have dq = dk = 0) the root mean square of
    the difference: a gradient there is rounding of products of numbers of size 1.
    """
    return difference / (norm if norm > 1e-9 * sqrt(size) else sqrt(size))
