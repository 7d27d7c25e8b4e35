"""Masks x changes of scores x shapes, drawn at random, over ranks that are threads, against the dense definition."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import usp
from tests.dense import dense_attention, relative_error, visible
from usp import layouts
from usp.mask import Mask
from usp.transports import local

DEGREES = [(1, 2), (2, 1), (1, 3), (2, 2), (3, 1), (1, 4), (4, 1), (2, 3), (3, 2), (1, 1)]
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
TOKENS = {"", "joint front", "joint rear", "cross"}


@dataclass(frozen=True)
class Combination:
    """What is drawn from a seed; the same seed, the same case."""

    seed: int
    degrees: tuple[int, int]
    layout: str
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    lengths: tuple[int, int]  # of queries, and of keys of their own or of joint tokens
    masks: tuple[str, ...]
    changes: tuple[str, ...]
    tokens: str = ""
    kv_layout: str = ""
    dtype: torch.dtype = torch.float64

    @property
    def batch(self) -> int:
        return max(2, len(self.masks)) if self.seed % 3 == 0 or len(self.masks) > 1 else 1

    def tensors(self) -> dict[str, Tensor]:
        """Whole q, k, v, dout, and those of joint tokens, sinks and slopes."""
        make = torch.Generator().manual_seed(self.seed)
        queries, others = self.lengths
        keys = others if self.tokens == "cross" else queries
        (heads, kv_heads), (d, e) = self.heads, self.head_dims
        shapes = {
            "q": (queries, heads, d),
            "k": (keys, kv_heads, d),
            "v": (keys, kv_heads, e),
            "dout": (queries, heads, e),
        }
        if self.tokens.startswith("joint"):
            shapes |= {f"joint {name}": (others, *shape[1:]) for name, shape in shapes.items()}
        made = {
            name: torch.randn(self.batch, *shape, generator=make, dtype=torch.float64) for name, shape in shapes.items()
        }
        made["sinks"] = torch.randn(heads, generator=make, dtype=torch.float64)
        made["slopes"] = torch.rand(heads, generator=make, dtype=torch.float64)
        return {name: t.to(self.dtype) for name, t in made.items()}


def any_mask(pick: random.Random, seq_len: int) -> Mask:
    """A named mask, or a union or an intersection of two."""
    some = pick.randint(0, seq_len)
    cuts = sorted({0, seq_len, *(pick.randint(1, seq_len) for _ in range(3))})
    kinds = [
        Mask.full(),
        Mask.causal(),
        Mask.window(pick.randint(0, 20), pick.randint(-1, 9)),
        Mask.prefix_lm(some),
        Mask.streaming(pick.randint(0, 5), pick.randint(0, 20)),
        Mask.longformer(pick.randint(0, 5), pick.randint(0, 9)),
        Mask.chunks(pick.randint(1, seq_len), seq_len) & Mask.causal(),
        Mask.keys(pick.randint(0, 5), max(5, seq_len - pick.randint(0, 5))),
        Mask.cu_seqlens(cuts),
        Mask.cu_seqlens(cuts) & Mask.causal(),
    ]
    one, other = pick.sample(kinds, 2)
    return pick.choice([one, one, one & other, one | other])


def draw(seed: int) -> Combination:
    pick = random.Random(seed)
    ulysses, ring = pick.choice(DEGREES)
    kv_heads = pick.randint(1, 3)
    heads = kv_heads * pick.randint(1, 3)
    while heads < ulysses:
        heads += kv_heads
    tokens = pick.choice(["", "", "", *sorted(TOKENS)])
    lengths = pick.randint(1, 70), pick.randint(1, 40)
    changes = tuple(name for name in ("softcap", "sinks", "slopes") if pick.random() < 0.4)
    total = lengths[0] + (lengths[1] if tokens.startswith("joint") else 0)
    rows = pick.choice([1, 1, 2]) if tokens != "cross" else 1
    masks = tuple(str(any_mask(pick, total)) for _ in range(rows))
    dealt_by = any_mask(pick, lengths[0])  # not the mask of the call: a model's layers share a layout
    layout = layouts.layout_for(pick.choice(layouts.names()), dealt_by)
    kv_layout = pick.choice(["", "contiguous", "zigzag", "striped"]) if "@" not in layout else "zigzag"
    if tokens == "cross":
        masks = (str(pick.choice([Mask.full(), Mask.keys(0, lengths[1] // 2), Mask.causal(), Mask.window(9, 9)])),)
        changes = tuple(name for name in changes if name != "slopes")
    head_dims = pick.choice([(8, 8), (24, 16), (5, 7), (192, 128)])
    dtype = pick.choice([torch.float64, torch.float64, torch.float32])
    return Combination(
        seed, (ulysses, ring), layout, (heads, kv_heads), head_dims, lengths, masks, changes, tokens, kv_layout, dtype
    )


def run(case: Combination, topology: usp.Topology) -> list[Tensor]:
    """The results on one rank, gathered; joint rows come first or last, as in the definition."""
    whole, cross = case.tensors(), case.tokens == "cross"
    masks = [Mask.parse(text) for text in case.masks]
    kv_layout = (case.kv_layout or case.layout) if cross else case.layout

    def cut(name: str) -> Tensor:
        layout = kv_layout if name in "kv" else case.layout
        return usp.shard(whole[name], topology, layout=layout).requires_grad_()

    q, k, v = map(cut, "qkv")
    joint = [whole[f"joint {name}"].clone().requires_grad_() for name in "qkv"] if case.tokens[:5] == "joint" else []
    options = dict(mask=masks if len(masks) > 1 else masks[0], softcap=1.5 if "softcap" in case.changes else 0.0)
    leaves = [q, k, v, *joint]
    if "sinks" in case.changes:
        leaves.append(whole["sinks"].clone().requires_grad_())
        options["sinks"] = leaves[-1]
    if "slopes" in case.changes:
        options["alibi_slopes"] = whole["slopes"]
    if cross:
        options |= dict(kv_seq_len=case.lengths[1]) | (dict(kv_layout=case.kv_layout) if case.kv_layout else {})
    if joint:
        options |= dict(joint=tuple(joint), joint_strategy=case.tokens.split()[1])
    attend = usp.USPAttention(topology=topology, layout=case.layout)
    found = attend(q, k, v, seq_len=case.lengths[0], return_lse=True, **options)
    # Every rank holds the joint rows, and its gradient is one share of the sum: here each has an equal part of it.
    share = topology.sequence_degree
    upstream = [cut("dout"), *([whole["joint dout"] / share] if joint else [])]
    outs, lses = found[: len(upstream)], found[len(upstream) :]
    grads = torch.autograd.grad(outs, leaves, [t.detach() for t in upstream])

    def gather(x: Tensor, layout: str = case.layout, length: int = case.lengths[0]) -> Tensor:
        return usp.unshard(x.detach(), topology, layout=layout, length=length)

    keys = dict(layout=kv_layout, length=case.lengths[1]) if cross else {}
    gathered = [gather(outs[0]), gather(lses[0]), gather(grads[0]), gather(grads[1], **keys), gather(grads[2], **keys)]
    return gathered + [t.detach() for t in (*outs[1:], *lses[1:], *grads[3:])]


def errors(case: Combination, results: list[list[Tensor]]) -> dict[str, float]:
    """Relative errors, with what every rank has a share of added up over ranks."""
    whole, joint = case.tensors(), case.tokens.startswith("joint")
    sequence = [whole[name] for name in ("q", "k", "v", "dout")]
    if joint:
        added = [whole[f"joint {name}"] for name in ("q", "k", "v", "dout")]
        order = (added, sequence) if case.tokens == "joint front" else (sequence, added)
        sequence = [torch.cat(pair, 1) for pair in zip(*order, strict=True)]
    q, k, *_ = sequence
    size = max(q.shape[1], k.shape[1])
    seen = torch.stack([visible(Mask.parse(text), size)[: q.shape[1], : k.shape[1]] for text in case.masks])
    more = dict(softcap=1.5 if "softcap" in case.changes else 0.0)
    if "sinks" in case.changes:
        more["sinks"] = whole["sinks"]
    if "slopes" in case.changes:
        more |= dict(slopes=whole["slopes"], distance=torch.arange(size) - torch.arange(size).unsqueeze(-1))
    expected = dense_attention(*sequence, seen.expand(case.batch, -1, -1), **more)
    wrong = {}
    for rank, result in enumerate(results):
        sharded, rest = result[:5], result[5:]
        if joint:
            out, lse, *_ = rest
            summed = [sum(other[5 + i] for other in results) for i in range(2, 5)]
            pairs = zip((out, lse, *summed), sharded, strict=True)
            sharded = [torch.cat(pair if case.tokens == "joint front" else pair[::-1], 1) for pair in pairs]
            rest = rest[5:]
        if "sinks" in case.changes:
            sharded.append(sum(other[-1] for other in results))
        for name, x, reference in zip(NAMES, sharded, expected, strict=False):
            dead = reference == -torch.inf
            if not torch.equal(x == -torch.inf, dead):
                wrong[f"{name} on rank {rank}: -inf in other places"] = 1.0
            wrong[f"{name} on rank {rank}"] = relative_error(x.masked_fill(dead, 0.0), reference.masked_fill(dead, 0.0))
    return wrong


@pytest.mark.filterwarnings("ignore:causal attention over a ring")
@pytest.mark.parametrize("first", range(0, 120, 10))
def test_random_combinations(first):
    for seed in range(first, first + 10):
        case = draw(seed)
        ulysses, ring = case.degrees
        results = local.run(lambda topology, case=case: run(case, topology), ulysses_degree=ulysses, ring_degree=ring)
        bound = 1e-12 if case.dtype == torch.float64 else 2e-6
        above = {name: error for name, error in errors(case, results).items() if not error <= bound}
        assert not above, (case, above)


def test_gradients_through_an_lse_that_counts_sinks():
    make = torch.Generator().manual_seed(5)
    q, k, v, dout = (torch.randn(1, 21, 2, 8, generator=make, dtype=torch.float64) for _ in range(4))
    sinks, dlse = (torch.randn(*shape, generator=make, dtype=torch.float64) for shape in ((2,), (1, 21, 2)))

    def work(topology):
        cut = [usp.shard(t, topology, layout="zigzag") for t in (q, k, v, dout, dlse)]
        leaves = [t.requires_grad_() for t in (*cut[:3], sinks.clone())]
        attend = usp.USPAttention(topology=topology, layout="zigzag")
        out, lse = attend(*leaves[:3], sinks=leaves[3], is_causal=True, return_lse=True, seq_len=21)
        grads = torch.autograd.grad((out * cut[3]).sum() + (lse * cut[4]).sum(), leaves)
        whole = [usp.unshard(grad, topology, layout="zigzag", length=21) for grad in grads[:3]]
        return [*whole, grads[3]]

    leaves = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
    scores = torch.einsum("bqhd,bkhd->bhqk", *leaves[:2]) * 8**-0.5
    scores = scores.masked_fill(torch.ones(21, 21, dtype=torch.bool).triu(1), -torch.inf)
    scores = torch.cat([scores, leaves[3].view(1, 2, 1, 1).expand(1, 2, 21, 1)], -1)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :-1], leaves[2])
    loss = (out * dout).sum() + (scores.logsumexp(-1).transpose(1, 2) * dlse).sum()
    expected = torch.autograd.grad(loss, leaves)
    for ulysses, ring in ((1, 3), (2, 2)):
        results = local.run(work, ulysses_degree=ulysses, ring_degree=ring)
        found = [*results[0][:3], sum(result[3] for result in results)]
        assert all(relative_error(x, reference) < 1e-12 for x, reference in zip(found, expected, strict=True))


def test_a_sink_of_minus_infinity_is_none():
    """Also for rows that see nothing else, whose lse then is -inf."""
    make = torch.Generator().manual_seed(6)
    q, k, v, dout = (torch.randn(1, 12, 2, 8, generator=make, dtype=torch.float64) for _ in range(4))

    def work(topology):
        attend = usp.USPAttention(topology=topology)
        found = []
        for sinks in (None, torch.full((2,), -torch.inf, dtype=torch.float64)):
            leaves = [usp.shard(t, topology).requires_grad_() for t in (q, k, v)]
            more = {} if sinks is None else {"sinks": sinks.requires_grad_()}
            out, lse = attend(*leaves, mask=Mask.queries(0, 7) & Mask.causal(), return_lse=True, **more)
            grads = torch.autograd.grad(out, [*leaves, *more.values()], usp.shard(dout, topology))
            found.append([out.detach(), lse.detach(), *grads])
        return found

    for without, given in local.run(work, ring_degree=3):
        assert all(torch.equal(x, y) for x, y in zip(without, given[:5], strict=True))
        assert torch.equal(given[5], torch.zeros(2, dtype=torch.float64))


def test_packed_tensors_are_a_batch_of_one():
    """(tokens, heads, dim) with the boundaries of documents, and joint tokens likewise; gradients too."""
    make = torch.Generator().manual_seed(7)
    q, k, v, dout = (torch.randn(29, heads, 8, generator=make, dtype=torch.float64) for heads in (4, 2, 2, 4))
    joint = [torch.randn(3, heads, 8, generator=make, dtype=torch.float64) for heads in (4, 2, 2)]

    def work(topology):
        attend, found = usp.USPAttention(topology=topology, layout="zigzag"), []
        for packed in (True, False):
            cut = [usp.shard(t, topology, dim=0, layout="zigzag") for t in (q, k, v, dout)]
            *leaves, upstream = cut if packed else [t.unsqueeze(0) for t in cut]
            text = joint if packed else [t.unsqueeze(0) for t in joint]
            leaves = [t.requires_grad_() for t in leaves]
            out, lse = attend(*leaves, cu_seqlens=[0, 4, 29], is_causal=True, seq_len=29, return_lse=True)
            grads = torch.autograd.grad(out, leaves, upstream)
            both = attend(*leaves, joint=tuple(text), seq_len=29)
            found.append([out, lse, *grads, *both])
        return found

    for packed, batched in local.run(work, ulysses_degree=2, ring_degree=2):
        assert [t.shape for t in packed] == [t.shape[1:] for t in batched]
        assert all(torch.equal(x, y.squeeze(0)) for x, y in zip(packed, batched, strict=True))
