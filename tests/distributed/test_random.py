"""A seeded random search over configurations. A failure prints the case; `Case(...)` in tests/cases.py replays it."""

import random

import pytest
import torch

from tests.cases import Case, check_all
from usp.mask import Band, Mask

COUNT = 300


def draw(seed: int) -> tuple[int, Case]:
    """(world size, case) of a seed."""
    pick = random.Random(seed)
    world = pick.choice([2, 3, 4, 4, 6, 6, 8])
    degrees = [(u, r) for u in range(1, 5) for r in range(1, 6) if world % (u * r) == 0 and u * r > 1]
    ulysses, ring = pick.choice(degrees)
    p = ulysses * ring
    seq_len = pick.choice([p, pick.randint(p, 3 * p), pick.randint(10, 150), pick.randint(100, 400)])
    kv_heads = pick.randint(1, 5)
    heads = kv_heads * pick.randint(-(-ulysses // kv_heads), 5)
    mask = pick.choice(
        [
            Mask.full(),
            Mask.causal(),
            Mask.window(pick.randint(0, seq_len), 0),
            Mask.window(pick.randint(0, seq_len), pick.randint(0, seq_len)),
            Mask.window(None, pick.randint(0, 9)),
            Mask.offsets(Band(None, -pick.randint(1, 20)), Band(0, pick.randint(0, 5))),  # a gap beside the diagonal
        ]
    )
    if pick.random() < 0.4:
        mask &= Mask.cu_seqlens(sorted({0, seq_len, *(pick.randint(1, seq_len) for _ in range(pick.randint(1, 9)))}))
    dtype = pick.choice([torch.float64, torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16])
    head_dim = pick.choice([8, 16, 24])
    half = dtype.itemsize == 2
    return world, Case(
        ulysses,
        ring,
        max(seq_len, 64) if half and mask.relative else seq_len,  # one rounding is a large share of few numbers
        str(mask),
        pick.choice(["contiguous", "zigzag", "striped"]),
        heads,
        kv_heads,
        head_dim,
        head_dim if half else pick.choice([head_dim, 8, 40]),
        pick.randint(1, 3),
        dtype,
        pick.choice(["auto", "auto", "sdpa", "reference"]),
        pick.choice(["auto", "p2p", "all_gather", f"double_ring:{ring // 2}" if ring in (4, 6, 8) else "p2p"]),
        pick.random() < 0.2,
        seed,
    )


@pytest.mark.parametrize("world", [2, 3, 4, 6, 8])
def test_random_configurations(pool, world):
    cases = [case for size, case in map(draw, range(COUNT)) if size == world]
    wrong = pool(world).run(check_all, cases, timeout=280)
    assert not wrong[0], f"{len(wrong[0])} of {len(cases)}\n" + "\n".join(wrong[0])


def test_how_many_are_drawn():
    assert COUNT >= 300
    assert {world for world, _ in map(draw, range(COUNT))} == {2, 3, 4, 6, 8}
