"""diffusers' transformers, tiny and random, sharded over processes against one process without usp."""

import copy
import importlib
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import usp
from tests.dense import relative_error

pytest.importorskip("diffusers")
from diffusers import FirstBlockCacheConfig, FluxTransformer2DModel, SD3Transformer2DModel, WanTransformer3DModel
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

from usp.integrations import diffusers as integration

BOUND = 1e-10
TIMEOUT = 240.0  # the first call of a process imports diffusers

# diffusers computes norms and rotations in float32 whatever the dtype of the model, which would round 1e-16 up to 1e-7.
FLOAT = Tensor.float
in_doubles = mock.patch.object(Tensor, "float", lambda x: x if x.dtype == torch.float64 else FLOAT(x))


def drawn_at_random(model):
    """In float64 and the same in every process; no weight is left at 1 and no bias at 0."""
    torch.manual_seed(0)
    for parameter in model.double().parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def flux() -> FluxTransformer2DModel:
    model = FluxTransformer2DModel(
        in_channels=8, num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=5,
        joint_attention_dim=12, pooled_projection_dim=10, guidance_embeds=True, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    return drawn_at_random(model)


def flux_inputs(text: int, image: int, sample: int = 0) -> dict:
    rows = torch.arange(image)
    drawn = torch.Generator().manual_seed(sample)

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, *shape, dtype=torch.float64, generator=drawn)

    return dict(
        hidden_states=draw(image, 8).requires_grad_(),
        encoder_hidden_states=draw(text, 12).requires_grad_(),
        pooled_projections=draw(10),
        timestep=torch.tensor([0.3, 0.7]).double(),
        img_ids=torch.stack((0 * rows, rows // 5, rows % 5), -1).double(),
        txt_ids=torch.zeros(text, 3).double(),
        guidance=torch.tensor([3.5, 1.0]).double(),
    )


def wan() -> WanTransformer3DModel:
    model = WanTransformer3DModel(
        num_attention_heads=5, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
        ffn_dim=24, num_layers=2, rope_max_seq_len=16,
    )  # fmt: skip
    return drawn_at_random(model)


def wan_inputs(per_token: bool, frames: int = 3, sample: int = 0) -> dict:
    drawn = torch.Generator().manual_seed(sample)
    size = (2, frames * 3 * 3) if per_token else (2,)
    return dict(
        hidden_states=torch.randn(2, 4, frames, 6, 7, dtype=torch.float64, generator=drawn).requires_grad_(),
        timestep=torch.randint(1000, size, generator=drawn),
        encoder_hidden_states=torch.randn(2, 6, 16, dtype=torch.float64, generator=drawn).requires_grad_(),
    )


CASES = {
    "flux": (flux, flux_inputs, (6, 23)),
    "flux, one rank of text and one of image": (flux, flux_inputs, (9, 5)),
    "wan": (wan, wan_inputs, (False,)),
    "wan, a time step a token": (wan, wan_inputs, (True,)),
}


def step(model: nn.Module, inputs: dict) -> dict[str, Tensor]:
    """The output, and gradients of a loss that weighs every element of it differently."""
    out = model(**inputs).sample
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(7))
    (out.square() * weights).sum().backward()
    tensors = {**inputs, **dict(model.named_parameters())}
    return {"output": out.detach(), **{name: t.grad for name, t in tensors.items() if t.grad is not None}}


def mean(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum(result[name] for result in results) / len(results) for name in results[0]}


def beyond(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    return {name: error for name, error in errors.items() if not error <= BOUND}


@in_doubles
def against_one_process(rank, degrees, case, options):
    topology = usp.Topology.build(*degrees)
    make, draw, size = CASES[case]
    model = make()
    if "fused" in options:
        model.fuse_qkv_projections()
    samples = [draw(*size, sample=sample) for sample in range(topology.data_degree)]
    whole = [step(copy.deepcopy(model), copy.deepcopy(sample)) for sample in samples]
    reference = mean(whole)
    if "checkpointed" in options:
        model.enable_gradient_checkpointing()
    integration.enable(model, topology)
    found = step(model, samples[topology.data_rank])
    wrong = beyond({"output": found.pop("output")}, {"output": whole[topology.data_rank]["output"]})
    reference.pop("output")
    for grad in found.values():  # as DDP and FSDP do over all ranks
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return wrong | beyond(found, reference)


@pytest.mark.parametrize("case", ["flux", "wan"])
@pytest.mark.parametrize("degrees", [(2, 2), (4, 1), (1, 4), (2, 1)], ids=lambda d: f"{d[0]}x{d[1]}")
def test_output_and_averaged_gradients(pool, degrees, case):
    assert pool(4).run(against_one_process, degrees, case, (), timeout=TIMEOUT) == [{}] * 4


@pytest.mark.parametrize("case", ["flux, one rank of text and one of image", "wan, a time step a token"])
def test_other_inputs(pool, case):
    assert pool(4).run(against_one_process, (2, 2), case, (), timeout=TIMEOUT) == [{}] * 4


@pytest.mark.parametrize("option", ["fused", "checkpointed"])
@pytest.mark.parametrize("case", ["flux", "wan"])
def test_options_of_diffusers(pool, case, option):
    assert pool(4).run(against_one_process, (2, 2), case, (option,), timeout=TIMEOUT) == [{}] * 4


@in_doubles
def two_lengths(rank):
    """Two forwards of different lengths, then their recomputation in one backward."""
    make, draw, _ = CASES["flux"]
    model = make()
    samples = [draw(6, 23), draw(6, 24)]  # 29 and 30 tokens: some ranks hold as many of both
    one = copy.deepcopy(model)
    sum(one(**sample).sample.sum() for sample in samples).backward()
    model.enable_gradient_checkpointing()
    integration.enable(model, usp.Topology.build(2, 2))
    sum(model(**sample).sample.sum() for sample in samples).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= 4
    grads = [{name: p.grad for name, p in m.named_parameters()} for m in (model, one)]
    return beyond(*grads)


def test_recomputation_after_a_forward_of_another_length(pool):
    assert pool(4).run(two_lengths, timeout=TIMEOUT) == [{}] * 4


@in_doubles
@torch.no_grad()
def undone(rank):
    """disable() gives back what was there; the outputs are then equal to the last bit, also on a copy made before."""
    topology = usp.Topology.build(2, 2)
    unequal = []
    for case in ("flux", "wan"):
        make, draw, size = CASES[case]
        model, sample = make(), draw(*size)
        processors = dict(model.attn_processors)
        before = model(**sample).sample
        with integration.enable(model, topology) as handle:
            (sharded,) = model(*sample.values(), return_dict=False)
            if relative_error(sharded, before) > BOUND:
                unequal.append(f"{case}, positional arguments")
            if relative_error(copy.deepcopy(model)(**sample).sample, before) > BOUND:
                unequal.append(f"{case}, a copy")
        handle.disable()  # once more does no harm
        if dict(model.attn_processors) != processors or not torch.equal(model(**sample).sample, before):
            unequal.append(f"{case}, after disable()")
        integration.enable(model, topology)
        if relative_error(model(**sample).sample, before) > BOUND:
            unequal.append(f"{case}, enabled again")
    return unequal


def test_disable_undoes_enable(pool):
    assert pool(4).run(undone, timeout=TIMEOUT) == [[]] * 4


ALONE = usp.Topology.build()


def test_what_cannot_be_sharded_is_refused():
    with pytest.raises(usp.InputError, match="takes a FluxTransformer2DModel or a WanTransformer3DModel, got Linear"):
        integration.enable(nn.Linear(2, 2), ALONE)
    model = wan()
    handle = integration.enable(model, ALONE)
    with pytest.raises(usp.InputError, match=r"enabled already: call disable\(\)"):
        integration.enable(model, ALONE)
    handle.disable()
    model.blocks[0].attn1.set_processor(FluxAttnProcessor())
    with pytest.raises(usp.InputError, match="through FluxAttnProcessor, and only WanAttnProcessor can be sharded"):
        integration.enable(model, ALONE)
    model = flux()
    model.transformer_blocks[1].ff.net[1].p = 0.1
    with pytest.raises(usp.InputError, match=r"dropout is 0\.1: ranks would draw other numbers"):
        integration.enable(model, ALONE)
    model.transformer_blocks[1].ff.net[1].p = 0.0
    model._parallel_config = object()
    with pytest.raises(usp.InputError, match="by one of the two"):
        integration.enable(model, ALONE)
    assert not model._forward_pre_hooks and type(model.transformer_blocks[0].attn.processor) is FluxAttnProcessor


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"joint_attention_kwargs": {"attention_mask": torch.ones(2, 9)}},
            "attention_mask: not supported while tokens",
        ),
        ({"joint_attention_kwargs": {"scale": 1.0, "ip_hidden_states": []}}, "^ip_hidden_states: not supported"),
        ({"controlnet_block_samples": [torch.zeros(1)]}, "^controlnet_block_samples: not supported"),
        ({"img_ids": torch.zeros(4, 3)}, "img_ids has 4 rows for 5 tokens"),
        ({"txt_ids": torch.zeros(5, 3)}, "txt_ids has 5 rows for 4 tokens"),
    ],
)
def test_what_flux_is_called_with_is_refused(changes, message):
    model = flux()
    integration.enable(model, ALONE)
    with pytest.raises(usp.InputError, match=message):
        model(**{**flux_inputs(4, 5), **changes})


def test_what_wan_is_called_with_is_refused():
    model = wan()
    integration.enable(model, ALONE)
    with pytest.raises(usp.InputError, match=r"timestep has 5 columns for 27 tokens: give one a token, or \(B,\)"):
        model(**{**wan_inputs(False), "timestep": torch.ones(2, 5)})
    with pytest.raises(usp.InputError, match="attention_mask: dense masks cannot be sharded"):
        rotary = *model.rope(wan_inputs(False)["hidden_states"])[:2], 27
        model.blocks[0].attn1(torch.zeros(2, 27, 60).double(), attention_mask=torch.ones(27, 27), rotary_emb=rotary)


def test_caches_are_refused():
    model = flux()
    integration.enable(model, ALONE)
    model.enable_cache(FirstBlockCacheConfig())
    with pytest.raises(usp.InputError, match=r"^enable_cache\(\): ranks would skip blocks each by its own tokens"):
        model(**flux_inputs(4, 5))


def short(rank):
    model = flux()
    integration.enable(model, usp.Topology.build(2, 2))
    with pytest.raises(usp.InputError, match="a sequence of 3 tokens is too short for 4 ranks: use 3 at most"):
        model(**flux_inputs(1, 2))


def test_fewer_tokens_than_ranks_are_refused(pool):
    pool(4).run(short, timeout=TIMEOUT)


def test_other_classes_of_diffusers_are_refused():
    model = SD3Transformer2DModel(
        sample_size=4, num_layers=1, attention_head_dim=8, num_attention_heads=2, caption_projection_dim=16,
        joint_attention_dim=8, pooled_projection_dim=8, in_channels=4,
    )  # fmt: skip
    with pytest.raises(usp.InputError, match="got SD3Transformer2DModel"):
        integration.enable(model, ALONE)


def test_without_diffusers_the_error_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "diffusers"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "usp.integrations.diffusers")
    with pytest.raises(ImportError, match=r"pip install usp-attention\[diffusers\]"):
        importlib.import_module("usp.integrations.diffusers")
