"""torch.compile and activation checkpointing of a whole model. The recipes of docs/compile.md are run as they stand."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import usp
from tests.cases import Case, failures
from tests.dense import relative_error
from tests.tiny_model import LAYERS, VOCABULARY, attend_whole, make_model
from usp.mask import Mask
from usp.ring import Ring
from usp.topology import Topology

RECIPES = dict(
    re.findall(r"^## (.+?)\n.*?```python\n(.+?)```", Path("docs/compile.md").read_text(), re.MULTILINE | re.DOTALL)
)
LENGTHS = (24, 40, 32)
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor on CPU needs a C++ compiler, and there is none"
)


# ---- a sharded model beside one process ------------------------------------------------------------------------------


def make_sharded(topology: Topology, layers: int = LAYERS) -> nn.Module:
    attn = usp.USPAttention(topology=topology, layout="zigzag")
    model = make_model(lambda q, k, v: attn(q, k, v, is_causal=True))
    model.blocks = model.blocks[:layers]
    return model


def inputs(seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and the gradient of the logits: whole, the same on every rank."""
    make = torch.Generator().manual_seed(seq_len)
    tokens = torch.randint(VOCABULARY, (2, seq_len), generator=make)
    dlogits = torch.randn(2, seq_len, VOCABULARY, generator=make, dtype=torch.float64)
    return tokens, torch.arange(seq_len), dlogits


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def sharded_inputs(topology: Topology, seq_len: int, marked: bool = False) -> list[Tensor]:
    cut = partial(usp.shard, topology=topology, layout="zigzag")
    tokens, positions, dlogits = inputs(seq_len)
    local = [cut(tokens), cut(positions, dim=0), cut(dlogits)]
    if marked:
        torch._dynamo.mark_dynamic(local[0], 1)
        torch._dynamo.mark_dynamic(local[1], 0)
    return local


def largest_error(model: nn.Module, topology: Topology, seq_len: int, marked: bool = False) -> float:
    """Relative error of the logits and of every parameter's gradient against one process without usp."""
    whole = make_model(attend_whole)
    whole.blocks = whole.blocks[: len(model.blocks)]
    tokens, positions, dlogits = inputs(seq_len)
    expected = whole(tokens, positions)
    expected.backward(dlogits)

    tokens, positions, dlogits = sharded_inputs(topology, seq_len, marked)
    model.zero_grad()
    logits = model(tokens, positions)
    logits.backward(dlogits)
    for gradient in gradients(model):
        dist.all_reduce(gradient)  # a shard's gradient is its tokens' share of the whole
    found = [usp.unshard(logits.detach(), topology, layout="zigzag", length=seq_len), *gradients(model)]
    return max(relative_error(x, ref) for x, ref in zip(found, [expected.detach(), *gradients(whole)], strict=True))


@contextlib.contextmanager
def counting() -> Iterator[Counter]:
    """Counts how often the ring is walked and the Ulysses exchange made, in either direction."""
    counts = Counter()

    def counted(name, function):
        def call(*args):
            counts[name] += 1
            return function(*args)

        return call

    import usp.all_to_all

    with (
        mock.patch.object(Ring, "forward", counted("forward", Ring.forward)),
        mock.patch.object(Ring, "backward", counted("backward", Ring.backward)),
        mock.patch.object(usp.all_to_all, "exchange", counted("exchanges", usp.all_to_all.exchange)),
    ):
        yield counts


# ---- compilation -----------------------------------------------------------------------------------------------------


def compiled(rank, degrees, backend, mode, layers, cache):
    """Largest error over several lengths, and how many programs were compiled."""
    topology = Topology.build(*degrees)
    model = make_sharded(topology, layers)
    torch._dynamo.reset()
    programs = CompileCounterWithBackend(backend)
    model.compile(fullgraph=True, backend=programs, dynamic=mode == "dynamic=True" or None)
    lengths = LENGTHS[:1] if mode == "static" else LENGTHS
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache), torch._inductor.config.patch(compile_threads=1):
        errors = [largest_error(model, topology, s, marked=mode == "marked") for s in lengths]
    return max(errors), programs.frame_count


@pytest.mark.parametrize(
    ("mode", "degrees"), [("static", (2, 2)), ("marked", (2, 1)), ("dynamic=True", (1, 2)), ("automatic", (2, 1))]
)
def test_complaint_24_a_whole_model_is_one_graph(pool, mode, degrees, tmp_path):
    """Marked or dynamic=True, one program serves all lengths; unmarked, the second length makes one for all others."""
    ranks = degrees[0] * degrees[1]
    for error, programs in pool(ranks).run(compiled, degrees, "aot_eager", mode, LAYERS, str(tmp_path), timeout=200):
        assert error < 1e-12
        assert programs == (2 if mode == "automatic" else 1)


@needs_compiler
@pytest.mark.parametrize(("mode", "degrees"), [("static", (2, 1)), ("marked", (1, 2))])
def test_inductor(pool, mode, degrees, tmp_path):
    for error, programs in pool(2).run(compiled, degrees, "inductor", mode, 1, str(tmp_path), timeout=280):
        assert error < 1e-12
        assert programs == 1


ATTENTION = Case(1, 2, 0, layout="zigzag", heads=4, kv_heads=2, batch=2)
OUTSIDE = Mask.causal() & Mask.window(7, 0)
CALLS = {
    "full": lambda s: {},
    "window": lambda s: dict(is_causal=True, window_size=(5, -1)),
    "documents": lambda s: dict(is_causal=True, cu_seqlens=(0, 3, s // 2, s)),
    "documents as a tensor": lambda s: dict(is_causal=True, cu_seqlens=torch.tensor([0, *range(3, s, 1 + s // 5), s])),
    "mask": lambda s: dict(mask=OUTSIDE),
    "mask of documents": lambda s: dict(mask=OUTSIDE & Mask.documents((3, s - 3))),
    "length": lambda s: dict(is_causal=True, seq_len=s),
}
ONE_PROGRAM = {"full", "window", "documents as a tensor", "mask", "length"}
"""Calls whose values other than lengths and numbers in tensors stay: a program of dynamic length serves them all."""


def mask_of(how: dict) -> Mask:
    mask = how.get("mask", Mask.causal() if how.get("is_causal") else Mask.full()) & Mask.full()
    if "window_size" in how:
        mask &= Mask.window(*how["window_size"])
    return mask & Mask.cu_seqlens([int(x) for x in how["cu_seqlens"]]) if "cu_seqlens" in how else mask


def called(rank, degrees, dynamic, lengths):
    """What is wrong with each way to say which keys are seen, and how many programs it took."""
    topology = Topology.build(*degrees)
    attn = usp.USPAttention(topology=topology, layout="zigzag")
    wrong, programs = [], {}
    for name, call in CALLS.items():
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        function = torch.compile(attn, fullgraph=True, backend=counter, dynamic=dynamic)
        for seq_len in lengths:
            how = call(seq_len)
            if seq_len % topology.sequence_degree and "seq_len" not in how:
                continue
            case = Case(*degrees, seq_len, str(mask_of(how)), "zigzag", batch=2)
            q, k, v, dout = (usp.shard(t, topology, layout="zigzag") for t in case.tensors())
            for t in (q, k, v):
                t.requires_grad_()
            out, lse = function(q, k, v, return_lse=True, **how)
            results = (out, lse, *torch.autograd.grad(out, (q, k, v), dout))
            whole = [usp.unshard(t.detach(), topology, layout="zigzag", length=seq_len) for t in results]
            wrong += [f"{name}, {seq_len} tokens: {what}" for what in failures(case, whole)]
        programs[name] = counter.frame_count
    return wrong, programs


@pytest.mark.parametrize(("degrees", "dynamic"), [((1, 2), None), ((2, 1), True)])
def test_every_way_to_say_which_keys_are_seen_compiles(pool, degrees, dynamic):
    for wrong, programs in pool(2).run(called, degrees, dynamic, (40, 24, 64), timeout=200):
        assert not wrong
        if dynamic:
            assert {name for name, count in programs.items() if count == 1} == ONE_PROGRAM


def refused(rank):
    topology = Topology.build(1, 2)
    attn = usp.USPAttention(topology=topology)
    q, k = torch.randn(1, 16, 4, 8), torch.randn(1, 16, 3, 8)
    messages = []
    for args, how in (
        ((q, k, k), {}),
        ((q, q, q), dict(seq_len=99)),
        ((q, q, q), dict(seq_len=16)),
        ((q, q, q), dict(cu_seqlens=(0, 5, 3))),
        ((q, q, q), dict(cu_seqlens=torch.tensor([0, 5, 31]))),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception) as found:  # torch wraps what is raised while it traces, in one of several types
            torch.compile(attn, fullgraph=True, backend="aot_eager")(*args, **how)
        messages.append(str(found.value))
    return messages


def test_a_refusal_while_compiling_keeps_its_words(pool):
    expected = [
        "heads must be a multiple of kv heads",
        "a sequence of 99 gives that rank",
        "this looks like the whole sequence",
        "document boundaries must start at 0 and ascend",
        "the documents add up to 31 tokens and the global sequence has 32",
    ]
    for messages in pool(2).run(refused):
        assert all(text in message for text, message in zip(expected, messages, strict=True)), messages


def opchecked(rank):
    """Of every op what tests/distributed/test_autograd.py does not check: backward, way back, documents in a tensor."""
    topology = Topology.build(2, 2)
    make = torch.Generator().manual_seed(0)

    def tensors(*heads, rows=32):
        return [torch.randn(1, rows, h, 8, generator=make) for h in heads]

    q, k, v, dout = tensors(2, 1, 1, 2)
    cu_seqlens = torch.tensor([0, 20, 64])
    plain = ":0 zigzag 2 p2p sdpa 2 0.3", topology.ring.group.group_name, 64
    out, lse = torch.ops.usp.attention.default(q, k, v, *plain, cu_seqlens)
    qkv = [t.requires_grad_() for t in (q, k, v)]
    deal = [4, 2, 2], 4, [17, 15], False, topology.ulysses.group.group_name
    shares = [t.requires_grad_() for t in tensors(2, 1, 1)]
    found = {
        "attention": (torch.ops.usp.attention.default, (*qkv, *plain, cu_seqlens)),
        "backward": (
            torch.ops.usp.attention_backward.default,
            ([t.detach() for t in (dout, q, k, v, out, lse)], *plain, cu_seqlens),
        ),
        "all_to_all": (torch.ops.usp.all_to_all.default, (shares, *deal)),
    }
    return {
        f"{name} {test}": str(result)
        for name, (op, args) in found.items()
        for test, result in torch.library.opcheck(op, args, raise_exception=False).items()
    }


def test_opcheck_of_every_op(pool):
    for result in pool(4).run(opchecked, timeout=200):
        assert len(result) == 12
        assert set(result.values()) == {"SUCCESS"}, result


def test_the_ops_are_there_once_attention_is_named():
    code = """if True:
        import torch, usp
        assert not hasattr(torch.ops.usp, "attention")
        usp.USPAttention
        print(torch.ops.usp.attention.default, torch.ops.usp.all_to_all.default)
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout == "usp.attention.default usp.all_to_all.default\n"


# ---- recipes ---------------------------------------------------------------------------------------------------------

# Each recipe: how often a step of a model of two layers must walk the ring forward and backward, and exchange heads.
PLAIN = Counter(forward=LAYERS, backward=LAYERS, exchanges=4 * LAYERS)
AGAIN = Counter(forward=LAYERS, exchanges=2 * LAYERS)
EXPECTED = {
    "One graph": PLAIN,
    "Sequences of changing length": PLAIN,
    "Layer by layer": PLAIN,
    "Full checkpointing": PLAIN + AGAIN,
    "Selective checkpointing": PLAIN + Counter(exchanges=AGAIN["exchanges"]),
    "Selective checkpointing in one graph": PLAIN,
    "Comparing arguments between ranks": PLAIN,
}


def followed(rank, degrees, recipe):
    """Largest error and the counts of one step after a recipe."""
    torch._dynamo.reset()
    topology = Topology.build(*degrees)
    model = make_sharded(topology)
    tokens, positions, _ = sharded_inputs(topology, 24)
    names = dict(torch=torch, usp=usp, model=model, tokens=tokens, positions=positions)
    with torch._dynamo.config.patch(), mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        exec(RECIPES[recipe], names)
    with counting() as counts:
        error = largest_error(names["model"], topology, 24)
    return error, counts


@pytest.mark.parametrize("recipe", sorted(EXPECTED))
def test_recipe(pool, recipe):
    for error, counts in pool(4).run(followed, (2, 2), recipe, timeout=200):
        assert error < 1e-12
        assert counts == EXPECTED[recipe]
