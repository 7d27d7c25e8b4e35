"""Trains a FLUX transformer of diffusers by flow matching, with the tokens of each picture sharded over processes.

    torchrun --standalone --nproc-per-node 4 examples/diffusion_transformer.py --check

That is small, for CPUs. With the sizes of FLUX.1 and 65,536 image tokens, on 4 nodes of 8 GPUs, each node runs

    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint NODE0:29500 \
        examples/diffusion_transformer.py --side 256 --text 512 --batch 1 --layers 19 --heads 24 --head-dim 128 \
        --ulysses-degree 8 --ring-degree 4

What sequence parallelism adds is marked (1) to (3). FSDP averages gradients over all processes, and that is right as it
is: see `usp.integrations.diffusers`. With --check one process trains once more on whole pictures, without usp, and the
losses must agree. The pictures are gratings, and the "text" says which.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

import usp
from usp.integrations.diffusers import enable

TOLERANCE = 1e-5  # of a loss and of a gradient's norm in float32, relative
CHANNELS, TEXT_CHANNELS = 4, 32


def draw(samples: int, side: int, text: int, seed: int) -> tuple[Tensor, ...]:
    """Pictures (samples, side * side, CHANNELS), texts (samples, text, TEXT_CHANNELS), noise and times."""
    generator = torch.Generator().manual_seed(seed)
    waves, line = torch.rand(samples, 2, generator=generator), torch.linspace(0, 20, side)
    angles = waves[:, :1, None] * line[:, None] + waves[:, 1:, None] * line
    pictures = torch.sin(angles.flatten(1)[..., None] + torch.arange(CHANNELS))
    texts = torch.cos(waves.sum(1)[:, None, None] * torch.arange(text * TEXT_CHANNELS).view(text, -1))
    return pictures, texts, torch.randn(pictures.shape, generator=generator), torch.rand(samples, generator=generator)


def train(model: FluxTransformer2DModel, batches: Iterable[tuple[Tensor, ...]]) -> Iterator[tuple[float, float]]:
    """Yields the loss and the gradient's norm, over the samples of all processes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for pictures, text, noise, time in batches:
        t, side = time[:, None, None], round(pictures.shape[1] ** 0.5)
        rows = torch.arange(side * side, device=pictures.device)
        velocity = model(
            hidden_states=(1 - t) * pictures + t * noise, encoder_hidden_states=text, timestep=time,
            pooled_projections=text.mean(1), txt_ids=text.new_zeros(text.shape[1], 3),
            img_ids=torch.stack((0 * rows, rows // side, rows % side), dim=-1).to(text.dtype),
        ).sample  # fmt: skip
        loss = (velocity - (noise - pictures)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total = loss.detach()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        yield total.item(), float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def main(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 10,
    side: Annotated[int, typer.Option(help="Image tokens of a side of the square picture.")] = 15,
    text: Annotated[int, typer.Option(help="Text tokens.")] = 6,
    batch: Annotated[int, typer.Option(help="Pictures of each data-parallel replica.")] = 4,
    layers: Annotated[int, typer.Option(help="Blocks of two streams; those of one are twice as many.")] = 1,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Width of a head, a multiple of 8.")] = 16,
    ulysses_degree: Annotated[int, typer.Option(help="Processes that exchange heads for sequence.")] = 2,
    ring_degree: Annotated[int, typer.Option(help="Processes that pass keys and values round.")] = 2,
    check: Annotated[bool, typer.Option("--check", help="Train in one process too, and compare.")] = False,
) -> None:
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    if dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    topology = usp.Topology.build(ulysses_degree, ring_degree)  # (1)

    def run(sharded: bool) -> list[tuple[float, float]]:
        torch.manual_seed(0)  # the same weights everywhere
        with torch.device(device):
            model = FluxTransformer2DModel(
                in_channels=CHANNELS, num_layers=layers, num_single_layers=2 * layers, attention_head_dim=head_dim,
                num_attention_heads=heads, joint_attention_dim=TEXT_CHANNELS, pooled_projection_dim=TEXT_CHANNELS,
                axes_dims_rope=(head_dim // 2, head_dim // 4, head_dim // 4),
            )  # fmt: skip
        model.enable_gradient_checkpointing()
        if sharded:
            enable(model, topology)  # (2)
        if dist.is_initialized():  # over all processes, whether or not they share a picture
            for module in (*model.transformer_blocks, *model.single_transformer_blocks, model):
                fully_shard(module)
        # (3) Processes that share a picture draw the same one, with the same noise and time.
        replicas = [topology.data_rank] if sharded else range(topology.data_degree)
        batches = ([draw(batch, side, text, seed=1000 * step + r) for r in replicas] for step in range(steps))
        return list(train(model, (tuple(torch.cat(x).to(device) for x in zip(*b, strict=True)) for b in batches)))

    found = run(sharded=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    if topology.rank == 0:
        print(f"{side**2} + {text} tokens on {topology.sequence_degree} ranks: {found[0][0]:.4f} -> {found[-1][0]:.4f}")
    if check and topology.rank == 0:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(run(sharded=False)), rtol=TOLERANCE, atol=0.0)
        print(f"one process has the same losses and norms of gradients within {TOLERANCE:g}")


if __name__ == "__main__":
    typer.run(main)
