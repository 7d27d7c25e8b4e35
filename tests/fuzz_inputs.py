"""Random bytes in files and random options of commands: whatever is given, the answer is a result or one line.

`python -m tests.fuzz_inputs --seconds 60` runs for a minute, from a seed that it prints. A failure is printed with its
own seed, which replays it alone: `python -m tests.fuzz_inputs --only SEED`.
tests/unit/test_inputs.py runs some in CI.
"""

import contextlib
import json
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from typer.testing import CliRunner

from usp.cli.app import app as usp_app
from usp.data.schedule import PRESETS, ContextSchedule
from usp.errors import InputError, TopologyError, USPError
from usp.planner import hardware, models
from usp.planner.spec import ClusterSpec, ModelSpec, Workload

CLUSTER = hardware.cluster("h100", 16).model_dump(mode="json", exclude_none=True)
MODEL = models.PRESETS["gpt-oss-20b"].model_dump(mode="json", exclude_none=True)
WORKLOAD = {"seq_len": "8K", "window_size": [4095, 0], "documents": [5000, 3192], "mode": "train"}
CONFIG = {
    "model_type": "deepseek_v3", "num_attention_heads": 16, "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 99,
    "intermediate_size": 128, "q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_layer_freq": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "mlp_only_layers": [2], "layer_types": [],
}  # fmt: skip
FILES: Sequence[tuple[Callable[[Path], Any], Any]] = (
    (ClusterSpec.read, CLUSTER), (ModelSpec.read, MODEL), (Workload.read, WORKLOAD), (models.from_config, CONFIG),
    (ContextSchedule.read, PRESETS["lwm-text"].model_dump(mode="json")), (lambda path: models.find(str(path)), CONFIG),
)  # fmt: skip
"""What reads a file, and what it should hold."""
TOKENS = (
    b"&a ", b"*a", b"<<: *a\n", b"<<: [*a, *a]\n", b"!!python/object/apply:os.system [x]", b"!!binary ", b"!!set ",
    b"!!omap ", b"? ", b"- ", b": ", b"\n", b"\t", b"\0", b"\xff", b"\xef\xbb\xbf", b"---\n", b"[" * 3000, b"{" * 3000,
    b"a: " * 99, b"1" * 5000, b"1:1" * 400, b"1e999", b".nan", b".inf", b"-1", b"0x", b"NaN", b"null", b"true", b'"',
    b"\\ud800", b"'", b"#", b"%YAML 9\n", b"2024-13-45", b"__class__", b"heads", b"name", "\u2028".encode(),
)  # fmt: skip
LONG = ("128K", "1M", "1T", str(2**40), "1K,1K")
"""Sequences that are quickly planned for, and slowly computed."""
COMPUTING = ("check", "dry-run")
VALUES = (
    "", " ", "0", "1", "2", "3", "4", "8", "-1", "-0", "1.5", "1e9", "nan", "inf", "x", "9" * 30, "9" * 5000, "3,0",
     "-1,-1", "4,4", "8,8,", ",", "1K,1K", "zigzag", "balanced", "balanced@", "p2p", "double_ring:2",
    "double_ring:-1", "float32", "float8", "h100", "H100", "llama3-8b", "lama", "nvlink4", "train", "none", "é\u2028",
    "two\nlines", "\udcff", "a\0b", "--help", "-h", ".", "nowhere/x.png", "kept.yaml", "kept.png", "x.tiles",
    "/dev/null", "@kept.yaml", "$HOME", "%s", "[red]", "true", *LONG,
)  # fmt: skip
"""Of options: what some of them take, and what none does."""
USUAL = {
    "check": "--seq-len 16 --heads 2 --head-dim 8",
    "dry-run": "--model llama3-8b --gpu h100 --seq-len 8K --gpus 4",
    "explain": "--seq-len 1K -r 2",
    "plan": "--model llama3-8b --gpu h100 --seq-len 8K",
    "simulate": "--model llama3-8b --gpu h100 --seq-len 8K",
    "topology": "--nodes 2",
    "trace": "--seq-len 1K",
}
"""What commands need."""
KEPT = {"kept.yaml": b"not: a cluster\n", "kept.png": b"not a picture"}
LONGEST_LINE = 2000
"""Characters, besides those of the options."""
SLOW_SECONDS = 120.0
"""Some masks of thousands of chunks take a minute to plan for, on a busy machine."""


def mutate(pick: random.Random, content: bytes) -> bytes:
    """Some random changes: bytes, slices, and what YAML and JSON give a meaning to."""
    for _ in range(pick.randint(1, 6)):
        start = pick.randint(0, len(content))
        stop = min(len(content), start + pick.choice([0, 1, 1, 4, 40]))
        new = pick.choice([b"", content[start:stop] * 2, bytes([pick.randint(0, 255)]), pick.choice(TOKENS), b"5"])
        content = content[:start] if pick.randint(0, 19) == 0 else content[:start] + new + content[stop:]
    return content


def any_file(pick: random.Random) -> tuple[Callable[[Path], Any], bytes]:
    """What reads a file, and a mutation of one that it takes."""
    reader, valid = pick.choice(FILES)
    text = json.dumps(valid, indent=pick.choice([None, 2])) if pick.randint(0, 1) else yaml.safe_dump(valid)
    return reader, mutate(pick, text.encode())


def any_arguments(pick: random.Random) -> list[str]:
    """A command with some of its options, whatever they are, and values."""
    commands: Mapping[str, Any] = getattr(typer.main.get_command(usp_app), "commands")  # noqa: B009
    name = pick.choice(sorted(commands))
    arguments = [name, *(USUAL.get(name, "").split() if pick.randint(0, 3) else ())]
    for _ in range(pick.randint(0, 4)):
        option = pick.choice(commands[name].params)
        arguments.append(pick.choice([*option.opts, *option.secondary_opts]))
        if not getattr(option, "is_flag", False):
            arguments.append(pick.choice(VALUES[: -len(LONG)] if name in COMPUTING else VALUES))
    return arguments


def wrong_with_file(reader: Callable[[Path], Any], content: bytes, folder: Path) -> str:
    """What is wrong with how a file is read, or nothing."""
    path, start = folder / "any.yaml", time.monotonic()
    path.write_bytes(content)
    try:
        reader(path)
    except InputError as error:
        found = _line(str(error))
    except BaseException:
        found = traceback.format_exc()
    else:
        found = ""
    found = found or ("the file has changed" if path.read_bytes() != content else "")
    return found or _late(start)


def wrong_with_arguments(arguments: Sequence[str], folder: Path) -> str:
    """What is wrong with how a command takes its arguments, or nothing. It runs in the folder."""
    for name, content in KEPT.items():
        (folder / name).write_bytes(content)
    start = time.monotonic()
    with contextlib.chdir(folder):
        result = CliRunner().invoke(usp_app, list(arguments))
    error = result.exception
    if isinstance(error, USPError):  # `main` prints it; that of a topology may be a table
        text = str(error).splitlines()[0] if isinstance(error, TopologyError) else str(error)
        found = _line(text, LONGEST_LINE + sum(map(len, arguments)))
    elif error is not None and not isinstance(error, SystemExit):
        found = "".join(traceback.format_exception(error))
    else:
        found = "" if result.exit_code in (0, 1, 2) else f"exit code {result.exit_code}"
    failed = isinstance(error, USPError)
    for name, content in KEPT.items():
        if failed and (folder / name).read_bytes() != content:
            found = found or f"{name} was overwritten"
    left = [name for name in os.listdir(folder) if name.endswith(".part")]
    return found or (f"{left} is left" if left else _late(start))


def _line(text: str, longest: int = LONGEST_LINE) -> str:
    return "" if len(text.splitlines()) == 1 and len(text) <= longest else f"not one line: {text[:4000]!r}"


def _late(start: float) -> str:
    seconds = time.monotonic() - start
    return f"it took {seconds:.0f} s" if seconds > SLOW_SECONDS else ""


def wrong(seed: int, folder: Path) -> str:
    """What is wrong with the case of a seed, and the case; or nothing."""
    pick = random.Random(seed)
    if pick.randint(0, 2):
        reader, content = any_file(pick)
        found, case = (
            wrong_with_file(reader, content, folder),
            f"{getattr(reader, '__qualname__', reader)} of {content!r}",
        )
    else:
        arguments = any_arguments(pick)
        found, case = wrong_with_arguments(arguments, folder), f"usp {arguments}"
    return f"{case}\n{found}" if found else ""


def main(
    seconds: Annotated[float, typer.Option(help="How long to search.")] = 60.0,
    seed: Annotated[int | None, typer.Option(help="Of the first case; the next has the next.")] = None,
    only: Annotated[int | None, typer.Option(help="Replay one case.")] = None,
) -> None:
    """Search for bytes and options that are answered by anything but a result or one line."""
    first = only if only is not None else random.randrange(2**32) if seed is None else seed
    typer.echo(f"seed {first}")
    deadline, current, failures = time.monotonic() + seconds, first, 0
    with tempfile.TemporaryDirectory() as folder:
        while current == first or (only is None and time.monotonic() < deadline):
            if found := wrong(current, Path(folder)):
                failures += 1
                typer.echo(f"\nseed {current}: {found}\nreplay: python -m tests.fuzz_inputs --only {current}")
            current += 1
    typer.echo(f"{current - first} cases, {failures} failures")
    raise typer.Exit(failures > 0)


if __name__ == "__main__":
    typer.run(main)
