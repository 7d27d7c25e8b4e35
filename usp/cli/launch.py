"""Where a launcher, such as torchrun, has put this process."""

import os
import re

from usp.errors import InputError


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
