"""A training run of examples/train_elastic.py whose processes are killed, and a soak of many kills.

python -m tests.faults.elastic --minutes 10 --seed 0      # ends by itself; exit code 1 if a loss differs
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[2]
PROCESSES = 4
MOST_KILLS = 40
"""Restarts that torchrun is allowed."""


@dataclass
class Outcome:
    """What a run printed, and what became of it.

    Attributes:
        exit_code: torchrun's; negative if it had to be ended.
        steps: (loss, norm) by step; of a step that was done again, each time.
        attempts: "ULYSSESxRING" of each.
        kills: how many processes were killed.
        restart_seconds: from a kill until all ranks are ready to train again.
        seconds: how long it took.
        errors: the end of what went to standard error.
        left: processes that had to be ended, at the time-out or after torchrun.
    """

    exit_code: int | None = None
    steps: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    attempts: list[str] = field(default_factory=list)
    kills: int = 0
    restart_seconds: list[float] = field(default_factory=list)
    seconds: float = 0.0
    errors: str = ""
    left: list[int] = field(default_factory=list)

    def differing(self, whole: "Outcome") -> list[str]:
        """Where it differs from an undisturbed run, beyond what is printed of numbers."""
        missing = [step for step in whole.steps if step not in self.steps]
        wrong = [f"{len(missing)} steps are missing, {min(missing)} to {max(missing)}"] if missing else []
        for step, times in self.steps.items():
            (expected,) = whole.steps[step]
            wrong += [
                f"step {step}: {found} instead of {expected}"
                for found in times
                if any(abs(a - b) > 1e-3 * abs(b) for a, b in zip(found, expected, strict=True))
            ]
        return wrong


def train(folder: Path, steps: int, strikes: Callable[[int, int], list[tuple[float, int]]], timeout: float) -> Outcome:
    """Runs it, and kills workers by SIGKILL.

    Args:
        folder: of the checkpoints; no other run may have the same.
        steps: of the whole run.
        strikes: (seconds to wait, which worker) of the kills to do when a step is done, by its number and the kills
            so far.
        timeout: seconds after which all its processes are ended.
    """
    options = ("--standalone", "--nproc-per-node", str(PROCESSES), "--max-restarts", str(MOST_KILLS))
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--monitor-interval", "0.1"]
    command += [str(ROOT / "examples" / "train_elastic.py"), str(folder), "--steps", str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    found, start, killed = Outcome(), time.monotonic(), None
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        ender = threading.Timer(timeout, _end, (folder, found))
        with process:
            ender.start()
            try:
                for line in process.stdout or ():
                    done = _note(line, found)
                    if killed and line.startswith("attempt"):
                        found.restart_seconds.append(time.monotonic() - killed)
                        killed = None
                    for wait, worker in strikes(max(found.steps), found.kills) if done else ():
                        time.sleep(wait)
                        if workers := [pid for pid in processes(folder) if pid != process.pid]:
                            _kill(workers[worker % len(workers)])
                            found.kills, killed = found.kills + 1, time.monotonic()
                found.exit_code = process.wait()
            finally:
                ender.cancel()
                _end(folder, found)
        errors.seek(0)
        found.errors = errors.read()[-4000:]
    found.seconds = time.monotonic() - start
    return found


def never(step: int, kills: int) -> list[tuple[float, int]]:
    """The strikes of an undisturbed run."""
    return []


def _note(line: str, found: Outcome) -> bool:
    """Takes in a line, and says whether a step is done."""
    if attempt := re.match(r"attempt \d+: ulysses (\d+) x ring (\d+)", line):
        found.attempts.append("x".join(attempt.groups()))
    done = re.match(r"step (\d+): loss (\S+), gradient norm (\S+)", line)
    if done:
        found.steps.setdefault(int(done[1]), []).append((float(done[2]), float(done[3])))
    return done is not None


def processes(folder: Path) -> list[int]:
    """Those of a run: the folder is an argument of torchrun and of each worker, which has a session of its own."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().split(b"\0")  # nothing, when it has ended and nobody has waited for it
        except OSError:
            continue  # it has ended meanwhile
        if os.fsencode(folder) in arguments:
            found.append(int(path.parent.name))
    return sorted(found)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(pid, signal.SIGKILL)


def _end(folder: Path, found: Outcome) -> None:
    """Ends what is left of a run; again and again, since torchrun may be starting workers."""
    while pids := processes(folder):
        found.left += [pid for pid in pids if pid not in found.left]
        for pid in pids:
            _kill(pid)
        time.sleep(0.05)


def main(minutes: Annotated[float, typer.Option(help="How long, at most and about.")] = 10.0, seed: int = 0) -> None:
    """A run with random kills against an undisturbed one of as many steps."""
    draw, seconds, start = random.Random(seed), minutes * 60, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trial = train(Path(folder) / "trial", 20, never, seconds)
        longer = train(Path(folder) / "longer", 60, never, seconds)
        a_step = max((longer.seconds - trial.seconds) / 40, 0.01)
        left = seconds - (time.monotonic() - start)
        # A quarter undisturbed, one for steps, one for starts, of which a strike needs up to two, and one to spare.
        steps = max(20, min(5000, int(left / 4 / a_step)))
        a_start = max(trial.seconds - 20 * a_step, 1.0)
        most_strikes = max(1, min(MOST_KILLS // 2, int(left / 4 / (2 * a_start))))
        chosen = set(draw.sample(range(steps), min(steps, most_strikes)))

        def strikes(step: int, kills: int) -> list[tuple[float, int]]:
            """Some in a step or in the writing of a checkpoint, and of those every other with one in the restart."""
            if step not in chosen:
                return []
            chosen.remove(step)  # which is done again
            waits = [draw.uniform(0, a_step), draw.uniform(0, a_start)][: draw.randint(1, 2)]
            return [(wait, draw.randrange(PROCESSES)) for wait in waits]

        whole = train(Path(folder) / "whole", steps, never, max(60.0, left))
        left = seconds - (time.monotonic() - start)
        disturbed = train(Path(folder) / "disturbed", steps, strikes, max(60.0, left))
    for run in (trial, longer, whole):
        if run.exit_code or run.left:
            sys.exit(f"an undisturbed run has exit code {run.exit_code}, {len(run.left)} processes left: {run.errors}")
    wrong = disturbed.differing(whole)
    again = sum(len(times) - 1 for times in disturbed.steps.values())
    restarts = disturbed.restart_seconds
    print(
        f"{steps} steps, {disturbed.kills} kills, {len(disturbed.attempts)} attempts, {again} steps done again: "
        f"{disturbed.seconds:.0f} s against {whole.seconds:.0f} s undisturbed, "
        f"{sum(restarts) / max(1, len(restarts)):.1f} s a restart, exit code {disturbed.exit_code}, "
        f"{len(disturbed.left)} processes left; last loss {disturbed.steps.get(steps - 1)} and {whole.steps[steps - 1]}"
    )
    print("\n".join(wrong) or "every step as in the undisturbed run")
    sys.exit(bool(wrong or disturbed.exit_code or disturbed.left or not disturbed.kills))


if __name__ == "__main__":
    typer.run(main)
