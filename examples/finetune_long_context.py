"""Trains a decoder on longer and longer contexts: each stage has its RoPE theta and degrees, one optimizer goes on.

    torchrun --standalone --nproc-per-node 4 examples/finetune_long_context.py /tmp/finetuned
    torchrun --standalone --nproc-per-node 4 examples/finetune_long_context.py /tmp/finetuned --resume-from 4

Not yet tried: on four hosts of 8 GPUs, N being 0 on the one called host0, from what pretrain_tiny_lm.py has saved:

    torchrun --nnodes 4 --node-rank N --master-addr host0 --master-port 29500 --nproc-per-node 8 \
        examples/finetune_long_context.py /shared/finetuned --layers 32 --width 4096 --schedule long.yaml \
        --pretrained /shared/pretrained --save-every 100

where long.yaml holds

    stages:
    - {seq_len: 4K, steps: 1000, batch: 1024, rope_theta: 1e4, ulysses_degree: 1, ring_degree: 1}
    - {seq_len: 64K, steps: 500, batch: 64, rope_theta: 1e6, ulysses_degree: 8, ring_degree: 1}
    - {seq_len: 1M, steps: 200, batch: 4, rope_theta: 5e7, ulysses_degree: 8, ring_degree: 4, layout: zigzag}

Documents are excerpts from the source of Python's standard library, by bytes.
"""

import random
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from pretrain_tiny_lm import CUDA, DEVICE, FILES, Decoder, prepare, update
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import AdamW

import usp
from usp.data import ContextSchedule, ContextStage, LongContextCollator

SMALL = ContextSchedule(
    stages=(
        ContextStage(seq_len=126, steps=2, batch=4, rope_theta=1e4, ulysses_degree=4, ring_degree=1),
        ContextStage(seq_len=254, steps=2, batch=2, rope_theta=1e5, ulysses_degree=2, ring_degree=2, layout="zigzag"),
        ContextStage(seq_len=510, steps=2, batch=1, rope_theta=1e6, ulysses_degree=1, ring_degree=4, layout="striped"),
    )
)


def sequences(stage: ContextStage, step: int) -> list[dict[str, Any]]:
    """All sequences of a step, drawn by its number alone: a resumed run goes on with the data it would have had."""
    draw, documents, left = random.Random(step), [], stage.batch * stage.seq_len
    while left > 0:
        text = draw.choice(FILES).read_bytes()
        start = draw.randrange(len(text))
        documents.append(text[start : start + draw.randrange(1, stage.seq_len)])
        left -= len(documents[-1])
    batches = LongContextCollator(stage.seq_len, separator=0)(documents).batches[: stage.batch]
    return [{name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in batch.items()} for batch in batches]


def state(model: Decoder, optimizer: AdamW) -> dict[str, Any]:
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments}


def restore(model: Decoder, optimizer: AdamW, folder: Path) -> None:
    load(found := state(model, optimizer), checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])


def train(
    checkpoints: Annotated[Path, typer.Argument(help="Folder of the checkpoints, by step, which all hosts see.")],
    schedule: Annotated[Path | None, typer.Option(help="A usp.data.ContextSchedule, YAML or JSON.")] = None,
    layers: int = 2,
    width: int = 128,
    pretrained: Annotated[Path | None, typer.Option(help="Checkpoint that a run starts with.")] = None,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints; stages end with one.")] = 1000,
    resume_from: Annotated[int, typer.Option(min=0, help="Step of the checkpoint to go on from.")] = 0,
) -> None:
    """Train what is left of the schedule on a torchrun world. A stage without degrees has a ring of all ranks."""
    dist.init_process_group("nccl" if CUDA else "gloo")
    torch.manual_seed(0)  # the same weights everywhere
    model = Decoder(width, layers, usp.attention).to(DEVICE)
    optimizer = prepare(model)
    if origin := checkpoints / str(resume_from) if resume_from else pretrained:
        restore(model, optimizer, origin)
    say = print if dist.get_rank() == 0 else (lambda line: None)
    stages = ContextSchedule.read(schedule) if schedule else SMALL
    for stage, steps in stages.remaining(resume_from):
        degrees = stage.ulysses_degree or 1, stage.ring_degree or dist.get_world_size()
        topology, layout = usp.Topology.build(*degrees), stage.layout or "contiguous"
        if stage.batch % topology.data_degree:
            groups = topology.data_degree
            raise usp.InputError(f"batch is {stage.batch}: {groups} data-parallel groups need a multiple of {groups}")
        say(
            f"context {stage.seq_len}, theta {stage.rope_theta:g}, ulysses {degrees[0]} x ring {degrees[1]}: "
            f"{stage.tokens_per_rank(*degrees)} tokens of a sequence per rank"
        )
        for step in steps:
            mine = sequences(stage, step)[topology.data_rank :: topology.data_degree]
            shards = [usp.shard_batch(batch, topology, layout) for batch in mine]
            say(f"step {step}: {update(model, optimizer, shards, stage=stage, topology=topology, layout=layout)}")
            done = step + 1
            if done % save_every == 0 or done == steps.stop:
                save(state(model, optimizer), checkpoint_id=checkpoints / str(done))
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(train)
