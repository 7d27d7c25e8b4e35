"""The examples run as they are documented, small: sharded runs print what one process prints."""

import ast
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from usp.data import ContextSchedule, ContextStage

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=250,
    )


def torchrun(processes: int, script: str, *args: str) -> str:
    """Standard output of an example."""
    launch = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)
    done = python(*launch, str(EXAMPLES / script), *args)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def numbers(printed: str) -> list[float]:
    """The loss and the norm of the gradient of every step."""
    return [float(number) for number in re.findall(r"(?:loss|norm) (\S+\d)", printed)]


def test_a_sharded_llama_trains_as_in_one_process():
    small = ("--steps", "2", "--context", "510")  # which 4 ranks do not divide
    sharded, whole = (
        numbers(torchrun(processes, "train_hf_llama.py", *small, *degrees))
        for processes, degrees in ((4, ("-u", "2", "-r", "2")), (1, ("-u", "1", "-r", "1")))
    )
    assert len(sharded) == 4  # a loss and a norm a step
    assert sharded == pytest.approx(whole, rel=1e-3)  # as printed


def test_a_sharded_diffusion_transformer_checks_itself():
    torchrun(4, "diffusion_transformer.py", "--check")


def test_a_sharded_cache_generates_what_one_process_does():
    printed = torchrun(4, "generate.py", "--check", "--prompt", "1022", "--tokens", "24")
    sharded, alone = re.findall(r"each: (.*)", printed)
    assert sharded == alone
    assert len(set(ast.literal_eval(sharded))) > 12  # not one byte again and again, which a wrong cache could say too


# ---- pre-training on hosts -------------------------------------------------------------------------------------------

PRETRAIN = ("--steps", "3", "--context", "510")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """The checkpoint of one process, and what it printed."""
    folder = tmp_path_factory.mktemp("pretrained")
    one = "-u", "1", "-r", "1", "--save-to", str(folder)
    return folder, numbers(torchrun(1, "pretrain_tiny_lm.py", *PRETRAIN, *one))


def test_a_decoder_pretrains_as_in_one_process(pretrained):
    printed = torchrun(4, "pretrain_tiny_lm.py", *PRETRAIN)
    assert "ring 2 x ulysses 2" in printed
    assert len(numbers(printed)) == 6
    assert numbers(printed) == pytest.approx(pretrained[1], rel=1e-3)


def test_a_decoder_pretrains_on_two_hosts(pretrained):
    hosts = str(ROOT / "benchmarks" / "two_hosts.py"), "--nproc-per-node", "2", "--timeout", "200", "--"
    done = python(*hosts, str(EXAMPLES / "pretrain_tiny_lm.py"), *PRETRAIN)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.findall(r"/\d \| .*", done.stdout) == ["/0 | 0: d0 r0 u0 | 1: d0 r0 u1", "/1 | 2: d0 r1 u0 | 3: d0 r1 u1"]
    assert "ulysses groups that cross nodes: none" in done.stdout
    assert "ring groups that cross nodes: [(0, 2), (1, 3)]" in done.stdout
    assert numbers(done.stdout) == pytest.approx(pretrained[1], rel=1e-3)


# ---- stages of context -----------------------------------------------------------------------------------------------

STAGES = ((126, 4, 1e4), (254, 2, 1e5), (510, 1, 1e6))


@pytest.fixture(scope="module")
def without_degrees(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Option for the example's own stages without degrees."""
    file = tmp_path_factory.mktemp("schedule") / "schedule.yaml"
    stages = [ContextStage(seq_len=s, steps=2, batch=batch, rope_theta=theta) for s, batch, theta in STAGES]
    ContextSchedule(stages=tuple(stages)).write(file)
    return "--schedule", str(file)


@pytest.fixture(scope="module")
def finetuned(pretrained, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The checkpoints of four processes with the example's own degrees, and what they printed."""
    folder = tmp_path_factory.mktemp("finetuned")
    options = "--pretrained", str(pretrained[0]), "--save-every", "3"
    return folder, torchrun(4, "finetune_long_context.py", str(folder), *options)


def test_stages_of_context_train_as_in_one_process(finetuned, pretrained, without_degrees, tmp_path):
    start = "--pretrained", str(pretrained[0])
    whole = torchrun(1, "finetune_long_context.py", str(tmp_path), *start, *without_degrees)
    assert re.findall("context.*", finetuned[1]) == [
        "context 126, theta 10000, ulysses 4 x ring 1: 32 tokens of a sequence per rank",
        "context 254, theta 100000, ulysses 2 x ring 2: 64 tokens of a sequence per rank",
        "context 510, theta 1e+06, ulysses 1 x ring 4: 128 tokens of a sequence per rank",
    ]
    assert len(numbers(whole)) == 12
    assert numbers(finetuned[1]) == pytest.approx(numbers(whole), rel=1e-3)
    assert numbers(whole)[0] < math.log(256)  # which an untrained model does not reach


@pytest.mark.parametrize(("step", "processes"), [(4, 4), (3, 1)], ids=["after stage 2", "within stage 2, one process"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(finetuned, without_degrees, tmp_path, step, processes):
    folder, printed = finetuned
    shutil.copytree(folder / str(step), tmp_path / str(step))  # all that is left of the run
    schedule = without_degrees if processes == 1 else ()
    resumed = torchrun(processes, "finetune_long_context.py", str(tmp_path), "--resume-from", str(step), *schedule)
    assert re.findall(r"step \d+", resumed) == [f"step {i}" for i in range(step, 6)]
    assert numbers(resumed) == pytest.approx(numbers(printed)[2 * step :], rel=1e-3)


# ---- length ----------------------------------------------------------------------------------------------------------


def test_under_ten_lines_are_added():
    """One process's script becomes a sharded one by the lines marked "usp"."""
    lines = (EXAMPLES / "train_hf_llama.py").read_text().splitlines()
    assert sum(line.endswith("# usp") for line in lines) < 10


@pytest.mark.parametrize(
    "path", sorted(set(EXAMPLES.glob("*.py")) - {EXAMPLES / "train_tiny_lm.py"}), ids=lambda p: p.stem
)
def test_an_example_is_short(path):
    """But for the demonstration, which draws and compares too."""
    assert len(path.read_text().splitlines()) < 120
