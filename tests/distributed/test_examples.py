"""The examples run as they are documented, small: sharded runs print what one process prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(processes: int, script: str, *args: str) -> str:
    """Standard output of an example."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*command, str(EXAMPLES / script), *args],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_a_sharded_llama_trains_as_in_one_process():
    small = ("--steps", "2", "--context", "510")  # which 4 ranks do not divide
    numbers = [
        [
            float(number)
            for number in re.findall(r"\d+\.\d+", torchrun(processes, "train_hf_llama.py", *small, *degrees))
        ]
        for processes, degrees in ((4, ("-u", "2", "-r", "2")), (1, ("-u", "1", "-r", "1")))
    ]
    assert len(numbers[0]) == 4  # a loss and a norm a step
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-3)  # as printed


def test_a_sharded_diffusion_transformer_checks_itself():
    torchrun(4, "diffusion_transformer.py", "--check")


def test_under_ten_lines_are_added():
    """One process's script becomes a sharded one by the lines marked "usp"."""
    lines = (EXAMPLES / "train_hf_llama.py").read_text().splitlines()
    assert sum(line.endswith("# usp") for line in lines) < 10
    assert len(lines) < 120
