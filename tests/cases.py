"""A configuration of sharded attention, its run on one rank, and the bound that its errors must keep."""

import warnings
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

import usp
from tests.dense import dense_attention, relative_error, visible
from usp.mask import Mask
from usp.topology import Topology

NAMES = ("out", "lse", "dq", "dk", "dv")
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6}


@dataclass(frozen=True)
class Case:
    """One configuration; `heads` are query heads, `str(case)` replays it."""

    ulysses: int
    ring: int
    seq_len: int
    mask: str = ":"
    layout: str = "contiguous"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    v_head_dim: int = 8
    batch: int = 1
    dtype: torch.dtype = torch.float64
    kernel: str = "auto"
    transport: str = "auto"
    strided: bool = False
    seed: int = 0

    def tensors(self) -> list[Tensor]:
        """q, k, v and the gradient of out, whole, the same on every rank."""
        make = torch.Generator().manual_seed(self.seed)
        widths = (self.heads, self.head_dim), (self.kv_heads, self.head_dim), (self.kv_heads, self.v_head_dim)
        shapes = [(self.batch, self.seq_len, h, d) for h, d in (*widths, (self.heads, self.v_head_dim))]
        return [torch.randn(shape, generator=make, dtype=torch.float64).to(self.dtype) for shape in shapes]


def run(case: Case, topology: Topology) -> list[Tensor]:
    """out, lse, dq, dk, dv of the sharded computation, gathered."""
    x = [usp.shard(t, topology, layout=case.layout) for t in case.tensors()]
    if case.strided:  # the same values in memory of another order, last dimension included
        x = [t.transpose(1, 3).contiguous().transpose(1, 3) for t in x]
    q, k, v, dout = x
    for t in (q, k, v):
        t.requires_grad_()
    how = dict(layout=case.layout, kernel=case.kernel, transport=case.transport)
    attend = usp.USPAttention(topology=topology, **how)
    out, lse = attend(q, k, v, mask=Mask.parse(case.mask), seq_len=case.seq_len, return_lse=True)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    whole = dict(layout=case.layout, length=case.seq_len)
    return [usp.unshard(t.detach(), topology, **whole) for t in (out, lse, *grads)]


def failures(case: Case, results: list[Tensor]) -> list[str]:
    """What breaks the bound: float64 1e-12, float32 2e-6, below float64 also 1.5 times single-device attention's error.

    In float32 that is more only where terms cancel in a reference of a few numbers.
    """
    q, k, v, dout = case.tensors()
    seen = visible(Mask.parse(case.mask), case.seq_len)
    reference = dense_attention(q, k, v, dout, seen)
    dead = reference[1] == -torch.inf
    wrong = [] if torch.equal(results[1] == -torch.inf, dead) else ["lse: -inf in other places"]
    results, reference = (
        [t.masked_fill(dead, 0.0) if i == 1 else t for i, t in enumerate(x)] for x in (results, reference)
    )
    errors = [relative_error(x, ref) for x, ref in zip(results, reference, strict=True)]
    bounds = [BOUNDS.get(case.dtype, BOUNDS[torch.float32])] * 5
    if case.dtype != torch.float64 and max(errors) > bounds[0]:
        single = [
            relative_error(x, ref)
            for x, ref in zip(_single_device(case, seen), (reference[0], *reference[2:]), strict=True)
        ]
        # torch's CPU kernel takes a fast exponential in half precision: an lse of its own is off by up to 1e-4
        lse = bounds[1] if case.dtype in BOUNDS else 1e-4
        bounds = [max(1.5 * error, BOUNDS[torch.float32]) for error in single]
        bounds.insert(1, lse)
    for name, error, bound, dtype in zip(NAMES, errors, bounds, [x.dtype for x in results], strict=True):
        if not error <= bound:
            wrong.append(f"{name}: {error:.2e} > {bound:.2e}")
        if name != "lse" and dtype != case.dtype:
            wrong.append(f"{name}: {dtype}")
    return wrong


def _single_device(case: Case, seen: Tensor) -> list[Tensor]:
    """out, dq, dk, dv of torch's own attention in the case's dtype."""
    q, k, v, dout = (t.transpose(1, 2) for t in case.tensors())
    for t in (q, k, v):
        t.requires_grad_()
    widest = max(case.head_dim, case.v_head_dim)
    padded = (F.pad(t, (0, widest - t.shape[-1])) for t in (q, k, v))
    scale = case.head_dim**-0.5
    out = F.scaled_dot_product_attention(*padded, attn_mask=seen, enable_gqa=True, scale=scale)[..., : case.v_head_dim]
    return [t.transpose(1, 2) for t in (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))]


def check_all(rank: int, cases: list[Case]) -> list[str]:
    """Runs cases on one of several processes; the first process returns what is wrong, ready to replay."""
    warnings.filterwarnings("ignore", "causal attention over a ring")  # tests/distributed/test_autograd.py expects it
    wrong = []
    for case in cases:
        results = run(case, Topology.build(case.ulysses, case.ring))
        if rank == 0 and (found := failures(case, results)):
            wrong.append(f"{case}: {'; '.join(found)}")
    return wrong


def variants(ulysses: int, ring: int) -> list[Case]:
    """Every layout x mask for these degrees, with shapes, dtypes and heads taken in turn."""
    p = ulysses * ring
    shapes = [
        dict(seq_len=101, heads=4, kv_heads=2),
        dict(seq_len=64, heads=7, kv_heads=1, batch=2, dtype=torch.float32),  # multi-query
        dict(seq_len=97, heads=6, kv_heads=3, v_head_dim=12, transport="all_gather"),
        dict(seq_len=p, heads=5, kv_heads=5),  # one token a rank
        dict(seq_len=300, heads=8, kv_heads=2, head_dim=16, v_head_dim=16, dtype=torch.bfloat16),
        dict(seq_len=131, heads=9, kv_heads=3, batch=3, strided=True, kernel="reference"),
        dict(seq_len=260, heads=4, kv_heads=4, head_dim=16, v_head_dim=16, dtype=torch.float16),
    ]
    base = [Case(ulysses, ring, 1, layout=layout) for layout in ("contiguous", "zigzag", "striped")]
    found = []
    for i, (case, kind) in enumerate((case, kind) for case in base for kind in MASKS):
        case = replace(case, **shapes[(i + ulysses + 2 * ring) % len(shapes)], seed=i)
        found.append(replace(case, mask=str(MASKS[kind](case.seq_len))))
    return found


def _documents(seq_len: int) -> Mask:
    boundaries = sorted({0, seq_len, seq_len // 3, seq_len // 2, (7 * seq_len) // 8} | {min(5, seq_len)})
    return Mask.cu_seqlens(boundaries)


MASKS = {
    "full": lambda s: Mask.full(),
    "causal": lambda s: Mask.causal(),
    "window": lambda s: Mask.window(s // 5, 0),
    "two-sided window": lambda s: Mask.window(s // 7, s // 9),
    "documents": lambda s: Mask.causal() & _documents(s),
    "bidirectional documents in a window": lambda s: Mask.window(s // 4, s // 4) & _documents(s),
}
