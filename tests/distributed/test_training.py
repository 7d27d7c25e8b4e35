"""Recipes: FSDP2, HSDP, DDP and tensor parallelism beside sequence parallelism, each equal to training in one process;
checkpoints resumed with other degrees; and how wrong the usual mistakes are. docs/training.md quotes this file.
"""

import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import usp
from tests import tiny_model
from tests.dense import relative_error
from tests.tiny_model import IGNORED, MAX_NORM, SAMPLES, SEQ_LEN, STEPS, Trained, make_batch, make_model, make_optimizer
from usp.errors import AgreementError
from usp.loss import check_replicas, count_targets, cross_entropy

BOUND = 1e-10
DOCS = Path(__file__).parents[2] / "docs" / "training.md"


@dataclass(frozen=True)
class Setup:
    """How a run is spread; `degrees` are those of the mesh: data, ring, ulysses, tensor."""

    recipe: str
    degrees: tuple[int, int, int, int]
    layout: str = "zigzag"
    micro_batches: int = 1
    block: str = "plain"

    def __str__(self) -> str:
        data, ring, ulysses, tensor = self.degrees
        parallel = f"{self.recipe} dp{data} x ring {ring} x ulysses {ulysses}" + f" x tp{tensor}" * (tensor > 1)
        return f"{parallel}, {self.layout}, {self.micro_batches} micro-batches, {self.block} blocks"


# ---- recipes ---------------------------------------------------------------------------------------------------------


@cache
def make_mesh(*degrees: int) -> DeviceMesh:
    return init_device_mesh("cpu", degrees, mesh_dim_names=("dp", "ring", "ulysses", "tp"))


@cache
def sequence_of(mesh: DeviceMesh) -> tuple[usp.Topology, DeviceMesh]:
    """The topology, and one axis of all ranks that hold different tokens."""
    tokens = mesh["dp", "ring", "ulysses"]  # without "tp": its ranks hold the same tokens
    topology = usp.Topology.from_mesh(tokens)
    everyone = tokens._flatten("dp_sp")
    return topology, everyone


def fsdp(model: nn.Module, everyone: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=everyone)
    return fully_shard(model, mesh=everyone)


def hsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    degrees = mesh["dp"].size(), mesh["ring"].size() * mesh["ulysses"].size()
    both = init_device_mesh("cpu", degrees, mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=both)
    return fully_shard(model, mesh=both)


def ddp(model: nn.Module, everyone: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=everyone.get_group())


def tensor(model: nn.Module, mesh: DeviceMesh, everyone: DeviceMesh) -> nn.Module:
    columns = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "gate", "up")}
    rows = {name: RowwiseParallel() for name in ("attention.out", "down")}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], columns | rows)
    return fsdp(model, everyone)


def checkpoint_blocks(model: nn.Module) -> None:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)


def compile_blocks(model: nn.Module, backend: str) -> None:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)


@contextmanager
def accumulating(model: nn.Module, more: bool) -> Iterator[None]:
    """Leaves the averaging of gradients to the last micro-batch of a step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(not more)
    with model.no_sync() if more and isinstance(model, DistributedDataParallel) else nullcontext():
        yield


def clip(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """`clip_grad_norm_` where parameters lie on different axes, as with tensor parallelism."""
    norm = torch.stack([whole(get_total_norm([p.grad])) for p in parameters]).norm()
    for p in parameters:
        clip_grads_with_norm_(p, max_norm, norm)
    return norm


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    parameters, moments = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": moments}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    parameters, moments = get_state_dict(model, optimizer)
    dcp.load({"model": parameters, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=moments)


# ---- training --------------------------------------------------------------------------------------------------------


class Run:
    """A model in training, on one rank."""

    def __init__(self, setup: Setup) -> None:
        self.setup, mesh = setup, make_mesh(*setup.degrees)
        self.topology, self.everyone = sequence_of(mesh)
        attention = usp.USPAttention(topology=self.topology, layout=setup.layout)
        model = make_model(partial(attention, is_causal=True, seq_len=SEQ_LEN))
        if setup.block == "checkpointed":
            checkpoint_blocks(model)
        elif setup.block != "plain":
            compile_blocks(model, setup.block)
        if setup.recipe == "hsdp":
            self.model = hsdp(model, mesh)
        elif setup.recipe == "tensor":
            self.model = tensor(model, mesh, self.everyone)
        else:
            self.model = {"fsdp": fsdp, "ddp": ddp}[setup.recipe](model, self.everyone)
        self.optimizer = make_optimizer(self.model)

    def micro_batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Tokens and targets of this rank: some of the samples, some of their tokens."""
        share, first = SAMPLES // self.topology.data_degree, self.topology.data_rank
        samples = [x[first * share : (first + 1) * share] for x in make_batch(step)]
        shards = [usp.shard(x, self.topology, dim=1, layout=self.setup.layout) for x in samples]
        return list(zip(*(x.chunk(self.setup.micro_batches) for x in shards), strict=True))

    def step(self, step: int) -> tuple[float, float]:
        """One optimizer step; the loss of the whole batch and the norm of its gradient."""
        micro_batches, model = self.micro_batches(step), self.model
        group, losses = self.everyone.get_group(), []
        positions = usp.positions(SEQ_LEN, self.topology, self.setup.layout)

        total = sum(count_targets(targets, group=group) for _, targets in micro_batches)
        for i, (tokens, targets) in enumerate(micro_batches):
            with accumulating(model, more=i < len(micro_batches) - 1):
                loss = cross_entropy(model(tokens, positions), targets, total, group=group)
                loss.backward()
            losses.append(loss.detach())

        if self.setup.recipe == "tensor":
            norm = clip(list(model.parameters()), MAX_NORM)
        else:
            norm = clip_grad_norm_(model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return mean(sum(losses), group), whole(norm).item()

    def parameters(self) -> dict[str, Tensor]:
        return named((name, p.detach()) for name, p in self.model.named_parameters())


def mean(x: Tensor, group: dist.ProcessGroup) -> float:
    """Over the ranks of a group."""
    dist.all_reduce(x := x.detach().clone(), group=group)
    return x.item() / group.size()


def named(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors, under the names that they have in one process."""
    wrappers = re.compile(r"^module\.|_checkpoint_wrapped_module\.")
    return {wrappers.sub("", name): whole(x) for name, x in tensors}


def train(rank: int, setup: Setup, steps: range = range(STEPS), load_from: str = "", save_to: str = "") -> Trained:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "causal attention over a ring")  # contiguous, on purpose
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # read by dynamo
        run = Run(setup)
        if load_from:
            load(run.model, run.optimizer, load_from)
        losses, norms = zip(*map(run.step, steps), strict=True)
        if save_to:
            save(run.model, run.optimizer, save_to)
    check_replicas(run.model, run.everyone)
    return Trained(run.parameters(), list(losses), list(norms))


def errors(found: Trained, steps: range = range(STEPS)) -> dict[str, float]:
    """Relative errors of every parameter, and the largest ones of losses and gradient norms, beside one process."""
    expected = tiny_model.train_in_one_process()
    assert found.parameters.keys() == expected.parameters.keys()
    every = {name: relative_error(found.parameters[name], p) for name, p in expected.parameters.items()}
    for name in ("losses", "norms"):
        pairs = zip(getattr(found, name), getattr(expected, name)[steps.start :], strict=True)
        every[name] = max(abs(x - ref) / ref for x, ref in pairs)
    return every


def check(pool, setup: Setup) -> None:
    for trained in pool(math.prod(setup.degrees)).run(train, setup, timeout=120):
        found = errors(trained)
        assert max(found.values()) < BOUND, found


def test_gradients_are_clipped_and_losses_fall_in_one_process():
    """What the rest is compared with trains, and is sensitive to the size of gradients."""
    alone = tiny_model.train_in_one_process()
    assert min(alone.norms) > MAX_NORM
    assert alone.losses[-1] < alone.losses[0]


FSDP = [
    Setup("fsdp", (2, 1, 2, 1), "contiguous", 2),
    Setup("fsdp", (2, 2, 1, 1), "zigzag", 1),
    Setup("fsdp", (1, 2, 2, 1), "contiguous", 1),
    Setup("fsdp", (1, 2, 2, 1), "zigzag", 4),
]
HSDP = [Setup("hsdp", (2, 1, 2, 1), "zigzag", 1), Setup("hsdp", (2, 2, 1, 1), "contiguous", 2)]
DDP = [
    Setup("ddp", (2, 1, 2, 1), "zigzag", 1),
    Setup("ddp", (2, 2, 1, 1), "contiguous", 2),
    Setup("ddp", (1, 2, 2, 1), "zigzag", 2),
]
TENSOR = [Setup("tensor", (1, 2, 1, 2), "zigzag", 1), Setup("tensor", (1, 1, 2, 2), "contiguous", 2)]


@pytest.mark.parametrize("setup", FSDP, ids=str)
def test_fsdp_over_all_ranks_equals_one_process(pool, setup):
    check(pool, setup)


@pytest.mark.parametrize("setup", HSDP, ids=str)
def test_hsdp_equals_one_process(pool, setup):
    check(pool, setup)


@pytest.mark.parametrize("setup", DDP, ids=str)
def test_ddp_equals_one_process(pool, setup):
    check(pool, setup)


@pytest.mark.parametrize("setup", TENSOR, ids=str)
def test_tensor_parallel_equals_one_process(pool, setup):
    check(pool, setup)


def test_checkpointed_blocks_equal_one_process(pool):
    check(pool, Setup("fsdp", (1, 2, 2, 1), block="checkpointed"))


def test_compiled_blocks_equal_one_process(pool):
    check(pool, Setup("fsdp", (1, 2, 2, 1), block="aot_eager"))


def count_here(rank: int, setup: Setup) -> tuple[int, set[int]]:
    """Number of targets on this rank, and the numbers of its samples."""
    run = Run(setup)
    targets = torch.cat([targets for _, targets in run.micro_batches(0)])
    return int((targets != IGNORED).sum()), set((make_batch(0)[1] != IGNORED).sum(1).tolist())


@pytest.mark.parametrize("setup", [*FSDP, *HSDP], ids=str)
def test_targets_are_spread_very_unevenly(pool, setup):
    """What the tests above have to cope with: a rank without any target, and a sample with a single one."""
    counts, samples = zip(*pool(4).run(count_here, setup), strict=True)
    assert min(counts) == 0
    assert max(counts) > 5
    assert 1 in samples[0]


# ---- checkpoints -----------------------------------------------------------------------------------------------------

CHAINS = {
    "degrees": [Setup("fsdp", (1, 2, 2, 1)), Setup("fsdp", (1, 1, 4, 1)), Setup("fsdp", (1, 4, 1, 1))],
    "recipes": [Setup("hsdp", (2, 1, 2, 1)), Setup("tensor", (1, 2, 1, 2)), Setup("fsdp", (1, 2, 1, 1))],
    "ddp": [Setup("fsdp", (1, 2, 2, 1)), Setup("ddp", (2, 2, 1, 1)), Setup("fsdp", (4, 1, 1, 1))],
}
"""(2, 2) to (4, 1) to (1, 4); other splits into data, tensor and sequence, and fewer processes; into DDP and out."""


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())
def test_resumed_with_other_degrees_equals_one_uninterrupted_process(pool, chain, tmp_path):
    parts, folders = (range(0, 2), range(2, 4), range(4, STEPS)), ["", str(tmp_path / "a"), str(tmp_path / "b"), ""]
    for setup, steps, load_from, save_to in zip(chain, parts, folders, folders[1:], strict=False):
        last = pool(math.prod(setup.degrees)).run(train, setup, steps, load_from, save_to, timeout=120)
    for trained in last:
        found = errors(trained, parts[-1])
        assert max(found.values()) < BOUND, found


# ---- mistakes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effect:
    """What a rank has after one backward pass: beside one process, and beside the other ranks."""

    error: float  # relative, of the gradient of the parameter where it is largest
    size: float  # of the whole gradient along the true one
    loss: float  # as it would be logged, divided by the true one
    complaint: str  # of check_replicas


def make_mistake(rank: int, mistake: str) -> tuple[dict[str, Tensor], float, str]:
    """Gradients, loss and complaint; data 2 x ring 2, where everything but the mistake is as it should be."""
    layout = "zigzag"
    mesh = make_mesh(2, 2, 1, 1)
    topology, everyone = sequence_of(mesh)
    group, samples = everyone.get_group(), [x[2 * topology.data_rank :][:2] for x in make_batch(0)]
    tokens, targets = (usp.shard(x, topology, layout=layout) for x in samples)
    positions = usp.positions(SEQ_LEN, topology, layout)
    attention = usp.USPAttention(topology=topology, layout=layout)
    model = make_model(partial(attention, is_causal=True, seq_len=SEQ_LEN))

    averaged = mesh["dp"] if "averaged over dp" in mistake else everyone
    model = ddp(model, averaged) if "DDP" in mistake else fsdp(model, averaged)
    if mistake == "positions of the shard":
        positions = torch.arange(len(positions))
    if mistake == "shifted after sharding":
        labels = usp.shard(F.pad(samples[1], (1, 0), value=IGNORED)[:, :-1], topology, layout=layout)
        targets = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    counted = samples[1] if mistake == "counted before sharding" else targets
    total = count_targets(counted, group=mesh["dp"].get_group() if mistake == "counted over dp" else group)
    logits = model(tokens, positions)
    loss = cross_entropy(logits, targets, total, group=group)
    if mistake == "without W":
        loss = loss / group.size()
    if mistake == "mean of the shard":
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()

    complaint = ""
    try:
        check_replicas(model, everyone)
    except AgreementError as error:
        complaint = str(error)
    return named((name, p.grad) for name, p in model.named_parameters()), mean(loss, group), complaint


def effects(pool, mistake: str) -> list[Effect]:
    """By rank."""
    model = make_model(tiny_model.attend_whole)
    tokens, targets = make_batch(0)
    true_loss = F.cross_entropy(model(tokens, torch.arange(SEQ_LEN)).flatten(0, 1), targets.flatten())
    true_loss.backward()
    true = {name: p.grad for name, p in model.named_parameters()}
    found = []
    for gradients, loss, complaint in pool(4).run(make_mistake, mistake):
        assert gradients.keys() == true.keys()
        error = max(relative_error(gradients[name], ref) for name, ref in true.items())
        size = sum((gradients[name] * ref).sum() for name, ref in true.items()) / sum(
            ref.square().sum() for ref in true.values()
        )
        found.append(Effect(error, float(size), loss / true_loss.item(), complaint))
    return found


@pytest.mark.parametrize("mistake", ["", "DDP"])
def test_without_a_mistake(pool, mistake):
    for effect in effects(pool, mistake):
        assert effect.error < BOUND
        assert abs(effect.loss - 1) < BOUND
        assert not effect.complaint


@pytest.mark.parametrize(("mistake", "factor"), [("without W", 1 / 4), ("counted before sharding", 1 / 2)])
def test_forgetting_w_or_counting_before_sharding_scales_the_gradient(pool, mistake, factor):
    """By exactly 1 / W and 1 / (ranks of a sequence). Adam hides it, clipping and the logged norm do not."""
    for effect in effects(pool, mistake):
        assert abs(effect.error - (1 - factor)) < BOUND
        assert abs(effect.size - factor) < BOUND


def test_counting_targets_over_dp_only_weighs_tokens_by_where_they_are(pool):
    for effect in effects(pool, "counted over dp"):
        assert effect.error > 0.5
        assert effect.size > 1.5


def test_the_mean_of_every_shard_weighs_tokens_by_where_they_are(pool):
    for effect in effects(pool, "mean of the shard"):
        assert effect.error > 0.2
        assert math.isnan(effect.loss)  # of the rank without any target


def test_positions_of_the_shard_spoil_the_gradient_and_the_loss_looks_normal(pool):
    for effect in effects(pool, "positions of the shard"):
        assert effect.error > 0.2
        assert abs(effect.loss - 1) < 0.01


def test_shifting_after_sharding_loses_targets_at_the_borders(pool):
    for effect in effects(pool, "shifted after sharding"):
        assert effect.error > 0.2
        assert abs(effect.loss - 1) < 0.05


@pytest.mark.parametrize("wrapper", ["FSDP", "DDP"])
def test_averaging_over_dp_only_lets_the_ranks_of_a_sequence_drift_apart(pool, wrapper):
    """No error is raised; `check_replicas` sees it."""
    found = effects(pool, f"{wrapper} averaged over dp")
    assert min(effect.error for effect in found) > 0.2
    assert abs(found[0].size - found[1].size) > 0.2
    assert all("'embedding.weight' differs on rank" in effect.complaint.replace("module.", "") for effect in found)


def draw_noise(rank: int, layout: str) -> tuple[Tensor, Tensor, int]:
    """This rank's shard, the whole put together, and the data rank."""
    topology, _ = sequence_of(make_mesh(2, 2, 1, 1))
    generator = torch.Generator().manual_seed(topology.data_rank)
    noise = torch.randn(1, SEQ_LEN, 3, generator=generator)
    here = usp.shard(noise, topology, dim=1, layout=layout)
    return here, usp.unshard(here, topology, dim=1, layout=layout, length=SEQ_LEN), topology.data_rank


def test_noise_is_drawn_by_sample_not_by_rank(pool):
    for here, joined, sample in pool(4).run(draw_noise, "zigzag"):
        alone = torch.randn(1, SEQ_LEN, 3, generator=torch.Generator().manual_seed(sample))
        assert torch.equal(joined, alone)
        assert here.shape[1] < SEQ_LEN


# ---- documentation ---------------------------------------------------------------------------------------------------


def test_the_documentation_quotes_this_file():
    """Every block of Python in docs/training.md is here, but for its indentation; every test that it names is there."""

    def lines(text: str) -> list[str]:
        return [line.strip() for line in text.splitlines() if line.strip()]

    text, own = DOCS.read_text(), lines(Path(__file__).read_text())
    for block in (lines(block) for block in re.findall(r"```python\n(.*?)```", text, re.S)):
        assert any(own[i : i + len(block)] == block for i in range(len(own))), block
    for file, test in re.findall(r"`(?:([\w/]+\.py)::)?(test_\w+)`", text):
        source = Path(__file__).parents[1] / (file or "distributed/test_training.py")
        assert f"def {test}(" in source.read_text(), (file, test)
