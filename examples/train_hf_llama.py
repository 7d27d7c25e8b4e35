"""Trains a Llama of Hugging Face transformers with its sequences sharded: FSDP2, compiled layers, checkpointing.

    torchrun --standalone --nproc-per-node 4 examples/train_hf_llama.py
    torchrun --nnodes 2 --nproc-per-node 8 ... examples/train_hf_llama.py --layers 32 --width 4096 --context 131072 \
        --ulysses-degree 8 --ring-degree 2 --compiler inductor

What sequence parallelism adds to the script is marked "usp". The text is the source of Python's standard library, by
bytes, so nothing is downloaded. Runs on CPUs (gloo) and, unchanged, on GPUs (not yet tried there).
"""

import os
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import LlamaConfig, LlamaForCausalLM

import usp
from usp.integrations.transformers import enable


def documents() -> Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray().join(file.read_bytes() for file in files), dtype=torch.uint8)


def batches(text: Tensor, steps: int, context: int, rank: int, size: int) -> Iterator[dict[str, Tensor]]:
    """A sequence for each of `size` groups of ranks; `rank` is that of the group."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        start = int(torch.randint(len(text) - context, (size,), generator=generator)[rank])
        tokens = text[None, start : start + context].long()
        yield {"input_ids": tokens, "labels": tokens}


def train(
    context: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 2048,
    steps: int = 5,
    layers: int = 2,
    width: int = 128,
    ulysses_degree: Annotated[int, typer.Option("--ulysses-degree", "-u")] = 2,
    ring_degree: Annotated[int, typer.Option("--ring-degree", "-r")] = 1,
    compiler: Annotated[str, typer.Option(help="Backend of torch.compile, such as inductor; none by default.")] = "",
    lr: float = 1e-3,
) -> None:
    """Train on a torchrun world of ulysses x ring ranks a sequence; what is left of the world is data parallel."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=max(4, width // 128), num_key_value_heads=max(2, width // 512),
        max_position_embeddings=context,
    )  # fmt: skip
    dtype = torch.bfloat16 if cuda else torch.float32
    model = LlamaForCausalLM(config).to(device, dtype)  # pyright: ignore[reportArgumentType] of its decorator

    topology = usp.Topology.build(ulysses_degree, ring_degree)  # usp
    enable(model, topology, layout="zigzag")  # usp

    keep = partial(create_selective_checkpoint_contexts, [torch.ops.usp.attention.default])  # usp
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer, context_fn=keep)
        if compiler:
            model.model.layers[i].compile(backend=compiler, fullgraph=True)
        fully_shard(model.model.layers[i])
    fully_shard(model)  # over all ranks: those of a sequence hold different tokens
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    for step, batch in enumerate(batches(documents(), steps, context, topology.data_rank, topology.data_degree)):  # usp
        batch = {name: x.to(device) for name, x in batch.items()}
        shard = usp.shard_batch(batch, topology, layout="zigzag")  # usp
        total = usp.count_targets(shard["shift_labels"])  # usp
        targets = shard.pop("shift_labels")
        shard.pop("labels")
        loss = usp.cross_entropy(model(**shard).logits, targets, total)  # usp
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        dist.all_reduce(loss.detach_())
        if dist.get_rank() == 0:
            loss_all = loss.item() / dist.get_world_size()
            print(f"step {step}: loss {loss_all:.4f}, gradient norm {norm.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(train)
