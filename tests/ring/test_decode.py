"""Inference over a sharded cache, over ranks that are threads, against the dense definition."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import usp
from tests.cases import BOUNDS
from tests.dense import dense_attention, relative_error, visible
from tests.ring.test_combinations import any_mask
from usp.mask import Mask
from usp.positions import count
from usp.transports import local
from usp.transports.local import Local

LAYOUTS = ("contiguous", "zigzag", "striped", "balanced[:0]")


@dataclass(frozen=True)
class Step:
    """Some tokens, and how they come: "prefill", "append", "decode", or what `extend` sends."""

    how: str
    tokens: int
    layout: str = "contiguous"


@dataclass(frozen=True)
class Session:
    """What is drawn from a seed."""

    seed: int
    degrees: tuple[int, int]
    steps: tuple[Step, ...]
    masks: tuple[str, ...] = (str(Mask.causal()),)
    changes: tuple[str, ...] = ()
    batch: int = 1
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (8, 8)
    dtype: torch.dtype = torch.float64

    @property
    def length(self) -> int:
        return sum(step.tokens for step in self.steps)

    def tensors(self) -> dict[str, Tensor]:
        """Whole q, k and v, sinks and slopes."""
        make = torch.Generator().manual_seed(self.seed)
        (heads, kv_heads), (d, e) = self.heads, self.head_dims
        shapes = {"q": (heads, d), "k": (kv_heads, d), "v": (kv_heads, e)}
        sized = {name: (self.batch, self.length, *shape) for name, shape in shapes.items()}
        made = {name: torch.randn(shape, generator=make, dtype=torch.float64) for name, shape in sized.items()}
        made["sinks"] = torch.randn(heads, generator=make, dtype=torch.float64)
        made["slopes"] = torch.rand(heads, generator=make, dtype=torch.float64)
        return {name: t.to(self.dtype) for name, t in made.items()}

    def options(self) -> dict:
        whole, masks = self.tensors(), [Mask.parse(text) for text in self.masks]
        given = {"softcap": 1.5, "sinks": whole["sinks"], "alibi_slopes": whole["slopes"], "scale": 0.3}
        return {"mask": masks if len(masks) > 1 else masks[0]} | {name: given[name] for name in self.changes}


def play(session: Session, topology: usp.Topology) -> tuple[list[Tensor], usp.KVCache]:
    """What every step that attends gives, whole, on one rank; and the cache in the end."""
    whole, options = session.tensors(), session.options()
    cache, found, start = usp.KVCache(topology), [], 0
    for step in session.steps:
        q, k, v = (whole[name][:, start : start + step.tokens] for name in "qkv")
        if step.how in ("append", "decode"):
            cache.append(k, v)
            if step.how == "decode":
                found.append(usp.decode(q, cache, **options))
        else:
            q, k, v = (usp.shard(t, topology, layout=step.layout) for t in (q, k, v))
            dealt = dict(seq_len=step.tokens, layout=step.layout)
            if step.how == "prefill":
                cache = usp.KVCache.from_shards(k, v, topology, **dealt)
            else:
                out = usp.extend(q, k, v, cache, **dealt, send=step.how, **options)
                found.append(usp.unshard(out, topology, layout=step.layout, length=step.tokens))
        start += step.tokens
        assert cache.length == start
    return found, cache


def expected(session: Session) -> list[Tensor]:
    """The same from the definition."""
    whole, found, start = session.tensors(), [], 0
    seen = torch.stack([visible(Mask.parse(text), session.length) for text in session.masks])
    seen = seen.expand(session.batch, -1, -1)
    position = torch.arange(session.length)
    for step in session.steps:
        stop = start + step.tokens
        if step.how not in ("prefill", "append"):
            q, k, v = whole["q"][:, start:stop], whole["k"][:, :stop], whole["v"][:, :stop]
            more = dict(softcap=1.5 if "softcap" in session.changes else 0.0)
            if "sinks" in session.changes:
                more["sinks"] = whole["sinks"]
            if "alibi_slopes" in session.changes:
                distance = position[:stop] - position[start:stop].unsqueeze(-1)
                more |= dict(slopes=whole["slopes"], distance=distance)
            scale = 0.3 if "scale" in session.changes else None
            dout = torch.zeros(*q.shape[:-1], v.shape[-1])
            found.append(dense_attention(q, k, v, dout, seen[:, start:stop, :stop], scale, **more)[0])
        start = stop
    return found


def check(session: Session) -> list[usp.KVCache]:
    """Plays a session on all ranks and compares; the ranks' caches."""
    ulysses, ring = session.degrees
    ranks = local.run(lambda topology: play(session, topology), ulysses_degree=ulysses, ring_degree=ring)
    references = expected(session)
    attended = [step for step in session.steps if step.how not in ("prefill", "append")]
    for rank, (found, _) in enumerate(ranks):
        for step, out, first, reference in zip(attended, found, ranks[0][0], references, strict=True):
            assert relative_error(out, reference) <= BOUNDS[session.dtype], (session, rank, step)
            assert out.dtype == session.dtype and out.is_contiguous()
            if step.how == "decode":
                assert torch.equal(out, first), (session, rank, step)
    return [cache for _, cache in ranks]


def draw(seed: int) -> Session:
    pick = random.Random(seed)
    kv_heads = pick.randint(1, 3)
    steps = [Step("prefill", pick.randint(1, 60), pick.choice(LAYOUTS))] if pick.random() < 0.8 else []
    for _ in range(pick.randint(2, 7)):
        how = pick.choice(["append", "decode", "decode", "decode", "queries", "keys", "auto"])
        tokens = pick.randint(1, 5) if how in ("append", "decode") else pick.randint(1, 40)
        steps.append(Step(how, tokens, pick.choice(LAYOUTS)))
    rows = pick.choice([1, 1, 1, 2])
    length = sum(step.tokens for step in steps)
    return Session(
        seed,
        degrees=(pick.randint(1, 4), pick.randint(1, 4)),
        steps=tuple(steps),
        masks=tuple(str(any_mask(pick, length)) for _ in range(rows)),
        changes=tuple(name for name in ("softcap", "sinks", "alibi_slopes", "scale") if pick.random() < 0.3),
        batch=max(rows, pick.choice([1, 2])),
        heads=(kv_heads * pick.randint(1, 3), kv_heads),
        head_dims=pick.choice([(8, 8), (24, 16), (5, 7)]),
        dtype=pick.choice([torch.float64, torch.float64, torch.float32]),
    )


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_sessions(first):
    for seed in range(first, first + 10):
        check(draw(seed))


# ---- the masks that models use ---------------------------------------------------------------------------------------

ALL = (Step("prefill", 37, "zigzag"), *[Step("decode", n) for n in (1, 2, 3, 4, 5)])
ALL += (Step("queries", 11, "striped"), Step("decode", 1), Step("keys", 23, "zigzag"), Step("append", 2))
ALL += (Step("decode", 2), Step("auto", 3), Step("decode", 1))
MASKS = {
    "causal": Mask.causal(),
    "window": Mask.window(6, 0),
    "streaming": Mask.streaming(3, 6),
    "documents": Mask.documents([30, 20, 100]) & Mask.causal(),  # of which the last goes on
    "chunks": Mask.chunks(16, 1000) & Mask.causal(),
    "left padding": Mask.keys(5, None) & Mask.causal(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, dtype):
    check(Session(1, (2, 2), ALL, (str(MASKS[mask]),), dtype=dtype, heads=(6, 2)))


@pytest.mark.parametrize("degrees", [(u, r) for u in range(1, 5) for r in range(1, 5)], ids=str)
def test_degrees_beyond_the_tokens_and_the_heads(degrees):
    steps = Step("append", 1), Step("decode", 1), Step("queries", 3), Step("decode", 2), Step("keys", 2, "zigzag")
    check(Session(2, degrees, (*steps, Step("decode", 1)), heads=(3, 1)))


def test_bfloat16_is_merged_in_float32():
    session = Session(3, (2, 2), ALL, dtype=torch.bfloat16)
    for rank, _ in local.run(lambda topology: play(session, topology), ulysses_degree=2, ring_degree=2):
        for out, reference in zip(rank, expected(session), strict=True):
            assert relative_error(out, reference) <= 4e-3


def test_causal_is_the_default_and_is_causal_false_is_not():
    q, k, v = (torch.randn(1, 9, 2, 8, dtype=torch.float64) for _ in range(3))

    def attend(topology):
        cache = usp.KVCache(topology)
        cache.append(k, v)
        return [usp.decode(q[:, 6:], cache, **o) for o in ({}, {"is_causal": False}, {"window_size": (2, None)})]

    masks = Mask.causal(), Mask.full(), Mask.window(2, 0)
    for outs in local.run(attend, ring_degree=3):
        for out, mask in zip(outs, masks, strict=True):
            reference, *_ = dense_attention(q[:, 6:], k, v, torch.zeros_like(q[:, 6:]), visible(mask, 9)[6:])
            assert relative_error(out, reference) <= 1e-12


# ---- where tokens go -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("degrees", [(1, 3), (2, 2), (3, 2), (4, 4)], ids=str)
def test_growth_is_balanced_and_known_to_all(layout, degrees):
    steps = Step("prefill", 61, layout), *[Step("append", n) for n in (1, 1, 3, 1, 7)]
    caches = check(Session(4, degrees, steps))
    assert len({cache.held for cache in caches}) == 1
    held = caches[0].held
    assert sorted(p for runs in held for run in runs for p in run) == list(range(74))
    counts = [count(runs) for runs in held]
    assert max(counts) - min(counts) <= 1
    for rank, cache in enumerate(caches):
        positions = [p for run in cache.held[rank] for p in run]
        whole = Session(4, degrees, steps).tensors()
        assert cache.rank == rank
        assert torch.equal(cache.shard[0], whole["k"][:, positions])
        assert torch.equal(cache.shard[1], whole["v"][:, positions])


def test_uneven_shares_even_out():
    steps = Step("prefill", 40), Step("auto", 3), Step("append", 5)  # 3 tokens on 4 ranks
    counts = [count(runs) for runs in check(Session(5, (1, 4), steps))[0].held]
    assert counts == [12, 12, 12, 12]


def test_positions_stay_few_runs():
    steps = (Step("prefill", 64, "zigzag"), *[Step("append", 1)] * 200)
    assert all(len(runs) <= 3 for runs in check(Session(6, (2, 2), steps))[0].held)


def test_buffers_grow_by_a_quarter():
    cache = usp.KVCache(usp.Topology.build())
    token = torch.zeros(1, 1, 2, 8)
    sizes = []
    for _ in range(1000):
        cache.append(token, token)
        sizes.append(cache.nbytes)
    per_token = 2 * token.nbytes
    assert all(n * per_token <= size <= 1.25 * n * per_token for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 40


def test_shards_are_copied():
    key = torch.zeros(1, 4, 1, 8)
    cache = usp.KVCache.from_shards(key, key, usp.Topology.build())
    key += 1
    assert not cache.shard[0].any()


def test_inference_mode_may_end_before_decoding_does():
    q = torch.randn(1, 4, 1, 8)
    with torch.inference_mode():
        cache = usp.KVCache.from_shards(q, q, usp.Topology.build())
    token = torch.randn(1, 1, 1, 8)
    cache.append(token, token)
    with torch.inference_mode():
        inside = usp.decode(token, cache)
    assert torch.equal(inside, usp.decode(token, cache))


# ---- what is sent ----------------------------------------------------------------------------------------------------


@pytest.fixture
def sent(monkeypatch):
    """Bytes and messages since it was cleared, over all ranks."""
    total, exchange = Counter(), Local.exchange

    def counting(self, sends, receives):
        full = [t for t in sends.values() if t.numel()]
        total.update(bytes=sum(t.nbytes for t in full), messages=len(full))
        return exchange(self, sends, receives)

    monkeypatch.setattr(Local, "exchange", counting)
    return total


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 2), (1, 4), (3, 1), (3, 2)])
def test_a_token_costs_the_same_whatever_the_cache_holds(sent, ulysses, ring):
    def attend(topology, length):
        cache = usp.KVCache(topology)
        k = torch.randn(2, length, 2, 8)
        cache.append(k, k[..., :6])
        usp.decode(torch.randn(2, 1, 4, 8), cache, is_causal=True)

    ranks, peers = ulysses * ring, (ulysses - 1) + (ring - 1)
    for length in (1, 64, 4096):
        sent.clear()
        local.run(lambda topology, n=length: attend(topology, n), ulysses_degree=ulysses, ring_degree=ring)
        assert sent == {"messages": ranks * peers, "bytes": ranks * peers * 2 * 4 * (6 + 1) * 4}


CHUNKS = [(64, 4, 1), (64, 32, 1), (64, 4, 4), (64, 64, 2), (8, 16, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("cached", "chunk", "kv_heads"), CHUNKS)
def test_a_chunk_sends_what_is_cheaper(sent, cached, chunk, kv_heads, dtype):
    """Lengths that all ranks share evenly, so that the formula is exact."""

    def attend(topology, send):
        cache = usp.KVCache(topology)
        k = torch.zeros(1, cached, kv_heads, 8, dtype=dtype)
        cache.append(k, k)
        share = chunk // topology.sequence_degree
        q, k = (torch.zeros(1, share, heads, 8, dtype=dtype) for heads in (4, kv_heads))
        usp.extend(q, k, k, cache, send=send)

    size = torch.empty(0, dtype=dtype).element_size()
    formula = {"queries": chunk * 4 * (8 * size + 9 * 4), "keys": (cached + chunk) * kv_heads * 16 * size}
    formula["auto"] = min(formula.values())
    for send, size in formula.items():
        sent.clear()
        local.run(lambda topology, way=send: attend(topology, way), ulysses_degree=2, ring_degree=2)
        assert sent["bytes"] == 3 * size, send


def test_both_ways_are_chosen_somewhere():
    """Of the cases above: or the one before would not compare anything."""
    costs = [(chunk * 4 * (8 * 4 + 9 * 4), (cached + chunk) * g * 16 * 4) for cached, chunk, g in CHUNKS]
    assert {queries < keys for queries, keys in costs} == {True, False}


def test_a_window_sends_only_keys_in_reach(sent):
    def attend(topology):
        k = torch.zeros(1, 1024, 1, 8)
        cache = usp.KVCache.from_shards(*[usp.shard(k, topology, layout="striped")] * 2, topology, layout="striped")
        shard = torch.zeros(1, 2, 1, 8)
        usp.extend(shard, shard, shard, cache, send="keys", window_size=(23, 0))

    local.run(attend, ulysses_degree=2, ring_degree=2)
    # Of 1,024 keys the last 23, in shares of 256 consecutive tokens of every second; and 8 of the chunk.
    assert sent["bytes"] == 3 * (23 + 8) * 16 * 4


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_is_refused():
    topology = usp.Topology.build()
    cache = usp.KVCache(topology)
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 2, 8)
    with pytest.raises(usp.InputError, match="cache is empty"):
        usp.decode(q, cache)
    cache.append(k, k)
    refused = {
        "requires a gradient, and inference has none": lambda: usp.decode(q.clone().requires_grad_(), cache),
        "sinks requires a gradient": lambda: usp.decode(q, cache, sinks=torch.zeros(4, requires_grad=True)),
        "3 tokens and the cache 2": lambda: usp.decode(torch.randn(1, 3, 4, 8), cache),
        "0 tokens and the cache 2": lambda: usp.decode(q[:, :0], cache),
        "must share dtype": lambda: usp.decode(q.double(), cache),
        "multiple of kv heads": lambda: usp.decode(q[:, :, :3], cache),
        "must agree in batch": lambda: usp.decode(torch.randn(2, 2, 4, 8), cache),
        r"must be \(batch": lambda: usp.decode(q[0], cache),
        "documents add up to 1 tokens": lambda: usp.decode(q, cache, mask=Mask.documents([1])),
        "both given": lambda: usp.decode(q, cache, mask=Mask.causal(), is_causal=True),
        "dropout": lambda: usp.decode(q, cache, dropout_p=0.1),
        "no file|there is no|kernel": lambda: usp.decode(q, cache, kernel="flash"),
        "key requires a gradient": lambda: cache.append(k.clone().requires_grad_(), k),
        "the cache holds": lambda: cache.append(k.double(), k.double()),
        "agree in all but head_dim": lambda: cache.append(k, k[:, :1]),
        "gives that rank 3": lambda: usp.KVCache.from_shards(k, k, topology, seq_len=3),
        "send is 'q'": lambda: usp.extend(q, k, k, cache, send="q"),
        "both are shards of the chunk": lambda: usp.extend(q[:, :1], k, k, cache),
        "value .* and the cache holds": lambda: usp.extend(q, k, k[..., :4], cache),
    }
    for words, call in refused.items():
        with pytest.raises(usp.InputError, match=words):
            call()
    for name in ("kv_seq_len", "joint", "return_lse"):
        with pytest.raises(TypeError, match=f"unknown argument {name}"):
            usp.decode(q, cache, **{name: 1})
    assert cache.length == 2  # a refused call leaves it alone
    with torch.no_grad():
        usp.decode(q.clone().requires_grad_(), cache)


def test_a_refusal_reaches_the_other_ranks():
    def attend(topology):
        cache = usp.KVCache(topology)
        k = torch.randn(1, 4, 2, 8)
        cache.append(k, k)
        mask = Mask.documents([1]) if topology.rank == 1 else Mask.causal()
        with pytest.raises(usp.USPError) as failure:
            usp.decode(k[:, :1], cache, mask=mask)
        return str(failure.value)

    first, second = local.run(attend, ring_degree=2)
    assert "documents add up to 1" in second
    assert first == f"rank 1: {second}"


def test_ranks_that_disagree_are_told():
    def attend(topology):
        cache = usp.KVCache(topology)
        k = torch.randn(1, 4 + topology.rank, 2, 8)
        cache.append(k, k)
        with pytest.raises(usp.AgreementError) as failure:
            usp.extend(k[:, :2], k[:, :2], k[:, :2], cache)
        return str(failure.value), cache.length

    for rank, (message, length) in enumerate(local.run(attend, ulysses_degree=2)):
        assert "rank 1 has cache 5 where rank 0 has 4" in message
        assert length == 4 + rank
