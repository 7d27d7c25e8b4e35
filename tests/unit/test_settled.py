"""A module remembers what a call comes to; another call must not be taken for it."""

import pytest
import torch

import usp
from usp.errors import InputError


def tensors() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randn(1, 12, 2, 8, dtype=torch.float64, generator=draw) for _ in range(3)]


def remembered(*calls: dict) -> None:
    """One module gives for each call, in turn and again, what a module of its own gives."""
    attn, qkv = usp.USPAttention(), tensors()
    fresh = [usp.USPAttention()(*qkv, **options) for options in calls]
    assert not any(torch.equal(a, b) for i, a in enumerate(fresh) for b in fresh[:i])
    for options, expected in (*zip(calls, fresh, strict=True), *zip(calls, fresh, strict=True)):
        assert torch.equal(attn(*qkv, **options), expected)


def test_numbers_in_tensors_count_by_their_values():
    remembered({"softcap": torch.tensor(1.0)}, {"softcap": torch.tensor(3.0)}, {"softcap": 2.0}, {})


def test_boundaries_count_by_their_values():
    remembered(*({"cu_seqlens": torch.tensor([0, cut, 12])} for cut in (3, 5)), {"cu_seqlens": [0, 7, 12]})
    attn, qkv, cu_seqlens = usp.USPAttention(), tensors(), torch.tensor([0, 3, 12])
    first = attn(*qkv, cu_seqlens=cu_seqlens)
    cu_seqlens[1] = 5
    assert not torch.equal(attn(*qkv, cu_seqlens=cu_seqlens), first)


def test_masks_and_sinks():
    remembered(
        {"is_causal": True}, {"window_size": (2, 0)}, {"window_size": (2, 1)},
        {"mask": usp.Mask.causal() | usp.Mask.keys(0, 2)},
        *({"sinks": torch.full((2,), height, dtype=torch.float64)} for height in (0.0, 1.0)),
    )  # fmt: skip


def test_what_was_wrong_once_is_wrong_again():
    attn, qkv = usp.USPAttention(), tensors()
    for _ in range(2):
        with pytest.raises(InputError, match="the documents add up to 5 tokens"):
            attn(*qkv, cu_seqlens=[0, 5])


def test_gradients_are_noticed():
    attn, qkv = usp.USPAttention(), tensors()
    attn(*qkv)
    needed = [x.requires_grad_() for x in qkv]
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(attn(*needed).square().sum(), needed))
