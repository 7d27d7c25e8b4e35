"""Blockwise modules against uncut ones: values, every gradient, and what is kept for the backward pass."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import usp
from usp.errors import InputError
from usp.nn import Blockwise, TransformerLayer, blockwise, rope

DIM, HIDDEN, S = 16, 40, 23


class Branch(nn.Module):
    """Norm, SwiGLU and residual."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = nn.RMSNorm(DIM, eps=1e-6), nn.Dropout(dropout)
        self.gate, self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        return x + self.drop(self.down(F.silu(self.gate(hidden)) * self.up(hidden)))


class LossHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, 50, bias=False)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).movedim(-1, 1), targets, reduction="none")


def made(build: Callable[..., nn.Module], *args: Any) -> nn.Module:
    torch.manual_seed(0)
    return build(*args).double()


def results(f: Callable[..., Tensor], x: Tensor, *others: Tensor, module: nn.Module) -> dict[str, Tensor]:
    """Output and gradients for a fixed upstream gradient."""
    x = x.clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    out = f(x, *others)
    out.backward(torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1)))
    grads = {name: p.grad for name, p in module.named_parameters()}
    assert x.grad is not None and all(grad is not None for grad in grads.values())
    return {"out": out.detach(), "x": x.grad, **grads}  # pyright: ignore[reportReturnType]


def check_equal(got: dict[str, Tensor], wanted: dict[str, Tensor], bound: float = 1e-12) -> None:
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        assert value.shape == wanted[name].shape, name
        assert (value - wanted[name]).norm() <= bound * wanted[name].norm(), name


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


# ---- equal to the plain module ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 5, 22, 23, 100])
def test_a_branch_in_chunks_is_the_branch(chunk):
    module, x = made(Branch), draw(2, S, DIM)
    check_equal(results(Blockwise(module, chunk), x, module=module), results(module, x, module=module))


@pytest.mark.parametrize(("dim", "shape"), [(0, (S, DIM)), (-2, (3, 2, S, DIM)), (2, (3, 2, S, DIM))])
def test_any_sequence_dimension(dim, shape):
    module, x = made(Branch), draw(*shape)
    check_equal(results(Blockwise(module, 4, dim), x, module=module), results(module, x, module=module))


def test_a_head_with_its_loss_takes_two_inputs():
    module, x, targets = made(LossHead), draw(2, S, DIM), torch.arange(2 * S).view(2, S)
    targets[0, :9] = -100
    cut = results(Blockwise(module, 4), x, targets, module=module)
    check_equal(cut, results(module, x, targets, module=module))


def test_several_outputs():
    x, y = draw(2, S, 3), draw(2, S, 5)
    first, second = blockwise(lambda x, y: (2 * x, y.sum(-1)), x, y, chunk=4)
    assert torch.equal(first, 2 * x) and torch.equal(second, y.sum(-1))


def test_an_empty_shard_has_gradients_of_zero():
    module = made(Branch)
    got = results(Blockwise(module, 4), draw(2, 0, DIM), module=module)
    assert got["out"].shape == (2, 0, DIM)
    assert all((grad == 0).all() for name, grad in got.items() if name not in ("out", "x"))


def test_a_module_s_own_forward_can_be_replaced():
    """Names stay, hooks run once for all chunks, and a copy works on its own parameters."""
    plain, x = made(Branch), draw(2, S, DIM)
    cut = copy.deepcopy(plain)
    cut.forward = partial(blockwise, cut.forward, chunk=4)  # pyright: ignore[reportAttributeAccessIssue]
    calls = []
    cut.register_forward_hook(lambda *_: calls.append(1))
    twin = copy.deepcopy(cut)
    assert list(cut.state_dict()) == list(plain.state_dict())
    wanted = results(plain, x, module=plain)
    check_equal(results(cut, x, module=cut), wanted)
    assert len(calls) == 1
    cut.zero_grad(set_to_none=True)
    check_equal(results(twin, x, module=twin), wanted)
    assert all(p.grad is None for p in cut.parameters())


def test_a_gradient_is_complete_when_hooks_see_it():
    module, x, seen = made(Branch), draw(2, S, DIM), []
    wanted = results(module, x, module=module)["down.weight"].clone()
    module.down.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    results(Blockwise(module, 4), x, module=module)
    assert len(seen) == 1
    assert (seen[0] - wanted).norm() <= 1e-12 * wanted.norm()


def test_without_gradients():
    module, x = made(Branch), draw(2, S, DIM)
    with torch.no_grad():
        out = Blockwise(module, 4)(x)
    assert not out.requires_grad and (out - module(x)).norm() < 1e-12 * out.norm()


def test_inputs_without_a_gradient():
    module, x = made(Branch), draw(2, S, DIM)
    wanted = results(module, x, module=module)["gate.weight"].clone()
    module.zero_grad(set_to_none=True)
    out = Blockwise(module, 4)(x)
    out.backward(torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1)))
    assert (module.gate.weight.grad - wanted).norm() <= 1e-12 * wanted.norm()


# ---- recomputation ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """A float that differs from the last module's is traced as a symbol, which torch 2.13 cannot in a checkpoint."""
    torch.compiler.reset()


def dropped(out: Tensor, x: Tensor) -> Tensor:
    """What a dropout of one half multiplied the branch with: 0 where the output is the residual, else 2."""
    return ((out - x).detach() != 0).double() * 2


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_draws_the_same_numbers_again(compiled):
    module, x = made(Branch, 0.5), draw(2, S, DIM)
    cut = Blockwise(module, 12)
    f = torch.compile(cut, fullgraph=True, backend="aot_eager") if compiled else cut
    out = f(x)
    state = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    factors = dropped(out, x)
    assert 0.3 < (factors == 0).double().mean() < 0.7
    assert (module.down.bias.grad - factors.sum((0, 1))).norm() <= 1e-12 * factors.sum()


def test_recomputation_is_under_the_forward_s_autocast():
    module, x = made(Branch).float(), draw(2, S, DIM).float()

    def mixed(f: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return f(x)

    wanted = results(partial(mixed, module), x, module=module)
    got = results(partial(mixed, Blockwise(module, 23)), x, module=module)
    check_equal(got, wanted, 0.0)
    assert wanted["out"].sub(module(x)).norm() > 1e-4  # it is not float32 after all
    check_equal(results(partial(mixed, Blockwise(module, 4)), x, module=module), wanted, 2e-2)


def test_inside_another_checkpoint():
    module, x = made(Branch), draw(2, S, DIM)
    outer = partial(checkpoint, Blockwise(module, 4), use_reentrant=False)
    check_equal(results(outer, x, module=module), results(module, x, module=module))


def test_compiled_whole_for_any_length():
    module, lengths = made(Branch), (S, S - 1, S + 1)
    compiled = torch.compile(Blockwise(module, 10), fullgraph=True, backend="aot_eager")
    for length in lengths:
        x = draw(2, length, DIM)
        torch._dynamo.maybe_mark_dynamic(x, 1)
        check_equal(results(compiled, x, module=module), results(module, x, module=module))


# ---- memory ----------------------------------------------------------------------------------------------------------


def kept_bytes(f: Callable[..., Any], *tensors: Tensor, but: nn.Module) -> int:
    """Bytes of the storages that a call keeps for its backward pass, parameters left out."""
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = f(*tensors)
    for p in but.parameters():
        kept.pop(p.untyped_storage().data_ptr(), None)
    assert out.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("length", [64, 256])
def test_only_the_input_is_kept(length):
    module, x = made(Branch), draw(1, length, DIM).requires_grad_()
    assert kept_bytes(Blockwise(module, 32), x, but=module) == length * DIM * 8
    assert kept_bytes(module, x, but=module) >= length * (DIM + 3 * HIDDEN) * 8


class Watched(nn.Module):
    """Notes the hidden activations that exist together."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.made: list[StorageWeakRef] = []
        self.tokens: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        self.made = [ref for ref in self.made if not ref.expired()] + [StorageWeakRef(hidden.untyped_storage())]
        self.tokens.append(len(self.made) * x.shape[1])
        return self.down(F.silu(hidden))


def test_one_chunk_s_activations_exist_at_a_time():
    module, x = made(Watched), draw(1, 64, DIM).requires_grad_()
    Blockwise(module, 8)(x).sum().backward()
    assert len(module.tokens) == 16 and max(module.tokens) == 8


# ---- the layer -------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 6
FREQUENCIES = (1.0, 0.3, 0.01)


def layer(chunk: int) -> TransformerLayer:
    torch.manual_seed(0)
    made = TransformerLayer(DIM, HEADS, KV_HEADS, HIDDEN, usp.USPAttention(), head_dim=HEAD_DIM, chunk=chunk)
    return made.double()


def written_out(module: TransformerLayer, x: Tensor) -> Tensor:
    """The layer from its definition: complex numbers turn the heads, a softmax over a matrix attends."""
    length = x.shape[1]
    parts = module.qkv(module.attention_norm(x)).split([n * HEAD_DIM for n in (HEADS, KV_HEADS, KV_HEADS)], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in parts)
    angles = torch.outer(torch.arange(length).double(), torch.tensor(FREQUENCIES, dtype=torch.float64))
    turn = torch.polar(torch.ones_like(angles), angles)
    q, k = (torch.complex(t[..., :3].contiguous(), t[..., 3:].contiguous()) * turn for t in (q, k))
    q, k = (torch.cat((t.real, t.imag), -1) for t in (q, k))
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)).masked_fill(
        torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf
    )
    x = x + module.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    hidden = module.mlp_norm(x)
    return x + module.down(F.silu(module.gate(hidden)) * module.up(hidden))


@pytest.mark.parametrize("chunk", [5, 100])
def test_the_layer_is_its_definition(chunk):
    module, x = layer(chunk), draw(2, S, DIM)
    cos, sin = rope(torch.arange(S), FREQUENCIES, torch.float64)

    def run(x: Tensor) -> Tensor:
        return module(x, cos, sin, is_causal=True)

    check_equal(results(run, x, module=module), results(partial(written_out, module), x, module=module))


def test_the_layer_compiles_whole():
    module, x = layer(12), draw(2, S, DIM)
    cos, sin = rope(torch.arange(S), FREQUENCIES, torch.float64)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    got = results(lambda x: compiled(x, cos, sin, is_causal=True), x, module=module)
    check_equal(got, results(partial(written_out, module), x, module=module))


def test_the_layer_keeps_its_input_and_what_attention_keeps():
    module, x = layer(16), draw(1, 64, DIM).requires_grad_()
    cos, sin = rope(torch.arange(64), FREQUENCIES, torch.float64)
    a_token = DIM + 2 * HEAD_DIM // 2 + 2 * (HEADS + KV_HEADS) * HEAD_DIM + HEADS  # x; cos, sin; q, out, k, v; lse
    kept = kept_bytes(lambda x: module(x, cos, sin, is_causal=True), x, but=module)
    assert kept == 64 * a_token * 8


def test_rope_is_exact_far_out():
    cos, sin = rope(torch.tensor([[0, 1_000_003]]), (1.0, 0.1), torch.float64)
    assert cos.shape == sin.shape == (1, 2, 2)
    assert cos[0, 0].tolist() == [1.0, 1.0] and sin[0, 0].tolist() == [0.0, 0.0]
    assert cos[0, 1].tolist() == pytest.approx([math.cos(1_000_003), math.cos(100_000.3)], abs=1e-9)
    in_float32 = rope(torch.tensor([1_000_003]), (1.0, 0.1))[1]
    assert in_float32.dtype == torch.float32
    assert in_float32[0, 0].tolist() == pytest.approx([math.sin(1_000_003), math.sin(100_000.3)], abs=1e-6)


def test_half_precision_stays_half():
    module = layer(5).bfloat16()
    cos, sin = rope(torch.arange(S), FREQUENCIES)
    assert module(draw(1, S, DIM).bfloat16(), cos, sin, is_causal=True).dtype == torch.bfloat16


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_is_refused():
    x = draw(2, S, DIM)
    for call, words in (
        (lambda: blockwise(torch.relu, x, chunk=0), "chunk must be 1 token or more, got 0"),
        (lambda: Blockwise(nn.Identity(), -1), "chunk must be 1 token or more, got -1"),
        (lambda: blockwise(torch.add, x, x[:, 1:], chunk=4), r"one length along dimension 1.*\(2, 22, 16\)"),
        (lambda: blockwise(torch.relu, chunk=4), "got no tensors"),
        (lambda: blockwise(lambda t: t.mean(1), x, chunk=4), r"not token-wise .* \(2, 4, 16\) gave \(2, 16\)"),
        (lambda: blockwise(torch.sum, x, chunk=4), r"gave \(\)"),
        (lambda: TransformerLayer(16, 4, 3, 8, torch.add), "heads=4, kv_heads=3"),
        (lambda: TransformerLayer(12, 4, 4, 8, torch.add), "head_dim=3"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            call()


def test_what_print_shows():
    assert "chunk=4, dim=0" in repr(Blockwise(nn.Identity(), 4, 0))
