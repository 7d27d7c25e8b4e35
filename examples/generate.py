"""Generates from a long prompt whose keys and values stay sharded over all ranks, and checks it against one process.

    torchrun --standalone --nproc-per-node 4 examples/generate.py --check

The prompt, source of Python's library by bytes, comes in two parts: a prefill, and a chunk that joins its cache. Then
every rank computes every token, and only attention is shared out. Weights are random, so it says nothing; with
`--check` every rank then does all of it alone, by torch's own attention, and must say the same nothing.
"""

import sysconfig
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import usp
from usp.nn import TransformerLayer, rope

LAYOUT, WIDTH, LAYERS = "zigzag", 256, 4
FILES = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


class Sharded:
    """Attention of one layer over all ranks."""

    def __init__(self, topology: usp.Topology) -> None:
        self.attend, self.cache = usp.USPAttention(topology=topology, layout=LAYOUT), usp.KVCache(topology)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, seq_len: int) -> Tensor:
        if not seq_len:  # new tokens, which every rank has
            self.cache.append(key, value)
            return usp.decode(query, self.cache)
        if self.cache.length:
            return usp.extend(query, key, value, self.cache, seq_len=seq_len, layout=LAYOUT)
        self.cache = usp.KVCache.from_shards(key, value, self.cache.topology, seq_len=seq_len, layout=LAYOUT)
        return self.attend(query, key, value, seq_len=seq_len, is_causal=True)


class Alone:
    """The same in one process, by torch's own attention."""

    def __init__(self, _: usp.Topology) -> None:
        self.held: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, seq_len: int) -> Tensor:
        new = [t.transpose(1, 2) for t in (key, value)]
        self.held = [torch.cat(pair, 2) for pair in zip(self.held, new, strict=True)] if self.held else new
        shape = query.shape[1], self.held[0].shape[2]
        seen = torch.ones(shape, dtype=torch.bool).tril(shape[1] - shape[0])
        out = F.scaled_dot_product_attention(query.transpose(1, 2), *self.held, attn_mask=seen, enable_gqa=True)
        return out.transpose(1, 2)


class Decoder(nn.Module):
    def __init__(self, attentions: list[Callable[..., Tensor]]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(TransformerLayer(WIDTH, 8, 2, 4 * WIDTH, attend) for attend in attentions)
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.frequencies = [1e4 ** (-16 * i / WIDTH) for i in range(WIDTH // 16)]
        for weight in self.layers.parameters():
            weight.mul_(2.0)  # sharp attention: what is said depends on the prompt

    def forward(self, tokens: Tensor, positions: Tensor, seq_len: int = 0) -> Tensor:
        """The most likely byte after the last of some tokens."""
        x, turns = self.embedding(tokens), rope(positions, self.frequencies)
        for layer in self.layers:
            x = layer(x, *turns, seq_len=seq_len)
        return self.head(self.norm(x[:, -1:])).argmax(-1)


def generate(model: Decoder, topology: usp.Topology, parts: list[Tensor], tokens: int) -> list[int]:
    length, said, token, begin = 0, [], torch.empty(0), perf_counter()
    for part in parts:
        positions = length + usp.positions(part.shape[1], topology, LAYOUT)
        length += part.shape[1]
        token = model(usp.shard(part, topology, layout=LAYOUT), positions, part.shape[1])
        token *= positions[-1] == length - 1
    dist.all_reduce(token, dist.ReduceOp.MAX)  # from the rank that has the last token of the prompt
    middle = perf_counter()
    for position in range(length, length + tokens):
        said.append(int(token))
        token = model(token, torch.tensor([position]))
    if dist.get_rank() == 0:
        each_ms = (perf_counter() - middle) / tokens * 1e3
        print(f"{length} bytes read in {middle - begin:.2f} s, {tokens} written, {each_ms:.1f} ms each: {bytes(said)}")
    return said


def main(
    prompt: Annotated[int, typer.Option(help="Bytes of the prompt.")] = 4094,
    tokens: Annotated[int, typer.Option(help="Bytes to generate.")] = 64,
    ulysses: Annotated[int, typer.Option("--ulysses-degree", "-u")] = 2,
    ring: Annotated[int, typer.Option("--ring-degree", "-r")] = 2,
    check: Annotated[bool, typer.Option(help="Compare with one process, byte by byte.")] = False,
) -> None:
    """Generate on a torchrun world of ulysses x ring ranks."""
    dist.init_process_group("gloo")
    text = torch.tensor(list(b"".join(file.read_bytes() for file in FILES)[:prompt])).unsqueeze(0)
    parts, found = list(text.split([prompt - prompt // 8, prompt // 8], 1)), []
    for attention, degrees in ((Sharded, (ulysses, ring)), (Alone, (1, 1)))[: 1 + check]:
        topology = usp.Topology.build(*degrees)
        torch.manual_seed(0)  # the same weights everywhere
        with torch.inference_mode():
            model = Decoder([attention(topology) for _ in range(LAYERS)])
            found.append(generate(model, topology, parts, tokens))
    if found[0] != found[-1]:
        raise SystemExit(f"one process says {bytes(found[-1])!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
