"""`usp trace` on real ranks: every hop's spans, in their order, and the command's table, events and document."""

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch

from usp.mask import Mask
from usp.planner.timeline import hidden, hops
from usp.planner.traffic import Layer, Shape
from usp.ring import Ring
from usp.schedule import Schedule
from usp.topology import Topology
from usp.trace import trace
from usp.transports.p2p import P2P

RING = ["forward hop 0", "forward hop 1", "backward hop 0", "backward hop 1", "backward home"]
EXCHANGES = ["forward all-to-all in", "forward all-to-all out", "backward all-to-all in", "backward all-to-all out"]


def run(rank, ulysses, ring, backward):
    layer = Layer(Shape(1, 2, 2, 8, 8, 4), Schedule(Mask.causal(), "zigzag", 64, ring), ulysses)
    return trace(layer, Topology.build(ulysses, ring), torch.float32, backward, steps=3, warm_up=1)


@pytest.mark.parametrize(
    ("ulysses", "ring", "backward", "labels", "under_way"),
    [
        (1, 2, True, RING, ["forward hop 0", "backward hop 0", "backward home"]),
        (1, 2, False, RING[:2], RING[:1]),
        (2, 1, True, [EXCHANGES[0], "forward hop 0", *EXCHANGES[1:3], "backward hop 0", EXCHANGES[3]], EXCHANGES),
    ],
)
def test_every_hop_on_every_rank(pool, ulysses, ring, backward, labels, under_way):
    first, second = pool(2).run(run, ulysses, ring, backward, timeout=60)
    assert first == second
    assert len(first.steps) == 3
    assert sorted(first.transfers) == sorted(under_way)
    assert all(seconds > 0 for seconds in first.transfers.values())
    for rank in range(2):
        spans = [span for span in first.spans if span.rank == rank]
        assert [hop.label for hop in hops(spans, {})] == labels
        assert {span.label for span in spans if span.kind == "start"} == set(under_way)
        for label in under_way:
            start, compute, wait, transfer = (
                [s for s in spans if (s.kind, s.label) == (kind, label)]
                for kind in ("start", "compute", "wait", "transfer")
            )
            begun = min(s.start for s in start)
            came = max(s.stop for s in wait)
            assert any(begun < s.start and s.stop <= came for s in compute)
            (alone,) = transfer
            assert (alone.start, alone.stop) == pytest.approx((begun, begun + first.transfers[label]))
        thread = sorted((s.start, s.stop) for s in spans if s.kind != "transfer")
        assert all(one[1] <= other[0] + 1e-9 for one, other in pairwise(thread))
        assert thread[0][0] > -1e-9


LATENCY, COMPUTE = 0.05, 0.1


class Slow:
    """Messages that take so long from when they were sent."""

    def __init__(self, flight):
        self.flights, self.due = [flight], time.perf_counter() + LATENCY

    def wait(self):
        while self.flights:
            self.flights.pop().wait()
        time.sleep(max(0.0, self.due - time.perf_counter()))


def slowly(rank, blocking):
    """Forward steps over a slow link that compute for longer; a blocking transport has sent before it returns."""
    exchange, block_forward = P2P.exchange, Ring._block_forward

    def slow(self, sends, receives):
        flight = Slow(exchange(self, sends, receives))
        if blocking:
            flight.wait()
        return flight

    def computing(*args):
        time.sleep(COMPUTE)
        block_forward(*args)

    with patch.object(P2P, "exchange", slow), patch.object(Ring, "_block_forward", computing):
        return run(rank, 1, 2, False)


@pytest.mark.parametrize("blocking", [False, True])
def test_what_is_hidden_is_known(pool, blocking):
    trace = pool(2).run(slowly, blocking, timeout=60)[0]
    first = hops(trace.spans, trace.transfers)[0]
    assert LATENCY < first.transfer_seconds < 2 * LATENCY
    assert first.compute_seconds > COMPUTE
    share = hidden([first])
    assert share < 0.3 if blocking else share > 0.7


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TINY = ["--seq-len", "64", "--heads", "2", "--kv-heads", "1", "--head-dim", "8", "--steps", "1"]


def command(*args, before=(), **environment):
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
    call = [sys.executable, *before, "-m", "usp.cli", "trace", *args]
    return subprocess.run(call, env=env, capture_output=True, text=True, timeout=120)


def test_the_command(tmp_path):
    done = command(*TINY, "--json", "--trace", str(tmp_path / "trace.json"), before=TORCHRUN)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [hop["label"] for hop in document["hops"]] == RING
    home = document["hops"][-1]
    assert home["hidden"] == pytest.approx(
        1 - (home["start_seconds"] + home["wait_seconds"]) / home["transfer_seconds"]
    )
    assert document["step_seconds"] > sum(hop["compute_seconds"] for hop in document["hops"])
    for text in ("U1 R2 zigzag: 64 tokens, 2:1 heads, float32, causal", *RING):
        assert text in done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {(e["pid"], e["name"]) for e in events if e["ph"] == "X"} == {
        (rank, name) for rank in range(2) for name in RING
    }


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "1"}, "one process sends nothing: start two or more with"),
        ({"WORLD_SIZE": "2"}, "dtype is 'float12': it must be one of bfloat16, float16, float32, float64"),
    ],
)
def test_errors_are_one_line(environment, message):
    done = command(*TINY, "--dtype", "float12", **environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert message in done.stderr
