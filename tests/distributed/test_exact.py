"""USPAttention on real processes equals dense attention in float64: out, lse, dq, dk, dv."""

import pytest
import torch

from tests.cases import Case, check_all, variants

DEGREES = [
    *((1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (2, 2), (1, 4), (1, 5), (3, 2), (2, 3), (4, 2), (2, 4)),
]


@pytest.mark.parametrize(("ulysses", "ring"), DEGREES, ids=lambda degree: str(degree))
def test_every_layout_and_mask(pool, ulysses, ring):
    wrong = pool(ulysses * ring).run(check_all, variants(ulysses, ring), timeout=120)
    assert not wrong[0], "\n".join(wrong[0])


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize("seq_len", [2999, 4096])
def test_long_sequences(pool, ulysses, ring, seq_len):
    base = dict(heads=2, kv_heads=1, head_dim=16, v_head_dim=16)
    cases = [
        Case(ulysses, ring, seq_len, ":0", "zigzag", dtype=torch.float32, **base),
        Case(ulysses, ring, seq_len, "-1000:0", "contiguous", dtype=torch.float32, **base),
        Case(ulysses, ring, seq_len, ":0", "striped", dtype=torch.bfloat16, **base),
        Case(ulysses, ring, seq_len, "-700:900", "zigzag", dtype=torch.bfloat16, **base),
    ]
    wrong = pool(ulysses * ring).run(check_all, cases, timeout=180)
    assert not wrong[0], "\n".join(wrong[0])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ulysses"),
    [(8, 2, 4), (7, 7, 4), (7, 1, 4), (30, 30, 4), (30, 5, 4), (8, 2, 3), (28, 4, 8), (9, 3, 8)],
)
def test_uneven_heads(pool, heads, kv_heads, ulysses):
    """Any number of query heads from the degree up; a kv head that several ranks use has its gradients summed."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16)
    cases = [Case(ulysses, 1, 67, ":0", heads=heads, kv_heads=kv_heads, dtype=d, batch=2) for d in dtypes]
    wrong = pool(ulysses).run(check_all, cases, timeout=90)
    assert not wrong[0], "\n".join(wrong[0])
