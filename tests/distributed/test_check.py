"""`usp check` under torchrun: the same report on every rank, and an exit code that tells."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import usp

SMALL = ("--seq-len", "61", "--heads", "4", "--kv-heads", "2", "--head-dim", "8")


def check(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "usp.cli", "check")
    return subprocess.run(
        [sys.executable, *launch, *args],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def report(rank):
    topology = usp.Topology.build(2, 2)
    mask = usp.Mask.causal() & usp.Mask.documents([20, 41])
    return usp.check(
        topology, seq_len=61, batch=2, heads=6, kv_heads=3, head_dim=8, dtype=torch.float64, mask=mask, layout="zigzag"
    )


def test_the_report_is_the_same_on_every_rank(pool):
    reports = pool(4).run(report)
    assert len(set(map(str, reports))) == 1
    assert reports[0].passed
    assert (reports[0].ulysses_degree, reports[0].ring_degree) == (2, 2)


def test_a_sweep_goes_over_degrees_layouts_and_masks():
    done = check(*SMALL, "--sweep", "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["passed"]
    cases = {(c["ulysses_degree"], c["ring_degree"], c["layout"], c["mask"]) for c in found["cases"]}
    assert len(cases) == len(found["cases"]) == 2 * 4 * 5
    assert {case[:2] for case in cases} == {(1, 2), (2, 1)}


@pytest.fixture
def with_a_fault(tmp_path: Path) -> dict[str, str]:
    """Environment of processes in which rank 1 gets dk wrong by a thousandth."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    from usp.ring import Ring\n"
        "    right = Ring.backward\n"
        "    def wrong(*args):\n"
        "        dq, dk, dv = right(*args)\n"
        "        return [dq, dk * 1.001, dv]\n"
        "    Ring.backward = wrong\n"
    )
    return {"PYTHONPATH": str(tmp_path)}


def test_a_fault_of_one_rank_is_an_exit_code(with_a_fault):
    done = check(*SMALL, "-u", "1", "-r", "2", **with_a_fault)
    assert done.returncode == 1
    assert "FAILS" in done.stdout
    assert "1 of 1 past a bound" in done.stdout
    assert "exitcode  : 1" in done.stderr


def test_a_sequence_of_other_ranks_fails_all(with_a_fault):
    """Rank 1 has a sequence of its own: rank 0 saw no fault, and exits with 1 too. Without torchrun, which ends it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | where | with_a_fault
    call = [sys.executable, "-m", "usp.cli", "check", *SMALL, "-r", "1"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ranks = [subprocess.Popen(call, env=env | {"RANK": str(rank)}, **pipes) for rank in range(2)]
    try:
        (table, _), (nothing, _) = (process.communicate(timeout=100) for process in ranks)
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [1, 1]
    assert table.count("FAILS") == 1
    assert nothing == ""
