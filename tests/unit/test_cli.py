"""The `usp` command: what it prints, where, and its exit codes."""

import json
import subprocess
import sys

import pytest

from tests.pool import Pool


def usp(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "usp.cli", *args], capture_output=True, text=True, timeout=60)


def test_topology_of_a_cluster_that_is_elsewhere():
    done = usp("topology", "-u", "2", "-r", "2", "--nodes", "2", "--gpus-per-node", "2")
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "ring 2 x ulysses 2 x data 1 (rank: d data, r ring, u ulysses)",
        "  node node0 | 0: d0 r0 u0 | 1: d0 r0 u1",
        "  node node1 | 2: d0 r1 u0 | 3: d0 r1 u1",
        "  ulysses groups that cross nodes: none",
        "  ring groups that cross nodes: [(0, 2), (1, 3)]",
    ]


def test_json_goes_to_standard_output_and_text_to_standard_error():
    done = usp("topology", "-u", "2", "--nodes", "1", "--gpus-per-node", "4", "--json")
    assert json.loads(done.stdout) == {
        "grids": [[[0, 1]], [[2, 3]]],
        "nodes": ["node0"] * 4,
        "groups_that_cross_nodes": {"ulysses": [], "ring": []},
    }
    assert done.stderr.startswith("ring 1 x ulysses 2 x data 2")


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["-u", "4", "--nodes", "2", "--gpus-per-node", "6"], 1, "usp: ulysses_degree=4 does not divide the ranks"),
        (["-u", "0", "--nodes", "1"], 1, "usp: ulysses_degree must be a positive integer, got 0"),
        ([], 2, "give --nodes"),
    ],
)
def test_errors_are_words_and_exit_codes(args, code, message):
    done = usp("topology", *args)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_version():
    assert usp("--version").stdout == "0.1.0\n"


def live(rank):
    """The command under torchrun's environment, in a process of its own beside the pool's group."""
    import os

    env = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": os.environ["PORT"],
    }
    done = subprocess.run(
        [sys.executable, "-m", "usp.cli", "topology", "-r", "2"], env=env, capture_output=True, text=True, timeout=50
    )
    return done.returncode, done.stdout, done.stderr


def test_topology_of_running_processes():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    pool = Pool(2, environment=lambda rank: {"PORT": port})
    try:
        first, second = pool.run(live)
    finally:
        pool.close()
    assert (first[0], second) == (0, (0, "", second[2])), (first, second)
    assert first[1].startswith("ring 2 x ulysses 1 x data 1")
    assert "| 0: d0 r0 u0 | 1: d0 r1 u0" in first[1]
