"""What ranks tell each other in tensors of bytes: JSON is read from them, and never a pickle, which could run code."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from usp.transports.base import Group


def gather(value: Any, group: Group = None) -> list[Any]:
    """Every rank's value, in the order of the group's ranks. Collective.

    Args:
        value: what JSON can hold; NaN and infinities too.
        group: a process group; None: the default one.
    """
    text, device = json.dumps(value).encode(), _device(group)
    sizes = list(torch.empty(dist.get_world_size(group), 1, dtype=torch.int64, device=device))
    dist.all_gather(sizes, torch.tensor([len(text)], device=device), group=group)
    longest = int(max(sizes))
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(device)  # JSON may end in spaces
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded, group=group)
    buffers = [bytearray(longest) for _ in texts]
    for buffer, text in zip(buffers, texts, strict=True):
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(text)
    return [json.loads(buffer) for buffer in buffers]


def broadcast(tensor: Tensor | None, source: int, group: Group = None) -> Tensor:
    """The bytes of one rank's tensor, on the CPU: uint8 (bytes,). Collective.

    Args:
        tensor: read on the source alone.
        source: its rank in the group.
        group: a process group; None: the default one.
    """
    content = torch.empty(0, dtype=torch.uint8, device=_device(group))
    if tensor is not None and dist.get_rank(group) == source:
        content = tensor.detach().reshape(-1).view(torch.uint8).to(content.device, copy=True)
    size = torch.tensor([content.numel()], device=content.device)
    dist.broadcast(size, group=group, group_src=source)
    content = content if content.numel() else content.new_empty(int(size))
    dist.broadcast(content, group=group, group_src=source)
    return content.cpu()


def _device(group: Group) -> torch.device:
    """Where the group's backends take tensors: the CPU, unless NCCL is the only one."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
