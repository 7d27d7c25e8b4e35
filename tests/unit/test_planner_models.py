"""Presets against published parameter counts; config.json files of many families against the shapes they stand for."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.strategies import examples
from usp.errors import InputError
from usp.planner.models import DEFAULTS, PRESETS, find, from_config
from usp.planner.spec import ModelSpec

LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "rope_scaling": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 128256, "eos_token_id": [128001, 128009],
}  # fmt: skip
QWEN2_72B = {
    "model_type": "qwen2", "hidden_size": 8192, "intermediate_size": 29568, "num_attention_heads": 64,
    "num_hidden_layers": 80, "num_key_value_heads": 8, "max_window_layers": 70, "sliding_window": 131072,
    "use_sliding_window": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 152064,
}  # fmt: skip
MISTRAL_7B = {
    "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 32000,
}  # fmt: skip
MIXTRAL_8X7B = MISTRAL_7B | {
    "model_type": "mixtral", "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
GPT_OSS_20B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "head_dim": 64,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 4,
    "experts_per_token": 4, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "tie_word_embeddings": False, "vocab_size": 201088, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 129280,
}  # fmt: skip
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 48, "num_experts": 128,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "max_window_layers": 48,
    "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False, "dtype": "bfloat16",
    "vocab_size": 151936,
}  # fmt: skip
GEMMA3_4B = {
    "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16,
                      "num_hidden_layers": 27},
}  # fmt: skip
LLAMA4_SCOUT = {
    "model_type": "llama4", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 48,
        "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "no_rope_layers": [],
        "attention_chunk_size": 8192, "vocab_size": 202048,
    },
    "vision_config": {"hidden_size": 1408, "num_attention_heads": 16},
}  # fmt: skip
LLAMA4_MAVERICK = LLAMA4_SCOUT | {
    "text_config": LLAMA4_SCOUT["text_config"] | {"num_local_experts": 128, "interleave_moe_layer_step": 2}
}
GPT2_XL = {
    "model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48, "n_ctx": 1024, "n_inner": None,
    "vocab_size": 50257,
}  # fmt: skip
FALCON_7B = {
    "model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_kv_heads": 71, "multi_query": True,
    "new_decoder_architecture": False, "num_hidden_layers": 32, "torch_dtype": "bfloat16", "vocab_size": 65024,
}  # fmt: skip
FALCON_40B = FALCON_7B | {
    "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": True,
    "num_hidden_layers": 60,
}  # fmt: skip

FAMILIES = (LLAMA3_8B, QWEN2_72B, MISTRAL_7B, MIXTRAL_8X7B, GPT_OSS_20B, DEEPSEEK_V3, QWEN3_30B_A3B, GEMMA3_4B,
            LLAMA4_SCOUT, LLAMA4_MAVERICK, GPT2_XL, FALCON_7B, FALCON_40B)  # fmt: skip


def without(config: dict, *keys: str) -> dict:
    return {key: value for key, value in config.items() if key not in keys}


def refusal(config) -> str:
    with pytest.raises(InputError) as caught:
        from_config(config)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


# ---- presets ---------------------------------------------------------------------------------------------------------

PUBLISHED = {
    "llama3-8b": 8.03e9, "llama3-70b": 70.6e9, "llama3-405b": 405.9e9, "llama2-7b": 6.74e9, "lwm-7b": 6.74e9,
    "qwen2.5-7b": 7.62e9, "qwen2.5-14b": 14.8e9, "gpt-oss-20b": 20.9e9, "gpt-oss-120b": 116.8e9, "flux.1": 12e9,
    "wan2.1-14b": 14.3e9, "hunyuanvideo": 13e9,
}  # fmt: skip
"""What model cards and papers say."""


def test_every_preset_has_its_published_size():
    assert set(PUBLISHED) == set(PRESETS)
    for name, published in PUBLISHED.items():
        assert PRESETS[name].parameter_count == pytest.approx(published, rel=0.02), name
        assert PRESETS[name].name == name


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("llama3-8b", (32, 8, 128, 32, 4096)),
        ("llama3-70b", (64, 8, 128, 80, 8192)),
        ("llama3-405b", (128, 8, 128, 126, 16384)),
        ("llama2-7b", (32, 32, 128, 32, 4096)),
        ("lwm-7b", (32, 32, 128, 32, 4096)),
        ("qwen2.5-7b", (28, 4, 128, 28, 3584)),
        ("qwen2.5-14b", (40, 8, 128, 48, 5120)),
        ("gpt-oss-20b", (64, 8, 64, 24, 2880)),
        ("gpt-oss-120b", (64, 8, 64, 36, 2880)),
        ("flux.1", (24, 24, 128, 57, 3072)),
        ("wan2.1-14b", (40, 40, 128, 40, 5120)),
        ("hunyuanvideo", (24, 24, 128, 60, 3072)),
    ],
)
def test_the_shape_of_every_preset(name, shape):
    model = PRESETS[name]
    assert (model.heads, model.kv_heads, model.head_dim, model.layers, model.hidden) == shape


@pytest.mark.parametrize(("name", "experts", "windowed"), [("gpt-oss-20b", 32, 12), ("gpt-oss-120b", 128, 18)])
def test_gpt_oss_alternates_a_window_of_128_and_full_attention(name, experts, windowed):
    model = PRESETS[name]
    assert (model.experts, model.active_experts) == (experts, 4)
    assert (model.window, model.windowed_layers) == (127, windowed)


def test_presets_without_a_vocabulary_are_the_diffusion_transformers():
    assert {name for name, model in PRESETS.items() if not model.vocab} == {"flux.1", "wan2.1-14b", "hunyuanvideo"}


@pytest.mark.parametrize(("preset", "config"), [("llama3-8b", LLAMA3_8B), ("gpt-oss-20b", GPT_OSS_20B)])
def test_a_preset_is_what_its_config_says(preset, config):
    assert from_config(config).model_copy(update={"name": preset}) == PRESETS[preset]


# ---- families --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (LLAMA3_8B, 8.03e9), (QWEN2_72B, 72.7e9), (MISTRAL_7B, 7.24e9), (MIXTRAL_8X7B, 46.7e9), (GPT_OSS_20B, 20.9e9),
        (DEEPSEEK_V3, 671e9), (QWEN3_30B_A3B, 30.5e9), (GEMMA3_4B, 3.88e9), (LLAMA4_SCOUT, 107.8e9),
        (LLAMA4_MAVERICK, 400e9), (GPT2_XL, 1.56e9), (FALCON_7B, 6.92e9), (FALCON_40B, 41.8e9),
    ],
)  # fmt: skip
def test_families_have_their_published_size(config, published):
    """Of the multimodal ones the language model: 4.3 billion less a vision tower of 0.4, 109 less 1."""
    assert from_config(config).parameter_count == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (LLAMA3_8B, (32, 8, 128, 128)),
        (DEEPSEEK_V3, (128, 128, 192, 128)),
        (QWEN3_30B_A3B, (32, 4, 128, 128)),
        (GEMMA3_4B, (8, 4, 256, 256)),
        (LLAMA4_SCOUT, (40, 8, 128, 128)),
        (GPT2_XL, (25, 25, 64, 64)),
        (FALCON_7B, (71, 1, 64, 64)),
        (FALCON_40B, (128, 8, 64, 64)),
        (without(LLAMA3_8B, "num_key_value_heads"), (32, 32, 128, 128)),
        (LLAMA3_8B | {"num_key_value_heads": None, "head_dim": None}, (32, 32, 128, 128)),
        (LLAMA3_8B | {"head_dim": 96}, (32, 8, 96, 96)),
    ],
)
def test_heads(config, shape):
    model = from_config(config)
    assert (model.heads, model.kv_heads, model.head_dim, model.value_dim) == shape


@pytest.mark.parametrize(
    ("config", "window", "windowed"),
    [
        (LLAMA3_8B, None, 0),
        (MISTRAL_7B, 4095, 32),
        (MISTRAL_7B | {"sliding_window": None}, None, 0),
        (GPT_OSS_20B, 127, 12),
        (without(GPT_OSS_20B, "layer_types"), 127, 12),
        (GPT_OSS_20B | {"layer_types": ["full_attention"] * 24}, None, 0),
        (QWEN2_72B, None, 0),
        (QWEN2_72B | {"use_sliding_window": True}, 131071, 10),
        (QWEN2_72B | {"use_sliding_window": True, "max_window_layers": 99}, None, 0),
        (QWEN2_72B | {"use_sliding_window": False, "sliding_window": 0}, None, 0),
        (GEMMA3_4B, 1023, 29),
        (MISTRAL_7B | {"sliding_window_pattern": 4}, 4095, 24),
        (LLAMA4_SCOUT, 8191, 36),
        (LLAMA4_SCOUT["text_config"] | {"no_rope_layers": [1, 0] * 24}, 8191, 24),
        (LLAMA4_SCOUT["text_config"] | {"layer_types": ["full_attention", "chunked_attention"] * 24}, 8191, 24),
    ],
)
def test_windows(config, window, windowed):
    """A sliding window of W holds the token itself: it reaches W - 1 back."""
    model = from_config(config)
    assert (model.window, model.windowed_layers) == (window, windowed)


@pytest.mark.parametrize(
    ("config", "experts", "active", "width"),
    [
        (LLAMA3_8B, 1, 1, 14336),
        (LLAMA3_8B | {"num_experts": 0, "num_experts_per_tok": 0}, 1, 1, 14336),
        (MIXTRAL_8X7B, 8, 2, 14336),
        (GPT_OSS_20B, 32, 4, 2880),
        (without(GPT_OSS_20B, "num_experts_per_tok"), 32, 4, 2880),
        (DEEPSEEK_V3, 257, 9, 2048),
        (QWEN3_30B_A3B, 128, 8, 768),
        (QWEN3_30B_A3B | {"shared_expert_intermediate_size": 1536}, 130, 10, 768),
        (without(QWEN3_30B_A3B, "intermediate_size"), 128, 8, 768),
        (LLAMA4_SCOUT, 17, 2, 8192),
        (LLAMA4_SCOUT["text_config"] | {"moe_layers": []}, 1, 1, 16384),
    ],
)
def test_experts(config, experts, active, width):
    model = from_config(config)
    assert (model.experts, model.active_experts, model.intermediate) == (experts, active, width)


def test_layers_without_experts_are_counted_as_they_are():
    """By hand: some of 4 layers have 4 experts of width 6, the others one MLP of width 10; attention 8 x 8 x 4."""
    config = {
        "model_type": "qwen3_moe", "hidden_size": 8, "intermediate_size": 10, "moe_intermediate_size": 6,
        "num_attention_heads": 2, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 5,
        "tie_word_embeddings": True,
    }  # fmt: skip
    attention, dense, sparse = 8 * 8 * 4, 3 * 8 * 10, 4 * 3 * 8 * 6
    for extra, sparse_layers in [
        ({}, 4),
        ({"decoder_sparse_step": 2}, 2),
        ({"mlp_only_layers": [0]}, 3),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, 1),
        ({"first_k_dense_replace": 1}, 3),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, 1),
        ({"moe_layers": [0, 1, 3]}, 3),
        ({"first_k_dense_replace": 9}, 0),
    ]:
        expected = 4 * attention + sparse_layers * sparse + (4 - sparse_layers) * dense + 5 * 8
        assert from_config(config | extra).parameter_count == expected, extra
    # A shared expert of width 9 counts as two of width 6 in `experts`, and as what it is in `parameters`.
    model = from_config(config | {"shared_expert_intermediate_size": 9, "mlp_only_layers": [0]})
    assert (model.experts, model.active_experts) == (6, 4)
    assert model.parameter_count == 4 * attention + 3 * (sparse + 3 * 8 * 9) + dense + 5 * 8


def test_latent_attention_is_counted_as_it_is():
    """By hand: queries 8 x 2 x (3 + 1), down 8 x (5 + 1), up 5 x 2 x (3 + 2), output 2 x 2 x 8, MLP 3 x 8 x 10."""
    config = {
        "hidden_size": 8, "intermediate_size": 10, "num_attention_heads": 2, "num_hidden_layers": 3, "vocab_size": 5,
        "kv_lora_rank": 5, "q_lora_rank": None, "qk_nope_head_dim": 3, "qk_rope_head_dim": 1, "v_head_dim": 2,
        "tie_word_embeddings": False,
    }  # fmt: skip
    rest = 8 * 6 + 5 * 2 * 5 + 2 * 2 * 8 + 240
    assert from_config(config).parameter_count == 3 * (64 + rest) + 2 * 5 * 8
    # With a waist of 3 the queries are 8 x 3 and 3 x 2 x 4.
    assert from_config(config | {"q_lora_rank": 3}).parameter_count == 3 * (48 + rest) + 2 * 5 * 8


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32"}, "float32"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"torch_dtype": "auto"}, "bfloat16"),
        ({"torch_dtype": None}, "bfloat16"),
        ({}, "bfloat16"),
    ],
)
def test_dtype(keys, dtype):
    assert from_config(without(LLAMA3_8B, "torch_dtype") | keys).dtype == dtype


def test_embeddings_are_tied_unless_a_file_says_otherwise():
    assert not from_config(LLAMA3_8B).tied_embeddings
    assert from_config(without(LLAMA3_8B, "tie_word_embeddings")).tied_embeddings
    assert from_config(GEMMA3_4B).tied_embeddings


def test_an_mlp_of_two_matrices_is_four_times_the_width_by_default():
    model = from_config(GPT2_XL)
    assert (model.gated, model.intermediate) == (False, 6400)
    assert from_config(GPT2_XL | {"n_inner": 5000}).intermediate == 5000
    assert from_config(LLAMA3_8B).gated


def test_the_language_model_is_what_counts():
    """Its keys win over those beside it, and what it leaves out is taken from there."""
    nested = {**without(LLAMA3_8B, "hidden_size"), "num_hidden_layers": 7, "text_config": {"hidden_size": 2048,
              "num_hidden_layers": 16}}  # fmt: skip
    model = from_config(nested)
    assert (model.hidden, model.layers, model.heads, model.head_dim) == (2048, 16, 32, 64)


def test_keys_that_do_not_matter_are_passed_over():
    assert from_config(LLAMA3_8B | {"rope_sclaing": 3, "quantization_config": {"bits": 4}}) == from_config(LLAMA3_8B)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("num_attention_heads", "num_attention_heads or n_head is missing"),
        ("hidden_size", "hidden_size or n_embd or n_embed is missing"),
        ("num_hidden_layers", "num_hidden_layers or n_layer is missing"),
        ("intermediate_size", "intermediate_size or"),
        ("vocab_size", "vocab_size is missing"),
    ],
)
def test_missing_keys_are_named_with_what_would_work(key, named):
    for config in (without(LLAMA3_8B, key), LLAMA3_8B | {key: None}):
        message = refusal(config)
        assert named in message and "add it, or give a specification file" in message


def test_a_misspelt_key_is_pointed_at():
    config = without(LLAMA3_8B, "num_attention_heads") | {"num_atention_heads": 32}
    assert "(there is num_atention_heads)" in refusal(config)


def test_experts_without_a_number_of_active_ones_are_refused():
    assert "num_experts_per_tok or experts_per_token is missing" in refusal(
        without(MIXTRAL_8X7B, "num_experts_per_tok")
    )


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LLAMA3_8B | {"num_attention_heads": 0}, "num_attention_heads: a whole number from 1"),
        (LLAMA3_8B | {"num_attention_heads": "32"}, "got '32'"),
        (LLAMA3_8B | {"num_key_value_heads": 7}, "heads=32 is not a multiple of kv_heads=7"),
        (LLAMA3_8B | {"hidden_size": 4096.0}, "hidden_size"),
        (LLAMA3_8B | {"num_hidden_layers": 10**12}, "num_hidden_layers"),
        (LLAMA3_8B | {"tie_word_embeddings": "no"}, "tie_word_embeddings: true or false is needed, got 'no'"),
        (LLAMA3_8B | {"torch_dtype": "float8_e4m3fn"}, "dtype"),
        (LLAMA3_8B | {"torch_dtype": 16}, "dtype"),
        (LLAMA3_8B | {"hidden_size": 16}, "head_dim"),
        (GPT_OSS_20B | {"layer_types": ["full_attention"] * 3}, "for each of 24 layers"),
        (GPT_OSS_20B | {"layer_types": ["linear_attention"] * 24}, "layer_types"),
        (GPT_OSS_20B | {"layer_types": [["full_attention"]] * 24}, "layer_types"),
        (GPT_OSS_20B | {"layer_types": "full_attention"}, "layer_types: a list is needed"),
        (GPT_OSS_20B | {"num_experts_per_tok": 33}, "active_experts=33 is more than experts=32"),
        (MISTRAL_7B | {"sliding_window": -1}, "sliding_window"),
        (QWEN2_72B | {"use_sliding_window": 1}, "use_sliding_window"),
        (DEEPSEEK_V3 | {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        (DEEPSEEK_V3 | {"moe_layer_freq": [0, 1]}, "moe_layer_freq"),
        (QWEN3_30B_A3B | {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (LLAMA3_8B | {"mamba_d_state": 16}, "mamba_d_state: not all layers are attention"),
        ({"_class_name": "FluxTransformer2DModel", "num_attention_heads": 24, "num_layers": 19}, "hidden_size"),
        ({}, "num_attention_heads"),
    ],
)
def test_what_no_model_is_described_by_is_refused(config, named):
    assert named in refusal(config)


JUNK = st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=5) | st.lists(
    st.none() | st.integers(-2, 3) | st.text(max_size=2) | st.lists(st.none(), max_size=1), max_size=3
) | st.dictionaries(st.text(max_size=3), st.none(), max_size=2)  # fmt: skip


@examples(400)
@given(st.sampled_from(FAMILIES), st.data())
def test_a_key_of_any_value_is_read_or_refused_in_one_line(config, data):
    key = data.draw(st.sampled_from(sorted(config)))
    if key == "text_config" and data.draw(st.booleans()):
        inner = data.draw(st.sampled_from(sorted(config[key])))
        value = config[key] | {inner: data.draw(JUNK)}
    else:
        value = data.draw(JUNK)
    try:
        assert isinstance(from_config(config | {key: value}), ModelSpec)
    except InputError as error:
        assert len(str(error).splitlines()) == 1


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "my-llama"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA3_8B))
    return path


def test_a_file_and_its_folder_are_read_alike(folder):
    expected = PRESETS["llama3-8b"].model_copy(update={"name": "my-llama"})
    for path in (folder, folder / "config.json", str(folder)):
        assert from_config(path) == expected
    assert find(str(folder)) == find(str(folder / "config.json")) == expected


def test_the_file_is_named_in_what_is_wrong_with_it(folder):
    file = folder / "config.json"
    file.write_text(json.dumps(without(LLAMA3_8B, "vocab_size")))
    assert refusal(folder).startswith(f"{file}: vocab_size is missing")
    file.write_text(json.dumps(LLAMA3_8B | {"num_key_value_heads": 5}))
    assert refusal(folder).startswith(f"{file}: ")
    for text in ("[1, 2]", "", "3"):
        file.write_text(text)
        assert refusal(folder).startswith(f"{file}: a JSON object is needed")
    file.write_text("{broken")
    assert "config.json" in refusal(folder)
    file.unlink()
    assert "config.json" in refusal(folder) and "No such file" in refusal(folder)
    assert "File name too long" in refusal("x" * 5000)


@pytest.mark.parametrize("name", ["llama3-8b", "Llama3-8B", "LLAMA3-8B"])
def test_a_preset_is_found_whatever_its_case(name):
    assert find(name) is PRESETS["llama3-8b"]


@pytest.mark.parametrize("suffix", ["json", "yaml"])
@pytest.mark.parametrize("name", ["gpt-oss-20b", "wan2.1-14b"])
def test_a_written_specification_is_found(tmp_path, name, suffix):
    path = tmp_path / f"model.{suffix}"
    PRESETS[name].write(path)
    assert find(str(path)) == PRESETS[name]


def test_a_specification_with_an_unknown_key_is_not_taken_for_a_config(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"heads": 8, "kv_head": 8, "hidden": 64, "intermediate": 64}))
    with pytest.raises(InputError, match=r"kv_head: unknown; did you mean kv_heads\?"):
        find(str(path))


@pytest.mark.parametrize(
    ("name", "hint"), [("lama3-8b", "did you mean 'llama3-8b'?"), ("", None), ("bert-of-mine", None), ("a\0b", None),
                       ("x" * 5000, None)]
)  # fmt: skip
def test_an_unknown_name_lists_the_presets(name, hint):
    with pytest.raises(InputError) as caught:
        find(name)
    message = str(caught.value)
    assert all(preset in message for preset in PRESETS) and "config.json" in message
    assert len(message.splitlines()) == 1 and len(message) < 700
    assert ("did you mean" in message) == bool(hint) and (hint or "") in message


def test_what_families_leave_out_is_used_only_where_a_file_is_silent():
    assert DEFAULTS["gemma3_text"]["head_dim"] == 256
    text = GEMMA3_4B["text_config"] | {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 16}
    model = from_config(GEMMA3_4B | {"text_config": text})
    assert (model.heads, model.kv_heads, model.head_dim) == (32, 16, 128)
