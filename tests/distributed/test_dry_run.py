"""`usp dry-run`: what it counts, which ranks it takes for alike, and what it says of faults that are put in."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from usp import dry_run, kernels
from usp.cli.app import app
from usp.dry_run import How, run, world
from usp.errors import InputError, USPError
from usp.mask import Mask
from usp.placement import place
from usp.planner.traffic import Layer, Shape
from usp.ring import Ring
from usp.schedule import Schedule
from usp.transports.p2p import P2P

HOW = How("float32", "cpu", "sdpa")


def nodes(ranks: int, each: int) -> list[str]:
    return [str(rank // each) for rank in range(ranks)]


def usp(*args: str, model: str = "--heads 28 --kv-heads 4 --gpus 16 --gpu h100"):
    """The command in this process, so that faults can be put in."""
    return CliRunner().invoke(app, ["dry-run", *model.split(), *args])


@pytest.fixture
def one_more(monkeypatch):
    """P2P sends every message of a ring to the next rank twice."""
    real = P2P.exchange

    def exchange(self, sends, receives):
        if len(sends) == 1:
            real(self, sends, {})
        return real(self, sends, receives)

    monkeypatch.setattr(P2P, "exchange", exchange)


# ---- one rank --------------------------------------------------------------------------------------------------------


def test_what_a_rank_sends_by_hand():
    """U=2 R=2, 10 tokens, 4:2 heads of 8 and 4, float32: ring ranks have 5 tokens, Ulysses ranks 3 and 2."""
    layer = Layer(Shape(1, 4, 2, 8, 4, 4), Schedule(Mask.full(), "contiguous", 10, 2), 2)
    with world(2, ["a", "a", "b", "b"], 2, 2) as topology:
        found = run(layer, topology, kernels.load("sdpa"), HOW)
    # To the peer of its node, 3 tokens of 2 q heads and a kv head of both; of its heads, 2 tokens; backward likewise.
    qkv, out = 2 * 8 + 8 + 4, 2 * 4
    # Round the ring, which crosses nodes, a kv head of 5 tokens, and once more the gradients.
    block = 5 * (8 + 4) * 4
    assert found.sent == {
        "forward all-to-all in": (1, 0, 3 * qkv * 4, 0),
        "forward ring": (1, 0, 0, block),
        "forward all-to-all out": (1, 0, 2 * out * 4, 0),
        "backward all-to-all in": (1, 0, 3 * out * 4, 0),
        "backward ring": (2, 0, 0, 2 * block),
        "backward all-to-all out": (1, 0, 2 * qkv * 4, 0),
    }
    assert found.equal
    shards = 3 * (4 * 8 + 2 * 8 + 2 * 4) * 4
    assert found.peak_bytes > shards + 5 * qkv * 4


LAYERS = {
    "first, last, between": (("zigzag", 208, 4), 2, "p2p", 2, 3),
    "uneven": (("zigzag", 101, 2), 4, "p2p", 2, 5),  # 51 and 50 tokens, 3 and 2 heads
    "half a node": (("striped", 64, 4), 2, "p2p", 4, 3),  # every second ring rank sends to its own node
    "window": (("contiguous", 96, 6), 1, "p2p", 3, 4),
    "all_gather": (("zigzag", 96, 6), 2, "all_gather", 6, 5),
    "double ring": (("contiguous", 96, 6), 2, "double_ring:3", 6, 1),
    "data parallel": (("zigzag", 64, 2), 2, "p2p", 3, 8),  # groups lie across nodes as it comes
}
"""Layout, tokens and ring degree; Ulysses degree; transport; ranks of a node; kinds of ranks, found by hand."""


@pytest.mark.parametrize("name", LAYERS)
def test_ranks_of_a_kind_do_the_same(name):
    """All ranks are run, also those that a dry run leaves out: shapes, bytes by link, and the planner's bytes."""
    (layout, seq_len, ring), degree, transport, each, number = LAYERS[name]
    mask = {"window": Mask.window(20, 0), "double ring": Mask.full()}.get(name, Mask.causal())
    layer = Layer(Shape(2, 10, 10, 8, 8, 4), Schedule(mask, layout, seq_len, ring), degree, transport)
    world_size = degree * ring * (3 if name == "data parallel" else 1)
    where = nodes(world_size, each)
    kinds = dry_run.rank_classes(layer, place(where, degree, ring, allow_cross_node=True), where)
    assert sorted(rank for kind in kinds for rank in kind) == list(range(world_size))
    assert len(kinds) == number
    held = {}
    for rank in range(world_size):
        with world(rank, where, degree, ring) as topology:
            held[rank] = run(layer, topology, kernels.load("sdpa"), HOW)
            assert held[rank].equal, (rank, held[rank])
    for first, *others in kinds:
        assert all(held[rank].sent == held[first].sent for rank in others)
    assert max(held[first].peak_bytes for first, *_ in kinds) == max(one.peak_bytes for one in held.values())


def test_the_busiest_rank_comes_first_and_then_the_ends():
    layer = Layer(Shape(1, 7, 7, 8, 8, 2), Schedule(Mask.causal(), "zigzag", 97, 4), 2)
    found = dry_run.dry_run(layer, nodes(8, 2), How(), most_steps=0)
    assert [r.rank for r in found.runs] == [0] and found.classes > 3 and found.ranks == 8
    found = dry_run.dry_run(layer, nodes(8, 2), How())
    assert [r.rank for r in found.runs][:2] == [0, 7]
    assert sum(r.stands_for for r in found.runs) == 8 and all(r.equal for r in found.runs)


def test_long_rings_are_sampled_at_both_ends():
    layer = Layer(Shape(1, 8, 8, 8, 8, 2), Schedule(Mask.causal(), "zigzag", 2**14, 512), 8)
    hops = dry_run.looked_at(layer)
    assert (hops[:2], hops[-2:], len(hops)) == ([0, 1], [510, 511], 8)
    kinds = dry_run.rank_classes(layer, place(nodes(4096, 8), 8, 512), nodes(4096, 8))
    assert [(kind[0], len(kind)) for kind in kinds] == [(0, 8), (4092, 8), (2048, 8 * 510)]


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_other_shapes_are_an_error(monkeypatch):
    layer = Layer(Shape(1, 4, 4, 8, 8, 2), Schedule(Mask.causal(), "zigzag", 64, 2), 1)
    real = Ring.backward
    monkeypatch.setattr(Ring, "backward", lambda *args: [t[:, 1:] for t in real(*args)])
    with pytest.raises(USPError, match=r"^rank 0: gradients came out as \(\(1, 31, 4, 8\), torch.bfloat16, 'cuda'\), "):
        dry_run.dry_run(layer, nodes(2, 2), How())
    monkeypatch.setattr(Ring, "backward", lambda *args: [t.float() for t in real(*args)])
    with pytest.raises(USPError, match=r"torch.float32, 'cuda'\) and must be \(\(1, 32, 4, 8\), torch.bfloat16"):
        dry_run.dry_run(layer, nodes(2, 2), How())
    assert not dist.is_initialized()


def test_what_cannot_be_counted_is_an_error(monkeypatch):
    layer = Layer(Shape(1, 4, 4, 8, 8, 2), Schedule(Mask.causal(), "zigzag", 64, 2), 1)
    monkeypatch.setattr(Ring, "forward", lambda self, q, k, v: dist.all_reduce(q, group=self.transport.group))
    with pytest.raises(USPError, match=r"^torch.distributed.allreduce was called, which a dry run does not know how "):
        dry_run.dry_run(layer, nodes(2, 2), How())


def test_the_rank_of_a_failure_is_named(monkeypatch):
    layer = Layer(Shape(1, 4, 4, 8, 8, 2), Schedule(Mask.causal(), "zigzag", 64, 2), 1)
    monkeypatch.setattr(Ring, "forward", lambda self, q, k, v: torch.cat([q, k[:, :, 1:]]))
    with pytest.raises(RuntimeError) as failure:
        dry_run.dry_run(layer, nodes(2, 2), How())
    assert failure.value.__notes__ == [f"in the dry run of rank 0 of {layer}"]


def test_a_process_group_is_in_the_way():
    there_already = r"^a dry run makes a process group of its own, and there is one: "
    with world(0, ["a", "a"], 1, 2), pytest.raises(InputError, match=there_already), world(0, ["a", "a"], 1, 2):
        pass


def test_a_message_too_many_is_exit_code_1(one_more):
    done = usp("--seq-len", "16K", "-u", "4", "-r", "4", "--transport", "p2p")
    assert done.exit_code == 1
    *lines, last = done.stdout.splitlines()
    assert last.endswith(" s; bytes DIFFER FROM the plan's")
    # 3 blocks of a kv head with 4,096 tokens, in bfloat16; in the backward pass as many again in float32.
    assert f"+{3 * 4096 * 256 * 2:,} B" in next(line for line in lines if line.startswith("   forward ring"))
    assert f"+{3 * 4096 * 256 * (2 + 4):,} B" in next(line for line in lines if line.startswith("   backward ring"))
    assert next(line for line in lines if line.startswith("   forward all-to-all")).split()[-1] == "equal"


# ---- the command -----------------------------------------------------------------------------------------------------

CASES = [
    ["-u", "2", "-r", "8", "--transport", "p2p", "--layout", "zigzag"],
    ["-u", "2", "-r", "8", "--transport", "all_gather", "--layout", "striped"],
    ["-u", "2", "-r", "8", "--transport", "double_ring", "--full"],
    ["-u", "8", "-r", "2", "--window", "500,0", "--layout", "contiguous", "--batch", "2"],
    ["-u", "16", "--dtype", "float16", "--checkpointing", "selective", "--layers", "3"],
    ["-u", "2", "--tp", "2", "--dp", "2", "--mode", "inference", "--documents", "10K,6411", "--causal"],
    ["-u", "4", "-r", "4", "--device", "cpu", "--dtype", "float32", "--causal"],
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_bytes_are_those_of_the_plan(case):
    seq_len = "16651" if "--documents" in case else "16411"  # what does not divide by anything
    done = usp("--seq-len", seq_len, *case, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    told = json.loads(done.stdout)
    assert told["equal"] and told["step"]["sent_bytes"] == told["step"]["planned_bytes"]
    (layer,) = told["layers"]
    assert sum(r["stands_for"] for r in layer["runs"]) == layer["ranks"] == (8 if "--tp" in case else 16)
    assert len(layer["runs"]) == layer["kinds"]
    for rank in layer["runs"]:
        assert rank["peak_bytes"] <= layer["planned_peak_bytes"]
        assert len(rank["sent"]) == (3 if "inference" in case else 6)
        for part in rank["sent"].values():
            assert part["bytes_inside"] + part["bytes_across"] == part["planned_bytes"]


def test_the_text(monkeypatch):
    monkeypatch.setattr(dry_run, "MOST_STEPS", 1)
    monkeypatch.setattr("usp.cli.dry_run.FRAMEWORK_BYTES", 2**40)
    done = usp("--seq-len", "64K", model="--model gpt-oss-20b --gpus 16 --gpu h100")
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    title = "gpt-oss-20b on 2 x 8 h100, 1 x 65,536 tokens, causal: U=8 R=2 zigzag p2p, bfloat16 on cuda, kernel sdpa"
    assert lines[0] == title
    assert lines[2] == (
        "one layer of 12, forward and backward; ranks: 16, kinds of them: 2, ONLY 1 RUN, to save time (--all)"
    )
    # 64:8 heads of 64: 4,096 tokens of 56 and 7 to 7 peers and 28,672 of the output back; a block of 32,768 of one.
    assert [line.split() for line in lines[4:9]] == [
        ["rank", "0,", "8", "alike", "274", "MiB"],
        ["forward", "all-to-all", "14", "63", "MiB", "0", "B", "equal"],
        ["forward", "ring", "1", "0", "B", "8", "MiB", "equal"],
        ["backward", "all-to-all", "14", "63", "MiB", "0", "B", "equal"],
        ["backward", "ring", "2", "0", "B", "24", "MiB", "equal"],
    ]
    assert lines[9].endswith("with what a CUDA kernel holds inside: MORE THAN PLANNED")
    assert lines[11].startswith("one windowed layer of 12, ")
    assert lines[-1].endswith(" s; bytes equal the plan's")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["-u", "16", "--heads", "8"],
            "the plan has no choice with ulysses_degree=16 (U=16 is more than the 8 query heads",
        ),
        (
            ["--dtype", "float32"],
            "the kernel for torch.float32 on cuda with head_dim 128 (v: 128) is the reference",
        ),
        (["--dtype", "int8"], "dtype: Input should be 'bfloat16', 'float16', 'float32' or 'float64', got 'int8'"),
        (["--device", "tpu"], "device is 'tpu': fake tensors pretend to be on cuda or cpu"),
        (["--kernel", "flesh"], "unknown kernel 'flesh': there are flash_attn, reference, sdpa"),
        (["--transport", "nccl"], "unknown transport 'nccl': there are p2p, all_gather, double_ring"),
    ],
)
def test_errors_are_words(args, message):
    done = usp("--seq-len", "64K", *args)
    assert isinstance(done.exception, USPError)
    assert str(done.exception).startswith(message)


def test_4096_ranks():
    """In a process of its own, as everyone runs it; a window, as a ring of 512 causal blocks takes a while."""
    args = "--model llama3-8b --gpus 4096 --gpu h100 --seq-len 16M -u 8 --window 4095,0 --layout contiguous --json"
    command = [sys.executable, "-m", "usp.cli", "dry-run", *args.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (layer,) = json.loads(done.stdout)["layers"]
    assert [(r["rank"], r["stands_for"]) for r in layer["runs"]] == [(0, 8), (2052, 4088)]
