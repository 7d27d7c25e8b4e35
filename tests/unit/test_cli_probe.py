"""`usp probe`: the file it writes and does not overwrite, what it prints where, and its errors."""

import json
import os
import subprocess
import sys

import pytest

from usp.planner.spec import ClusterSpec

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TINY = ["--quick", "--max-length", "256", "--heads", "1", "--head-dim", "8"]


def probe(*args: str, before: list[str] | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(before or []), "-m", "usp.cli", "probe", *args]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_force_overwrites_the_file_and_json_is_what_it_holds(tmp_path):
    output = tmp_path / "cluster.yaml"
    output.write_text("old")
    done = probe("-o", str(output), "--force", "--json", *TINY, before=TORCHRUN)
    assert done.returncode == 0, done.stderr
    cluster = ClusterSpec.read(output)
    assert ClusterSpec.read(json.loads(done.stdout)) == cluster
    assert cluster.name == "measured: 1 x 2 cpu"
    assert f"written to {output}" in done.stderr
    assert "not measured (one node)" in done.stderr
    assert f"{cluster.device.attention[0].forward_tflops:g}" in done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cluster.yaml", "cluster.yaml exists: give --force to overwrite it, or another --output"),
        ("absent/cluster.yaml", "absent: give the name of a file in a folder that exists as --output"),
    ],
)
def test_what_cannot_be_written_is_not_measured(tmp_path, name, message):
    (tmp_path / "cluster.yaml").write_text("old")
    done = probe("-o", str(tmp_path / name), "--max-length", "1048576", before=TORCHRUN)  # would take hours
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stdout == ""
    assert (tmp_path / "cluster.yaml").read_text() == "old"


@pytest.mark.parametrize("world", [{}, {"WORLD_SIZE": "1", "RANK": "0"}])
def test_one_process_has_no_links(world):
    done = probe(**world)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "usp: one process has no links to measure" in done.stderr
    assert "`torchrun --nproc-per-node 2 -m usp.cli probe`" in done.stderr


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--dtype", "float12"], 1, "usp: dtype is 'float12': it must be one of bfloat16, float16, float32, float64"),
        (["--max-length", "100"], 2, "'--max-length'"),
        (["--heads", "0"], 2, "'--heads'"),
    ],
)
def test_errors_are_words_and_exit_codes(args, code, message):
    done = probe(*args, WORLD_SIZE="2")
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
