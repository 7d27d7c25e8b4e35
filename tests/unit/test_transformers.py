"""The adapter for Hugging Face transformers in one process: what it refuses, and what it leaves alone."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DynamicCache,
)
from transformers.masking_utils import create_causal_mask

import usp
from tests.dense import relative_error
from usp.agreement import Options
from usp.integrations.transformers import PREFIX, Shard, enable
from usp.topology import assemble

SHAPE = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0,
)  # fmt: skip
IDS = torch.arange(1, 25).expand(2, -1)
POSITIONS = torch.arange(24).expand(2, -1)


def config(kind="llama", **changes):
    return AutoConfig.for_model(kind, **(SHAPE | changes))


def build(kind="llama", auto=AutoModelForCausalLM, **changes):
    torch.manual_seed(0)
    return auto.from_config(config(kind, **changes), attn_implementation="sdpa").double()


def alone():
    return usp.Topology.build()


def member(rank, ulysses=2, ring=2):
    """A rank's view of a grid without processes: enough for everything that comes before communication."""
    ranks = iter(range(ulysses * ring))
    grid = tuple(tuple(next(ranks) for _ in range(ulysses)) for _ in range(ring))
    return assemble(rank, (grid,), ("?",) * (ulysses * ring), None, lambda *_: None, Options())


# ---- what it leaves alone --------------------------------------------------------------------------------------------


def test_another_model_of_the_same_config_keeps_its_attention():
    shared = config()
    first, second = (AutoModelForCausalLM.from_config(shared, attn_implementation="sdpa") for _ in range(2))
    handle = enable(first, alone())
    names = {module.config._attn_implementation for module in first.modules() if hasattr(module, "config")}
    assert names == {handle.name}
    assert handle.name.startswith(PREFIX)
    assert second.config._attn_implementation == "sdpa"
    assert first.config is not second.config
    assert first.model.layers[0].self_attn.config is first.config  # what was one config stays one
    assert PREFIX not in str(first.config.to_dict())  # a saved model does not ask for it


def test_disable_gives_the_model_back():
    model = build().eval()
    before = [(module, name, value) for module in model.modules() for name, value in vars(module).items()]
    plain = model(input_ids=IDS).logits
    with enable(model, alone()) as handle:
        assert model.config._attn_implementation == handle.name
    handle.disable()
    assert all(vars(module)[name] is value for module, name, value in before)
    assert not model._forward_pre_hooks
    assert not model.model._forward_pre_hooks
    assert torch.equal(model(input_ids=IDS).logits, plain)


def test_each_enabled_model_has_a_name_of_its_own():
    first, second = build(), build()
    with enable(first, alone()) as a, enable(second, alone(), layout="zigzag") as b:
        assert a.name != b.name
        with pytest.raises(usp.InputError, match=r"^LlamaForCausalLM is enabled already: call disable\(\)"):
            enable(first, alone())
    with enable(first, alone()):
        pass


def test_nothing_else_imports_transformers_and_its_absence_is_explained():
    code = """
import importlib, pkgutil, sys
import usp
for module in pkgutil.walk_packages(usp.__path__, "usp."):
    if not module.name.startswith(("usp.integrations.", "usp.cli.__main__")):
        importlib.import_module(module.name)
assert "transformers" not in sys.modules
sys.modules["transformers"] = None
try:
    import usp.integrations.transformers
except ImportError as error:
    print(error)
"""
    root = Path(usp.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("needs transformers 5 or newer: pip install usp-attention[transformers]")


# ---- one rank equals no usp ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "auto", "changes"),
    [
        ("llama", AutoModelForCausalLM, {}),
        ("granite", AutoModelForCausalLM, dict(attention_multiplier=1.0)),  # a scale of its own
        ("phi3", AutoModelForCausalLM, dict(sliding_window=5)),
        ("modernbert", AutoModel, dict(local_attention=8, global_attn_every_n_layers=2)),  # a window on both sides
    ],
)
def test_one_rank_equals_none(kind, auto, changes):
    model = build(kind, auto, **changes).eval()
    plain = model(input_ids=IDS, position_ids=POSITIONS)[0]
    with enable(model, alone()):
        found = model(input_ids=IDS, position_ids=POSITIONS)[0]
        again = model(IDS, torch.ones_like(IDS), POSITIONS)[0]  # by position, and with a mask that hides nothing
    assert relative_error(found.detach(), plain.detach()) < 1e-12
    assert torch.equal(found, again)


def test_the_scale_of_a_call_is_kept(enabled):
    layer = enabled.model.layers[0].self_attn
    q, k, v = (torch.randn(1, heads, 24, 8, dtype=torch.float64) for heads in (4, 2, 2))
    attend = AttentionInterface()[enabled.config._attn_implementation]
    for scale in (layer.scaling, 0.3, None):
        found = attend(layer, q, k, v, None, scaling=scale, usp_shard=Shard(None, None))[0].transpose(1, 2)
        scores = q.unflatten(1, (2, 2)) @ k.unsqueeze(2).mT * (8**-0.5 if scale is None else scale)
        scores = scores.masked_fill(torch.ones(24, 24).triu(1).bool(), float("-inf"))
        assert relative_error(found, (scores.softmax(-1) @ v.unsqueeze(2)).flatten(1, 2)) < 1e-12


def test_an_encoder():
    torch.manual_seed(0)
    dropout = dict(attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    model = AutoModel.from_config(config("bert", **dropout), add_pooling_layer=False, attn_implementation="sdpa")
    plain = model(input_ids=IDS, position_ids=POSITIONS)[0]
    with enable(model, alone()):
        found = model(input_ids=IDS, position_ids=POSITIONS)[0]
    assert relative_error(found.detach(), plain.detach()) < 2e-6


# ---- what enable refuses ---------------------------------------------------------------------------------------------

GEMMA = dict(head_dim=8, sliding_window=8)


@pytest.mark.parametrize(
    ("kind", "auto", "changes", "reason"),
    [
        ("llama", AutoModelForCausalLM, dict(attention_dropout=0.1), "set attention_dropout to 0, it is 0.1"),
        ("llama", AutoModelForCausalLM, dict(num_attention_heads=1, num_key_value_heads=1),
         r"it has 1 query heads and ulysses_degree=2 needs one a rank: use ulysses_degree <= 1"),
        ("llama", AutoModelForSequenceClassification, {}, "ForSequenceClassification.* is not a sum over tokens"),
        ("llama4_text", AutoModelForCausalLM, dict(intermediate_size_mlp=48, head_dim=8, num_local_experts=2),
         "layers of type chunked_attention"),
        ("bert", AutoModel, {}, "attention_probs_dropout_prob to 0, it is 0.1"),
        ("bert", AutoModel, {}, "pooler reads the first token.*add_pooling_layer=False"),
        ("t5", AutoModel, dict(d_model=32, d_kv=8, d_ff=48), "cross attention"),
        ("bloom", AutoModelForCausalLM, {}, "does not come from transformers' AttentionInterface"),
        ("bloom", AutoModelForCausalLM, {}, "takes no position_ids"),
        ("mamba", AutoModelForCausalLM, {}, "convolutions over the sequence"),
        ("gemma3_text", AutoModel, GEMMA | dict(use_bidirectional_attention=True), "switched to bidirectional"),
        ("llama", AutoModel, dict(is_causal=False), "switched to bidirectional"),
    ],
)  # fmt: skip
def test_enable_refuses(kind, auto, changes, reason):
    torch.manual_seed(0)
    model = auto.from_config(config(kind, **changes))
    before = model.config, model.config._attn_implementation
    with pytest.raises(usp.InputError, match=f"^{type(model).__name__} cannot be sharded exactly: .*{reason}"):
        enable(model, member(0))
    assert (model.config, model.config._attn_implementation) == before


def test_enable_refuses_a_model_of_several_parts():
    vision = dict(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=8, patch_size=4
    )
    whole = AutoConfig.for_model("gemma3", text_config=SHAPE | GEMMA, vision_config=vision, mm_tokens_per_image=4)
    model = AutoModel.from_config(whole)
    with pytest.raises(usp.InputError, match=r"configs of their own \(.*text_config.*\): enable its language model"):
        enable(model, alone())
    with enable(model.language_model, alone()):
        assert model.config._attn_implementation == "sdpa"


def test_enable_refuses_a_wrapped_model_and_unknown_names():
    with pytest.raises(usp.InputError, match=r"^model is a Sequential and must be a transformers\.PreTrainedModel"):
        enable(torch.nn.Sequential(build()), alone())
    model = build()
    for wrong in (dict(layout="zigzga"), dict(kernel="spda"), dict(transport="p2")):
        with pytest.raises(usp.InputError, match=f"unknown .*{next(iter(wrong.values()))}|transport"):
            enable(model, alone(), **wrong)
    assert model.config._attn_implementation == "sdpa"


# ---- what the forward pass refuses -----------------------------------------------------------------------------------

HERE = dict(input_ids=IDS, position_ids=POSITIONS)


@pytest.fixture(scope="module")
def enabled():
    model = build()
    with enable(model, alone()):
        yield model


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (dict(position_ids=None), "^position_ids is missing.*count from 0 on every rank"),
        (dict(use_cache=True), "^use_cache was given: generating from a cache"),
        (dict(output_attentions=True), "^output_attentions=True needs all weights"),
        (dict(attention_mask=torch.ones(2, 24).tril(3)), "^attention_mask has padding: usp.shard_batch makes padding"),
        (dict(attention_mask=torch.ones(2, 1, 24, 24)), r"^attention_mask is of shape \(2, 1, 24, 24\): a dense or"),
        (dict(attention_mask={"full_attention": None}), "^attention_mask is dict: a dense or prepared mask"),
        (dict(labels=IDS), "^labels were given, and without shift_labels the model would shift labels inside"),
        (dict(labels=IDS, shift_labels=IDS, loss_weights=IDS), "and transformers' loss takes no loss_weights"),
        (dict(cu_seq_lens_q=[0, 24], cu_seq_lens_k=[0, 4, 24]), "^cu_seq_lens_q and cu_seq_lens_k differ"),
        (dict(cu_seqlens=(0, 9, 30)), "^the documents add up to 30 tokens and the global sequence has 24"),
        (dict(seq_len=48), "^position_ids has 24 tokens on rank 0"),
        (dict(position_ids=POSITIONS % 9), "positions that restart need the documents' cu_seqlens"),
    ],
)
def test_the_forward_pass_refuses(enabled, given, reason):
    with pytest.raises(usp.InputError, match=reason):
        enabled(**(HERE | given))


def test_an_empty_cache_is_refused_too(enabled):
    with pytest.raises(usp.InputError, match=r"^cache was given"):
        enabled(**HERE, cache=DynamicCache())


def test_it_does_not_generate(enabled):
    with pytest.raises(usp.InputError, match=r"^(cache|past_key_values) was given: generating from a cache"):
        enabled.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=2)


@pytest.mark.parametrize(
    ("argument", "value", "reason"),
    [
        ("position_bias", torch.zeros(4, 24, 24), r"a position bias \(position_bias\) is not supported"),
        ("dropout", 0.1, "attention dropout is 0.1, and must be 0"),
        ("usp_shard", None, "does not hand keyword arguments on"),
    ],
)
def test_an_attention_layer_refuses(enabled, argument, value, reason):

    attend = AttentionInterface()[enabled.config._attn_implementation]
    layer = enabled.model.layers[0].self_attn
    q, k, v = (torch.randn(1, heads, 24, 8) for heads in (4, 2, 2))
    given = dict(scaling=0.3, usp_shard=Shard(None, None))
    assert attend(layer, q, k, v, None, **given)[0].shape == (1, 24, 4, 8)
    with pytest.raises(usp.InputError, match=f"^LlamaAttention cannot attend exactly: .*{reason}"):
        attend(layer, q, k, v, None, **(given | {argument: value}))
    with pytest.raises(usp.InputError, match="24 queries and 12 keys: caches and cross attention"):
        attend(layer, q, k[:, :, :12], v[:, :, :12], None, **given)
    with pytest.raises(usp.InputError, match="it was given a mask"):
        attend(layer, q, k, v, torch.ones(24, 24), **given)


def test_a_window_that_stays_in_the_mask_is_refused():

    model = build("mistral", sliding_window=8)
    q, k, v = (torch.randn(1, heads, 24, 8) for heads in (4, 2, 2))
    with (
        enable(model, alone()) as handle,
        pytest.raises(usp.InputError, match="keeps in its mask and does not hand on"),
    ):
        AttentionInterface()[handle.name](model.model.layers[0].self_attn, q, k, v, None, usp_shard=Shard(None, None))


def test_a_mask_function_of_the_model_is_refused():

    model = build()
    embedded = torch.zeros(2, 24, 32)
    with enable(model, alone()):
        how = dict(config=model.config, inputs_embeds=embedded, attention_mask=None, cache=None)
        assert create_causal_mask(**how, position_ids=POSITIONS % 9) is None
        with pytest.raises(usp.InputError, match="adds a mask function of its own"):
            create_causal_mask(**how, or_mask_function=lambda b, h, q, k: k < 4)
        with pytest.raises(usp.InputError, match="a padding mask of its own"):
            create_causal_mask(**(how | dict(attention_mask=torch.ones(2, 24).tril(3))))


@pytest.mark.parametrize("rope", [
    dict(rope_type="dynamic", factor=2.0, rope_theta=1e4),
    dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=64,
         factor=2.0, rope_theta=1e4),
])  # fmt: skip
def test_frequencies_that_depend_on_the_largest_position(rope):
    model = build(max_position_embeddings=64, rope_parameters=rope)
    ids = torch.ones(1, 17, dtype=torch.int64)  # of 68 tokens
    with (
        enable(model, member(0)),
        pytest.raises(usp.InputError, match=r"^the sequence has 68 tokens and .* position of the input above 64"),
    ):
        model(input_ids=ids, position_ids=usp.positions(68, member(0)).unsqueeze(0))


# ---- positions -------------------------------------------------------------------------------------------------------


class Passed(Exception):
    """Raised in place of the first layer."""


def begin(rank, position_ids, layout="contiguous", check_positions=True, **given):
    """A forward pass up to the first layer."""

    def stop(*_):
        raise Passed

    model = build()
    model.model.layers[0].register_forward_pre_hook(stop)
    ids = torch.ones(1, position_ids.shape[-1], dtype=torch.int64)
    with enable(model, member(rank), layout=layout, check_positions=check_positions):
        model(input_ids=ids, position_ids=position_ids, **given)


def test_positions_of_the_shard_pass():
    for rank in range(4):
        for layout in ("contiguous", "zigzag", "striped"):
            mine = usp.positions(26, member(rank), layout).unsqueeze(0)
            with pytest.raises(Passed):
                begin(rank, mine, layout, seq_len=26)
            starts = torch.where(mine >= 9, torch.where(mine >= 20, 20, 9), 0)
            for position_ids in (mine, mine - starts):
                with pytest.raises(Passed):
                    begin(rank, position_ids, layout, seq_len=26, cu_seqlens=torch.tensor([0, 9, 20, 26]))


def test_local_positions_are_refused_on_every_rank_but_the_first():
    local = torch.arange(6).unsqueeze(0)
    with pytest.raises(Passed):
        begin(0, local)
    for rank in (1, 2, 3):
        with pytest.raises(usp.InputError, match=rf"^position_ids on rank {rank} start with \[0, 1, 2, 3\], and the"):
            begin(rank, local)
    with pytest.raises(Passed):
        begin(1, local, check_positions=False)


def test_positions_that_fit_neither_the_sequence_nor_the_documents_are_refused():
    local = torch.tensor([[7, 8, 0, 1, 2, 3]])  # of tokens 7 to 12
    documents = dict(seq_len=26, cu_seqlens=(0, 9, 20, 26))
    with pytest.raises(Passed):
        begin(1, local, **documents)
    for wrong in (torch.arange(6).unsqueeze(0), local.roll(1, 1), local + 1):
        with pytest.raises(usp.InputError, match=r"^position_ids on rank 1 start with \["):
            begin(1, wrong, **documents)


def test_positions_of_another_layout_are_refused():
    with pytest.raises(
        usp.InputError, match=r"start with \[0, 1, 2, 3\], and the striped layout .* gives .*\[0, 2, 4, 6\]"
    ):
        begin(0, usp.positions(24, member(0), "zigzag").unsqueeze(0), "striped")
