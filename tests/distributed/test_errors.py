"""Bad input is an error on every rank before any communication, and says what would work."""

import contextlib
import time
from datetime import timedelta

import pytest
import torch

import usp
from usp import kernels, layouts, transports
from usp.errors import USPError
from usp.mask import Mask


def tensors(length=8, heads=4, kv_heads=2, **options):
    return [torch.randn(1, length, h, 8).to(**options) for h in (heads, kv_heads, kv_heads)]


def message(call):
    try:
        call()
    except USPError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def every_message(rank):
    topology = usp.Topology.build(2, 2)
    q, k, v = tensors()

    def attend(q=q, k=k, v=v, **options):
        return message(lambda: usp.attention(q, k, v, topology=topology, **options))

    found = {
        "heads < U": message(lambda: usp.USPAttention(4, 1)(*tensors(heads=3, kv_heads=3))),
        "heads % kv_heads": attend(*tensors(heads=4, kv_heads=3)),
        "whole sequence": attend(*tensors(32), seq_len=32),
        "wrong length": attend(*tensors(9), seq_len=32),
        "rank of tensor": attend(q[0]),
        "dtypes": attend(q, k.double()),
        "devices": attend(q, k.to("meta")),
        "integers": attend(q.long(), k.long(), v.long()),
        "empty batch": attend(q[:0], k[:0], v[:0]),
        "lengths of q and k": attend(q, k[:, 1:], v[:, 1:]),
        "shapes of k and v": attend(q, k, v[:, 1:]),
        "softcap": attend(softcap=-1.0),
        "softcap of flash": message(lambda: usp.USPAttention(topology=topology, kernel="sdpa")(q, k, v, softcap=5.0)),
        "sinks": attend(sinks=torch.zeros(2)),
        "slopes": attend(alibi_slopes=torch.zeros(4, requires_grad=True)),
        "masks of rows": attend(mask=[Mask.full()] * 3),
        "kv_layout": attend(kv_layout="zigzag"),
        "causal cross": attend(is_causal=True, kv_seq_len=32),
        "wrong kv length": attend(kv_seq_len=40),
        "joint": attend(joint=(q[:, :3], k[:, :3], v[:, :2])),
        "joint_strategy": attend(joint=(q, k, v), joint_strategy="middle"),
        "joint_strategy alone": attend(joint_strategy="rear"),
        "window": attend(window_size=(-3, 0)),
        "documents": attend(mask=Mask.documents([10, 10])),
        "cu_seqlens of a shard": attend(cu_seqlens=torch.tensor([0, 3, 8])),
        "cu_seqlens not from 0": attend(cu_seqlens=[4, 32]),
        "float8": attend(*(t.to(torch.float8_e4m3fn) for t in (q, k, v))),
        "layout": attend(layout="zigzac"),
        "kernel": message(lambda: usp.USPAttention(topology=topology, kernel="flash")),
        "transport": message(lambda: usp.USPAttention(topology=topology, transport="nccl")),
        "local transport": message(lambda: usp.USPAttention(topology=topology, transport="local")),
        "flash_attn": message(lambda: usp.USPAttention(topology=topology, kernel="flash_attn")(q, k, v)),
        "mask and is_causal": attend(mask=Mask.full(), is_causal=True),
        "dense mask": attend(mask=torch.ones(8, 8)),
        "dropout": attend(dropout_p=0.1),
        "enable_gqa": attend(enable_gqa=False),
        "degrees and topology": message(lambda: usp.USPAttention(4, 1, topology=topology)),
        "dim": message(lambda: usp.shard(q, topology, dim=4)),
        "unshard": message(lambda: usp.unshard(q.requires_grad_(), topology)),
        "unshard length": message(lambda: usp.unshard(k, topology, length=31)),
    }
    with pytest.raises(TypeError, match="unknown argument causal: there are is_causal, window_size"):
        usp.attention(q, k, v, topology=topology, causal=True)
    q.requires_grad_(False)
    assert attend(enable_gqa=True, dropout_p=0.0) == "no error"  # all ranks go on in step
    return found


EXPECTED = {
    "heads < U": "InputError: query has 3 heads and ulysses_degree=4 needs one head a rank at least: use "
    "ulysses_degree <= 3, such as ulysses_degree=2 with ring_degree=2",
    "heads % kv_heads": "InputError: query has 4 heads and key/value 3: heads must be a multiple of kv heads",
    "whole sequence": "and the contiguous layout of a sequence of 32 gives that rank 8; this looks like the whole "
    "sequence: cut it with usp.shard",
    "wrong length": "InputError: query has 9 tokens on rank {rank} (ulysses {u} of 2, ring {r} of 2), and the "
    "contiguous layout of a sequence of 32 gives that rank 8",
    "rank of tensor": "InputError: query must be (batch, sequence, heads, head_dim), got shape (8, 4, 8)",
    "dtypes": "query has torch.float32 on cpu, key has torch.float64 on cpu",
    "devices": "query has torch.float32 on cpu, key has torch.float32 on meta",
    "integers": "InputError: query must have a floating dtype, got torch.int64",
    "empty batch": "InputError: the batch is empty: query has shape (0, 8, 4, 8)",
    "lengths of q and k": "InputError: query has 8 tokens and key 7: both must be shards of one sequence; if keys are "
    "those of another sequence, give its global length as kv_seq_len",
    "shapes of k and v": "got query (1, 8, 4, 8), key (1, 8, 2, 8), value (1, 7, 2, 8)",
    "softcap": "InputError: softcap is -1.0: it must be a positive number, or 0 for none",
    "softcap of flash": "sdpa: torch's CPU flash attention has no softcap",
    "sinks": "InputError: sinks must hold a floating number for each of the 4 query heads, on cpu: got shape (2,), ",
    "slopes": "InputError: alibi_slopes requires a gradient, and there is none for slopes",
    "masks of rows": "InputError: there are 3 masks for a batch of 1: give one, or one for each row",
    "kv_layout": "InputError: kv_layout was given without kv_seq_len",
    "causal cross": "InputError: is_causal with kv_seq_len: queries and keys of different sequences have no distance",
    "wrong kv length": "InputError: key has 8 tokens on rank {rank} (ulysses {u} of 2, ring {r} of 2), and the "
    "contiguous layout of a sequence of 40 gives that rank 10",
    "joint": "InputError: the joint value must be like value but for its length, which is one for all three: got shape "
    "(1, 2, 2, 8), torch.float32 on cpu, where value has (1, 8, 2, 8)",
    "joint_strategy": "InputError: joint_strategy is 'middle': it must be 'front' or 'rear'",
    "joint_strategy alone": "InputError: joint_strategy='rear' was given without joint tokens",
    "window": "InputError: window left is -3: it must be >= 0, or -1 or None for no bound",
    "documents": "InputError: the documents add up to 20 tokens and the global sequence has 32",
    "cu_seqlens of a shard": "InputError: the documents add up to 8 tokens and the global sequence has 32",
    "cu_seqlens not from 0": "must start at 0 and ascend, got (4, 32)",
    "float8": "KernelError: no kernel takes torch.float8_e4m3fn on cpu with head_dim 8 (v: 8); sdpa: torch's CPU flash",
    "layout": f"InputError: unknown layout 'zigzac': there are {', '.join(sorted(layouts.names()))}; did you mean "
    "'zigzag'?",
    "kernel": f"InputError: unknown kernel 'flash': there are {', '.join(kernels.names())}",
    "transport": f"InputError: unknown transport 'nccl': there are {', '.join(transports.names())}",
    "local transport": f"InputError: transport 'local' does not run over a group of type ProcessGroup; of "
    f"{', '.join(transports.names())} these do: all_gather, ",
    "flash_attn": "KernelError: no kernel takes torch.float32 on cpu with head_dim 8 (v: 8); flash_attn: ",
    "mask and is_causal": "InputError: mask and is_causal were both given: combine them into one mask with &",
    "dense mask": "InputError: mask must be a usp.Mask, got Tensor",
    "dropout": "InputError: dropout_p is 0.1: attention dropout is not supported",
    "enable_gqa": "InputError: enable_gqa is False, and query has 4 heads where key/value have 2",
    "degrees and topology": "contradict the topology, which is ulysses 2 x ring 2",
    "dim": "InputError: dim 4 is not a dimension of a tensor of shape (1, 8, 4, 8)",
    "unshard": "InputError: unshard has no gradient and x requires one",
    "unshard length": "InputError: x has 8 tokens on rank 3 (ulysses 1 of 2, ring 1 of 2), and the contiguous layout "
    "of a sequence of 31 gives that rank 7",
}


def test_every_rank_gets_the_message(pool):
    results = pool(4).run(every_message)
    for name, expected in EXPECTED.items():
        for rank in range(4):
            wanted = expected.format(rank=rank, r=rank // 2, u=rank % 2)
            if name == "unshard length" and rank < 3:  # these hold what 31 tokens give them; they are told of rank 3
                wanted = "AgreementError: rank 3: x has 8 tokens on rank 3"
            assert wanted in results[rank][name], (name, rank, results[rank][name])


def disagree(rank, what, timeout):
    topology = usp.Topology.from_mesh(
        torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses")),
        timeout=timedelta(seconds=timeout),
    )
    odd = rank == 2
    q, k, v = tensors(
        9 if odd and what == "length" else 8, dtype=torch.float64 if odd and what == "dtype" else torch.float32
    )
    if what == "missing" and odd:
        time.sleep(timeout + 0.5)
        return "late"
    options = {
        "mask": dict(is_causal=not odd),
        "layout": dict(layout="striped" if odd else "zigzag"),
        "gradient": {},
        "refused": dict(dropout_p=0.5 if odd else 0.0),
    }.get(what, {})
    q.requires_grad_(odd and what == "gradient")
    started = time.monotonic()
    with contextlib.suppress(UserWarning):
        found = message(lambda: usp.attention(q, k, v, topology=topology, **options))
    assert time.monotonic() - started < 30
    return found


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("length", "rank 2 has seq_len 36 where rank 0 has 32"),
        ("dtype", "rank 2 has dtype torch.float64 where rank 0 has torch.float32"),
        ("mask", "rank 2 has mask : where rank 0 has :0"),
        ("layout", "rank 2 has layout striped where rank 0 has zigzag"),
        ("gradient", "rank 2 has requires_grad True where rank 0 has False"),
    ],
)
def test_ranks_that_disagree_are_told_which_and_how(pool, what, expected):
    for found in pool(4).run(disagree, what, 20.0):
        assert found.startswith("AgreementError")
        assert expected in found


def test_a_rank_that_refuses_is_quoted_to_the_others(pool):
    results = pool(4).run(disagree, "refused", 20.0)
    assert results[2].startswith("InputError: dropout_p is 0.5")
    for rank in (0, 1, 3):
        assert results[rank].startswith("AgreementError: rank 2: dropout_p is 0.5")


def test_a_rank_that_does_not_come_is_named(pool):
    results = pool(4).run(disagree, "missing", 1.0)
    assert results[2] == "late"
    for rank in (0, 1, 3):
        assert "rank 2: did not arrive at call 1 within 1 s (it has made no call yet)" in results[rank]


def checks(rank, check):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    topology = usp.Topology.from_mesh(mesh, check=check)
    for length in (8, 8, 12, 8):
        usp.attention(*tensors(length), topology=topology)
    return topology.agreement._calls if topology.agreement else 0


@pytest.mark.parametrize(("check", "compared"), [("first", 2), ("always", 4), ("off", 0)])
def test_arguments_are_compared_once_for_each_shape_or_as_told(pool, check, compared):
    assert pool(4).run(checks, check) == [compared] * 4
