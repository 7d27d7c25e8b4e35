"""`usp plan`: its words, its document, its picture, and an error in words for whatever is given."""

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schema import fits
from tests.unit.strategies import examples
from usp.cli.app import main
from usp.planner import hardware, models
from usp.planner.plan import Plan, plan
from usp.planner.spec import Workload

LLAMA = ["--model", "llama3-8b", "--gpu", "h100", "--seq-len", "128K"]
TOO_LARGE = ["--model", "llama3-70b", "--gpu", "h100", "--seq-len", "1M"]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def usp(*args: str) -> Done:
    """The command as the shell runs it, in this process: anything but an exit is an error of the test."""
    out, err = io.StringIO(), io.StringIO()
    # Wide enough for what is said of a wrong option to stay in one line.
    environment = mock.patch.dict(os.environ, {"COLUMNS": "400", "TERMINAL_WIDTH": "400"})
    arguments = mock.patch.object(sys, "argv", ["usp", "plan", *args])
    with environment, arguments, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as done:
            code = done.code or 0
    assert isinstance(code, int)
    return Done(code, out.getvalue(), err.getvalue())


def document(*args: str) -> Plan:
    done = usp(*args, "--json")
    assert done.code in (0, 2), done.err
    return Plan.model_validate_json(done.out)


def rows(text: str) -> list[list[str]]:
    """The words of every line of figures, each with the line below it as the last."""
    lines = text.splitlines()
    return [
        [*line.split(), below.strip()]
        for line, below in pairwise(lines)
        if line.split()[:1] and line.split()[0].isdigit() and len(line.split()) == 10
    ]


# ---- what is printed -------------------------------------------------------------------------------------------------


def test_the_text():
    done = usp(*LLAMA)
    made = plan("llama3-8b", hardware.cluster("h100", 8), seq_len="128K")
    best = made.best
    assert (done.code, done.err) == (0, "") and best is not None
    lines = done.out.splitlines()
    assert lines[:3] == [
        "llama3-8b on 1 x 8 h100, tensor parallel 1, data parallel 1",
        "train, 1 x 131,072 tokens, causal; seconds of attention a step",
        "",
    ]
    assert " ".join(lines[3].split()) == "U R layout transport total compute merge ring all-to-all GiB"
    shown = rows(done.out)
    assert [(int(row[0]), int(row[1])) for row in shown] == list(
        dict.fromkeys((c.ulysses_degree, c.ring_degree) for c in made.choices)
    )
    u, r, layout, transport, total, compute, merge, ring, exchange, gib, why = shown[0]
    assert (int(u), int(r), why) == (best.ulysses_degree, best.ring_degree, best.why)
    assert (layout, transport) == ((best.layout, best.transport) if best.ring_degree > 1 else ("-", "-"))
    for text, number in (
        (total, best.seconds), (compute, best.seconds_compute), (merge, best.seconds_merge), (ring, best.seconds_ring),
        (exchange, best.seconds_all_to_all), (gib, best.memory_bytes / 2**30),
    ):  # fmt: skip
        assert float(text) == pytest.approx(number, rel=0.006, abs=0.05 if text == gib else 0)
    memory = done.out.split("GiB\n")[-1].splitlines()
    assert f"memory of the fullest rank with U={u} R={r}, GiB" in done.out
    printed = {line.split(None, 1)[1]: float(line.split()[0]) for line in memory[: len(best.memory) + 1]}
    assert printed.pop("in all, of 80") == pytest.approx(sum(printed.values()), abs=0.05)
    assert set(printed) == set(best.memory)


def test_the_last_line_builds_it():
    assert usp(*LLAMA, "--gpus", "32").out.splitlines()[-1] == (
        'usp.USPAttention(ulysses_degree=8, ring_degree=4, layout="zigzag", transport="p2p")'
    )
    assert usp("--heads", "8", "--gpu", "h100", "--seq-len", "8K").out.splitlines()[-1] == (
        "usp.USPAttention(ulysses_degree=8, ring_degree=1)"
    )
    assert usp(*LLAMA, "--gpus", "32", "--mode", "inference", "--documents", "8K,64K,4K,4K,48K").out.splitlines()[
        -1
    ] == ('usp.USPAttention(ulysses_degree=8, ring_degree=4, layout=usp.layout_for("balanced", mask), transport="p2p")')
    crossing = usp("--heads", "12", "--gpu", "h100", "--gpus", "12", "--gpus-per-node", "6", "--seq-len", "4K")
    assert crossing.out.splitlines()[-1] == (
        "usp.USPAttention(topology=usp.Topology.build(12, 1, allow_cross_node=True))"
    )


def test_all_choices_on_demand():
    few, every = rows(usp(*LLAMA).out), rows(usp(*LLAMA, "--all").out)
    made = document(*LLAMA)
    assert (len(few), len(every)) == (4, len(made.choices)) == (4, 1 + 3 * 6)
    assert [row[-1] for row in every] == [choice.why for choice in made.choices]


def test_degrees_that_are_not_legal_are_listed():
    done = usp(*LLAMA, "--gpus", "64")
    assert " 64    1 not legal: U=64 is more than the 32 query heads: some ranks would have none" in done.out


def test_nothing_fits():
    done = usp(*TOO_LARGE)
    assert (done.code, done.err) == (2, "")
    assert "needs 524.7 GiB of 80: 219 of logits and 160 of activations" in done.out
    assert "   219.19  logits" in done.out and "   524.71  in all, of 80" in done.out
    said = done.out.split("nothing fits into memory; what would make it fit, the cheapest first:\n")[1]
    assert said.splitlines() == ["  loss_chunks=16, 8 nodes (64 devices)"]
    assert "USPAttention" not in done.out
    fixed = usp(*TOO_LARGE, "--loss-chunks", "16", "--gpus", "64")
    assert fixed.code == 0 and "USPAttention" in fixed.out


def test_nothing_is_legal():
    done = usp("--heads", "8", "--gpu", "h100", "--seq-len", "4")
    assert (done.code, done.err) == (2, "")
    assert done.out.count("not legal: 8 ranks are more than the 4 tokens") == 4
    assert done.out.splitlines()[-1] == "no pair of degrees is legal"
    assert "memory" not in done.out


def test_nothing_helps(tmp_path):
    cluster = hardware.cluster("h100", 1)
    device = cluster.device.model_copy(update={"memory_gib": 1.0})
    cluster.model_copy(update={"device": device}).write(tmp_path / "small.yaml")
    done = usp("--model", "llama3-8b", "--cluster", str(tmp_path / "small.yaml"), "--seq-len", "8K")
    assert done.code == 2
    assert done.out.splitlines()[-1] == ("  nothing that was tried: try a smaller model, or devices of more memory")


# ---- the document ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("args", "code"), [(LLAMA, 0), (TOO_LARGE, 2), ([*LLAMA, "--window", "4095,0"], 0)])
def test_one_document_on_standard_output_and_text_on_standard_error(args, code):
    text, done = usp(*args), usp(*args, "--json")
    assert (done.code, done.err) == (code, text.out)
    assert done.out.count("\n") == 1
    schema = Plan.model_json_schema()
    assert fits(json.loads(done.out), schema, schema) == []
    made = Plan.model_validate_json(done.out)
    assert made.model_dump(mode="json") == json.loads(done.out)
    assert (made.best is None) == (code == 2) == bool(made.remedies)


def test_the_document_is_the_plan():
    assert document(*LLAMA) == plan("llama3-8b", hardware.cluster("h100", 8), seq_len="128K")
    assert document(
        "--model", "llama3-70b", "--gpu", "b200", "--gpus", "32", "--gpus-per-node", "4", "--intra", "nvlink4",
        "--inter", "roce-400g", "--seq-len", "64K", "--batch", "2", "--full", "--window", "4095,10",
        "--chunk", "8K", "--sinks", "4", "--prefix", "1K", "--documents", "16K,48K",
        "--mode", "inference", "--tp", "2", "--dp", "4", "--checkpointing", "none",
        "--loss-chunks", "3", "--zero-stage", "1",
    ) == plan(
        "llama3-70b",
        hardware.cluster("b200", 32, 4, "nvlink4", "roce-400g"),
        Workload(
            seq_len=2**16, batch=2, is_causal=False, window_size=(4095, 10), chunk=2**13, sinks=4,
            prefix=2**10, documents=(2**14, 3 * 2**14), mode="inference", tensor_parallel=2,
            data_parallel=4, checkpointing="none", loss_chunks=3, zero_stage=1,
        ),
    )  # fmt: skip


# ---- the model, the cluster, the workload ----------------------------------------------------------------------------


def test_a_model_from_flags():
    made = document(
        "--heads", "28", "--kv-heads", "4", "--gpu", "l20", "--seq-len", "128K", "--mode", "inference"
    ).model
    assert (made.heads, made.kv_heads, made.head_dim, made.layers) == (28, 4, 128, 1)
    assert (made.hidden, made.intermediate, made.vocab) == (28 * 128, 4 * 28 * 128, 0)
    made = document(
        "--heads", "6", "--head-dim", "64", "--hidden", "512", "--gpu", "h100", "--gpus", "2", "--seq-len", "8K"
    ).model
    assert (made.kv_heads, made.hidden, made.intermediate) == (6, 512, 2048)


def test_a_preset_with_other_fields():
    made = document(*LLAMA, "--kv-heads", "4", "--vocab", "1000").model
    preset = models.find("llama3-8b")
    assert made == preset.model_copy(update={"kv_heads": 4, "vocab": 1000})


def test_a_preset_with_fewer_layers_has_fewer_parameters_and_windows():
    """Also where the preset says how many parameters it has, and how many layers have a window."""
    rest = ["--gpu", "h100", "--seq-len", "8K", "--mode", "inference"]
    whole, part = (document("--model", "flux.1", *rest, *less).model for less in ([], ["--layers", "19"]))
    assert part.parameter_count < 0.5 * whole.parameter_count
    part = document("--model", "gpt-oss-20b", *rest, "--layers", "6").model
    assert (part.layers, part.windowed_layers) == (6, 3)


def test_a_config_and_a_written_specification(tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8,
        "num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 1000, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    rest = ["--gpu", "h100", "--gpus", "4", "--seq-len", "8K"]
    made = document("--model", str(tmp_path / "config.json"), *rest).model
    assert (made.heads, made.kv_heads, made.head_dim, made.layers) == (8, 2, 128, 4)
    made.write(tmp_path / "model.yaml")
    assert document("--model", str(tmp_path / "model.yaml"), *rest).model == made
    assert document("--model", str(tmp_path), *rest).model == made


def test_a_cluster_file(tmp_path):
    cluster = hardware.cluster("l20", 8).model_copy(update={"name": "measured"})
    for name in ("cluster.yaml", "cluster.json"):
        cluster.write(tmp_path / name)
        assert document("--model", "llama3-8b", "--cluster", str(tmp_path / name), "--seq-len", "8K").cluster == cluster


def test_a_cluster_file_says_it_all(tmp_path):
    hardware.cluster("l20", 8).write(tmp_path / "cluster.yaml")
    file = ["--model", "llama3-8b", "--seq-len", "8K", "--cluster", str(tmp_path / "cluster.yaml")]
    done = usp(*file, "--gpu", "h100", "--gpus-per-node", "4")
    assert (done.code, done.out) == (1, "")
    assert done.err == "usp: --cluster says it all: leave out --gpu, --gpus-per-node\n"
    assert usp(*file, "--gpus", "8").err == "usp: --cluster says it all: leave out --gpus\n"
    assert usp(*file, "--inter", "roce-400g").code == 1


@pytest.mark.parametrize(("name", "causal"), [("llama3-8b", True), ("flux.1", False), ("wan2.1-14b", False)])
def test_what_attends_in_both_directions_by_default(name, causal):
    args = ["--model", name, "--gpu", "h100", "--seq-len", "8K", "--mode", "inference"]
    assert document(*args).workload.is_causal is causal
    assert document(*args, "--causal").workload.is_causal is True
    assert document(*args, "--full").workload.is_causal is False
    assert ("causal" if causal else "full") + "; seconds" in usp(*args).out


@pytest.mark.parametrize(("text", "tokens"), [("131072", 2**17), ("128K", 2**17), ("128k", 2**17), ("0.5M", 2**19)])
def test_lengths(text, tokens):
    assert document("--model", "llama3-8b", "--gpu", "h100", "--seq-len", text).workload.seq_len == tokens


def test_windowed_models_are_faster():
    args = ["--gpu", "h100", "--seq-len", "64K", "--mode", "inference"]
    some, none = (
        document("--model", "gpt-oss-20b", *args).best,
        document("--model", "gpt-oss-20b", *args, "--window", "127,0").best,
    )
    assert some is not None and none is not None and none.seconds < some.seconds


# ---- the picture -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [LLAMA, [*LLAMA, "--gpus", "1", "--mode", "inference"], [*TOO_LARGE, "--json"]])
def test_a_picture_is_written(tmp_path, args):
    path = tmp_path / "plan.png"
    done = usp(*args, "--plot", str(path))
    assert done.code == (2 if args[1] == "llama3-70b" else 0), done.err
    assert path.read_bytes().startswith(b"\x89PNG")
    from PIL import Image

    with Image.open(path) as picture:
        assert picture.width >= 800 and picture.height >= 400
        colours = {colour for _, colour in picture.convert("RGB").getcolors(10**6) or ()}
    assert (0x44, 0x77, 0xAA) in colours  # kernels


@pytest.mark.parametrize("name", ["nowhere/plan.png", "plan.tiles"])
def test_a_picture_that_cannot_be_written(tmp_path, name):
    done = usp(*LLAMA, "--plot", str(tmp_path / name))
    assert done.code == 1
    assert done.err.startswith(f"usp: cannot write {tmp_path / name}: ")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    done = usp(*LLAMA, "--plot", str(tmp_path / "plan.png"))
    assert (done.code, done.err) == (1, "usp: --plot needs matplotlib: pip install 'usp-attention[plot]'\n")


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--gpu", "h100", "--seq-len", "8K"], 1, "give --model, or --heads"),
        (["--model", "llama3-8b", "--seq-len", "8K"], 1, "give --gpu (one of a100, h100"),
        (["--model", "llama3-8b", "--gpu", "h100"], 2, "--seq-len"),
        ([*LLAMA, "--gpu", "h1000"], 1, "unknown GPU 'h1000': did you mean h100?"),
        ([*LLAMA, "--intra", "nvlnk4"], 1, "unknown link 'nvlnk4': did you mean nvlink4?"),
        ([*LLAMA, "--inter", "rocket"], 1, "unknown link 'rocket': "),
        ([*LLAMA, "--model", "lama3-8b"], 1, "unknown model 'lama3-8b'"),
        ([*LLAMA, "--model", "lama3-8b"], 1, "did you mean 'llama3-8b'?"),
        ([*LLAMA, "--gpus", "12"], 1, "gpus=12 do not fill nodes of gpus_per_node=8"),
        ([*LLAMA, "--gpus", "0"], 1, "gpus=0 do not fill nodes"),
        ([*LLAMA, "--gpus", "600120"], 1, "gpus=600120 with gpus_per_node=8 are more than 65536 nodes"),
        ([*LLAMA, "--kv-heads", "3"], 1, "heads=32 is not a multiple of kv_heads=3"),
        ([*LLAMA, "--batch", "0"], 1, "batch: Input should be greater than or equal to 1, got 0"),
        ([*LLAMA, "--mode", "dream"], 1, "mode: Input should be 'train' or 'inference', got 'dream'"),
        ([*LLAMA, "--checkpointing", "some"], 1, "checkpointing: Input should be 'none', 'selective' or 'full'"),
        ([*LLAMA, "--zero-stage", "4"], 1, "zero_stage: Input should be less than or equal to 3, got 4"),
        ([*LLAMA, "--tp", "3"], 1, "tensor_parallel x data_parallel = 3 x 1 does not divide the 8 devices"),
        ([*LLAMA, "--dp", "16"], 1, "tensor_parallel x data_parallel = 1 x 16 does not divide the 8 devices"),
        (
            ["--heads", "28", *LLAMA[2:], "--tp", "8"],
            1,
            "tensor_parallel=8 does not divide the 28 heads: use 1, 2, 4, 7",
        ),
        ([*LLAMA, "--cluster", "/nowhere.yaml"], 1, "--cluster says it all: leave out --gpu"),
        (["--model", "llama3-8b", "--seq-len", "8K", "--cluster", "/nowhere.yaml"], 1, "cannot read /nowhere.yaml"),
        ([*LLAMA, "--seq-len", "8x"], 2, "--seq-len"),
        ([*LLAMA, "--window", "3"], 2, "--window"),
        ([*LLAMA, "--prefix", "1M"], 1, "prefix=1048576 is more than seq_len=131072"),
        ([*LLAMA, "--documents", "3,4"], 2, "the documents add up to 7 tokens and the global sequence has 131072"),
        ([*LLAMA, "--heads", "many"], 2, "--heads"),
        ([*LLAMA, "--gpuss", "8"], 2, "--gpuss"),
        ([*LLAMA, "extra"], 2, "extra"),
    ],
)
def test_errors_are_words_and_exit_codes(args, code, message):
    done = usp(*args)
    assert (done.code, done.out) == (code, "")
    assert message in done.err
    if code == 1:
        assert done.err.startswith("usp: ") and done.err.count("\n") == 1


NUMBERS = {
    "--heads": "heads", "--kv-heads": "kv_heads", "--head-dim": "head_dim", "--layers": "layers", "--hidden": "hidden",
    "--intermediate": "intermediate", "--vocab": "vocab", "--gpus": "gpus", "--gpus-per-node": "gpus_per_node",
    "--batch": "batch", "--tensor-parallel": "tensor_parallel", "--data-parallel": "data_parallel",
    "--loss-chunks": "loss_chunks", "--zero-stage": "zero_stage",
}  # fmt: skip
TEXTS = {
    "--seq-len": "seq_len", "--mode": "mode", "--checkpointing": "checkpointing", "--window": "window",
    "--chunk": "chunk", "--sinks": "sinks", "--prefix": "prefix", "--documents": "documents",
    "--gpu": "GPU", "--intra": "link", "--inter": "link", "--model": "model", "--cluster": "cluster",
}  # fmt: skip
NASTY = ["-1", "0", "1.5", "nan", "1e30", "9" * 40, "", "٣", "\x00", "a" * 500]


def check(option: str, field: str, value: str) -> Done:
    """Planned, or refused in words that name the option or the field."""
    given = [option, value] if not value.startswith("-") else [f"{option}={value}"]
    done = usp(*LLAMA, *given)
    assert done.code in (0, 1, 2)
    assert "Traceback" not in done.err and "pydantic" not in done.err
    if done.out:  # a plan, whether or not something fits
        assert done.err == ""
        return done
    assert done.code in (1, 2)
    assert option in done.err or field in done.err or repr(value) in done.err, done.err
    if done.code == 1:
        assert done.err.startswith("usp: ") and done.err.count("\n") == 1, done.err
        assert len(done.err) < 1000
    return done


@pytest.mark.parametrize("option", NUMBERS)
@pytest.mark.parametrize("value", NASTY)
def test_any_number_is_planned_or_refused_in_words(option, value):
    done = check(option, NUMBERS[option], value)
    legal = {("--vocab", "0"), ("--zero-stage", "0"), ("--gpus-per-node", "9" * 40)}  # all of them in one node
    assert bool(done.out) <= (value == "٣" or (option, value) in legal), "nothing else of that can be right"


@pytest.mark.parametrize("option", TEXTS)
@pytest.mark.parametrize("value", NASTY)
def test_any_text_is_planned_or_refused_in_words(option, value):
    done = check(option, TEXTS[option], value)
    assert done.out == "", "nothing of that can be right"


@examples(60)
@given(option=st.sampled_from(list(NUMBERS)), value=st.integers(-(2**70), 2**70) | st.integers(-3, 70))
def test_any_integer_is_planned_or_refused_in_words(option, value):
    check(option, NUMBERS[option], str(value))


@examples(60)
@given(option=st.sampled_from([*NUMBERS, *TEXTS]), value=st.text(max_size=20) | st.floats().map(str))
def test_anything_is_planned_or_refused_in_words(option, value):
    check(option, (NUMBERS | TEXTS)[option], value)


@examples(40)
@given(text=st.text(max_size=60) | st.sampled_from(["nodes: 1", "[1]", "{", "nodes: nan\ngpus_per_node: 1e30"]))
def test_any_cluster_file_is_read_or_refused_in_words(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    done = usp("--model", "llama3-8b", "--seq-len", "8K", "--cluster", str(path))
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"usp: {path}") and done.err.count("\n") == 1


# ---- what it costs ---------------------------------------------------------------------------------------------------


def test_planning_needs_neither_torch_nor_numpy_nor_matplotlib():
    code = (
        "import sys\nfrom usp.cli.app import app\n"
        "try:\n    app(['plan', '--model', 'llama3-8b', '--gpu', 'h100', '--seq-len', '8K', '--json'])\n"
        "except SystemExit as done:\n    assert not done.code\n"
        "print([name for name in ('torch', 'numpy', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_shows_examples_and_names():
    done = usp("--help")
    assert done.code == 0
    for text in ("usp plan --model llama3-8b", "Exit code 2: nothing fits", "h100", "qwen2.5-7b", "infiniband-ndr"):
        assert text in done.out, text


def test_the_shell_gets_the_same():
    done = subprocess.run(
        [sys.executable, "-m", "usp.cli", "plan", *TOO_LARGE], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, usp(*TOO_LARGE).out, "")
