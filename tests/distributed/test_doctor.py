"""`usp doctor` under torchrun: one report on all ranks, which names those that differ and those that do not come."""

import json
import os
import subprocess
import sys
import time

SCRIPT = """
import os, time
import torch
{hook}
from usp.cli.app import main
main()
"""
DIFFERS = 'torch.__version__ = "2.9.0" if os.environ["RANK"] == "1" else torch.__version__'
STAYS_AWAY = 'if os.environ["RANK"] == "1": raise SystemExit'


def doctor(folder, hook: str = "", *options: str) -> subprocess.CompletedProcess[str]:
    """The command in two processes, after a line of their own."""
    script = folder / "script.py"
    script.write_text(SCRIPT.format(hook=hook))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), "doctor", *options]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, *launch], env=env, capture_output=True, text=True, timeout=120)


def test_one_report_on_all_ranks(tmp_path):
    done = doctor(tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "ok    ranks: 2 on 1 host, 2 on each"
    assert sum("versions: torch" in line for line in lines) == 1
    assert any(line.startswith("ok    rendezvous: MASTER_ADDR=") for line in lines)
    assert lines[-1].startswith("0 faults, ")


def test_a_rank_of_another_version_is_named(tmp_path):
    done = doctor(tmp_path, DIFFERS, "--json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    (fault,) = [finding for finding in told["findings"] if finding["level"] == "fault"]
    assert (told["faults"], fault["what"]) == (1, "torch version")
    assert fault["found"].endswith(" on rank 0; 2.9.0 on rank 1")


def test_a_rank_that_does_not_come_is_named_within_the_time_out(tmp_path):
    start = time.monotonic()
    done = doctor(tmp_path, STAYS_AWAY, "--json", "--timeout", "2")
    assert time.monotonic() - start < 60
    assert done.returncode == 1
    (fault,) = [finding for finding in json.loads(done.stdout)["findings"] if finding["level"] == "fault"]
    assert fault["found"] == "rank 1 of 2 did not report in time"
