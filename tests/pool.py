"""Real gloo processes for tests: started once for a world size, reused by every test that wants that many.

def work(rank: int, length: int): ...            # runs in every process, at module level

results = pool(4).run(work, 1024, timeout=60)    # results by rank, or the failing rank's traceback
"""

import contextlib
import multiprocessing as mp
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class WorkerFailure(AssertionError):
    """A process raised, died or did not answer in time."""


class Pool:
    """`world_size` processes in one gloo group, waiting for work."""

    def __init__(self, world_size: int, environment: Callable[[int], dict[str, str]] | None = None) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "usp.attention"])
        self._folder = tempfile.TemporaryDirectory()
        self.alive = True
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            store = str(Path(self._folder.name) / "store")
            extra = environment(rank) if environment else {}
            process = context.Process(target=_serve, args=(rank, world_size, store, theirs, extra), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, work: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """`work(rank, *args)` in every process; results in rank order.

        Raises:
            WorkerFailure: with the traceback of the first rank to fail, or the ranks that did not answer in time.
        """
        for pipe in self._pipes:
            pipe.send((work, args))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(results) < len(self._pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise WorkerFailure(f"ranks {sorted(waiting.values())} did not answer within {timeout:g} s")
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    good, value = pipe.recv()
                except EOFError:
                    good, value = False, "the process died"
                if not good:
                    self.close()
                    raise WorkerFailure(f"rank {rank} of {len(self._pipes)} failed:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        """Ends the processes."""
        self.alive = False
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def _serve(rank: int, world_size: int, store: str, pipe: Connection, environment: dict[str, str]) -> None:
    import os

    os.environ.update(environment)
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    shared = dist.FileStore(store, world_size)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    with contextlib.suppress(EOFError):
        while True:
            work, args = pipe.recv()
            try:
                pipe.send((True, work(rank, *args)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
