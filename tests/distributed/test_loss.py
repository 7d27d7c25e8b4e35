"""The loss over data parallel 2 x sequence parallel 2 ranks against one process without usp, and checks of replicas."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import usp
from tests.dense import relative_error
from usp.errors import AgreementError, InputError
from usp.loss import check_replicas, count_targets, cross_entropy, linear_cross_entropy

SAMPLES, LENGTH, VOCABULARY, WIDTH, HEADS = 2, 24, 19, 8, 2
MAX_NORM = 0.05  # below the norms met here: clipping clips


class Model(nn.Module):
    """An embedding, causal attention and a head; returns the loss, as FSDP2 has whole weights inside forward only."""

    def __init__(self, attend, loss):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64)
        self.head = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
        self.attend, self.loss = attend, loss

    def forward(self, tokens: Tensor, targets: Tensor, total: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).chunk(3, dim=2)
        x = x + self.attend(q, k, v).flatten(2)
        return self.loss(x, self.head, targets, total)


def dense_attend(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def with_logits(x, head, targets, total):
    return cross_entropy(head(x), targets, total)


def chunked(x, head, targets, total):
    return linear_cross_entropy(x, head.weight, targets, total, bias=head.bias, chunk=5)


def torchs(x, head, targets, total):
    return F.cross_entropy(head(x).flatten(0, 1), targets.flatten(), reduction="sum") / total


UNEVEN = [[(0, 0, 12), (1, 12, 13)], [(0, 3, 4), (0, 20, 24), (1, 0, 1), (1, 5, 7)]]
ONE_TOKEN = [[], [(1, 12, 13)]]
"""Valid targets of each micro-batch: (sample, start, stop). A shard has 12 tokens, so 12 is the second one's first."""


def batches(valid, steps: int = 3):
    """For each step its micro-batches of (tokens, shifted targets), the whole of them."""
    make = torch.Generator().manual_seed(7)
    for _ in range(steps):
        micro_batches = []
        for runs in valid:
            text = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=make)
            targets = torch.full((SAMPLES, LENGTH), -100)
            for sample, start, stop in runs:
                targets[sample, start:stop] = text[sample, start + 1 : stop + 1]
            micro_batches.append((text[:, :-1], targets))
        yield micro_batches


def one_process(valid) -> list[Tensor]:
    """Loss and gradient norm of every step, and the parameters in the end."""
    model = Model(dense_attend, torchs)
    optimizer, results = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), []
    for micro_batches in batches(valid):
        optimizer.zero_grad()
        total = sum((targets != -100).sum() for _, targets in micro_batches)
        losses = [model(tokens, targets, total) for tokens, targets in micro_batches]
        sum(losses).backward()
        results += [sum(losses).detach(), clip_grad_norm_(model.parameters(), MAX_NORM)]
        optimizer.step()
    return results + [p.detach() for p in model.parameters()]


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def trained(rank, how, loss, valid):
    """The largest relative error against one process; and how many valid targets this rank had in the first step."""
    topology = usp.Topology.build(2, 1)
    model = module = Model(partial(usp.attention, topology=topology, is_causal=True), loss)
    if how == "ddp":
        module = DistributedDataParallel(model)
    if how == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    optimizer, results = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), []
    mine = None
    for micro_batches in batches(valid):
        shards = [
            [usp.shard(t[topology.data_rank :][:1], topology) for t in micro_batch] for micro_batch in micro_batches
        ]
        mine = mine or [(targets != -100).sum().item() for _, targets in shards]
        total, logged = sum(count_targets(targets) for _, targets in shards), torch.zeros((), dtype=torch.float64)
        optimizer.zero_grad()
        for i, (tokens, targets) in enumerate(shards):
            more = i + 1 < len(shards)
            with module.no_sync() if how == "ddp" and more else nullcontext():
                part = module(tokens, targets, total)
                part.backward()
            logged += part.detach()
        if how == "hand":
            average(model)
        check_replicas(model)
        dist.all_reduce(logged)
        results += [logged / 4, whole(clip_grad_norm_(model.parameters(), MAX_NORM))]
        optimizer.step()
        check_replicas(module, gradients=False)
    results += [whole(p) for p in model.parameters()]
    return max(map(relative_error, results, one_process(valid))), mine


@pytest.mark.parametrize("loss", [with_logits, chunked])
@pytest.mark.parametrize("how", ["hand", "ddp", "fsdp2"])
@pytest.mark.parametrize("valid", [UNEVEN, ONE_TOKEN], ids=["uneven", "one token"])
def test_training_equals_one_process(pool, how, loss, valid):
    """Micro-batches, clipping after averaging, loss to log: losses, norms and parameters after three steps."""
    errors, counts = zip(*pool(4).run(trained, how, loss, valid, timeout=120), strict=True)
    assert max(errors) < 1e-12
    assert list(counts) == ([[12, 1], [0, 4], [0, 3], [1, 0]] if valid is UNEVEN else [[0, 0]] * 3 + [[0, 1]])


def clipped_too_early(rank):
    """Why the recipe says after averaging: clipping every rank's own gradient gives another one."""
    topology = usp.Topology.build(2, 1)
    gradients = []
    for early in (True, False):
        model = Model(partial(usp.attention, topology=topology, is_causal=True), with_logits)
        (tokens, targets), _ = next(batches(UNEVEN))
        tokens, targets = (usp.shard(t[topology.data_rank :][:1], topology) for t in (tokens, targets))
        model(tokens, targets, count_targets(targets)).backward()
        if early:
            clip_grad_norm_(model.parameters(), MAX_NORM)
        average(model)
        clip_grad_norm_(model.parameters(), MAX_NORM)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return relative_error(*gradients)


def test_clipping_before_averaging_is_another_gradient(pool):
    assert min(pool(4).run(clipped_too_early)) > 0.05


# ---- counts and groups -----------------------------------------------------------------------------------------------


def counted(rank):
    topology = usp.Topology.build(2, 1)
    _, targets = next(batches(UNEVEN))[0]
    shard = usp.shard(targets[topology.data_rank :][:1], topology)
    weights = torch.full_like(shard, 0.5, dtype=torch.float64) * (rank + 1)
    counts = [count_targets(shard), count_targets(shard, group=topology.ulysses.group)]
    counts += [count_targets(shard, weights=weights), count_targets(targets)]
    return [count.item() for count in counts]


def test_counts_are_of_shards_over_all_ranks_of_the_group(pool):
    """12, 0, 0 and 1 targets. Whole targets, counted on every rank, are the usual mistake: too many by the ranks."""
    results = pool(4).run(counted)
    assert results == [[13, 12, 12 * 0.5 + 1 * 2.0, 4 * 13]] * 2 + [[13, 1, 12 * 0.5 + 1 * 2.0, 4 * 13]] * 2


def in_groups(rank):
    """The two pairs stand for tensor parallel halves of one job: W is 2, and N is counted over two."""
    group = usp.Topology.build(2, 1).ulysses.group
    logits = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    targets = torch.tensor([[rank % 2, 2, -100]])
    total = count_targets(targets, group=group)
    loss = cross_entropy(logits, targets, total, group=group)
    eye = torch.eye(5, dtype=torch.float64)
    assert torch.allclose(linear_cross_entropy(logits, eye, targets, total, group=group), loss, rtol=1e-14)
    return relative_error(loss, 2 * F.cross_entropy(logits[0, :2], targets[0, :2], reduction="sum") / 4)


def test_a_group_that_is_not_the_world(pool):
    assert max(pool(4).run(in_groups)) < 1e-14


def outside(rank):
    group = dist.new_group([0, 1])
    if rank < 2:
        return True
    targets = torch.zeros(1, 3, dtype=torch.int64)
    for call in (
        lambda: count_targets(targets, group=group),
        lambda: cross_entropy(torch.zeros(1, 3, 5), targets, 3, group=group),
        lambda: check_replicas(nn.Linear(2, 2), group),
    ):
        with pytest.raises(InputError, match="this rank is not in the group"):
            call()
    return True


def test_ranks_outside_the_group_are_told(pool):
    assert pool(4).run(outside) == [True] * 4


def compiled(rank):
    """With the default group and a given one: no graph break, and W in the graph. Nothing here communicates."""
    if rank > 0:
        return 0.0
    torch._dynamo.reset()
    group = usp.Topology.build(2, 1).ulysses.group
    hidden, weight = torch.randn(1, 6, 4, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    targets = torch.tensor([[1, 2, -100, 4, 5, 6]])

    def step(hidden, weight, targets, total):
        of_world = linear_cross_entropy(hidden, weight, targets, total, chunk=4)
        return of_world + cross_entropy(F.linear(hidden, weight), targets, total, group=group)

    hidden.requires_grad_()
    found, expected = [], []
    for run, results in ((torch.compile(step, backend="aot_eager", fullgraph=True), found), (step, expected)):
        loss = run(hidden, weight, targets, torch.tensor(5))
        results += [loss, *torch.autograd.grad(loss, hidden)]
    torch._dynamo.reset()
    alone = F.cross_entropy(F.linear(hidden, weight)[0], targets[0])
    return max(*map(relative_error, found, expected), relative_error(found[0], (4 + 2) * alone))


def test_compiles_in_a_process_group(pool):
    assert max(pool(4).run(compiled, timeout=120)) < 1e-14


def refused(rank):
    model = Model(dense_attend, chunked)
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    x, targets = torch.zeros(1, 3, WIDTH, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(InputError, match=r"weight is a DTensor, .*Shard\(dim=0\).*inside the forward of the module"):
        linear_cross_entropy(x, model.head.weight, targets, 3)
    with pytest.raises(InputError, match="logits is a DTensor"):
        cross_entropy(DTensor.from_local(x, init_device_mesh("cpu", (4,))), targets, 3)
    return True


def test_dtensors_are_refused(pool):
    assert pool(4).run(refused) == [True] * 4


# ---- replicas --------------------------------------------------------------------------------------------------------


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def complaint(module, group=None, **options) -> str:
    try:
        check_replicas(module, group, **options)
    except AgreementError as error:
        return str(error)
    return "agree"


def broken(rank):
    """What each rank is told about models that agree, and that don't in one way each."""
    told = [complaint(small())]

    model = small()
    if rank == 2:
        with torch.no_grad():
            model[1].weight[0, 1] += 0.25
    if rank == 3:
        with torch.no_grad():
            model[1].weight[1, 1] -= 0.5
            model[1].bias += 1  # the first is named
    told.append(complaint(model))

    model = small()
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    model[0](torch.full((1, 3), 1.0 + (rank == 1))).sum().backward()
    told += [complaint(model, gradients=False), complaint(model)]

    model = small()
    if rank != 1:
        model[1].bias.grad = torch.zeros(2)
    told.append(complaint(model))

    told.append(complaint(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2 + (rank == 3))) if rank == 3 else small()))
    told.append(complaint(nn.Sequential(small()[0]) if rank in (1, 2) else small()))
    told.append(complaint(small().bfloat16() if rank == 2 else small()))

    model = small()
    if rank == 3:
        with torch.no_grad():
            model[0].bias[1] = torch.nan
    told.append(complaint(model))
    return told


def test_what_differs_is_named_on_every_rank(pool):
    advice = (
        ". Start all ranks from the same values, and average gradients over all of them, those that share a sequence "
        "included"
    )
    lacks = "ranks 1, 2 without parameter '1.weight', which other ranks have: build the same model on all"
    told = pool(4).run(broken)
    assert told[1:] == told[:1] * 3
    shape = told[0].pop(5)
    assert told[0] == [
        "agree",
        f"parameter '1.weight' differs on ranks 2, 3 from rank 0: by up to 0.5{advice}",
        "agree",
        f"the gradient of '0.weight' differs on rank 1 from rank 0: by up to 1{advice}",
        f"the gradient of '1.bias' differs on rank 1 from rank 0: None instead of torch.float32 (2,){advice}",
        lacks,
        f"parameter '0.weight' differs on rank 2 from rank 0: torch.bfloat16 (4, 3) instead of torch.float32 (4, 3)"
        f"{advice}",
        f"parameter '0.bias' differs on rank 3 from rank 0: by up to nan{advice}",
    ]
    assert shape.startswith("parameter '0.weight' differs on rank 3 from rank 0: by up to ")


def averaged_over_data_only(rank, how):
    """The mistake: gradients of the ranks that share a sequence stay apart, and no error says so."""
    topology = usp.Topology.build(2, 1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    model = Model(partial(usp.attention, topology=topology, is_causal=True), with_logits)
    module = model
    if how == "ddp":
        module = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    else:
        fully_shard(model, mesh=mesh["dp"])
    (tokens, targets), _ = next(batches(UNEVEN))
    tokens, targets = (usp.shard(t[topology.data_rank :][:1], topology) for t in (tokens, targets))
    before = complaint(model, mesh["sp"])
    module(tokens, targets, count_targets(targets)).backward()
    groups = mesh["sp"], mesh["dp"], None
    return [before, *(complaint(module, group).split(":")[0].replace("module.", "") for group in groups)]


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_averaging_over_the_data_axis_alone_is_found(pool, how):
    """On the sequence axis, and over all ranks, where with FSDP2 the ranks are compared that hold the same part."""
    a, b, c, d = pool(4).run(averaged_over_data_only, how)
    first = "the gradient of 'embedding.weight' differs on rank"
    everywhere = f"{first} 1 from rank 0" if how == "fsdp2" else f"{first}s 1, 3 from rank 0"
    assert a == b == ["agree", f"{first} 1 from rank 0", "agree", everywhere]
    assert c == d == ["agree", f"{first} 3 from rank 2", "agree", everywhere]


def hybrid_sharded(rank):
    """HSDP: ranks 0 and 2, 1 and 3 hold the same parts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = small()
    fully_shard(model, mesh=mesh)
    model(torch.full((1, 3), 1.0 + rank)).sum().backward()
    told = [complaint(model), complaint(model, mesh["replicate"])]
    if rank == 3:
        model[0].bias.grad.to_local()[0] += 4
    told += [complaint(model).split(". ")[0], complaint(model, mesh["shard"])]
    with pytest.raises(InputError, match=r"\('replicate', 'shard'\): pass one of them"):
        check_replicas(model, mesh)
    return told


def test_parts_are_compared_with_the_same_parts(pool):
    told = "the gradient of '0.bias' differs on rank 3 from rank 1: by up to 4"
    assert pool(4).run(hybrid_sharded) == [["agree", "agree", told, "agree"]] * 4
