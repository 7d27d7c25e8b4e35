"""Shapes of models: presets, and what a Hugging Face `config.json` says.

A key that the shape depends on and that a file does not hold is an error, unless the model's own configuration class
would fill it in: a guess would be a silent wrong number.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from usp.errors import InputError
from usp.files import named
from usp.planner.spec import ModelSpec, load


def _llama(name: str, heads: int, kv_heads: int, layers: int, intermediate: int, vocab: int) -> ModelSpec:
    """A decoder of the Llama shape: heads of 128 that add up to the width, SwiGLU, an output matrix of its own."""
    return ModelSpec(
        name=name, heads=heads, kv_heads=kv_heads, layers=layers, hidden=heads * 128, intermediate=intermediate,
        vocab=vocab,
    )  # fmt: skip


def _gpt_oss(name: str, layers: int, experts: int) -> ModelSpec:
    """Layers alternate between full attention and the last 128 tokens, the token itself included."""
    return ModelSpec(
        name=name, heads=64, kv_heads=8, head_dim=64, layers=layers, hidden=2880, intermediate=2880, vocab=201_088,
        experts=experts, active_experts=4, window=127, windowed_layers=layers // 2,
    )  # fmt: skip


def _diffusion(name: str, heads: int, layers: int, intermediate: int, parameters: int) -> ModelSpec:
    """A diffusion transformer: no vocabulary, no causal mask, and blocks with more matrices than the shape tells.

    Their parameters are counted on the models that `diffusers` builds.
    """
    return ModelSpec(
        name=name, heads=heads, kv_heads=heads, layers=layers, hidden=heads * 128, intermediate=intermediate,
        gated=False, parameters=parameters,
    )  # fmt: skip


_MODELS = (
    _llama("llama3-8b", 32, 8, 32, 14_336, 128_256),  # config.json of meta-llama/Meta-Llama-3-8B
    _llama("llama3-70b", 64, 8, 80, 28_672, 128_256),  # config.json of meta-llama/Meta-Llama-3-70B
    # config.json of meta-llama/Llama-3.1-405B as corrected: the first upload held each of the 8 kv heads twice.
    _llama("llama3-405b", 128, 8, 126, 53_248, 128_256),
    _llama("llama2-7b", 32, 32, 32, 11_008, 32_000),  # config.json of meta-llama/Llama-2-7b-hf
    _llama("lwm-7b", 32, 32, 32, 11_008, 32_000),  # config.json of LargeWorldModel/LWM-Text-1M
    _llama("qwen2.5-7b", 28, 4, 28, 18_944, 152_064),  # config.json of Qwen/Qwen2.5-7B
    _llama("qwen2.5-14b", 40, 8, 48, 13_824, 152_064),  # config.json of Qwen/Qwen2.5-14B
    _gpt_oss("gpt-oss-20b", 24, 32),  # config.json of openai/gpt-oss-20b
    _gpt_oss("gpt-oss-120b", 36, 128),  # config.json of openai/gpt-oss-120b
    # transformer/config.json of black-forest-labs/FLUX.1-dev: 19 double-stream and 38 single-stream blocks; the model
    # card says 12 billion.
    _diffusion("flux.1", 24, 19 + 38, 4 * 3072, 11_901_408_320),
    # wan_t2v_14B.py of Wan-Video/Wan2.1; its blocks also attend to the text, which is not split and not counted here.
    _diffusion("wan2.1-14b", 40, 40, 13_824, 14_288_491_584),
    # transformer/config.json of hunyuanvideo-community/HunyuanVideo: 20 double-stream and 40 single-stream blocks; the
    # model card says 13 billion.
    _diffusion("hunyuanvideo", 24, 20 + 40, 4 * 3072, 12_821_012_544),
)

PRESETS: Mapping[str, ModelSpec] = {model.name: model for model in _MODELS}
"""Models by name. Those without a vocabulary attend in both directions: plan them with `is_causal=False`."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window_pattern": 2},
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
        "sliding_window_pattern": 6,
    },
    "cohere2": {"sliding_window_pattern": 4},
    "gpt_oss": {"sliding_window_pattern": 2},
    "llama4_text": {"head_dim": 128, "sliding_window_pattern": 4},
}  # fmt: skip
"""What the configuration classes of `transformers` fill in where published files of their family are silent."""

UNGATED = {"bert", "bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "nemotron", "opt", "phi", "starcoder2"}
"""Families whose MLP has two matrices."""

NO_ATTENTION = ("mamba_d_state", "ssm_state_size", "linear_num_key_heads", "lru_width", "attn_type_list")
"""Keys of models that mix attention with layers of another kind."""

LAYER_TYPES = {"full_attention": False, "sliding_attention": True, "chunked_attention": True}
"""Kinds of layers, and whether a window bounds their work. A chunk sees at most as much as a window of its length."""


def find(name: str) -> ModelSpec:
    """A model by the name of a preset, whatever its case, or by a path.

    Args:
        name: a preset; or a Hugging Face `config.json`, a folder that holds one, or a file written by
            `ModelSpec.write`.

    Raises:
        InputError: there is neither such a preset nor such a path (the message lists the presets), or the file does
            not describe a model.
    """
    if name.lower() in PRESETS:
        return PRESETS[name.lower()]
    if os.path.isdir(name):
        return from_config(name)
    if not os.path.isfile(name):
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(
            f"unknown model {name[:200]!r}: there are {', '.join(PRESETS)}, or give the path of a config.json, of a "
            f"folder with one, or of a specification file{hint}"
        )
    data = load(name)
    ours = {key for key, field in ModelSpec.model_fields.items() if field.is_required()}
    return from_config(name) if isinstance(data, Mapping) and ours.isdisjoint(data) else ModelSpec.read(name)


def from_config(config: Mapping[str, Any] | str | Path) -> ModelSpec:
    """The shape that a Hugging Face `config.json` describes; of a multimodal model, that of its language model.

    Keys mean what they mean in `transformers`. An expert that every token goes through counts as an active expert; a
    layer of chunked attention counts as one with a window. Where layers differ in size, `parameters` is their sum.

    Args:
        config: path of the file or of the folder that holds it, or what the file holds.

    Raises:
        InputError: in one line, the file cannot be read, lacks a key, or holds something that no `ModelSpec` can say.
    """
    if isinstance(config, Mapping):
        return _Config(_flat(config), "the configuration").spec(str(config.get("model_type") or "custom"))
    path = Path(config)
    path = path / "config.json" if os.path.isdir(path) else path
    name = path.absolute().parent.name if path.name == "config.json" else path.stem
    data = load(path)
    if not isinstance(data, Mapping):
        raise InputError(f"{named(path)}: a JSON object is needed, got {repr(data)[:60]}")
    return _Config(_flat(data), named(path)).spec(name)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the language model, over those of the whole model, over what its family takes for granted."""
    text = config.get("text_config")
    values = {**config, **text} if isinstance(text, Mapping) else dict(config)
    return {**DEFAULTS.get(str(values.get("model_type")), {}), **values}


@dataclass(frozen=True)
class _Config:
    """What a `config.json` holds, read with the types that its keys must have."""

    values: Mapping[str, Any]
    where: str

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def wrong(self, key: str, wanted: str) -> InputError:
        return InputError(f"{self.where}: {key}: {wanted}, got {repr(self.values[key])[:60]}")

    def number(self, *keys: str, default: int | None = None, least: int = 1, most: int = 2**40) -> int:
        """The whole number under the first of the keys that is set."""
        key = next(filter(self.has, keys), None)
        if key is None and default is not None:
            return default
        if key is None:
            near = difflib.get_close_matches(keys[0], filter(self.has, map(str, self.values)), n=1)
            hint = f" (there is {named(near[0])})" if near else ""
            raise InputError(
                f"{self.where}: {' or '.join(keys)} is missing{hint}; add it, or "
                f"give a specification file with heads, kv_heads, head_dim, layers, hidden, intermediate and vocab"
            )
        value = self.values[key]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(key, f"a whole number from {least} to {most} is needed")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values[key] if self.has(key) else default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false is needed")
        return value

    def items(self, key: str) -> list[Any]:
        value = self.values[key] if self.has(key) else []
        if not isinstance(value, list):
            raise self.wrong(key, "a list is needed")
        return value

    def spec(self, name: str) -> ModelSpec:
        for key in filter(self.has, NO_ATTENTION):
            raise InputError(f"{self.where}: {key}: not all layers are attention, which no specification can say")
        heads = self.number("num_attention_heads", "n_head")
        hidden = self.number("hidden_size", "n_embd", "n_embed")
        layers = self.number("num_hidden_layers", "n_layer", most=2**16)
        gated = str(self.values.get("model_type")) not in UNGATED
        mlp, excess = self.mlp(layers, hidden, gated)
        attention, more = self.attention(heads, layers, hidden)
        window, windowed_layers = self.window(layers)
        fields = {
            "name": name, "layers": layers, "hidden": hidden, "vocab": self.number("vocab_size"), "dtype": self.dtype(),
            "gated": gated, "window": window, "windowed_layers": windowed_layers, **attention, **mlp,
            # Absent means true: the base class says so, and files are written without what it says.
            "tied_embeddings": self.flag("tie_word_embeddings", default=True),
        }  # fmt: skip
        try:
            spec = ModelSpec.read(fields)
            if excess + more:
                spec = ModelSpec.read({**fields, "parameters": spec.parameter_count - excess - more})
        except InputError as error:
            raise InputError(f"{self.where}: {error}") from None
        return spec

    def dtype(self) -> Any:
        value = next((self.values[key] for key in ("dtype", "torch_dtype") if self.has(key)), "auto")
        return "bfloat16" if value == "auto" else value.removeprefix("torch.") if isinstance(value, str) else value

    def attention(self, heads: int, layers: int, hidden: int) -> tuple[dict[str, int], int]:
        """Fields of the heads, and by how many parameters a count from them is too high."""
        if not self.has("qk_rope_head_dim"):
            few = self.flag("multi_query") and not self.flag("new_decoder_architecture")
            kv_heads = 1 if few else self.number("num_key_value_heads", "num_kv_heads", default=heads)
            head_dim = self.number("head_dim", default=hidden // heads)
            return {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}, 0
        # Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values have all heads once they are
        # brought back from what is cached, and their matrices go through a narrow waist.
        nope, rope = self.number("qk_nope_head_dim"), self.number("qk_rope_head_dim")
        value, waist = self.number("v_head_dim"), self.number("kv_lora_rank")
        queries = hidden * heads * (nope + rope)
        if self.has("q_lora_rank"):
            queries = self.number("q_lora_rank") * (hidden + heads * (nope + rope))
        count = queries + hidden * (waist + rope) + waist * heads * (nope + value) + heads * value * hidden
        fields = {"heads": heads, "kv_heads": heads, "head_dim": nope + rope, "v_head_dim": value}
        return fields, layers * (hidden * heads * 2 * (nope + rope + value) - count)

    def mlp(self, layers: int, hidden: int, gated: bool) -> tuple[dict[str, int], int]:
        """Fields of the MLPs, and by how many parameters a count from them is too high."""
        widths = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
        dense_widths = ("intermediate_size_mlp",) if self.has("intermediate_size_mlp") else widths
        default = None if gated else 4 * hidden
        routed = self.number("num_local_experts", "num_experts", "n_routed_experts", default=0, least=0)
        dense = layers - self.expert_layers(layers) if routed else layers
        if dense == layers:
            return {"intermediate": self.number(*dense_widths, default=default)}, 0
        width = self.number("moe_intermediate_size", *widths)
        shared_width = self.shared_width(width)
        shared = -(-shared_width // width)
        active = self.number("num_experts_per_tok", "experts_per_token") + shared
        excess = (layers - dense) * (shared * width - shared_width)
        if dense:
            excess += dense * ((routed + shared) * width - self.number(*dense_widths, default=default))
        fields = {"intermediate": width, "experts": routed + shared, "active_experts": active}
        return fields, (3 if gated else 2) * hidden * excess

    def expert_layers(self, layers: int) -> int:
        """How many of the layers have experts."""
        if self.has("moe_layers"):
            experts = _numbers(self.items("moe_layers"))
            return sum(layer in experts for layer in range(layers))
        first = self.number("first_k_dense_replace", default=0, least=0)
        every = self.number("moe_layer_freq", default=1)
        step = self.number("decoder_sparse_step", "interleave_moe_layer_step", default=1)
        dense = _numbers(self.items("mlp_only_layers"))
        return sum(
            layer not in dense and layer >= first and layer % every == 0 and (layer + 1) % step == 0
            for layer in range(layers)
        )

    def shared_width(self, width: int) -> int:
        """Width of what every token goes through beside the experts of that width that it is sent to."""
        if self.has("intermediate_size_mlp"):  # Llama-4
            return width
        experts = self.number("n_shared_experts", default=0, least=0)
        keys = ("shared_expert_intermediate_size", "shared_intermediate_size")
        return self.number(*keys, default=experts * width, least=0)

    def window(self, layers: int) -> tuple[int | None, int]:
        """How far back the windowed layers see, and how many there are."""
        kinds = self.items("layer_types")
        if any(kind not in list(LAYER_TYPES) for kind in kinds) or len(kinds) not in (0, layers):
            raise self.wrong("layer_types", f"one of {', '.join(LAYER_TYPES)} is needed for each of {layers} layers")
        size = self.number("sliding_window", "attention_chunk_size", default=0, least=0)
        if not size or not self.flag("use_sliding_window", default=True):
            return None, 0
        if kinds:
            windowed = sum(LAYER_TYPES[kind] for kind in kinds)
        elif self.flag("use_sliding_window"):  # Qwen2: from that layer on
            windowed = layers - min(layers, self.number("max_window_layers", default=0, least=0))
        elif self.items("no_rope_layers"):  # Llama-4: layers with rotary positions are chunked
            windowed = sum(map(bool, self.items("no_rope_layers")))
        else:  # all, or all but each n-th
            period = self.number("sliding_window_pattern", "no_rope_layer_interval", default=layers + 1)
            windowed = layers - layers // period
        return (size - 1, windowed) if windowed else (None, 0)


def _numbers(items: list[Any]) -> set[int]:
    return {item for item in items if isinstance(item, int)}
