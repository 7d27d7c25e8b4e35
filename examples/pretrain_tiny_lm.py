"""Trains a decoder on several hosts: Ulysses inside a host, the ring across, parameters sharded over all ranks (FSDP2).

    torchrun --standalone --nproc-per-node 4 examples/pretrain_tiny_lm.py

The same on one machine that stands for two hosts (Linux, root: network namespaces); and, not yet tried, on two hosts of
8 GPUs, where N is 0 on the one called host0 and 1 on the other:

    python benchmarks/two_hosts.py --nproc-per-node 2 -- examples/pretrain_tiny_lm.py
    torchrun --nnodes 2 --node-rank N --master-addr host0 --master-port 29500 --nproc-per-node 8 \
        examples/pretrain_tiny_lm.py -u 8 -r 2 --context 131072 --steps 1000 --layers 32 --width 4096 \
        --compiler inductor --save-to /shared/pretrained

The text is the source of Python's standard library, by bytes. finetune_long_context.py goes on from what is saved.
"""

import os
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

import usp
from usp.data import ContextStage
from usp.nn import TransformerLayer, rope

CUDA = torch.cuda.is_available()
FILES = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")


class Decoder(nn.Module):
    def __init__(self, width: int, layers: int, attend: Callable[..., Any]) -> None:
        super().__init__()
        heads = max(4, width // 128)
        shape = width, heads, max(2, heads // 4), 4 * width, attend
        self.head_dim = width // heads
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(TransformerLayer(*shape) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, shard: dict[str, Any], total: Tensor, stage: ContextStage, **options: Any) -> Tensor:
        """The loss of what `usp.shard_batch` gave, a chunk of logits at a time; `options` are for attention."""
        turns = rope(shard["position_ids"], stage.inverse_frequencies(self.head_dim))  # in float32
        x = self.embedding(shard["input_ids"])
        for layer in self.layers:
            x = layer(x, *turns, is_causal=True, seq_len=stage.seq_len, cu_seqlens=shard.get("cu_seqlens"), **options)
        return usp.linear_cross_entropy(self.norm(x), self.head.weight, shard["shift_labels"], total)


def prepare(model: Decoder, compiler: str = "") -> AdamW:
    """FSDP2 over all ranks: those of a sequence hold different tokens, so data x sequence is one flat mesh."""
    policy = MixedPrecisionPolicy(torch.bfloat16 if CUDA else None, torch.float32, cast_forward_inputs=False)
    for layer in model.layers:
        if compiler:
            layer.compile(backend=compiler, fullgraph=True)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return AdamW(model.parameters(), lr=1e-3)


def update(model: Decoder, optimizer: AdamW, shards: list[dict[str, Any]], **options: Any) -> str:
    """One step on this rank's shards of the step's sequences; the loss of all of them, and the norm of its gradient."""
    total = torch.stack([usp.count_targets(shard["shift_labels"]) for shard in shards]).sum()
    loss = torch.zeros((), device=DEVICE)
    for shard in shards:
        part = model(shard, total, **options)
        part.backward()
        loss += part.detach() / dist.get_world_size()
    norm = cast(DTensor, nn.utils.clip_grad_norm_(model.parameters(), 1.0))  # once, when gradients are averaged
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss)
    return f"loss {loss.item():.4f}, gradient norm {norm.full_tensor().item():.4f}"


def train(
    context: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 2048,
    steps: int = 5,
    layers: int = 2,
    width: int = 128,
    ulysses_degree: Annotated[int, typer.Option("--ulysses-degree", "-u", help="Ranks of one host.")] = 2,
    ring_degree: Annotated[int, typer.Option("--ring-degree", "-r")] = 2,
    compiler: Annotated[str, typer.Option(help="Backend of torch.compile, such as inductor; none by default.")] = "",
    save_to: Annotated[Path | None, typer.Option(help="Folder of the checkpoint, which all hosts see.")] = None,
) -> None:
    """Train on a torchrun world of ulysses x ring ranks a sequence; what is left of the world is data parallel."""
    dist.init_process_group("nccl" if CUDA else "gloo")
    torch.manual_seed(0)  # the same weights everywhere
    topology = usp.Topology.build(ulysses_degree, ring_degree)  # refuses ulysses groups that would cross hosts
    say = print if dist.get_rank() == 0 else (lambda line: None)
    say(topology.describe())
    model = Decoder(width, layers, usp.USPAttention(topology=topology, layout="zigzag")).to(DEVICE)
    optimizer = prepare(model, compiler)
    stage = ContextStage(seq_len=context, steps=steps)
    text = bytearray().join(file.read_bytes() for file in FILES)
    for step in range(steps):
        start = random.Random(f"step {step}, sequence {topology.data_rank}").randrange(len(text) - context)
        tokens = torch.frombuffer(text, dtype=torch.uint8, count=context, offset=start).to(DEVICE, torch.int64)[None]
        shard = usp.shard_batch({"input_ids": tokens, "labels": tokens}, topology, layout="zigzag")
        say(f"step {step}: {update(model, optimizer, [shard], stage=stage)}")
    if save_to:
        parameters, moments = get_state_dict(model, optimizer)
        save({"model": parameters, "optimizer": moments}, checkpoint_id=save_to)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(train)
