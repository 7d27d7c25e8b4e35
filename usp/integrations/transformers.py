"""Sharded sequences for the models of Hugging Face transformers (5 or newer).

    handle = usp.integrations.transformers.enable(model, topology, layout="zigzag")
    out = model(**usp.shard_batch(batch, topology, layout="zigzag"))
    handle.disable()

`enable` registers an attention function and a mask function under a name of their own in transformers' registries
(`AttentionInterface`, `AttentionMaskInterface`) and switches this model to it; nothing is patched. The model gets a
copy of its config, so another model that was built from the same config object keeps its attention.

A forward hook carries the global length and the document boundaries to every attention layer as a keyword argument, so
recomputation in checkpointing sees what the forward pass saw, and two models in one process may differ.

What would make a sharded model differ from one process is refused in words, by `enable` where the config tells and by
the forward pass otherwise: attention dropout, chunked and linear attention, cross attention, caches,
masks that are not causal, windowed or made of documents, missing or local position ids, labels that are shifted after
sharding. The load-balancing loss of a mixture of experts stays what it is under data parallelism: each rank's own.

B batch, S tokens of this rank, H query heads, G kv heads, D head_dim of q and k, E head_dim of v.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from usp.arguments import AttentionOptions
from usp.attention import USPAttention
from usp.errors import InputError, USPError
from usp.shard import check_length, positions
from usp.topology import Topology

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
    from transformers.masking_utils import flash_attention_mask
except ImportError as error:
    raise ImportError(
        "usp.integrations.transformers needs transformers 5 or newer: pip install usp-attention[transformers]"
    ) from error

NO_PARAMETER = {
    "position_bias": "a position bias",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
}
"""Arguments of attention functions that `usp.attention` has no parameter for."""
NOT_NEEDED = {"attention_mask": None, "use_cache": False}
"""Arguments of the base model whose work is done, or not wanted, once a shard is described."""
LAYER_TYPES = ("full_attention", "sliding_attention")
LOSSES = (None, "ForCausalLM", "ForMaskedLM", "ForTokenClassification")
"""Losses that are sums over tokens."""
DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
PREFIX = "usp-"


Boundaries = tuple[int, ...] | tuple[tuple[int, ...], ...]
"""Of documents: of all rows, or of each row."""


class Shard(NamedTuple):
    """What the attention layers of one forward pass must know beyond their tensors.

    Attributes:
        seq_len: global number of tokens; None where every rank has the same number.
        cu_seqlens: document boundaries over the GLOBAL sequence, of all rows or one for each; or None.
    """

    seq_len: int | None
    cu_seqlens: Boundaries | None


class Enabled:
    """A model whose attention is sharded, until `disable` or the end of a `with` block.

    Attributes:
        model: the model.
        name: what its attention is called in transformers' registries.
    """

    def __init__(self, model: PreTrainedModel, name: str, undo: ExitStack) -> None:
        self.model, self.name, self._undo = model, name, undo

    def disable(self) -> None:
        """Gives the model back its config, and with it its attention. Again: nothing."""
        self._undo.close()

    def __enter__(self) -> "Enabled":
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()


def enable(
    model: PreTrainedModel,
    topology: Topology,
    *,
    layout: str = "contiguous",
    kernel: str = "auto",
    transport: str = "auto",
    check_positions: bool = True,
) -> Enabled:
    """Makes a model attend over the whole sequence when every rank gives it its shard, as from `usp.shard_batch`.

    The forward pass takes, besides the model's own arguments, `seq_len` (global number of tokens, for shards of
    different lengths) and the boundaries of packed documents over the GLOBAL sequence as `cu_seqlens`, or as
    transformers' own `cu_seq_lens_q` and `cu_seq_lens_k`. Under torch.compile boundaries must be integers, not a
    tensor, and each new packing compiles anew. `use_cache` is False unless asked for, which is refused.

    The loss that a causal language model returns for `labels` and `shift_labels` is this rank's part: with
    `num_items_in_batch` the sum over its tokens divided by that, as ever; without, `P * sum_local / N_sequence` for P
    ranks and N_sequence targets of the sequences they share. Averaged over ranks, as DDP and FSDP do with gradients, it
    is the mean over the targets of the sequences that one process would have returned.

    Args:
        model: a decoder, or an encoder without cross attention. Enable before wrapping in DDP or torch.compile.
        topology: the grid of processes; models in one process may have different ones.
        layout: how positions are dealt to ring ranks, the same as the batch's.
        kernel: see `USPAttention`.
        transport: see `USPAttention`.
        check_positions: refuse `position_ids` that are not those of this rank's shard, counted over the sequence or
            from the start of each document. Costs one synchronisation with the device a forward pass, and is not done
            under torch.compile. Turn it off for ids that jump on purpose.

    Returns:
        A handle whose `disable()` gives the model back its old config and attention; also a context manager. What was
        set on `model.config` in between goes with the copy.

    Raises:
        InputError: the model cannot be sharded exactly, or it is enabled already; the message has every reason.
    """
    if not isinstance(model, PreTrainedModel):
        raise InputError(
            f"model is a {type(model).__name__} and must be a transformers.PreTrainedModel: enable it first, then wrap "
            "it in DDP, torch.compile or PEFT"
        )
    if str(model.config._attn_implementation).startswith(PREFIX):
        raise InputError(f"{type(model).__name__} is enabled already: call disable() of its handle first")
    reasons = list(_refusals(model, topology))
    if reasons:
        raise InputError(f"{type(model).__name__} cannot be sharded exactly: {'; '.join(reasons)}")
    make = partial(USPAttention, topology=topology, layout=layout, kernel=kernel, transport=transport)
    adapter = _Adapter(model, topology, layout, make, check_positions)
    name = f"{PREFIX}{id(adapter):x}"  # the registries have no way to remove a name, so it is never another adapter's
    AttentionInterface.register(name, adapter.attend)
    AttentionMaskInterface.register(name, adapter.mask)
    undo = ExitStack()
    try:
        _switch(model, adapter, name, undo)
    except BaseException:
        undo.close()
        raise
    return Enabled(model, name, undo)


def _switch(model: PreTrainedModel, adapter: "_Adapter", name: str, undo: ExitStack) -> None:
    """Gives the model a config of its own, the attention called `name`, and the hooks."""
    memo: dict = {}  # what is one config stays one
    for module in model.modules():
        for attribute, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                undo.callback(setattr, module, attribute, value)
                setattr(module, attribute, copy.deepcopy(value, memo))
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise InputError(f"transformers cannot set the attention of {type(model).__name__} at run time")
    base = model.base_model
    undo.callback(base.register_forward_pre_hook(adapter.before_layers, with_kwargs=True).remove)
    if base is not model:
        undo.callback(model.register_forward_pre_hook(adapter.before_loss, with_kwargs=True).remove)


def _refusals(model: PreTrainedModel, topology: Topology) -> Iterator[str]:
    """Why a model cannot be sharded, as far as its config and its modules tell."""
    config, ulysses = model.config, topology.ulysses.degree
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        yield "it has cross attention, whose keys are another sequence's"
    if config.sub_configs:
        yield f"it has parts with configs of their own ({', '.join(config.sub_configs)}): enable its language model"
        return
    if not model._supports_attention_backend:
        yield "its attention does not come from transformers' AttentionInterface"
    kinds = set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES)
    if kinds:
        yield f"it has layers of type {', '.join(sorted(kinds))}, and only {' and '.join(LAYER_TYPES)} are exact"
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        yield "it has convolutions over the sequence, which would not see the neighbouring shard"
    if getattr(model.base_model, "pooler", None) is not None:
        yield "its pooler reads the first token, which one rank has: build it with add_pooling_layer=False"
    if getattr(model, "loss_type", None) not in LOSSES:
        yield f"its loss ({model.loss_type}) is not a sum over tokens"
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", False):
        yield "a decoder that is switched to bidirectional attention is not supported"
    for name in DROPOUTS:
        if getattr(config, name, None):
            yield f"attention dropout is not supported: set {name} to 0, it is {getattr(config, name)}"
    heads = getattr(config, "num_attention_heads", None)
    if heads is not None and heads < ulysses:
        yield f"it has {heads} query heads and ulysses_degree={ulysses} needs one a rank: use ulysses_degree <= {heads}"
    arguments = inspect.signature(model.base_model.forward).parameters
    if "position_ids" not in arguments:
        yield "its forward pass takes no position_ids, so a shard would count from 0"
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in arguments.values()):
        yield "its forward pass takes no keyword arguments for the attention"


def _largest_exact_length(config: PreTrainedConfig) -> int | None:
    """The longest sequence for which rotary frequencies do not depend on the largest position a rank sees."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *(nested for nested in parameters.values() if isinstance(nested, dict))):
        if rope.get("rope_type") == "longrope":
            return rope["original_max_position_embeddings"]
        if "dynamic" in rope.get("rope_type", ""):
            return config.max_position_embeddings
    return None


class _Adapter:
    """The two functions that transformers calls and the two hooks, for one model. Holds nothing of a forward pass."""

    def __init__(
        self,
        model: PreTrainedModel,
        topology: Topology,
        layout: str,
        make: Callable[..., USPAttention],
        check_positions: bool,
    ) -> None:
        self.topology, self.layout, self.make, self.check_positions = topology, layout, make, check_positions
        self.longest = _largest_exact_length(model.config)
        self.base_arguments = tuple(inspect.signature(model.base_model.forward).parameters)
        self.arguments = tuple(inspect.signature(model.forward).parameters)
        scales = {getattr(module, "scaling", None) for module in model.modules()}
        # Made here, as torch.compile cannot look kernels up by name while it traces.
        self.attentions = {scale: make(scale=scale) for scale in scales if isinstance(scale, float | None)}

    def _refuse(self, reason: str) -> NoReturn:
        error = InputError(reason)
        self.topology.object(error)
        raise error

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **given: Any
    ) -> tuple[Tensor, None]:
        """Transformers' attention function: (B, H, S, D), (B, G, S, D), (B, G, S, E) -> ((B, S, H, E), None)."""
        window = given.get("sliding_window")
        reason = self._refusal(module, query, key, attention_mask, given)
        if reason is not None:
            self._refuse(f"{type(module).__name__} cannot attend exactly: {reason}")
        is_causal = given.get("is_causal")
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        options: AttentionOptions = {"is_causal": is_causal}
        if window is not None:  # a query sees the keys less than `window` away from it
            options["window_size"] = (window - 1, 0 if is_causal else window - 1)
        shard: Shard = given["usp_shard"]
        if shard.cu_seqlens is not None:
            options["cu_seqlens"] = shard.cu_seqlens
        if given.get("softcap") is not None:  # Gemma 2
            options["softcap"] = given["softcap"]
        if given.get("s_aux") is not None:  # gpt-oss
            options["sinks"] = given["s_aux"]
        scale = given.get("scaling")
        attention = self.attentions[scale] if scale in self.attentions else self.make(scale=scale)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return attention(query, key, value, seq_len=shard.seq_len, **options), None

    def _refusal(
        self, module: nn.Module, query: Tensor, key: Tensor, attention_mask: object, given: Mapping[str, Any]
    ) -> str | None:
        if given.get("usp_shard") is None:
            return "its model does not hand keyword arguments on to the attention, or was not called as a whole"
        if attention_mask is not None:
            return "it was given a mask; say what a query sees by is_causal, sliding_window and cu_seqlens"
        if query.shape[2] != key.shape[2]:
            return f"{query.shape[2]} queries and {key.shape[2]} keys: caches and cross attention are not supported"
        if given.get("dropout", 0.0):
            return f"attention dropout is {given['dropout']}, and must be 0"
        if given.get("output_attentions"):
            return "output_attentions=True needs all weights of attention, which no rank has"
        for name, meaning in NO_PARAMETER.items():
            if given.get(name) is not None:
                return f"{meaning} ({name}) is not supported"
        if given.get("sliding_window") is None and _is_sliding(module):
            return "its config has a sliding window, which the model keeps in its mask and does not hand on"
        return None

    def mask(self, *, attention_mask: Tensor | None = None, use_vmap: bool = False, **given: Any) -> None:
        """Transformers' mask function. Never makes a mask: is_causal, sliding_window and cu_seqlens say it all."""
        if use_vmap:
            self._refuse("the model adds a mask function of its own, which is not supported")
        if flash_attention_mask(attention_mask=attention_mask, **given) is not None:
            self._refuse("the model made a padding mask of its own, which is not supported")

    def before_loss(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Forward pre-hook of a model with a loss: refuses a wrong one, and counts the targets of all shards."""
        given = dict(zip(self.arguments, args, strict=False)) | kwargs
        if given.get("labels") is None:
            return (), given
        reason = None
        if getattr(module, "loss_type", None) != "ForCausalLM":
            reason = f"the loss of {type(module).__name__} is a mean over one shard"
        elif given.get("loss_weights") is not None:
            reason = "transformers' loss takes no loss_weights"
        elif given.get("shift_labels") is None:
            reason = "without shift_labels the model would shift labels inside the shard and lose its last target"
        if reason is not None:
            self._refuse(
                f"labels were given, and {reason}: shift before sharding, as usp.shard_batch does, or leave labels out "
                "and pass the logits to usp.cross_entropy"
            )
        if given.get("num_items_in_batch") is None:
            given["num_items_in_batch"] = self._targets(given["shift_labels"]) / self.topology.sequence_degree
        return (), given

    def _targets(self, shift_labels: Tensor) -> Tensor:
        """Number of valid targets of the whole sequences, at least 1. Collective over the ranks that share them."""
        total = (shift_labels != -100).sum()
        for axis in (self.topology.ulysses, self.topology.ring):
            if axis.group is not None:
                dist.all_reduce(total, group=axis.group)
        return total.clamp(min=1)

    def before_layers(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Forward pre-hook of the base model: checks its arguments, and hands a `Shard` on to the attention layers."""
        given = dict(zip(self.base_arguments, args, strict=False)) | kwargs
        try:
            shard = self._shard(module, given)
        except USPError as error:
            self.topology.object(error)
            raise
        given |= {name: value for name, value in NOT_NEEDED.items() if name in self.base_arguments}
        return (), given | {"usp_shard": shard}

    def _shard(self, module: nn.Module, given: dict[str, Any]) -> Shard:
        """Takes the arguments that describe the shard out of `given`, once they are found right."""
        for name in ("cache", "past_key_values", "use_cache"):
            if given.get(name) not in (None, False):
                raise InputError(f"{name} was given: generating from a cache with a sharded model is not supported")
        if given.get("encoder_hidden_states") is not None:
            raise InputError("encoder_hidden_states was given: cross attention is not supported")
        if given.get("output_attentions") or getattr(module.config, "output_attentions", False):
            raise InputError("output_attentions=True needs all weights of attention, which no rank has")
        _check_mask(given.get("attention_mask"))
        shard = Shard(given.pop("seq_len", None), _documents(given))
        position_ids = given.get("position_ids")
        if position_ids is None:
            raise InputError(
                "position_ids is missing, and the model would count from 0 on every rank: pass those of the shard, "
                "from usp.shard_batch or usp.positions"
            )
        seq_len = shard.seq_len
        if seq_len is None:
            seq_len = position_ids.shape[-1] * self.topology.sequence_degree
        if self.longest is not None and seq_len > self.longest:
            raise InputError(
                f"the sequence has {seq_len} tokens and this model's rotary frequencies depend on the largest position "
                f"of the input above {self.longest}, which a shard does not see: set another rope_type"
            )
        # A rank cannot tell positions of axes apart in (3, B, S); and reading values would break a compiled graph.
        if self.check_positions and position_ids.ndim < 3 and not torch.compiler.is_compiling():
            self._check_positions(position_ids, seq_len, shard.cu_seqlens)
        return shard

    def _check_positions(self, given: Tensor, seq_len: int, cu_seqlens: Boundaries | None) -> None:
        topology, layout = self.topology, self.layout
        check_length(given.shape[-1], "position_ids", seq_len, topology, layout)
        expected = positions(seq_len, topology, layout, device=given.device)
        right = given == expected
        if cu_seqlens is not None:
            rows = [cu_seqlens] if isinstance(cu_seqlens[0], int) else cu_seqlens
            right |= given == torch.stack([_in_documents(expected, row) for row in rows])
        if not right.all():
            packed = "" if cu_seqlens is not None else "; positions that restart need the documents' cu_seqlens"
            raise InputError(
                f"position_ids on rank {topology.rank} start with {given.flatten()[:4].tolist()}, and the {layout} "
                f"layout of a sequence of {seq_len} gives that rank {expected[:4].tolist()}: take them from "
                f"usp.shard_batch or usp.positions, with the layout given to enable{packed}; check_positions=False "
                "accepts any"
            )


def _in_documents(positions: Tensor, boundaries: Any) -> Tensor:
    """The same positions, counted from the starts of their documents."""
    ends = torch.tensor(boundaries, device=positions.device)
    return positions - ends[torch.bucketize(positions, ends, right=True) - 1]


def _is_sliding(module: nn.Module) -> bool:
    """Whether the config gives this layer a sliding window."""
    kinds, index = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and index is not None:
        return kinds[index] == "sliding_attention"
    return getattr(module.config, "sliding_window", None) is not None


def _check_mask(mask: Any) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        kind = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            f"attention_mask is {kind}: a dense or prepared mask cannot be sharded exactly; describe packed documents "
            "by cu_seqlens"
        )
    if not mask.all():
        raise InputError(
            "attention_mask has padding: usp.shard_batch makes padding a document of its own, and leaves no mask"
        )


def _documents(given: dict[str, Any]) -> Boundaries | None:
    """Takes the document boundaries out of the model's arguments."""
    names = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
    found = {name: given.pop(name) for name in names if given.get(name) is not None}
    for name in ("max_length_q", "max_length_k"):  # follow from the boundaries
        given.pop(name, None)
    ends = {_plain(value.tolist() if isinstance(value, Tensor) else value) for value in found.values()}
    if len(ends) > 1:
        raise InputError(f"{' and '.join(found)} differ: queries and keys must have the same documents")
    return ends.pop() if ends else None


def _plain(boundaries: Sequence[Any]) -> Boundaries:
    return tuple(tuple(map(int, row)) if isinstance(row, Sequence) else int(row) for row in boundaries)  # pyright: ignore[reportReturnType] of a mixture, refused later
