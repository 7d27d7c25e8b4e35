"""A Llama-like language model in plain torch, its batches, and its training in one process: what sharded training is
compared with. Nothing here imports usp.

B samples, S tokens, H query heads, G key/value heads, D head_dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (B, S, H, D), (B, S, G, D), (B, S, G, D) -> (B, S, H, D)
VOCABULARY, DIM, HEADS, KV_HEADS, HIDDEN, LAYERS = 31, 16, 4, 2, 24, 2
SAMPLES, SEQ_LEN, STEPS = 4, 21, 5
MAX_NORM = 0.5
IGNORED = -100


class Attention(nn.Module):
    """Takes the number of heads from its weights, so that it does not mind how they are divided."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend, self.head_dim = attend, DIM // HEADS
        self.q = nn.Linear(DIM, HEADS * self.head_dim, bias=False)
        self.k = nn.Linear(DIM, KV_HEADS * self.head_dim, bias=False)
        self.v = nn.Linear(DIM, KV_HEADS * self.head_dim, bias=False)
        self.out = nn.Linear(HEADS * self.head_dim, DIM, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.q, self.k, self.v))
        return self.out(self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(2))


class Block(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attention = Attention(attend)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.gate, self.up = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        hidden = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class TinyLM(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens_BS: Tensor, positions_S: Tensor) -> Tensor:
        head_dim = DIM // HEADS
        frequencies = 100.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.outer(positions_S, frequencies).unsqueeze(1)
        x = self.embedding(tokens_BS)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attend_whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's attention over whole sequences."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def make_model(attend: Attend) -> TinyLM:
    """The same float64 weights in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TinyLM(attend).double()


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets (SAMPLES, SEQ_LEN) of a step, with very different numbers of targets.

    The last quarter of every sample has none, the second sample has a single one, and the second half of the batch
    has some in the first quarter only.
    """
    make = torch.Generator().manual_seed(step)
    text = torch.randint(VOCABULARY, (SAMPLES, SEQ_LEN + 1), generator=make)
    tokens, targets = text[:, :-1], text[:, 1:].clone()  # shifted here, before anything is sharded
    quarter = SEQ_LEN // 4
    targets[:, -quarter:] = IGNORED
    targets[1, torch.arange(SEQ_LEN) != 2] = IGNORED
    targets[2:, quarter:] = IGNORED
    targets[3, 1] = IGNORED
    return tokens, targets


@dataclass(frozen=True)
class Trained:
    """What a run ends with, and saw on the way."""

    parameters: dict[str, Tensor]
    losses: list[float]
    norms: list[float]


@cache
def train_in_one_process() -> Trained:
    """STEPS steps of AdamW on whole batches, gradients clipped to MAX_NORM."""
    model = make_model(attend_whole)
    optimizer = make_optimizer(model)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, targets = make_batch(step)
        loss = F.cross_entropy(model(tokens, torch.arange(SEQ_LEN)).flatten(0, 1), targets.flatten())
        loss.backward()
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained({name: p.detach() for name, p in model.named_parameters()}, losses, norms)
