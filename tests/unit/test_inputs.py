"""Files, options and documents that cannot be right: one line each, at once, and nothing is overwritten."""

import json
import os
import random
import time
from collections.abc import Mapping

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.fuzz_inputs import FILES, KEPT, any_arguments, any_file, mutate, wrong_with_arguments, wrong_with_file
from tests.unit.strategies import examples
from usp import layouts, transports
from usp.data import ContextSchedule
from usp.data.collator import LongContextCollator, Packed
from usp.errors import InputError
from usp.mask import Mask
from usp.planner import models
from usp.planner.spec import ClusterSpec, ModelSpec

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """No launcher, and a terminal that breaks no line."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)


# ---- files -----------------------------------------------------------------------------------------------------------


def chain(first: str, each: str) -> str:
    """A line that a and b to i refer to, each nine times the one before."""
    lines = [f"a: &a {first}"]
    pairs = zip("abcdefgh", "bcdefghi", strict=True)
    return "\n".join(lines + [f"{new}: &{new} {each.replace('?', old)}" for old, new in pairs])


NINE = ",".join(["*?"] * 9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (chain("[x, x, x, x, x, x, x, x, x]", f"[{NINE}]"), "its aliases stand for more than 1,048,576 values"),
        (chain("{k: x}", "{" + ",".join(f"{i}: *?" for i in range(9)) + "}"), "its aliases stand for more than"),
        (chain("{k: x}", f"{{<<: [{NINE}]}}"), "its aliases stand for more than"),
        (chain(f"[{'x' * 9999}]", f"[{NINE}]"), "its aliases stand for more than"),
        ("name: &a [*a]", "its aliases stand for more than"),
        ("name: &a {<<: *a}", "is neither JSON nor YAML"),
        ("name: " + "[" * 100_000, "is neither JSON nor YAML"),
        ("[" * 100_000 + "]" * 100_000, "is neither JSON nor YAML"),
        ('{"a":' * 100_000, "is neither JSON nor YAML"),
        ("heads: 1" + ":1" * 300_000, "a number of 600,001 characters"),
        ("heads: !!python/object/apply:os.system ['true']", "is neither JSON nor YAML"),
        ("{" + '"' + "k" * 5000 + '": 1}', "kkk: unknown; there are name"),
        ("{" + '"heads\u2028": 1}', "heads : unknown; did you mean heads?"),
    ],
    ids=range(13),
)
def test_a_hostile_file_is_refused_at_once(tmp_path, text, said):
    path, start = tmp_path / "any.yaml", time.monotonic()
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        ModelSpec.read(path)
    assert time.monotonic() - start < 20
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 2000
    assert said in str(caught.value)


def test_aliases_within_bounds_are_read(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "gpus_per_node: 2\ninter: &wire {gb_per_s: 5.0}\nintra: *wire\ndevice:\n  memory_gib: 1.0\n  peak_tflops: 1.0\n"
        "  memory_gb_per_s: 1.0\n  attention: [{block_length: 1, forward_tflops: 1.0, backward_tflops: 1.0}]\n"
    )
    cluster = ClusterSpec.read(path)
    assert cluster.intra == cluster.inter and cluster.intra.gb_per_s == 5.0


@pytest.mark.parametrize("reader", [reader for reader, _ in FILES], ids=range(len(FILES)))
def test_every_reader_takes_what_is_mutated(tmp_path, reader):
    """Else the mutations would be of nothing."""
    path = tmp_path / "any.yaml"
    path.write_text(json.dumps(dict(FILES[[each for each, _ in FILES].index(reader)][1])))
    reader(path)


@examples(400)
@given(st.integers(0, 2**32))
def test_mutated_files(tmp_path_factory, seed):
    reader, content = any_file(random.Random(seed))
    assert not wrong_with_file(reader, content, tmp_path_factory.getbasetemp())


@examples(200)
@given(st.sampled_from(FILES), st.binary(max_size=200))
def test_any_bytes(tmp_path_factory, file, content):
    assert not wrong_with_file(file[0], content, tmp_path_factory.getbasetemp())


def test_keys_that_no_line_holds(tmp_path):
    """Found by `python -m tests.fuzz_inputs`: thousands of characters, deep inside, and line breaks."""
    path = tmp_path / "config.json"
    path.write_text(
        '{"num_attention_heads": 8, "hidden_size": 64, "num_hidden_layers": 2, "n_inner": 8, "vocab_siz e": 9}'
    )
    with pytest.raises(InputError, match=r"vocab_size is missing \(there is 'vocab_siz\\u2028e'\)") as caught:
        models.find(str(path))
    assert len(str(caught.value).splitlines()) == 1
    stages = [{"seq_len": 8, "steps": 1}, {"seq_len": 16, "steps": 1, "[" * 5000: 1}]
    with pytest.raises(InputError, match=r"stages\.1\.\[+: unknown; there are seq_len") as caught:
        ContextSchedule.read({"stages": stages})
    assert len(str(caught.value)) < 500
    with pytest.raises(InputError, match="unknown layout") as caught:
        ContextSchedule.read({"stages": [{"seq_len": 8, "steps": 1, "layout": "x" * 5000}]})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("moe", ["moe_layers", "mlp_only_layers"])
def test_a_config_that_lists_many_layers(moe):
    """Each of 65,536 layers is looked up, not searched for."""
    config = {
        "num_attention_heads": 8, "hidden_size": 64, "num_hidden_layers": 2**16, "vocab_size": 9, "num_experts": 2,
        "intermediate_size": 8, "moe_intermediate_size": 8, "num_experts_per_tok": 1,
        moe: [2**20] * 100_000 + [[], "x"],
    }  # fmt: skip
    start = time.monotonic()
    assert models.from_config(config).experts == (1 if moe == "moe_layers" else 2)
    assert time.monotonic() - start < 20


# ---- options ---------------------------------------------------------------------------------------------------------


@examples(120)
@given(st.randoms(use_true_random=False))
def test_any_options(tmp_path_factory, pick):
    folder = tmp_path_factory.getbasetemp() / "options"
    folder.mkdir(exist_ok=True)
    assert not wrong_with_arguments(any_arguments(pick), folder)


@pytest.mark.parametrize(
    "arguments",
    [
        ["topology", "--nodes", "1000000000", "--gpus-per-node", "1000000000"],
        ["check", "--seq-len", "16", "--batch", "9" * 30],
        ["doctor", "--timeout", "nan"],
        ["explain", "--seq-len", "1K", "-r", "2", "--plot", "kept.png/x.png"],
        ["explain", "--seq-len", "1K", "-r", "2", "--plot", "kept.tiles"],
        ["plan", "--cluster", "kept.yaml", "--seq-len", "1K", "--heads", "4"],
        ["plan", "--model", "two\nlines", "--gpu", "h100", "--seq-len", "1K"],
        ["plan", "--cluster", "two\nlines", "--seq-len", "1K", "--heads", "4"],
        ["topology", "--cluster", "/dev/zero"],
    ],
    ids=range(9),
)
def test_options_that_cannot_be_right(tmp_path, arguments):
    start = time.monotonic()
    assert not wrong_with_arguments(arguments, tmp_path)
    assert time.monotonic() - start < 20
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == KEPT


@pytest.mark.parametrize("command", ["probe", "trace", "doctor", "check"])
@pytest.mark.parametrize(("rank", "world_size"), [("0", "many"), ("7", "2"), ("", ""), ("0", "0")])
def test_a_launcher_that_cannot_be_right(tmp_path, monkeypatch, command, rank, world_size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    arguments = [command, *(["--seq-len", "16"] if command in ("trace", "check") else [])]
    assert not wrong_with_arguments(arguments, tmp_path)


HUGE = "9" * 5000
"""More digits than Python makes an int of."""


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (layouts.parse, f"contiguous:{HUGE}+zigzag"), (layouts.parse, f"balanced[:{HUGE}]"),
        (layouts.parse, "balanced[x]"), (Mask.parse, f":@{HUGE}"), (Mask.parse, f":q{HUGE}"), (Mask.parse, "0"),
        (Mask.parse, ""), (Mask.parse, ":@0,\n"), (lambda text: transports.load(text, None), f"double_ring:{HUGE}"),
        (lambda text: transports.load(text, None), f"p2p:{HUGE}"),
    ],
    ids=range(10),
)  # fmt: skip
def test_names_with_numbers_that_are_none(work, text):
    with pytest.raises(InputError) as caught:
        work(text)
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 500


# ---- documents -------------------------------------------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
TENSORS = st.builds(
    lambda shape, dtype: torch.ones(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.int64, torch.uint8, torch.float32, torch.bool, torch.complex64]),
)
DOCUMENTS = st.lists(st.lists(st.integers(0, 99), max_size=12) | TENSORS | ANYTHING, max_size=4) | ANYTHING


@examples(300)
@given(DOCUMENTS, st.sampled_from(["pad", "drop", "carry"]), st.sampled_from(["error", "split"]), st.none() | ANYTHING)
def test_any_documents(documents, tail, long_documents, tokens):
    """Every token is accounted for, or one line says which document is none."""
    collator = LongContextCollator(8, lambda text: tokens, tail=tail, long_documents=long_documents)
    try:
        packed = collator(documents)
    except InputError as error:
        assert len(str(error).splitlines()) == 1
        return
    assert isinstance(packed, Packed)
    sizes = [batch["input_ids"].shape for batch in packed.batches]
    assert sizes == [(1, 8)] * len(sizes)
    given_tokens = [tokens if isinstance(document, str) else document for document in documents]
    given_tokens = [each["input_ids"] if isinstance(each, Mapping) else each for each in given_tokens]
    assert sum(map(len, given_tokens)) + packed.padded == 8 * len(sizes) + packed.dropped + packed.carried


@examples(100)
@given(ANYTHING, ANYTHING, ANYTHING, ANYTHING)
def test_any_collator(length, separator, pad, ignore_index):
    assume(not isinstance(length, int) or length < 99 or length > 2**40)  # what is between is room for as many
    try:
        collator = LongContextCollator(length, separator=separator, pad=pad, ignore_index=ignore_index)
        collator([[1, 2], [3]])
    except InputError as error:
        assert len(str(error).splitlines()) == 1


def test_a_mutation_changes_something():
    content = b"x" * 40
    assert sum(mutate(random.Random(seed), content) != content for seed in range(100)) > 90
