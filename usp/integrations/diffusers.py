"""diffusers' transformers with their tokens sharded: FLUX (`FluxTransformer2DModel`) and Wan (`WanTransformer3DModel`).

    handle = enable(transformer, topology)
    sample = transformer(hidden_states=latents, ...).sample  # whole tensors in, the whole sample out, on every rank
    handle.disable()

**Tokens.** The ranks of a sequence pass the same whole inputs: the same latents, noise, time steps and text. Inside,
each holds an even share of the tokens, whatever their number. FLUX attends to text and image together, so they are one
sequence, text first: one rank may hold only text where another holds only image, and nothing is held twice. Wan's video
tokens are sharded, and its cross-attention reads the whole text on every rank.

**Gradients.** The mean over all ranks of a parameter's gradient is the gradient of the mean over all ranks of their
losses. DDP and FSDP over data x sequence ranks take just that mean, so a training script changes nothing: the ranks of
a sequence have equal losses, and no factor makes up for them. It holds because the gather of the output sums,
backwards, what the losses of all ranks ask of a shard (a reduce-scatter). diffusers' own context parallelism takes the
local slice instead: its mean is too small by the number of ranks of a sequence.

B batch, S tokens of the whole sequence, S_local this rank's, H heads, D head_dim, C channels.
"""

import inspect
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from usp import transports
from usp.attention import USPAttention
from usp.errors import InputError, USPError
from usp.positions import split
from usp.shard import local_positions, shard, unshard
from usp.topology import Axis, Topology
from usp.transports.base import waiting

try:
    from diffusers.models.embeddings import apply_rotary_emb
    from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor, FluxTransformer2DModel
    from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor, WanTransformer3DModel
except ImportError as error:
    raise ImportError("usp.integrations.diffusers needs diffusers: pip install usp-attention[diffusers]") from error

Rotary = tuple[Tensor, Tensor, int]
"""cos and sin of this rank's tokens, and the number of tokens of the whole sequence.

The number travels among the arguments of a block: recomputation in a backward pass finds the one of its forward.
"""


def enable(transformer: nn.Module, topology: Topology, *, kernel: str = "auto", transport: str = "auto") -> "Handle":
    """Shards a transformer's tokens over the ranks of a sequence, until the handle's `disable`.

    Self-attention runs through `USPAttention` with a full mask, and every other layer sees this rank's tokens. Gradient
    checkpointing, fused projections, and DDP or FSDP around the transformer work as before; no parameter is touched.

    Args:
        transformer: a `FluxTransformer2DModel` or a `WanTransformer3DModel`.
        topology: the grid of processes.
        kernel: as `USPAttention` takes it.
        transport: as `USPAttention` takes it.

    Returns:
        The handle that undoes it; also a context manager.

    Raises:
        InputError: another class, dropout, a processor other than the class's own (IP-adapters), diffusers' own
            parallelism, or a transformer that is enabled already. When the transformer is called: attention masks,
            ControlNet residuals, caches, ids that do not match the tokens, fewer tokens than ranks.
    """
    attend = USPAttention(topology=topology, kernel=kernel, transport=transport)
    if isinstance(transformer, FluxTransformer2DModel):
        return _Flux(transformer, attend)
    if isinstance(transformer, WanTransformer3DModel):
        return _Wan(transformer, attend)
    raise InputError(
        f"enable takes a FluxTransformer2DModel or a WanTransformer3DModel, got {type(transformer).__name__}"
    )


class Handle(AbstractContextManager):
    """A transformer whose tokens are sharded. `disable`, or leaving it as a context manager, undoes that."""

    _own: ClassVar[type]

    def __init__(self, transformer: Any, topology: Topology, attentions: list[Any], processor: "_Processor") -> None:
        self._topology = topology
        # Of the forward under way: set by its first hook and read by its last, neither of which is ever recomputed.
        self._text, self._seq_len = 0, 0
        self._processors = [(attention, attention.processor) for attention in attentions]
        _check(transformer, [processor for _, processor in self._processors], self._own)
        for attention in attentions:
            attention.set_processor(processor)
        self._hooks = [
            transformer.register_forward_pre_hook(self._enter, with_kwargs=True),
            transformer.proj_out.register_forward_hook(self._gather),
        ]

    def disable(self) -> None:
        """Undoes `enable`: the transformer has its own processors and whole tokens again."""
        for hook in self._hooks:
            hook.remove()
        for attention, processor in self._processors:
            attention.set_processor(processor)
        self._hooks, self._processors = [], []

    def __exit__(self, *_: object) -> None:
        self.disable()

    def _inputs(self, transformer: Any, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a forward with what is to be sharded, sharded. Calls `_begin`."""
        raise NotImplementedError

    def _enter(self, transformer: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        given = inspect.signature(transformer.forward).bind(*args, **kwargs).arguments
        try:
            if transformer.is_cache_enabled:
                raise InputError(
                    "enable_cache(): ranks would skip blocks each by its own tokens; disable_cache() first"
                )
            return (), self._inputs(transformer, given)
        except USPError as error:
            self._topology.object(error)
            raise

    def _begin(self, text: int, seq_len: int) -> range:
        """Notes the length of a sequence, `text` of whose tokens do not reach the output; gives this rank's rows."""
        ranks = self._topology.sequence_degree
        if seq_len < ranks:
            raise InputError(f"a sequence of {seq_len} tokens is too short for {ranks} ranks: use {seq_len} at most")
        self._text, self._seq_len = text, seq_len
        (rows,) = local_positions(seq_len, self._topology, "contiguous")
        return rows

    def _cut_rotary(self, dim: int, cos_sin: Any) -> Rotary:
        cos, sin = (shard(x, self._topology, dim) for x in cos_sin)
        return cos, sin, self._seq_len

    def _gather(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """(B, S_local, C), text tokens left out -> (B, S, C), text tokens left out."""
        (rows,) = local_positions(self._seq_len, self._topology, "contiguous")
        padded = F.pad(output, (0, 0, len(rows) - output.shape[1], 0))
        return _Gather.apply(padded, self._topology, self._seq_len)[:, self._text :]


class _Flux(Handle):
    _own = FluxAttnProcessor

    def __init__(self, transformer: Any, attend: USPAttention) -> None:
        blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
        super().__init__(transformer, attend.topology, [block.attn for block in blocks], _FluxProcessor(attend))
        self._hooks.append(transformer.pos_embed.register_forward_hook(lambda _, __, out: self._cut_rotary(0, out)))

    def _inputs(self, transformer: Any, given: dict[str, Any]) -> dict[str, Any]:
        residuals = ("controlnet_block_samples", "controlnet_single_block_samples")
        unsupported = [name for name in residuals if given.get(name) is not None]
        unsupported += sorted(set(given.get("joint_attention_kwargs") or ()) - {"scale"})
        if unsupported:
            raise InputError(
                f"{', '.join(unsupported)}: not supported while tokens are sharded; leave out, or disable()"
            )
        image, text = given["hidden_states"], given["encoder_hidden_states"]
        for name, ids, tokens in (("img_ids", given["img_ids"], image), ("txt_ids", given["txt_ids"], text)):
            if ids.shape[-2] != tokens.shape[1]:
                raise InputError(f"{name} has {ids.shape[-2]} rows for {tokens.shape[1]} tokens: give one row a token")
        before = text.shape[1]
        rows = self._begin(before, before + image.shape[1])
        image = image[:, max(rows.start - before, 0) : max(rows.stop - before, 0)]
        return {**given, "hidden_states": image, "encoder_hidden_states": text[:, rows.start : rows.stop]}


class _Wan(Handle):
    _own = WanAttnProcessor

    def __init__(self, transformer: Any, attend: USPAttention) -> None:
        attentions = [block.attn1 for block in transformer.blocks]
        super().__init__(transformer, attend.topology, attentions, _WanProcessor(attend))
        self._hooks += [
            transformer.rope.register_forward_hook(lambda _, __, out: self._cut_rotary(1, out)),
            # (B, C, frames, height, width) becomes the (B, C, S_local) that the model makes of it anyway.
            transformer.patch_embedding.register_forward_hook(
                lambda _, __, out: shard(out.flatten(2), self._topology, 2)
            ),
        ]

    def _inputs(self, transformer: Any, given: dict[str, Any]) -> dict[str, Any]:
        sizes = given["hidden_states"].shape[2:]
        seq_len = math.prod(size // patch for size, patch in zip(sizes, transformer.config.patch_size, strict=True))
        self._begin(0, seq_len)
        timestep = given["timestep"]
        if timestep.ndim == 1:
            return given
        if timestep.shape[1] != seq_len:
            raise InputError(
                f"timestep has {timestep.shape[1]} columns for {seq_len} tokens: give one a token, or (B,)"
            )
        return {**given, "timestep": shard(timestep, self._topology, 1)}


def _check(transformer: nn.Module, processors: list[object], own: type) -> None:
    for kind in map(type, processors):
        if issubclass(kind, _Processor):
            raise InputError("this transformer is enabled already: call disable() on its handle first")
        if kind is not own:
            raise InputError(
                f"attention runs through {kind.__name__}, and only {own.__name__} can be sharded: "
                f"unload the adapter that brought it, or transformer.set_attn_processor({own.__name__}())"
            )
    if getattr(transformer, "_parallel_config", None) is not None:  # diffusers has no public word for it
        raise InputError("enable_parallelism() was called on this transformer: shard it by one of the two, not both")
    dropout = max((m.p for m in transformer.modules() if isinstance(m, nn.Dropout)), default=0.0)
    if dropout:
        raise InputError(f"dropout is {dropout:g}: ranks would draw other numbers than one process does; set it to 0")


# ---- attention processors --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Processor:
    """diffusers' own processor of a model, step by step, with `USPAttention` where that one attends."""

    attend: USPAttention

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seq_len: int) -> Tensor:
        """(B, S_local, H, D) three times -> (B, S_local, H * D) in the dtype of query."""
        if mask is not None:
            raise InputError("attention_mask: dense masks cannot be sharded; leave it out, and padding with it")
        out = self.attend(query, key, value, seq_len=seq_len)
        assert isinstance(out, Tensor)  # no lse was asked for
        return out.flatten(2)


class _FluxProcessor(_Processor):
    def __call__(
        self,
        attn: FluxAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        assert image_rotary_emb is not None  # the model always has them
        cos, sin, seq_len = image_rotary_emb
        query, key, value = _project(attn, hidden_states, "to_qkv", "to_q", "to_k", "to_v")
        query, key = attn.norm_q(query), attn.norm_k(key)
        if encoder_hidden_states is not None:
            names = "to_added_qkv", "add_q_proj", "add_k_proj", "add_v_proj"
            query_text, key_text, value_text = _project(attn, encoder_hidden_states, *names)
            query = torch.cat((attn.norm_added_q(query_text), query), dim=1)
            key = torch.cat((attn.norm_added_k(key_text), key), dim=1)
            value = torch.cat((value_text, value), dim=1)
        rotate: Any = apply_rotary_emb  # whose annotations are not right
        query, key = (rotate(x, (cos, sin), sequence_dim=1) for x in (query, key))
        out = self._attend(query, key, value, attention_mask, seq_len)
        if encoder_hidden_states is None:
            return out
        text, image = out.tensor_split((encoder_hidden_states.shape[1],), dim=1)
        return attn.to_out[1](attn.to_out[0](image.contiguous())), attn.to_add_out(text.contiguous())


def _project(attn: Any, x_BSC: Tensor, fused: str, *separate: str) -> Iterator[Tensor]:
    """Query, key and value, (B, S_local, H, D) each, by one projection or three."""
    if attn.fused_projections:
        projected = getattr(attn, fused)(x_BSC).chunk(3, dim=-1)
    else:
        projected = (getattr(attn, name)(x_BSC) for name in separate)
    return (x.unflatten(-1, (attn.heads, -1)) for x in projected)


class _WanProcessor(_Processor):
    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Rotary | None = None,
    ) -> Tensor:
        assert rotary_emb is not None and encoder_hidden_states is None  # self-attention
        cos, sin, seq_len = rotary_emb
        query, key, value = _project(attn, hidden_states, "to_qkv", "to_q", "to_k", "to_v")
        # Wan's norm is over all heads.
        query, key = (norm(x.flatten(2)).view_as(x) for norm, x in ((attn.norm_q, query), (attn.norm_k, key)))
        query, key = (_rotate(x, cos[..., 0::2], sin[..., 1::2]) for x in (query, key))
        out = self._attend(query, key, value, attention_mask, seq_len)
        return attn.to_out[1](attn.to_out[0](out))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Wan's rotary embedding of neighbouring channels; x (B, S_local, H, D), cos and sin (1, S_local, 1, D / 2)."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).type_as(x)


# ---- the gather ------------------------------------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    """(B, S_local, C) -> (B, S, C); backwards, the sum over ranks of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x_BSC: Tensor, topology: Topology, seq_len: int) -> Tensor:
        ctx.topology = topology
        return unshard(x_BSC.detach(), topology, dim=1, length=seq_len)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSC: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows = grad_BSC.to(torch.promote_types(grad_BSC.dtype, torch.float32)).transpose(0, 1)
        rows = _reduce_scatter(_reduce_scatter(rows, ctx.topology.ring), ctx.topology.ulysses)
        return rows.transpose(0, 1).to(grad_BSC.dtype), None, None


def _reduce_scatter(rows: Tensor, axis: Axis) -> Tensor:
    """This rank's share of the rows, summed over an axis; shares may differ by one row."""
    shares = [rows[run.start : run.stop].contiguous() for run in split(len(rows), axis.degree)]
    total = shares.pop(axis.rank)
    peers = [rank for rank in range(axis.degree) if rank != axis.rank]
    received = {peer: torch.empty_like(total) for peer in peers}
    with waiting(f"reduce-scatter along {axis.name}"):
        flight = transports.load("auto", axis.group).exchange(dict(zip(peers, shares, strict=True)), received)
        flight.wait()
    return sum(received.values(), start=total)
