"""What the commands that torchrun starts share: which rank this is, its device, and bars of one rank."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from usp.errors import InputError

if TYPE_CHECKING:
    import torch


def place() -> tuple[int, int]:
    """This process's global rank and the number of ranks, as a launcher set them; 0 and 1 without one.

    Raises:
        InputError: they are no such numbers.
    """
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    numbers = all(re.fullmatch(r"\d{1,7}", text, re.ASCII) for text in (rank, world_size))
    if not numbers or int(rank) >= int(world_size):
        raise InputError(
            f"RANK={rank[:40]} and WORLD_SIZE={world_size[:40]}: a rank is a number from 0 to WORLD_SIZE - 1; start "
            "with `torchrun --nproc-per-node 2 -m usp.cli`, or unset both"
        )
    return int(rank), int(world_size)


def this_device(name: str = "auto") -> "torch.device":
    """This process's GPU, or the CPU where that is asked for or there is none.

    Raises:
        InputError: there is no such device, or more processes than GPUs.
    """
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"device is {name!r}: it must be auto, cpu or cuda")
    if name == "cpu" or not torch.cuda.is_available():
        if name == "cuda":
            raise InputError("device is cuda, and torch sees no GPU: leave it out, or give cpu")
        return torch.device("cpu")
    gpus, processes = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if processes > gpus:
        raise InputError(
            f"{processes} processes were started on a node of {gpus} GPUs: start one for each GPU, "
            "or set CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


@contextmanager
def progress(shown: bool) -> Iterator[Callable[[Sequence[Any], str], Iterable[Any]]]:
    """Bars on standard error, or on ranks that show nothing, none."""
    with Progress(console=Console(stderr=True), transient=True, disable=not shown) as bars:
        yield lambda items, what: bars.track(items, description=what)
