"""Processes that meet a fault, and what becomes of the others.

The store is kept by the caller, as torchrun keeps it, unless a rank is to keep it.
"""

import contextlib
import multiprocessing as mp
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

TIMEOUT = timedelta(seconds=5)
"""Of the topologies of these jobs."""
GRACE = 10.0
"""Seconds beyond the time-out until a survivor must have ended."""
LONGEST = 60.0
"""Seconds until the fault happens, at most."""


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code (minus a signal), what it raised, and how long after the fault."""

    exit_code: int | None
    error: str
    seconds: float


class Job:
    """Runs `work(rank, mark, *args)` in every process; `mark()` says that the fault happens now.

    Args:
        work: at module level.
        args: its further arguments.
        world_size: number of processes.
        store_rank: the rank that keeps the rendezvous store; None for the caller.
    """

    def __init__(
        self, work: Callable[..., Any], *args: Any, world_size: int = 4, store_rank: int | None = None
    ) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "usp.attention"])
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if store_rank is None else None
        port = self._store.port if self._store else free_port()
        self._pipes: list[Connection] = []
        self.processes = []
        self._fault: float | None = None
        self._errors: dict[int, tuple[str, float]] = {}
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            given = (rank, world_size, port, rank == store_rank, theirs, work, args)
            process = context.Process(target=_body, args=given, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def signal_all(self, number: int) -> None:
        """Once the ranks have said that they are ready."""
        self._wait_for_fault()
        for process in self.processes:
            os.kill(process.pid, number)

    def ends(self, but: int | None = None) -> dict[int, Ended]:
        """How all ranks ended, but one that is stopped; it is killed afterwards.

        Raises:
            AssertionError: one had not ended by itself in time.
        """
        start = self._wait_for_fault()
        deadline = start + TIMEOUT.total_seconds() + GRACE
        found: dict[int, Ended] = {}
        try:
            for rank, (process, pipe) in enumerate(zip(self.processes, self._pipes, strict=True)):
                if rank == but:
                    continue
                process.join(max(0.0, deadline - time.monotonic()))
                assert process.exitcode is not None, f"rank {rank} is still there; ended: {found}"
                self._listen(rank, pipe, 0)
                error, when = self._errors.get(rank, ("", start))
                found[rank] = Ended(process.exitcode, error, when - start)
        finally:
            for process in self.processes:
                process.kill()
            for process in self.processes:
                process.join()
        return found

    def _wait_for_fault(self) -> float:
        """When it happened."""
        deadline = time.monotonic() + LONGEST
        while self._fault is None and time.monotonic() < deadline and len(self._errors) < len(self._pipes):
            for rank, pipe in enumerate(self._pipes):
                self._listen(rank, pipe, 0.02)
        assert self._fault is not None, f"nothing has happened but {self._errors}"
        return self._fault

    def _listen(self, rank: int, pipe: Connection, seconds: float) -> None:
        """What a rank has to say."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            while pipe.poll(seconds):
                kind, text, moment = pipe.recv()
                if kind == "fault":
                    self._fault = moment
                else:
                    self._errors[rank] = text, moment


def free_port() -> int:
    """A port that nobody listens on."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store.port


def _body(
    rank: int, world_size: int, port: int, keeps: bool, pipe: Connection, work: Callable[..., Any], args: tuple
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a fork server ignores it
    torch.set_num_threads(1)
    try:
        store = TCPStore("127.0.0.1", port, is_master=keeps, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        work(rank, lambda: pipe.send(("fault", "", time.monotonic())), *args)
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}", time.monotonic()))
        traceback.print_exc()
        os._exit(1)  # as at once as a process that a scheduler ends; the interpreter would wait for threads of gloo


def shared_memory() -> set[str]:
    """What lies in shared memory; but for what the fork server keeps."""
    return {path.name for path in Path("/dev/shm").glob("*") if not path.name.startswith("sem.mp-")}
