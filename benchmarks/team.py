"""Processes that sleep on pipes: while one side of a comparison computes, every other side must not.

A team is a group of gloo ranks, or one process alone. It starts with its own environment, because oneDNN and OpenMP
read theirs once, when they are loaded.
"""

import multiprocessing as mp
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

TICKS = os.sysconf("SC_CLK_TCK")


class RankError(RuntimeError):
    """What a rank raised: `failure` is the kind and the first line, or "died"."""

    def __init__(self, rank: str, failure: str, trace: str) -> None:
        super().__init__(f"{rank}: {failure}\n{trace}".rstrip())
        self.failure = failure


class Team:
    """`ranks` processes of `threads` threads each, in one process group; `silent` ones print nothing.

    with Team(2) as team:
        results = team.run(work, 1024)      # work(rank, 1024) in every process, at module level; results by rank
    """

    def __init__(
        self, ranks: int, threads: int = 1, environment: Mapping[str, str] | None = None, *, silent: bool = False
    ) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.mkdtemp()
        self._pipes: list[Connection] = []
        self._processes = []
        with _environment({"OMP_NUM_THREADS": str(threads), **(environment or {})}):
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                store = str(Path(self._folder) / "store")
                process = context.Process(
                    target=_serve, args=(rank, ranks, threads, store, theirs, silent), daemon=True
                )
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)

    def run(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """`work(rank, *args)` in every process; results in rank order.

        Raises RankError as soon as a rank raises or dies. The team is then of no more use, even if all ranks raise:
        another may wait for that rank, and gloo may spin on a message that nobody takes.
        """
        for pipe in self._pipes:
            pipe.send((work, args))
        results: dict[Connection, Any] = {}
        while waiting := [pipe for pipe in self._pipes if pipe not in results]:
            for pipe in wait(waiting):
                assert isinstance(pipe, Connection)
                try:
                    failure, results[pipe] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    failure, results[pipe] = "died", ""
                if failure:
                    raise RankError(f"rank {self._pipes.index(pipe)} of {len(self._pipes)}", failure, results[pipe])
        return [results[pipe] for pipe in self._pipes]

    def cpu_seconds(self) -> float:
        """What the processes have computed since they started, by the kernel's clock of 10 ms ticks."""
        return sum(_cpu_seconds(process.pid) for process in self._processes if process.pid)

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Load:
    """Who used the cores between `__init__` and `stop`, as shares of all cores' time.

    Attributes:
        foreign: processes that are not part of the benchmark, and a hypervisor's other guests.
        idle_side: teams that had nothing to do.
    """

    def __init__(self, busy: Team, teams: list[Team]) -> None:
        self._others = [team for team in teams if team is not busy]
        self._busy = busy
        self._start = self._read()
        self.foreign = self.idle_side = 0.0

    def stop(self) -> None:
        wall, machine, own, others, parent = (b - a for a, b in zip(self._start, self._read(), strict=True))
        available = wall * (os.cpu_count() or 1)
        self.idle_side = others / available
        self.foreign = max(0.0, machine - own - others - parent) / available

    def _read(self) -> tuple[float, ...]:
        others = sum(team.cpu_seconds() for team in self._others)
        return time.perf_counter(), machine_seconds(), self._busy.cpu_seconds(), others, _cpu_seconds(os.getpid())


def wait_for_quiet(limit: float, deadline: float) -> None:
    """Sleeps until the cores are used by less than `limit`, or until `deadline` on the monotonic clock."""
    while time.monotonic() < deadline:
        start, before = time.perf_counter(), machine_seconds()
        time.sleep(0.5)
        if machine_seconds() - before < limit * (time.perf_counter() - start) * (os.cpu_count() or 1):
            return


def machine_seconds() -> float:
    """Seconds in which some core worked, or was taken away; 0 where the system does not tell."""
    with suppress(OSError), open("/proc/stat") as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
        return (user + nice + system + irq + softirq + steal) / TICKS
    return 0.0


def _cpu_seconds(pid: int) -> float:
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    return 0.0


@contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    """Spawned processes inherit the environment as it is when they start."""
    before = dict(os.environ)
    os.environ.update(extra)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(rank: int, ranks: int, threads: int, store: str, pipe: Connection, silent: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sees it too, and ends the team
    if silent:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    if ranks > 1:
        timeout = timedelta(minutes=10)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout)
    with suppress(EOFError):
        while True:
            work, args = pipe.recv()
            try:
                pipe.send(("", work(rank, *args)))
            except Exception as error:
                message = next(iter(str(error).strip().splitlines()), "")
                pipe.send((f"{type(error).__name__}: {message}".removesuffix(": "), traceback.format_exc()))
