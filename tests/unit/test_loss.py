"""The loss in one process: right values from the definition in float64, memory, compilation, and what is refused."""

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.dense import relative_error
from usp.errors import InputError
from usp.loss import check_replicas, count_targets, cross_entropy, linear_cross_entropy

BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6}
OP = torch.ops.usp.linear_cross_entropy.default
NAMES = ("hidden", "weight", "bias")


def layer(shape=(2, 11), width=6, vocabulary=13, dtype=torch.float64, seed=0) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(seed)
    sizes = (*shape, width), (vocabulary, width), (vocabulary,)
    tensors = [torch.randn(size, generator=make, dtype=torch.float64).to(dtype) for size in sizes]
    return {name: t.requires_grad_() for name, t in zip(NAMES, tensors, strict=True)}


def targets_for(shape=(2, 11), vocabulary=13, seed=1) -> Tensor:
    """About a third of them ignored."""
    make = torch.Generator().manual_seed(seed)
    targets = torch.randint(vocabulary, shape, generator=make)
    return targets.masked_fill(torch.rand(shape, generator=make) < 0.3, -100)


def by_definition(tensors: dict[str, Tensor], targets: Tensor, total: float, weights=None, upstream=1.0):
    """Loss and gradients in float64, token by token: sum of weight * (log sum exp - the target's logit)."""
    copies = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    logits = copies["hidden"] @ copies["weight"].T
    if "bias" in copies:
        logits = logits + copies["bias"]
    loss = torch.zeros((), dtype=torch.float64)
    for place in torch.cartesian_prod(*map(torch.arange, targets.shape)).tolist():
        place = tuple(place)
        if targets[place] != -100:
            factor = 1.0 if weights is None else weights[place].double()
            loss = loss + factor * (logits[place].logsumexp(0) - logits[place][targets[place]])
    (loss / total * upstream).backward()
    return (loss / total).detach(), {name: t.grad for name, t in copies.items()}


def errors(loss: Tensor, tensors: dict[str, Tensor], expected) -> dict[str, float]:
    found = {name: relative_error(t.grad, expected[1][name]) for name, t in tensors.items()}
    return found | {"loss": relative_error(loss.detach(), expected[0])}


def plain(hidden, weight, targets, total, *, bias=None, chunk=None, **options):
    return cross_entropy(F.linear(hidden, weight, bias), targets, total, **options)


both = pytest.mark.parametrize("compute", [plain, linear_cross_entropy], ids=["logits", "chunked"])


# ---- values ----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("chunk", [1, 5, 22, 1000])
def test_equals_the_definition(compute, dtype, weighted, chunk):
    """With an incoming gradient that is not 1."""
    tensors, targets = layer(dtype=dtype), targets_for()
    weights = torch.rand(targets.shape, generator=torch.Generator().manual_seed(2)) - 0.3 if weighted else None
    loss = compute(**tensors, targets=targets, total=7.5, chunk=chunk, weights=weights)
    (loss * -3.7).backward()
    assert loss.dtype == dtype and loss.shape == ()
    expected = by_definition(tensors, targets, 7.5, weights, -3.7)
    assert max(errors(loss, tensors, expected).values()) < BOUNDS[dtype]


@both
def test_equals_torchs_mean(compute):
    tensors, targets = layer(), targets_for()
    loss = compute(**tensors, targets=targets, total=count_targets(targets))
    logits = F.linear(*tensors.values())
    assert relative_error(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten())) < 1e-14


@both
def test_one_valid_token(compute):
    """A mean over each shard's own targets would be wrong here by the number of shards."""
    tensors, targets = layer(), torch.full((2, 11), -100)
    targets[1, 0] = 4
    total = count_targets(targets)
    assert total == 1
    loss = compute(**tensors, targets=targets, total=total, chunk=4)
    loss.backward()
    assert max(errors(loss, tensors, by_definition(tensors, targets, 1.0)).values()) < 1e-12
    assert torch.count_nonzero(tensors["hidden"].grad.abs().sum(-1)) == 1


@both
@pytest.mark.parametrize("total", [9, 9.0, torch.tensor(9), torch.tensor(0)], ids=str)
@pytest.mark.parametrize("length", [11, 0])
def test_no_valid_target_gives_zeros(compute, total, length):
    """Other ranks may have some, or none has; a shard may hold no token at all."""
    tensors = layer((2, length))
    loss = compute(**tensors, targets=torch.full((2, length), -100), total=total)
    loss.backward()
    assert loss.item() == 0
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in tensors.values())


@both
def test_another_ignore_index_and_integer_dtype(compute):
    tensors, targets = layer(), targets_for()
    targets = targets.where(targets != 0, -100)  # 0 is ignored too, as padding often is
    expected = by_definition(tensors, targets, 9.0)
    loss = compute(**tensors, targets=targets.where(targets != -100, 0).int(), total=9, ignore_index=0, chunk=3)
    loss.backward()
    assert max(errors(loss, tensors, expected).values()) < 1e-12


@both
def test_weights_of_ignored_targets_do_not_matter(compute):
    tensors, targets = layer(), targets_for()
    weights = torch.ones(targets.shape).masked_fill(targets == -100, torch.nan)
    total = count_targets(targets, weights=weights)
    loss = compute(**tensors, targets=targets, total=total, weights=weights)
    assert relative_error(loss, by_definition(tensors, targets, (targets != -100).sum().item())[0]) < 1e-12


def test_counts():
    """Of the shifted targets: the first token is nobody's target."""
    labels = torch.tensor([[5, 6, 7, 8], [5, -100, 7, 8]])
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
    assert count_targets(targets) == 5 and count_targets(targets).dtype == torch.int64
    assert count_targets(labels) == 7
    assert count_targets(targets, ignore_index=7) == 6
    assert count_targets(torch.ones(3, 1001).int()[:1], weights=torch.ones(1, 1001, dtype=torch.bfloat16)) == 1001
    assert count_targets(targets, weights=torch.full(targets.shape, 0.25)) == 1.25


@both
def test_micro_batches_of_different_lengths(compute):
    """The total is that of all micro-batches; a mean of their means would weigh tokens of short ones more."""
    tensors, targets = layer(), targets_for()
    pieces = slice(0, 3), slice(3, 4), slice(4, 11)
    total = sum(count_targets(targets[:, piece]) for piece in pieces)
    losses = []
    for piece in pieces:
        part = tensors | {"hidden": tensors["hidden"][:, piece]}
        losses.append(compute(**part, targets=targets[:, piece], total=total, chunk=2))
        losses[-1].backward()
    assert max(errors(sum(losses), tensors, by_definition(tensors, targets, total.item())).values()) < 1e-12


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.randn(1, 3000, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.zeros(1, 3000, dtype=torch.int64)
    loss = cross_entropy(logits, targets, 3000)
    assert loss.dtype == torch.float32
    assert relative_error(loss, F.cross_entropy(logits[0].double(), targets[0])) < 2e-6


# ---- the chunked loss: gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [(), *((n,) for n in NAMES), NAMES[:2], NAMES[1:], NAMES], ids="+".join)
def test_gradients_that_are_asked_for_and_no_others(wanted):
    tensors, targets = layer(), targets_for()
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in wanted)
    with Sizes() as sizes:
        loss = linear_cross_entropy(**tensors, targets=targets, total=9, chunk=4)
    assert [n > 0 for n in sizes.op_results[1:]] == [name in wanted for name in NAMES]
    expected = by_definition(tensors, targets, 9.0)
    assert relative_error(loss, expected[0]) < 1e-12
    if not wanted:
        assert not loss.requires_grad
        return
    loss.backward()
    for name, tensor in tensors.items():
        assert (tensor.grad is not None) == (name in wanted)
        assert name not in wanted or relative_error(tensor.grad, expected[1][name]) < 1e-12


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_computes_no_gradients(mode):
    tensors, targets = layer(), targets_for()
    with mode(), Sizes() as sizes:
        loss = linear_cross_entropy(**tensors, targets=targets, total=9)
    assert sizes.op_results == [1, 0, 0, 0] and not loss.requires_grad
    assert relative_error(loss, by_definition(tensors, targets, 9.0)[0]) < 1e-12


def test_backward_may_be_repeated_but_not_differentiated():
    tensors = layer()
    loss = linear_cross_entropy(**tensors, targets=targets_for(), total=9)
    once = torch.autograd.grad(loss, [*tensors.values()], retain_graph=True)
    twice = torch.autograd.grad(loss, [*tensors.values()], retain_graph=True)
    assert all(map(torch.equal, once, twice))
    with pytest.raises(InputError, match=r"no second derivative: .* use cross_entropy"):
        torch.autograd.grad(loss, tensors["hidden"], create_graph=True)


def test_a_weight_tied_to_the_embedding():
    make = torch.Generator().manual_seed(3)
    table = torch.randn(13, 6, generator=make, dtype=torch.float64, requires_grad=True)
    tokens, targets = torch.randint(13, (2, 11), generator=make), targets_for()
    linear_cross_entropy(torch.tanh(F.embedding(tokens, table)), table, targets, 9, chunk=4).backward()
    found, table.grad = table.grad, None
    logits = F.linear(torch.tanh(F.embedding(tokens, table)), table)
    (F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 9).backward()
    assert relative_error(found, table.grad) < 1e-12


def transposed(x: Tensor) -> Tensor:
    """The same values in memory of the reverse order."""
    order = tuple(reversed(range(x.ndim)))
    return x.permute(order).contiguous().permute(order)


def test_tensors_of_any_strides():
    tensors, targets = layer(), targets_for()
    strided = {name: transposed(t.detach()).requires_grad_() for name, t in tensors.items()}
    assert not strided["hidden"].is_contiguous() and not strided["weight"].is_contiguous()
    loss = linear_cross_entropy(**strided, targets=transposed(targets), total=9, chunk=4)
    loss.backward()
    assert max(errors(loss, strided, by_definition(tensors, targets, 9.0)).values()) < 1e-12


# ---- the chunked loss: dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_half_precision_is_as_good_as_torch(dtype, autocast):
    """In autocast the weight is float32 and so is its gradient. The incoming gradient is no number of that dtype."""
    tensors, targets = layer((1, 300), 32, 50, torch.float32 if autocast else dtype), targets_for((1, 300), 50)
    if autocast:
        tensors["hidden"] = tensors["hidden"].detach().to(dtype).requires_grad_()
    upstream = 1.2345
    expected = by_definition(tensors, targets, 300.0, upstream=upstream)
    found = []
    for compute in (plain, partial(linear_cross_entropy, chunk=64)):
        for tensor in tensors.values():
            tensor.grad = None
        with torch.autocast("cpu", dtype, enabled=autocast):
            loss = compute(**tensors, targets=targets, total=300)
        (loss * upstream).backward()
        assert loss.dtype == torch.float32 and all(t.grad.dtype == t.dtype for t in tensors.values())
        found.append(errors(loss, tensors, expected))
    for name, error in found[1].items():
        assert error < 1.2 * found[0][name] + 1e-6, (name, found)


def test_the_gradient_of_the_weight_is_summed_in_float32():
    """Sums over many chunks in bfloat16 would stall: 512 equal terms make 256 of one."""
    hidden, weight = torch.ones(512, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    weight.requires_grad_()
    linear_cross_entropy(hidden, weight, torch.zeros(512, dtype=torch.int64), 1, chunk=1).backward()
    assert weight.grad.tolist() == [[-256.0], [256.0]]


def test_the_incoming_gradient_is_not_rounded_to_half_precision():
    """Every gradient would be off by the same factor: here by 0.4 %, or to 0 under float16's smallest number."""
    for dtype, upstream in ((torch.bfloat16, 1 + 2**-8), (torch.float16, 2**-30)):
        hidden = torch.full((1, 1), 2.0, dtype=dtype, requires_grad=True)
        weight = torch.tensor([[0.0], [-(2.0**8)]], dtype=dtype)
        loss = linear_cross_entropy(hidden, weight, torch.tensor([1]), 1)
        # By the hidden value: p0 * 0 + (p1 - 1) * -256 = 256, as p1 is 0 to rounding.
        (grad,) = torch.autograd.grad(loss * (upstream * 3), hidden)
        assert grad.item() == torch.tensor(256 * upstream * 3).to(dtype).item()


# ---- the chunked loss: memory ----------------------------------------------------------------------------------------


class Sizes(TorchDispatchMode):
    """The number of elements of the largest tensor that any op makes, and of the results of the loss's op."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **kwargs or {})
        made = [t for t in (results if isinstance(results, tuple | list) else [results]) if isinstance(t, Tensor)]
        self.largest = max([self.largest, *(t.numel() for t in made)])
        if func is OP:
            self.op_results = [t.numel() for t in made]
        return results


def allocations(run, folder) -> tuple[int, int]:
    """Bytes of the largest allocation, and the most that were live at once, as torch's allocator saw them."""
    with profile(profile_memory=True) as profiler:
        run()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    trace = json.loads((folder / "trace.json").read_bytes())["traceEvents"]
    changes = [e["args"]["Bytes"] for e in sorted((e for e in trace if e["name"] == "[memory]"), key=lambda e: e["ts"])]
    live = peak = 0
    for change in changes:
        live += change
        peak = max(peak, live)
    return max(changes), peak


VOCABULARY, WIDTH, CHUNK = 4096, 16, 32


def step(length, compute):
    tensors = layer((1, length), WIDTH, VOCABULARY, torch.float32)
    targets = targets_for((1, length), VOCABULARY)
    return lambda: compute(**tensors, targets=targets, total=length, chunk=CHUNK).backward()


def test_no_tensor_is_larger_than_a_chunk_of_logits(tmp_path):
    """Forward and backward, inside the op too. The check sees the logits of the plain loss."""
    chunk_bytes, logits_bytes = CHUNK * VOCABULARY * 4, 1024 * VOCABULARY * 4
    assert chunk_bytes > max(VOCABULARY * WIDTH, 1024 * WIDTH) * 4
    assert allocations(step(1024, linear_cross_entropy), tmp_path)[0] == chunk_bytes
    assert allocations(step(1024, plain), tmp_path)[0] == logits_bytes


def test_peak_memory_grows_with_the_hidden_states_only(tmp_path):
    short, long = (allocations(step(length, linear_cross_entropy), tmp_path)[1] for length in (512, 1024))
    assert 512 * WIDTH * 4 <= long - short < 2 * 512 * WIDTH * 4
    # Logits and their softmax; the gradient of the weight, and a chunk's part of it.
    assert short < 2 * CHUNK * VOCABULARY * 4 + 2 * VOCABULARY * WIDTH * 4 + 4 * 512 * WIDTH * 4


# ---- checkpointing and compilation -----------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """How often the op runs."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is OP
        return func(*args, **kwargs or {})


SAVE_LOSS = partial(create_selective_checkpoint_contexts, [OP])


@pytest.mark.parametrize(
    ("options", "runs"),
    [({"use_reentrant": True}, 2), ({"use_reentrant": False}, 2),
     ({"use_reentrant": False, "context_fn": SAVE_LOSS}, 1)],
    ids=["reentrant", "not reentrant", "selective"],
)  # fmt: skip
def test_activation_checkpointing(options, runs):
    tensors, targets = layer(), targets_for()

    def head(hidden, weight, bias):
        return linear_cross_entropy(hidden, weight, targets, 9, bias=bias, chunk=4)

    with Calls() as calls:
        loss = checkpoint(head, *tensors.values(), **options)
        loss.backward()
    assert calls.number == runs
    assert max(errors(loss, tensors, by_definition(tensors, targets, 9.0)).values()) < 1e-12


@both
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiles_without_a_graph_break(compute, dynamic):
    torch._dynamo.reset()
    tensors = layer()

    def model(hidden, weight, bias, targets, total):
        return compute(torch.tanh(hidden), weight, targets, total, bias=bias, chunk=4) * 3

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length in (11, 17):
        hidden, targets = layer((2, length))["hidden"], targets_for((2, length))
        inputs = tensors | {"hidden": hidden}
        found, expected = [], []
        for run, results in ((compiled, found), (model, expected)):
            loss = run(*inputs.values(), targets, count_targets(targets))
            results += [loss, *torch.autograd.grad(loss, [*inputs.values()])]
        assert max(map(relative_error, found, expected)) < 1e-12
    torch._dynamo.reset()


def test_compiles_in_autocast():
    torch._dynamo.reset()
    tensors, targets = layer((1, 64), 16, 40, torch.float32), targets_for((1, 64), 40)

    def model(hidden, weight, bias):
        with torch.autocast("cpu", torch.bfloat16):
            return linear_cross_entropy(F.linear(hidden, weight[:16]), weight, targets, 64, bias=bias, chunk=20)

    found, expected = [], []
    for run, results in ((torch.compile(model, backend="aot_eager", fullgraph=True), found), (model, expected)):
        loss = run(*tensors.values())
        results += [loss, *torch.autograd.grad(loss, [*tensors.values()])]
    assert all(map(torch.equal, found, expected))
    torch._dynamo.reset()


@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, True, False)], ids=str)
def test_opcheck(wanted):
    tensors, targets = layer((22,)), targets_for((22,))
    hidden, weight, bias = (t.requires_grad_(wish) for t, wish in zip(tensors.values(), wanted, strict=True))
    factors = (targets != -100).double()
    args = (hidden, weight, bias, targets.clamp(min=0), factors, torch.float64, 5, list(wanted))
    found = torch.library.opcheck(OP, args, raise_exception=False)
    assert set(map(str, found.values())) == {"SUCCESS"}, found


# ---- refusals --------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.zeros(2, 12, dtype=torch.int64)}, r"targets have shape \(2, 12\) and the tokens \(2, 11\)"),
        ({"targets": torch.zeros(2, 11)}, "of an integer dtype, got torch.float32"),
        ({"targets": torch.ones(2, 11, dtype=torch.bool)}, "got torch.bool"),
        ({"weights": torch.ones(2, 1)}, r"weights have shape \(2, 1\) and the targets \(2, 11\)"),
        ({"weights": torch.ones(2, 11, requires_grad=True)}, r"pass weights.detach\(\)"),
    ],
    ids=["longer", "floats", "bools", "weights", "gradient of weights"],
)
def test_what_both_refuse(compute, change, message):
    with pytest.raises(InputError, match=message):
        compute(**layer(), **{"targets": targets_for(), "total": 9} | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(13, 7)}, r"got hidden \(2, 11, 6\) and weight \(13, 7\)"),
        ({"bias": torch.zeros(6)}, r"bias must be \(V,\) = \(13,\), got \(6,\)"),
        ({"chunk": 0}, "chunk is 0"),
        ({"weight": torch.zeros(13, 6)}, "hidden has dtype torch.float64 and weight torch.float32: .*autocast"),
        ({"bias": torch.zeros(13)}, "hidden has dtype torch.float64 and bias torch.float32"),
    ],
    ids=["width", "bias", "chunk", "dtype", "dtype of bias"],
)
def test_what_the_chunked_loss_refuses(change, message):
    with pytest.raises(InputError, match=message):
        linear_cross_entropy(**layer() | {"targets": targets_for(), "total": 9} | change)


@both
def test_unknown_options_are_errors(compute):
    with pytest.raises(TypeError, match="reduction"):
        compute(**layer(), targets=targets_for(), total=9, reduction="mean")


def test_one_process_agrees_with_itself():
    check_replicas(torch.nn.Linear(2, 2))
