"""How attention behaves inside a model: checkpointing, partial gradients, compilation, copies of a module."""

import copy
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import usp
from tests.cases import Case, failures
from tests.dense import dense_attention, relative_error, visible
from usp.mask import Mask

CASE = Case(2, 2, 96, ":0", "zigzag", heads=4, kv_heads=2)
CAUSAL = visible(Mask.causal(), CASE.seq_len)


def shards(topology, case=CASE):
    return [usp.shard(t, topology, layout=case.layout) for t in case.tensors()]


def whole(x, topology, case=CASE):
    return usp.unshard(x.detach(), topology, layout=case.layout, length=case.seq_len)


def checkpointed(rank, use_reentrant):
    topology = usp.Topology.build(2, 2)
    attn = usp.USPAttention(topology=topology, layout="zigzag")
    q, k, v, dout = shards(topology)
    for t in (q, k, v):
        t.requires_grad_()

    def layer(q, k, v):
        return attn(q, k, v, is_causal=True, return_lse=True)

    out, lse = checkpoint(layer, q, k, v, use_reentrant=use_reentrant)
    out.backward(dout)
    return failures(CASE, [whole(t, topology) for t in (out, lse, q.grad, k.grad, v.grad)])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(pool, use_reentrant):
    assert pool(4).run(checkpointed, use_reentrant) == [[]] * 4


def partly(rank):
    """Relative errors of whichever gradients are asked for; the rest must stay None."""
    topology = usp.Topology.build(2, 2)
    reference = dict(zip("qkv", dense_attention(*CASE.tensors(), CAUSAL)[2:], strict=True))
    errors = []
    for wanted in ("q", "k", "v", "qk", "kv", "qv"):
        q, k, v, dout = shards(topology)
        inputs = dict(q=q, k=k, v=v)
        for name in wanted:
            inputs[name].requires_grad_()
        usp.attention(q, k, v, topology=topology, layout="zigzag", is_causal=True).backward(dout)
        assert all(inputs[name].grad is None for name in set("qkv") - set(wanted))
        errors += [relative_error(whole(inputs[name].grad, topology), reference[name]) for name in wanted]
    return max(errors)


def test_gradients_of_some_inputs_only(pool):
    assert max(pool(4).run(partly)) < 1e-12


def without_gradients(rank):
    topology = usp.Topology.build(2, 2)
    q, k, v, _ = shards(topology)
    q.requires_grad_()
    with torch.no_grad():
        out = usp.attention(q, k, v, topology=topology, layout="zigzag", is_causal=True)
    assert not out.requires_grad
    with torch.inference_mode():
        assert torch.equal(usp.attention(q, k, v, topology=topology, layout="zigzag", is_causal=True), out)
    return relative_error(whole(out, topology), dense_attention(*CASE.tensors(), CAUSAL)[0])


def test_no_grad_and_inference_mode(pool):
    assert max(pool(4).run(without_gradients)) < 1e-12


def through_lse(rank, ulysses, ring, dtype):
    """A loss of out AND lse; and one of lse alone."""
    case = Case(ulysses, ring, 60, "-20:3", "striped", heads=4, kv_heads=2, v_head_dim=16, dtype=dtype)
    topology = usp.Topology.build(ulysses, ring)
    tensors = case.tensors()
    seen = visible(Mask.parse(case.mask), case.seq_len)
    dlse = torch.randn(1, 60, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def dense(with_out):
        q, k, v = (t.double().requires_grad_() for t in tensors[:3])
        scores = torch.einsum("bqhd,bkhd->bqhk", q, k.repeat_interleave(2, 2)) * 8**-0.5
        lse = scores.masked_fill(~seen.unsqueeze(1), -torch.inf).logsumexp(-1)
        loss = (lse * dlse).sum()
        if with_out:
            weights = torch.exp(scores.masked_fill(~seen.unsqueeze(1), -torch.inf) - lse.unsqueeze(-1))
            out = torch.einsum("bqhk,bkhd->bqhd", weights, v.repeat_interleave(2, 2))
            loss = loss + (out * tensors[3]).sum()
        return torch.autograd.grad(loss, (q, k, v), allow_unused=True, materialize_grads=True)

    errors = []
    for with_out in (True, False):
        q, k, v, dout = shards(topology, case)
        for t in (q, k, v):
            t.requires_grad_()
        mask = Mask.parse(case.mask)
        out, lse = usp.attention(q, k, v, topology=topology, layout="striped", mask=mask, return_lse=True)
        loss = (lse * usp.shard(dlse.to(lse.dtype), topology, layout="striped")).sum()
        (loss + (out * dout).sum() if with_out else loss).backward()
        pairs = zip((q.grad, k.grad, v.grad), dense(with_out), strict=True)
        errors += [relative_error(whole(x, topology, case), ref) for x, ref in pairs]
    return max(errors)


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_gradient_through_lse(pool, ulysses, ring):
    assert max(pool(4).run(through_lse, ulysses, ring, torch.float64)) < 1e-12
    assert max(pool(4).run(through_lse, ulysses, ring, torch.float32)) < 2e-6


def compiled(rank, backend, dynamic):
    topology = usp.Topology.build(2, 2)
    attn = usp.USPAttention(topology=topology, layout="zigzag")
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 8, dtype=torch.float64)

    def model(q, k, v):
        return torch.relu(attn(linear(q), k, v, is_causal=True))

    q, k, v, dout = shards(topology)
    expected = model(q, k, v)
    expected.backward(dout)
    gradient, linear.weight.grad = linear.weight.grad, None
    torch._dynamo.reset()
    if dynamic:
        for t in (q, k, v):
            torch._dynamo.mark_dynamic(t, 1)
    out = torch.compile(model, backend=backend, fullgraph=True)(q, k, v)
    out.backward(dout)
    return max(relative_error(out.detach(), expected), relative_error(linear.weight.grad, gradient))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(pool, dynamic):
    """The whole graph, forward and backward; inductor is tried by hand, see docs/status.md."""
    assert max(pool(4).run(compiled, "aot_eager", dynamic, timeout=200)) < 1e-12


def registered(rank):
    topology = usp.Topology.build(2, 2)
    make = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 32, heads, 8, generator=make, requires_grad=True) for heads in (2, 1, 1)]
    inputs.append(torch.randn(2, generator=make, requires_grad=True))
    recipe = ":0 zigzag 2 2 p2p sdpa 0 0.3;5.0 sinks"
    found = torch.library.opcheck(
        torch.ops.usp.attention.default,
        (inputs, recipe, topology.ring.group.group_name, [64], None),
        raise_exception=False,
    )
    whole_heads = [torch.randn(1, 16, heads, 8, generator=make, requires_grad=True) for heads in (4, 1, 1)]
    plain = ([4, 1, 1], 4, [16, 16], True, topology.ulysses.group.group_name)
    found |= torch.library.opcheck(torch.ops.usp.all_to_all.default, (whole_heads, *plain), raise_exception=False)
    return {name: str(result) for name, result in found.items()}


def test_opcheck(pool):
    for result in pool(4).run(registered, timeout=200):
        assert set(result.values()) == {"SUCCESS"}, result


def copied(rank):
    attn = usp.USPAttention(2, 2, layout="zigzag")
    other = copy.deepcopy(attn)
    assert other.topology is attn.topology
    assert str(attn) == (
        "USPAttention(ulysses_degree=2, ring_degree=2, layout='zigzag', kernel='sdpa or reference', "
        "transport='p2p', scale=None)"
    )
    q, k, v, dout = shards(attn.topology)
    strided = [t.transpose(1, 3).contiguous().transpose(1, 3).requires_grad_() for t in (q, k, v)]
    out = other(*strided, is_causal=True)
    assert out.is_contiguous()
    out.backward(dout.transpose(0, 1).contiguous().transpose(0, 1))
    reference = dense_attention(*CASE.tensors(), CAUSAL)
    results = [whole(t, attn.topology) for t in (out, *(t.grad for t in strided))]
    expected = (reference[0], *reference[2:])
    return max(relative_error(x, ref) for x, ref in zip(results, expected, strict=True))


def test_a_copied_module_shares_the_topology_and_takes_any_strides(pool):
    assert max(pool(4).run(copied)) < 1e-12


def contiguous_causal(rank):
    topology = usp.Topology.build(1, 4)
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    messages = []
    for layout, mask in (("contiguous", Mask.full()), ("zigzag", Mask.causal()), ("contiguous", Mask.causal())):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            usp.attention(q, k, v, topology=topology, layout=layout, mask=mask)
        messages.append([str(w.message) for w in caught])
    return messages


def test_one_rank_recommends_zigzag_for_causal_masks(pool):
    results = pool(4).run(contiguous_causal)
    assert results[0][:2] == [[], []]
    assert len(results[0][2]) == 1
    assert "takes 1.75 times as long" in results[0][2][0]
    assert "zigzag" in results[0][2][0]
    assert results[1:] == [[[], [], []]] * 3
