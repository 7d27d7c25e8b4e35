"""`usp simulate`: its words, its document, its trace and its picture."""

import json
import subprocess
import sys

import pytest

from tests.schema import fits
from usp.cli import timeline_plot
from usp.cli.simulate import Simulated
from usp.errors import InputError
from usp.planner.plan import plan
from usp.planner.timeline import Span

DIT = ["--heads", "24", "--gpu", "h100", "--gpus", "16", "--seq-len", "64K", "--full"]


def usp(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "usp.cli", "simulate", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def document(*args: str) -> Simulated:
    done = usp(*args, "--json")
    assert done.returncode == 0, done.stderr
    assert not fits(json.loads(done.stdout), Simulated.model_json_schema(), Simulated.model_json_schema())
    return Simulated.model_validate_json(done.stdout)


def test_the_text(tmp_path):
    picture, trace = tmp_path / "timeline.png", tmp_path / "trace.json"
    done = usp(*DIT, "-u", "4", "--transport", "p2p", "--backward", "--plot", str(picture), "--trace", str(trace))
    assert (done.returncode, done.stderr) == (0, "")
    first, second, head, *rest = done.stdout.splitlines()
    assert first == "custom on 2 x 8 h100, 65,536 tokens, full: U=4 R=4 contiguous p2p, backward"
    assert " ms a layer (the planner says " in second and second.endswith(" of the transfers hidden")
    assert head.split() == ["rank", "computes", "waits", "sends"]
    assert [line.split()[0] for line in rest[:4]] == ["0", "1", "2", "3"]
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    events = json.loads(trace.read_text())["traceEvents"]
    calls = [e for e in events if e["ph"] == "X" and e["cat"] == "compute" and e["pid"] == 0]
    assert [e["name"] for e in calls] == ["hop 0", "hop 1", "hop 2", "hop 3", "home"]
    # Three blocks, their gradients, and two exchanges.
    assert sum(e["ph"] == "X" and e["cat"] == "transfer" for e in events) == 4 * (3 + 3 + 2)


def test_what_is_not_given_is_as_in_the_plan():
    told = document("--model", "llama3-8b", "--gpu", "h100", "--gpus", "32", "--seq-len", "128K")
    from usp.planner import hardware

    best = plan("llama3-8b", hardware.cluster("h100", 32), seq_len="128K").best
    assert best is not None
    assert (told.ulysses_degree, told.ring_degree) == (best.ulysses_degree, best.ring_degree)
    assert (told.layout, told.transport) == (best.layout, best.transport)
    assert len(told.compute_seconds) == told.ring_degree
    assert told.seconds == pytest.approx(told.planned_seconds, rel=0.05)


def test_options_are_heeded():
    plain = document(*DIT, "-u", "2", "-r", "8", "--transport", "p2p")
    double = document(*DIT, "-u", "2", "--transport", "double_ring")
    assert double.transport == "double_ring:4" and double.seconds < plain.seconds
    shared = document(*DIT, "-u", "2", "--transport", "p2p", "--adapters", "1")
    assert shared.seconds < plain.seconds  # as fast as all eight, and free
    assert document(*DIT, "-r", "8", "--transport", "p2p", "--backward").seconds > 2 * plain.seconds


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-u", "3"], "usp: the plan has no choice with ulysses_degree=3: its U x R are 1 x 16, 16 x 1, 2 x 8, "),
        (["--transport", "nccl"], "usp: unknown transport 'nccl': there are p2p, all_gather, "),
        (["--adapters", "3"], "usp: --adapters 3 does not divide the 8 devices of a node"),
        (["--trace", "/nowhere/x.json"], "usp: cannot write /nowhere/x.json: "),
    ],
)
def test_errors_are_words(args, message):
    done = usp(*DIT, *args)
    assert done.returncode == 1
    assert done.stderr.startswith(message) and len(done.stderr.splitlines()) == 1


def test_any_timeline_is_drawn(tmp_path):
    measured = [Span(rank, kind, rank * 0.1, 1.0, "measured") for rank in range(40) for kind in timeline_plot.KINDS]
    timeline_plot.draw(measured, tmp_path / "a.png", "40 ranks")
    assert (tmp_path / "a.png").stat().st_size > 10_000
    with pytest.raises(InputError, match=r"^cannot write .*"):
        timeline_plot.draw(measured, tmp_path / "nowhere" / "a.png", "")
