"""A training run of examples/train_elastic.py whose processes are killed, and a soak of many kills.

python -m tests.faults.elastic --minutes 10 --seed 0      # ends by itself; exit code 1 if a loss differs
"""

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
        exit_code: torchrun's; None if it had to be ended.
        steps: (loss, norm) by step; of a step that was done again, each time.
        attempts: "ULYSSESxRING" of each.
        kills: how many processes were killed.
        seconds: how long it took.
        errors: the end of what went to standard error.
        left: processes that were still there.
    """

    exit_code: int | None = None
    steps: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    attempts: list[str] = field(default_factory=list)
    kills: int = 0
    seconds: float = 0.0
    errors: str = ""
    left: list[int] = field(default_factory=list)

    def differing(self, whole: "Outcome") -> list[str]:
        """Where it differs from an undisturbed run, beyond what is printed of numbers."""
        wrong = [f"step {step} is missing" for step in whole.steps if step not in self.steps]
        for step, times in self.steps.items():
            (expected,) = whole.steps[step]
            wrong += [
                f"step {step}: {found} instead of {expected}"
                for found in times
                if any(abs(a - b) > 1e-3 * abs(b) for a, b in zip(found, expected, strict=True))
            ]
        return wrong


def train(folder: Path, steps: int, kill: Callable[[int, int], bool], timeout: float) -> Outcome:
    """Runs it, and kills a worker by SIGKILL whenever `kill(step, kills so far)` says so of a step that is done."""
    options = ("--standalone", "--nproc-per-node", str(PROCESSES), "--max-restarts", str(MOST_KILLS))
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--monitor-interval", "0.1"]
    command += [str(ROOT / "examples" / "train_elastic.py"), str(folder), "--steps", str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    found, start = Outcome(), time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        ender = threading.Timer(timeout, os.killpg, (process.pid, signal.SIGKILL))
        with process:
            ender.start()
            try:
                for line in process.stdout or ():
                    if _note(line, found) and kill(max(found.steps), found.kills) and (pids := children(process.pid)):
                        os.kill(random.Random(found.kills).choice(pids), signal.SIGKILL)
                        found.kills += 1
                found.exit_code = process.wait()
            finally:
                ender.cancel()
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        errors.seek(0)
        found.errors = errors.read()[-4000:]
    found.seconds, found.left = time.monotonic() - start, in_session(process.pid)
    return found


def _note(line: str, found: Outcome) -> bool:
    """Takes in a line, and says whether a step is done."""
    if attempt := re.match(r"attempt \d+: ulysses (\d+) x ring (\d+)", line):
        found.attempts.append("x".join(attempt.groups()))
    done = re.match(r"step (\d+): loss (\S+), gradient norm (\S+)", line)
    if done:
        found.steps.setdefault(int(done[1]), []).append((float(done[2]), float(done[3])))
    return done is not None


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").glob("*") for child in (task / "children").read_text().split()
    ]


def in_session(leader: int) -> list[int]:
    """Processes that belong to a session, by its leader."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(after_name[3]) == leader and after_name[0] != "Z":
            found.append(int(path.parent.name))
    return found


def main(minutes: Annotated[float, typer.Option(help="How long, at most and about.")] = 10.0, seed: int = 0) -> None:
    """A run with random kills against an undisturbed one of as many steps."""
    draw, seconds = random.Random(seed), minutes * 60
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        trial = train(Path(folder) / "trial", 20, lambda step, kills: False, seconds)
        long = train(Path(folder) / "longer", 60, lambda step, kills: False, seconds)
        a_step = max((long.seconds - trial.seconds) / 40, 0.01)
        left = seconds - (time.monotonic() - start)
        steps = max(20, min(5000, int(left / 3 / a_step)))  # a third undisturbed, a third for steps, a third for starts
        most_kills = min(MOST_KILLS - 1, int(left / 3 / trial.seconds))
        whole = train(Path(folder) / "whole", steps, lambda step, kills: False, left)
        disturbed = train(
            Path(folder) / "disturbed",
            steps,
            lambda step, kills: kills < most_kills and draw.random() < 1.3 * most_kills / steps,
            max(60.0, seconds - (time.monotonic() - start)),
        )
    wrong = disturbed.differing(whole)
    again = sum(len(times) - 1 for times in disturbed.steps.values())
    print(
        f"{steps} steps, {disturbed.kills} kills, {len(disturbed.attempts)} attempts, {again} steps done again: "
        f"{disturbed.seconds:.0f} s against {whole.seconds:.0f} s undisturbed, exit code {disturbed.exit_code}, "
        f"{len(disturbed.left)} processes left; last loss {disturbed.steps.get(steps - 1)} and {whole.steps[steps - 1]}"
    )
    print("\n".join(wrong) or "every step as in the undisturbed run")
    sys.exit(bool(wrong or disturbed.exit_code or disturbed.left))


if __name__ == "__main__":
    typer.run(main)
