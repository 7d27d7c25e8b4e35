"""The CUDA path of one rank of 64 (ulysses 8 x ring 8), on fake tensors and the fake process group.

Proves schemas, shapes, dtypes, devices and splits, not numbers. Functions are called below autograd: a fake CUDA tensor
that requires a gradient aborts the process.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

import usp
from usp import kernels, transports
from usp.all_to_all import Deal, exchange
from usp.dry_run import fakes, world
from usp.heads import groups
from usp.kernels.base import Call, Scores
from usp.mask import Mask
from usp.positions import split
from usp.ring import Ring
from usp.schedule import Schedule

WORLD, RANK = 64, 27
PACKED = Mask.causal() & Mask.documents([37] * 443 + [20])
"""16,411 tokens."""
aten = torch.ops.aten


@pytest.fixture
def topology():
    with world(RANK, [str(rank // 8) for rank in range(WORLD)], 8, 8) as topology:
        yield topology


@pytest.mark.parametrize("transport", ["p2p", "all_gather"])
@pytest.mark.parametrize(
    ("mask", "layout"),
    [
        (":0", "zigzag"),
        (":", "contiguous"),
        ("-500:0", "contiguous"),
        ("-900:40", "striped"),
        (str(PACKED), "zigzag"),
    ],
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(64, 8), (32, 4), (28, 4)])
def test_forward_and_backward_of_one_rank(topology, transport, mask, layout, heads, kv_heads):
    seq_len = 16_411  # a prime: uneven shards on both axes
    schedule = Schedule(Mask.parse(mask), layout, seq_len, 8)
    lengths = tuple(len(run) for run in split(schedule.length(topology.ring.rank), 8))
    deal = Deal(heads, (heads, kv_heads, kv_heads), lengths)
    ulysses = transports.load("auto", topology.ulysses.group)
    with fakes():
        like = dict(dtype=torch.bfloat16, device="cuda")
        local = lengths[topology.ulysses.rank]
        qkv = [torch.empty(2, local, h, 128, **like) for h in (heads, kv_heads, kv_heads)]
        name = kernels.select(kernels.candidates("auto"), Call("cuda", torch.bfloat16, 128, 128))
        assert name == "sdpa"
        own = groups(heads, kv_heads, 8, topology.ulysses.rank)
        end = transports.load(transport, topology.ring.group)
        ring = Ring((schedule,), end, kernels.load(name), own, Scores(128**-0.5))
        q, k, v = exchange(qkv, deal, True, ulysses)
        assert q.shape == (2, schedule.length(topology.ring.rank), sum(own), 128)
        out, lse = ring.forward(q, k, v)
        (back,) = exchange([out], Deal(heads, (heads,), lengths), False, ulysses)
        assert (back.shape, back.dtype, back.device.type) == (qkv[0].shape, torch.bfloat16, "cuda")
        assert (lse.shape, lse.dtype, lse.device.type) == (q.shape[:-1], torch.float32, "cuda")
        (dout,) = exchange([torch.empty_like(back)], Deal(heads, (heads,), lengths), True, ulysses)
        grads = exchange(ring.backward(dout, q, k, v, out, lse), deal, False, ulysses)
        for grad, x in zip(grads, qkv, strict=True):
            assert (grad.shape, grad.dtype, grad.device.type) == (x.shape, torch.bfloat16, "cuda")


class Launches(TorchDispatchMode):
    """Keeps the arguments of torch's flash attention."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[tuple] = []
        self.backward: list[tuple] = []

    @override
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten._flash_attention_forward.default:
            self.forward.append(args)
        elif func is aten._flash_attention_backward.default:
            self.backward.append(args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_documents_are_sequences_of_a_few_launches(topology, layout):
    schedule = Schedule(PACKED, layout, 16_411, 8)
    length = schedule.length(topology.ring.rank)
    with fakes():
        q, k, v = (torch.empty(2, length, h, 128, dtype=torch.bfloat16, device="cuda") for h in (8, 1, 1))
        end = transports.load("p2p", topology.ring.group)
        ring = Ring((schedule,), end, kernels.load("sdpa"), (8,), Scores(128**-0.5))
        with Launches() as launches:
            out, lse = ring.forward(q, k, v)
            grads = ring.backward(torch.empty_like(out), q, k, v, out, lse)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:-1], torch.float32)
    assert [(grad.shape, grad.dtype) for grad in grads] == [(x.shape, torch.bfloat16) for x in (q, k, v)]
    tiles = [schedule.tiles(topology.ring.rank, owner) for owner in range(8)]
    assert sum(map(len, tiles)) > 50
    hops = sum(map(bool, tiles))
    forward, backward = len(launches.forward), len(launches.backward)
    assert hops <= forward <= 3 * hops
    assert forward < backward <= forward + 3  # its own block in two parts
    for args, at in [(args, 3) for args in launches.forward] + [(args, 6) for args in launches.backward]:
        ends = args[at : at + 2]
        if ends != (None, None):  # a lone tile is a batch of equal sequences
            assert all((t.dtype, t.device.type, t.ndim) == (torch.int32, "cuda", 1) for t in ends)
            assert args[at - 3].ndim == 3 and all(isinstance(longest, int) for longest in args[at + 2 : at + 4])
    sequences = [args[3].shape[0] - 1 for args in launches.forward if args[3] is not None]
    assert sum(sequences) > 2 * 0.9 * sum(map(len, tiles))  # rows of the batch are sequences too


def test_the_module_under_fake_tensors(topology):
    attn = usp.USPAttention(topology=topology, layout="zigzag")
    with fakes(), torch.no_grad():
        q, k, v = (torch.empty(1, 2048, h, 128, dtype=torch.bfloat16, device="cuda") for h in (64, 8, 8))
        out, lse = attn(q, k, v, is_causal=True, return_lse=True)
    assert (out.shape, out.dtype, out.device.type) == (q.shape, torch.bfloat16, "cuda")
    assert (lse.shape, lse.dtype) == (q.shape[:-1], torch.float32)
