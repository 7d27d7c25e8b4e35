"""Whatever happens to one rank, the others end by themselves, soon, with an error that names it.

`python -m tests.faults.table` prints what is asserted here, with times.
"""

import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

import usp
from tests.faults.job import TIMEOUT, Ended, Job, free_port, shared_memory
from usp.errors import TopologyError
from usp.ring import Ring

VICTIM = 2
STEP = 3
"""The step in which it happens."""


@dataclass(frozen=True)
class Fault:
    """What happens to a rank.

    Attributes:
        name: in the table.
        kind: "kill", "stop", "memory" or "error".
        when: "forward" and "backward" are in the middle of those, at the second block of the ring; "between" is before
            a step, "first" before the first one.
        degrees: ulysses and ring.
        victim: its rank.
        store_rank: the rank that keeps the rendezvous store, if it is not torchrun.
    """

    name: str
    kind: str
    when: str
    degrees: tuple[int, int] = (1, 4)
    victim: int = VICTIM
    store_rank: int | None = None

    @property
    def waits(self) -> bool:
        """Whether the others can only notice that nothing comes."""
        return self.kind == "stop" or (self.when == "first" and self.store_rank is None)


FAULTS = [
    Fault("a rank is killed in forward", "kill", "forward"),
    Fault("a rank is killed in backward", "kill", "backward"),
    Fault("a rank is killed between steps", "kill", "between"),
    Fault("a rank is killed between steps, Ulysses", "kill", "between", (4, 1)),
    Fault("a rank is killed in forward, 2 x 2", "kill", "forward", (2, 2)),
    Fault("a rank is killed before its first call", "kill", "first"),
    Fault("a rank is stopped in forward", "stop", "forward"),
    Fault("a rank is stopped in backward", "stop", "backward"),
    Fault("a rank is stopped between steps, Ulysses", "stop", "between", (4, 1)),
    Fault("a rank runs out of memory in forward", "memory", "forward"),
    Fault("a rank's own code raises between steps", "error", "between"),
    Fault("rank 0, which keeps the store, is killed", "kill", "forward", victim=0, store_rank=0),
    Fault("the same before its first call", "kill", "first", victim=0, store_rank=0),
    Fault("rank 0, which keeps the store, is stopped", "stop", "forward", victim=0, store_rank=0),
]


def suffer(fault: Fault, mark) -> None:
    mark()
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "memory":
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")
    raise ValueError("a mistake in user code")


def train(rank: int, mark, fault: Fault) -> None:
    """Steps without end, but for the fault."""
    topology = usp.Topology.build(*fault.degrees, allow_cross_node=True, timeout=TIMEOUT)
    attn = usp.USPAttention(topology=topology, layout="zigzag")
    blocks, step = 0, 0
    name = {"forward": "_block_forward", "backward": "_block_backward"}.get(fault.when)
    if rank == fault.victim and name is not None:
        original = getattr(Ring, name)

        def counted(*args):
            nonlocal blocks
            blocks += step == STEP
            if blocks == 2:
                suffer(fault, mark)
            return original(*args)

        setattr(Ring, name, counted)
    while True:
        if rank == fault.victim and (fault.when, step) in (("between", STEP), ("first", 0)):
            suffer(fault, mark)
        q, k, v = (torch.randn(1, 64, 4, 16, requires_grad=True) for _ in range(3))
        attn(q, k, v, is_causal=True).sum().backward()
        step += 1


def endings(fault: Fault) -> dict[int, Ended]:
    """How all ranks ended, or all but a stopped one."""
    job = Job(train, fault, store_rank=fault.store_rank)
    return job.ends(but=fault.victim if fault.kind == "stop" else None)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_others_end_with_an_error_that_names_the_rank(fault):
    before = shared_memory()
    found = endings(fault)
    own = found.pop(fault.victim, None)
    if fault.kind == "kill":
        assert own == Ended(-signal.SIGKILL, "", 0.0)
    elif own is not None:
        assert own.exit_code == 1
        assert own.error.startswith({"memory": "OutOfMemoryError: tried", "error": "ValueError: a mis"}[fault.kind])
    assert len(found) == 3
    for rank, end in found.items():
        assert end.exit_code == 1
        if fault.when == "first" and fault.store_rank is not None:
            assert "the rendezvous store does not answer" in end.error
            assert "or else rank 0, has ended" in end.error
        elif fault.when == "first":
            assert f"rank {fault.victim}: did not arrive at call 1 within {TIMEOUT.seconds} s" in end.error
        else:
            where = "all_to_all: " if fault.degrees[0] > 1 else "ring h"
            assert re.match(rf"TransportError: ({where}|ring h).*rank {rank} on \S+ waited to ", end.error), end.error
            assert re.search(rf"(from|to|heard is|or else) rank {fault.victim}\b", end.error), end.error
        least = TIMEOUT.total_seconds() - 0.5 if fault.waits else 0.0
        assert least <= end.seconds <= TIMEOUT.total_seconds() + 10
    assert shared_memory() == before


# ---- ranks that do not ask for the same ------------------------------------------------------------------------------

MISMATCHES = {
    "seq_len": dict(seq_len=255),
    "mask": dict(options=dict(is_causal=True)),
    "layout": dict(layout="striped"),
    "dtype": dict(dtype=torch.float64),
    "heads": dict(heads=8),
    "head_dim": dict(head_dim=8),
    "kernel": dict(kernel="reference"),
    "transport": dict(transport="all_gather"),
    "scale": dict(scale=1.0),
    "device": dict(device="meta"),
}
BUILDS = {
    "ulysses_degree": dict(degrees=(2, 2)),
    "timeout": dict(seconds=9),
    "check": dict(check="always"),
    "nodes": dict(nodes="aabb"),
    "usp": dict(version="0.0.9"),
}


def disagree(rank: int, mark, given: dict) -> None:
    differs = rank == VICTIM

    def mine(name, default):
        return given.get(name, default) if differs else default

    if mine("version", None):
        sys.modules["usp.topology"].__version__ = given["version"]
    if rank == 0:
        mark()
    degrees = mine("degrees", (1, 4))
    timeout = timedelta(seconds=mine("seconds", TIMEOUT.seconds))
    topology = usp.Topology.build(*degrees, nodes=mine("nodes", None), check=mine("check", None), timeout=timeout)
    names = ("layout", "kernel", "transport", "scale")
    attn = usp.USPAttention(topology=topology, **{name: given[name] for name in names if differs and name in given})
    shape = 1, 64, mine("heads", 4), mine("head_dim", 16)
    x = torch.zeros(shape, dtype=mine("dtype", torch.float32), device=mine("device", "cpu"))
    attn(x, x, x, seq_len=mine("seq_len", 256), **mine("options", {}))


@pytest.mark.parametrize("fact", [*MISMATCHES, *BUILDS])
def test_a_rank_that_differs_is_an_error_on_every_rank(fact):
    found = Job(disagree, (MISMATCHES | BUILDS)[fact]).ends()
    assert len(found) == 4
    for end in found.values():
        assert end.error.startswith("AgreementError: the ranks of one group called with different arguments: ")
        assert f"rank {VICTIM} has {fact} " in end.error
        assert " where rank 0 has " in end.error
        assert end.seconds < TIMEOUT.total_seconds() + 10


# ---- the process group -----------------------------------------------------------------------------------------------


def exact(topology) -> bool:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 32, 4, 8, dtype=torch.float64) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    shards = [usp.shard(t, topology) for t in (q, k, v)]
    out = usp.unshard(usp.attention(*shards, topology=topology), topology)
    return bool((out - expected).norm() / expected.norm() < 1e-12)


def come_again(rank: int, mark, ports: list[int]) -> None:
    """Groups that end and begin anew, with other degrees."""
    mark()
    for port, degrees in zip([None, *ports], [(2, 2), (4, 1), (1, 4)], strict=True):
        if port is not None:
            store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
            with pytest.raises(ValueError, match="initialize the default process group twice"):
                dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
        assert exact(usp.Topology.build(*degrees, timeout=TIMEOUT))
        dist.barrier()
        dist.destroy_process_group()


def test_a_process_group_may_end_and_begin_anew():
    ends = Job(come_again, [free_port(), free_port()]).ends()
    assert [(end.exit_code, end.error) for end in ends.values()] == [(0, "")] * 4


def fork(rank: int, mark) -> None:
    mark()
    topology = usp.Topology.build(2, 2, timeout=TIMEOUT)
    assert exact(topology)
    child = os.fork()
    if child == 0:
        try:
            exact(topology)
        except TopologyError as error:
            os._exit(0 if "this is a fork of it" in str(error) else 2)
        os._exit(3)
    assert os.waitpid(child, 0)[1] == 0
    assert exact(topology)  # the parent is as before


def test_a_fork_is_refused_and_its_parent_goes_on():
    ends = Job(fork).ends()
    assert [(end.exit_code, end.error) for end in ends.values()] == [(0, "")] * 4


def wait_for_a_signal(rank: int, mark) -> None:
    topology = usp.Topology.build(2, 2, timeout=TIMEOUT)
    for step in range(10**9):
        exact(topology)
        if step == STEP and rank == 0:
            mark()


def test_an_interrupt_from_the_keyboard_ends_all_ranks():
    job = Job(wait_for_a_signal)
    job.signal_all(signal.SIGINT)
    start = time.monotonic()
    found = job.ends()
    assert time.monotonic() - start < TIMEOUT.total_seconds() + 10
    assert {end.exit_code for end in found.values()} == {1}
    assert any(end.error.startswith("KeyboardInterrupt") for end in found.values())
    assert all(re.match("KeyboardInterrupt|TransportError|AgreementError", end.error) for end in found.values())
