"""torch.compile and activation checkpointing of a whole model. The recipes of docs/compile.md are run as they stand."""

import contextlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor_config
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

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


def make_sharded(topology: Topology, layers: int = LAYERS, layout: str = "zigzag") -> nn.Module:
    attn = usp.USPAttention(topology=topology, layout=layout)
    model = make_model(lambda q, k, v: attn(q, k, v, is_causal=True))
    model.blocks = model.blocks[:layers]
    return model


def inputs(seq_len: int) -> list[Tensor]:
    """Tokens, positions and the gradient of the logits: whole, the same on every rank."""
    make = torch.Generator().manual_seed(seq_len)
    tokens = torch.randint(VOCABULARY, (2, seq_len), generator=make)
    return [tokens, torch.arange(seq_len), torch.randn(2, seq_len, VOCABULARY, generator=make, dtype=torch.float64)]


def shards(topology: Topology, seq_len: int, layout: str = "zigzag") -> list[Tensor]:
    return [usp.shard(t, topology, 0 if t.ndim == 1 else 1, layout) for t in inputs(seq_len)]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def reference(seq_len: int, change: Callable[[nn.Module], None]) -> list[Tensor]:
    """Logits and gradients of a model in one process, without usp."""
    model = make_model(attend_whole)
    change(model)
    tokens, positions, dlogits = inputs(seq_len)
    logits = model(tokens, positions)
    logits.backward(dlogits)
    return [logits.detach(), *gradients(model)]


def largest_error(model: nn.Module, topology: Topology, seq_len: int, local: list[Tensor] | None = None) -> float:
    """Relative error of the logits and of every parameter's gradient against one process."""

    def same_depth(whole: nn.Module) -> None:
        whole.blocks = whole.blocks[: len(model.blocks)]

    tokens, positions, dlogits = shards(topology, seq_len) if local is None else local
    model.zero_grad()
    logits = model(tokens, positions)
    logits.backward(dlogits)
    for gradient in gradients(model):
        dist.all_reduce(gradient)  # a shard's gradient is its tokens' share of the whole
    found = [usp.unshard(logits.detach(), topology, layout="zigzag", length=seq_len), *gradients(model)]
    return max(relative_error(x, ref) for x, ref in zip(found, reference(seq_len, same_depth), strict=True))


@contextlib.contextmanager
def counting() -> Iterator[Counter]:
    """Counts how often the ring is walked and the Ulysses exchange made, in either direction."""
    counts = Counter()

    def counted(owner, attribute, name):
        original = getattr(owner, attribute)

        def call(*args):
            counts[name] += 1
            return original(*args)

        return mock.patch.object(owner, attribute, call)

    with (
        counted(Ring, "forward", "forward"),
        counted(Ring, "backward", "backward"),
        counted(importlib.import_module("usp.all_to_all"), "exchange", "exchanges"),
    ):
        yield counts


@contextlib.contextmanager
def without_torchs_own_warnings() -> Iterator[None]:
    """What torch 2.13 warns of when it imports inductor, and when it compiles a module whose input has a history."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        yield


# ---- compilation -----------------------------------------------------------------------------------------------------


def compiled(rank, degrees, backend, mode, cache):
    """Largest error over several lengths, and at how many of them a program was compiled."""
    topology = Topology.build(*degrees)
    model = make_sharded(topology, layers=1)
    torch._dynamo.reset()
    programs = CompileCounterWithBackend(backend)
    model.compile(fullgraph=True, backend=programs, dynamic=mode == "dynamic=True" or None)
    errors, counts = [], [0]
    with (
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache),
        inductor_config.patch(compile_threads=1),
        without_torchs_own_warnings(),
    ):
        for seq_len in LENGTHS:
            local = shards(topology, seq_len)
            if mode == "marked":
                torch._dynamo.mark_dynamic(local[0], 1)
                torch._dynamo.mark_dynamic(local[1], 0)
            errors.append(largest_error(model, topology, seq_len, local))
            counts.append(programs.frame_count)
    return max(errors), sum(a < b for a, b in pairwise(counts))


@pytest.mark.parametrize(("mode", "degrees"), [("automatic", (1, 2)), ("dynamic=True", (2, 1))])
def test_complaint_24_a_whole_model_is_one_graph(pool, mode, degrees, tmp_path):
    """By itself the second length makes a program for all others; with dynamic=True the first one does."""
    for error, programs in pool(2).run(compiled, degrees, "aot_eager", mode, str(tmp_path), timeout=200):
        assert error < 1e-12
        assert programs == (2 if mode == "automatic" else 1)


@needs_compiler
def test_inductor(pool, tmp_path):
    """The first program is of static length, the second of any."""
    for error, programs in pool(2).run(compiled, (1, 2), "inductor", "automatic", str(tmp_path), timeout=280):
        assert error < 1e-12
        assert programs == 2


OUTSIDE = Mask.causal() & Mask.window(7, 0)
CALLS = {
    "all keys": lambda s: {},
    "window": lambda s: dict(is_causal=True, window_size=(5, -1)),
    "documents": lambda s: dict(is_causal=True, cu_seqlens=(0, 3, s // 2, s)),
    "documents in a tensor": lambda s: dict(is_causal=True, cu_seqlens=torch.tensor([0, *range(3, s, 1 + s // 5), s])),
    "mask": lambda s: dict(mask=OUTSIDE),
    "mask of documents": lambda s: dict(mask=OUTSIDE & Mask.documents((3, s - 3))),
    "length": lambda s: dict(is_causal=True, seq_len=s),
}


def mask_of(how: dict) -> Mask:
    mask = how.get("mask", Mask.causal() if how.get("is_causal") else Mask.full())
    if "window_size" in how:
        mask &= Mask.window(*how["window_size"])
    return mask & Mask.cu_seqlens([int(x) for x in how["cu_seqlens"]]) if "cu_seqlens" in how else mask


def errors_of(attend: Callable, topology: Topology, seq_len: int, mask: Mask) -> list[str]:
    """What is wrong with out, lse and gradients of `attend(q, k, v)`, which returns out and lse of a shard."""
    case = Case(topology.ulysses.degree, topology.ring.degree, seq_len, str(mask), "zigzag", batch=2)
    q, k, v, dout = (usp.shard(t, topology, layout="zigzag") for t in case.tensors())
    for t in (q, k, v):
        t.requires_grad_()
    out, lse = attend(q, k, v)
    results = (out, lse, *torch.autograd.grad(out, (q, k, v), dout))
    return failures(case, [usp.unshard(t.detach(), topology, layout="zigzag", length=seq_len) for t in results])


def called(rank, degrees, dynamic, lengths, names):
    """What is wrong with each way to say which keys are seen, and how many programs all lengths took."""
    topology = Topology.build(*degrees)
    attn = usp.USPAttention(topology=topology, layout="zigzag", scale=8**-0.5)  # the default, but as an attribute
    wrong, programs = [], []
    for name in names:
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        function = torch.compile(attn, fullgraph=True, backend=counter, dynamic=dynamic)
        counts = [0]
        for seq_len in lengths:
            how = CALLS[name](seq_len)
            attend = partial(function, return_lse=True, **how)
            wrong += [f"{name}, {seq_len} tokens: {x}" for x in errors_of(attend, topology, seq_len, mask_of(how))]
            counts.append(counter.frame_count)
        programs.append(sum(a < b for a, b in pairwise(counts)))
    return wrong, programs


@pytest.mark.parametrize(
    ("degrees", "dynamic", "lengths", "names"),
    [
        ((1, 2), None, (40,), ["all keys", "documents", "mask of documents"]),
        ((2, 1), None, (27, 24), ["length"]),  # the first in unequal shards
        ((2, 1), True, (40, 24, 64), ["window", "documents in a tensor", "mask", "length"]),
    ],
)
def test_ways_to_say_which_keys_are_seen(pool, degrees, dynamic, lengths, names):
    """Static: a program a length. Dynamic: one for all, whatever the numbers in a tensor; heads are constants."""
    for wrong, programs in pool(2).run(called, degrees, dynamic, lengths, names, timeout=200):
        assert not wrong
        assert programs == [1 if dynamic else len(lengths)] * len(names)


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


def masks_made_inside(rank):
    """Largest difference of compiled functions that make their masks from the same in eager."""
    attn = usp.USPAttention(topology=Topology.build(1, 2), layout="zigzag")
    makers = (Mask.full, Mask.causal, lambda: Mask.causal() & Mask.documents((3, 13)), lambda: Mask.window(5, 0))
    torch.manual_seed(rank)
    x, differences = torch.randn(1, 8, 4, 8, dtype=torch.float64), []
    for make in makers:
        torch._dynamo.reset()

        def run(x, make=make):
            return attn(x, x, x, mask=make())

        differences.append((torch.compile(run, fullgraph=True, backend="aot_eager")(x) - run(x)).abs().max().item())
    return differences


def test_a_mask_may_be_made_inside_the_graph(pool):
    assert pool(2).run(masks_made_inside, timeout=200) == [[0.0] * 4] * 2


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
    ring, ulysses = Topology.build(1, 2).ring, Topology.build(2, 1).ulysses
    make = torch.Generator().manual_seed(0)

    def tensors(*heads, rows=32):
        return [torch.randn(1, rows, h, 8, generator=make) for h in heads]

    q, k, v, dout = tensors(2, 1, 1, 2)
    cu_seqlens = torch.tensor([0, 20, 64])
    plain = ":0 zigzag 2 2 p2p sdpa 0 0.3;0.0 ", ring.group.group_name, [64]
    out, lse = torch.ops.usp.attention.default([q, k, v], *plain, cu_seqlens)
    qkv = [t.requires_grad_() for t in (q, k, v)]
    deal = [4, 2, 2], 4, [17, 15], False, ulysses.group.group_name
    shares = [t.requires_grad_() for t in tensors(2, 1, 1)]
    found = {
        "attention": (torch.ops.usp.attention.default, (qkv, *plain, cu_seqlens)),
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
    for result in pool(2).run(opchecked, timeout=200):
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

PLAIN = Counter(forward=1, backward=1, exchanges=4)
EXCHANGED_AGAIN = Counter(exchanges=2)
WALKED_AGAIN = Counter(forward=1, exchanges=2)
STEPS = {
    "One graph": ((2, 2), 2, PLAIN),
    "Sequences of changing length": ((2, 1), 1, PLAIN),
    "Layer by layer": ((2, 1), 2, PLAIN),
    "Full checkpointing": ((2, 2), 2, PLAIN + WALKED_AGAIN),
    "Full checkpointing in one graph": ((2, 1), 1, PLAIN + WALKED_AGAIN),
    "Selective checkpointing": ((2, 2), 2, PLAIN + EXCHANGED_AGAIN),
    "Selective checkpointing, nothing sent again": ((2, 2), 2, PLAIN),
    "Selective checkpointing in one graph": ((2, 1), 1, PLAIN + EXCHANGED_AGAIN),
}
"""By recipe: degrees and layers to try it with, and what a step does in each layer: walks of the ring, exchanges."""


def per_layer(counts: Counter, layers: int) -> Counter:
    assert all(count % layers == 0 for count in counts.values())
    return Counter({name: count // layers for name, count in counts.items()})


def followed(rank, degrees, layers, recipe):
    """Largest error of a step after a recipe, what a layer did in it, and the programs: at first, and after that."""
    torch._dynamo.reset()
    topology = Topology.build(*degrees)
    local = shards(topology, LENGTHS[0])
    names = dict(torch=torch, usp=usp, model=make_sharded(topology, layers), tokens=local[0], positions=local[1])
    programs = CompileCounterWithBackend("aot_eager")
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=programs)):
        exec(RECIPES[recipe], names)
    with counting() as counts, without_torchs_own_warnings():
        error = largest_error(names["model"], topology, LENGTHS[0], local)
    before = programs.frame_count
    if recipe == "Sequences of changing length":
        error = max(error, *(largest_error(names["model"], topology, seq_len) for seq_len in LENGTHS[1:]))
    return error, per_layer(counts, layers), before, programs.frame_count - before


@pytest.mark.parametrize("recipe", sorted(STEPS))
def test_recipe(pool, recipe):
    degrees, layers, expected = STEPS[recipe]
    processes = pool(degrees[0] * degrees[1])
    for error, counts, programs, more in processes.run(followed, degrees, layers, recipe, timeout=200):
        assert error < 1e-12
        assert counts == expected
        assert bool(programs) == ("compile" in RECIPES[recipe])
        assert more == 0


def packed(rank):
    """The error for one set of documents after the other, and how many programs that took."""
    torch._dynamo.reset()
    topology = Topology.build(1, 2)
    attention = partial(usp.attention, topology=topology, layout="zigzag")
    programs = CompileCounterWithBackend("aot_eager")
    names = dict(torch=torch, attention=attention)
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=programs)):
        exec(RECIPES["Packed documents"], names)
    wrong = []
    for boundaries in (names["cu_seqlens"].tolist(), [0, 1, 23, 24], [0, 11, 12, 24]):
        names["cu_seqlens"] = torch.tensor(boundaries)
        wrong += errors_of(names["packed"], topology, 24, Mask.causal() & Mask.cu_seqlens(boundaries))
    return wrong, programs.frame_count


def test_recipe_for_packed_documents(pool):
    assert pool(2).run(packed) == [([], 1)] * 2


def compared(rank):
    """Masks that differ between ranks."""
    torch._dynamo.reset()
    topology = Topology.build(1, 2)
    model = make_sharded(topology)
    attn = usp.USPAttention(topology=topology, layout="zigzag")
    for block in model.blocks:
        block.attention.attend = lambda q, k, v: attn(q, k, v, is_causal=rank == 0)
    tokens, positions, _ = shards(topology, 24)
    names = dict(torch=torch, model=model, tokens=tokens, positions=positions)
    with pytest.raises(usp.AgreementError, match="rank 1 has mask : where rank 0 has :0"):
        exec(RECIPES["Comparing arguments between ranks"], names)


def test_recipe_for_comparing_arguments(pool):
    pool(2).run(compared)


def test_every_recipe_is_run():
    assert set(RECIPES) == {*STEPS, "Packed documents", "Comparing arguments between ranks"}


# ---- checkpointing beyond the recipes --------------------------------------------------------------------------------


def reentrant(rank, use_reentrant):
    """Through torch.utils.checkpoint itself."""
    topology = Topology.build(2, 2)
    model = make_sharded(topology)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=use_reentrant)
    with counting() as counts:
        error = largest_error(model, topology, 24)
    return error, per_layer(counts, LAYERS)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_both_kinds_of_checkpoint_walk_the_ring_again(pool, use_reentrant):
    for error, counts in pool(4).run(reentrant, use_reentrant):
        assert error < 1e-12
        assert counts == PLAIN + WALKED_AGAIN


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank update (LoRA, Hu et al. 2021)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(0)
        self.linear = linear
        self.down = nn.Parameter(torch.randn(2, linear.in_features, generator=make, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(linear.out_features, 2, generator=make, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.down.T @ self.up.T


def adapt(model: nn.Module) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        block.attention.q, block.attention.v = Adapted(block.attention.q), Adapted(block.attention.v)


def recomputed_elsewhere(rank):
    """Two models of different grids, layouts and lengths: both forward, then both backward, in a thread of their own.

    A new thread inherits no context variable, and a setting that the second model left behind would reach the first.
    """
    steps = []
    for degrees, layout, seq_len in (((1, 2), "striped", 26), ((2, 1), "zigzag", 40)):
        topology = Topology.build(*degrees)
        model = make_sharded(topology, layout=layout)
        adapt(model)
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
        tokens, positions, dlogits = shards(topology, seq_len, layout)
        steps.append((model, seq_len, partial(model(tokens, positions).backward, dlogits)))
    with ThreadPoolExecutor(1) as thread, counting() as counts:
        for *_, backward in steps:
            thread.submit(backward).result()
    assert counts["forward"] == 2 * LAYERS  # all of them recomputed there
    errors = []
    for model, seq_len, _ in steps:
        found = gradients(model)
        for gradient in found:
            dist.all_reduce(gradient)
        errors += [relative_error(x, ref) for x, ref in zip(found, reference(seq_len, adapt)[1:], strict=True)]
    return max(errors)


def test_complaint_17_recomputation_needs_no_context(pool):
    assert max(pool(2).run(recomputed_elsewhere)) < 1e-12


# ---- asked for, and off ----------------------------------------------------------------------------------------------


def test_complaint_18_without_a_process_group_degrees_are_refused():
    assert not dist.is_initialized()
    with pytest.raises(usp.TopologyError, match="needs a process group and none is initialised"):
        usp.USPAttention(ulysses_degree=2)
    with pytest.raises(usp.TopologyError, match="needs a process group and none is initialised"):
        usp.USPAttention(ring_degree=2)


def really_on(rank):
    """Whether this rank's output depends on the other rank's keys: plain, checkpointed and compiled."""
    for wrong in ({"ulysses_degree": 4}, {"ring_degree": 3}):
        with pytest.raises(usp.TopologyError):
            usp.USPAttention(**wrong)
    answers = []
    for degrees in ((1, 2), (2, 1)):
        attn = usp.USPAttention(*degrees)
        torch._dynamo.reset()
        compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
        for run in (attn, partial(checkpoint, attn, use_reentrant=False), compiled):
            torch.manual_seed(rank)
            x = torch.randn(1, 8, 4, 8, requires_grad=True)
            before = run(x, x, x)
            other = (2 * x.detach()).requires_grad_() if rank == 1 else x
            after = run(x, other, x)
            answers.append(not torch.equal(before, after))
    return answers


def test_complaint_18_parallelism_that_was_asked_for_is_on(pool):
    assert pool(2).run(really_on, timeout=200) == [[True] * 6] * 2
