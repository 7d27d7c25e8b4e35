"""Trains on through the loss of processes, with other degrees after each restart.

    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/train_elastic.py /tmp/elastic

torchrun starts all ranks anew when one ends; they go on from the newest checkpoint that is whole. Degrees are those of
the attempt: what a checkpoint holds does not depend on them. Not yet tried on GPUs or several hosts.
"""

import os
import random
import shutil
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from finetune_long_context import restore, state
from pretrain_tiny_lm import CUDA, DEVICE, FILES, Decoder, prepare, update
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint.state_dict_saver import save

import usp
from usp.data import ContextStage

LAYOUT = "zigzag"


def join(attempt: int) -> None:
    """Makes the process group. torchrun keeps one store for all attempts, and gloo's addresses of the last in it."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = PrefixStore(f"attempt {attempt}", store)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if CUDA else "gloo", store=store, rank=rank, world_size=world_size)


def tokens_of(step: int, sequence: int, context: int) -> Tensor:
    """One sequence of a step, drawn by its numbers alone: the same in every attempt, whoever computes it."""
    draw = random.Random(f"step {step}, sequence {sequence}")
    text = draw.choice([file for file in FILES if file.stat().st_size > context]).read_bytes()
    start = draw.randrange(len(text) - context)
    return torch.tensor(list(text[start : start + context]), device=DEVICE)[None]


def newest(checkpoints: Path) -> int:
    """The last step with a checkpoint; 0 without one. A name that is a number is given to whole ones only."""
    return max((int(path.name) for path in checkpoints.glob("*") if path.name.isdecimal()), default=0)


def write(checkpoints: Path, step: int, found: dict) -> None:
    """All ranks write their parts; then the folder gets its name, and the one before the last goes."""
    unnamed = checkpoints / f"{step}.part"
    save(found, checkpoint_id=unnamed)  # ends on all ranks when the parts of all are there
    if dist.get_rank() == 0:
        unnamed.rename(checkpoints / str(step))
        for path in checkpoints.glob("*"):
            if path.name.isdecimal() and int(path.name) < step:
                shutil.rmtree(path)
    dist.barrier()


def train(
    checkpoints: Annotated[Path, typer.Argument(help="Folder of the checkpoints, which all hosts see.")],
    context: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 254,
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 2,
    steps: int = 8,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 2,
    degrees: Annotated[list[str] | None, typer.Option(help="ULYSSESxRING of each attempt, in turn.")] = None,
) -> None:
    """Train on a torchrun world, from where the attempt before came to."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    chosen = degrees or ["2x2", "4x1", "1x4"]
    ulysses_degree, ring_degree = map(int, chosen[attempt % len(chosen)].split("x"))
    join(attempt)
    torch.manual_seed(0)  # the same weights everywhere
    topology = usp.Topology.build(ulysses_degree, ring_degree)
    model = Decoder(64, 2, usp.USPAttention(topology=topology, layout=LAYOUT)).to(DEVICE)
    optimizer = prepare(model)
    checkpoints.mkdir(parents=True, exist_ok=True)
    if first := newest(checkpoints):
        restore(model, optimizer, checkpoints / str(first))
    say = print if dist.get_rank() == 0 else (lambda *_, **__: None)
    say(f"attempt {attempt}: ulysses {ulysses_degree} x ring {ring_degree} from step {first}", flush=True)
    stage = ContextStage(seq_len=context, steps=steps)
    for step in range(first, steps):
        mine = [tokens_of(step, i, context) for i in range(topology.data_rank, batch, topology.data_degree)]
        shards = [usp.shard_batch({"input_ids": x, "labels": x}, topology, layout=LAYOUT) for x in mine]
        say(f"step {step}: {update(model, optimizer, shards, stage=stage)}", flush=True)
        if (step + 1) % save_every == 0 or step + 1 == steps:
            write(checkpoints, step + 1, state(model, optimizer))
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(train)
