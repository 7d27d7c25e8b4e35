"""What a plan is made from: the model, the cluster and the workload, as strict values read from flags or files.

A specification is frozen; it can be read from a mapping, JSON or YAML, and written back. What a file holds and the
specification does not know is refused: a misspelt key is never a silent default.
"""

import difflib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from usp import files
from usp.errors import InputError
from usp.mask import Mask

SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
LONGEST_NUMBER = 1000
"""Characters of a number in a file."""
MOST_CHUNKS = 2**12
"""Chunks of the finest cut that is planned for: every boundary is listed."""


def parse_size(value: Any) -> Any:
    """A count of tokens from text: "128K" is 131,072 and "1M" is 1,048,576. Anything but text is returned as it is.

    Raises:
        ValueError: the text is no such count.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d{1,3}(?:[,_]\d{3}){1,4}|\d{1,15})(\.\d{1,9})?([KMG]?)", value.strip().upper(), re.ASCII)
    size = Decimal(re.sub("[,_]", "", match[1]) + (match[2] or "")) * SIZES[match[3]] if match else Decimal("0.5")
    if size != int(size):
        raise ValueError(f"{value[:40]!r} is not a number of tokens: give one like 131072, 128K or 1M (K is 1,024)")
    return int(size)


def load(path: str | Path) -> Any:
    """What a JSON or YAML file holds.

    Raises:
        InputError: in one line, it cannot be read, or is neither.
    """
    text = files.read(path)
    try:
        with suppress(ValueError):
            return json.loads(text)  # first, since YAML 1.1 reads JSON's 1e-05 as text
        return _Loader(text).get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{files.named(path)} is neither JSON nor YAML: {' '.join(str(error).split())}") from None


class _Loader(yaml.SafeLoader):
    """Plain values, of which there are no more than a file can hold without aliases.

    An alias costs three characters and may stand for millions of values, which those who merge or write them pay for;
    what holds itself has no end. A number in base 60 is read in the square of its length.
    """

    def construct_document(self, node: Any) -> Any:
        size, left = 0, [node]
        while left:
            part = left.pop()
            size += len(part.value)  # characters, items or pairs: each takes a byte of the file at least
            if size > files.MOST_BYTES:
                raise yaml.YAMLError(f"its aliases stand for more than {files.MOST_BYTES:,} values")
            if isinstance(part, yaml.MappingNode):
                left += chain.from_iterable(part.value)
            elif isinstance(part, yaml.SequenceNode):
                left += part.value
            elif len(part.value) > LONGEST_NUMBER and part.tag != "tag:yaml.org,2002:str":
                raise yaml.YAMLError(f"a number of {len(part.value):,} characters")
        return super().construct_document(node)


Count = Annotated[int, Field(ge=1, le=2**40)]
Share = Annotated[int, Field(ge=0, le=2**40)]
Size = Annotated[Count, BeforeValidator(parse_size)]
Part = Annotated[Share, BeforeValidator(parse_size)]
Rate = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Delay = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Spec(BaseModel):
    """What all specifications share."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def read(cls, source: Mapping[str, Any] | str | Path) -> Self:
        """Reads a specification from a mapping, or from a JSON or YAML file.

        Raises:
            InputError: in one line, the file cannot be read, or which fields are wrong, what they hold and what is
                wanted.
        """
        data, where = (source, "") if isinstance(source, Mapping) else (load(source), f"{files.named(source)}: ")
        try:
            text = json.dumps(data, default=lambda value: dict(value) if isinstance(value, Mapping) else [repr(value)])
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"{where}{cls.__name__}: not what JSON can hold: {error}") from None
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise InputError(f"{where}{explain(error, cls)}") from None

    def write(self, path: str | Path) -> None:
        """Writes it as YAML, or as JSON if the name says so.

        Raises:
            InputError: the file cannot be written; what was there before is there still.
        """
        data = self.model_dump(mode="json", exclude_none=True)
        text = json.dumps(data, indent=2) if Path(path).suffix == ".json" else yaml.safe_dump(data, sort_keys=False)
        files.write(path, text)


class ModelSpec(Spec):
    """The shape of a transformer, as far as attention and memory depend on it.

    Attributes:
        name: what to call it.
        heads: query heads of a layer.
        kv_heads: key/value heads of a layer; `heads` is a multiple of it.
        head_dim: size of a query and key head.
        v_head_dim: size of a value head; None: `head_dim`.
        layers: layers with attention.
        hidden: width of the residual stream.
        intermediate: width of the MLP, or of one expert.
        vocab: size of the vocabulary; 0 for a model without one (a diffusion transformer).
        dtype: of parameters and activations in compute.
        gated: whether the MLP has three matrices (SwiGLU) and not two.
        experts: MLPs of a layer.
        active_experts: how many of them a token goes through.
        tied_embeddings: whether the embedding is also the output matrix.
        parameters: their number; None: counted from the shape.
        window: how far back the windowed layers see, the token itself left out.
        windowed_layers: how many of the layers have that window.
    """

    name: str = "custom"
    heads: Count
    kv_heads: Count
    head_dim: Annotated[int, Field(ge=1, le=2**16)] = 128
    v_head_dim: Annotated[int, Field(ge=1, le=2**16)] | None = None
    layers: Count = 1
    hidden: Count
    intermediate: Count
    vocab: Share = 0
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    gated: bool = True
    experts: Count = 1
    active_experts: Count = 1
    tied_embeddings: bool = False
    parameters: Annotated[int, Field(ge=1, le=2**50)] | None = None
    window: Share | None = None
    windowed_layers: Share = 0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.active_experts > self.experts:
            raise ValueError(f"active_experts={self.active_experts} is more than experts={self.experts}")
        if self.windowed_layers > self.layers:
            raise ValueError(f"windowed_layers={self.windowed_layers} is more than layers={self.layers}")
        if self.windowed_layers and self.window is None:
            raise ValueError(f"windowed_layers={self.windowed_layers} needs a window")
        return self

    @property
    def value_dim(self) -> int:
        """Size of a value head."""
        return self.v_head_dim or self.head_dim

    @property
    def window_mask(self) -> Mask:
        """What the windowed layers see of a workload's mask: without a causal one as far ahead as back."""
        return Mask.full() if self.window is None else Mask.window(self.window, self.window)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def parameter_count(self) -> int:
        """Number of parameters: as given, or counted from the shape (biases and norms' scales left out)."""
        if self.parameters is not None:
            return self.parameters
        attention = self.hidden * (
            (self.heads + self.kv_heads) * self.head_dim + (self.heads + self.kv_heads) * self.value_dim
        )
        mlp = self.experts * (3 if self.gated else 2) * self.hidden * self.intermediate
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab * self.hidden
        return self.layers * (attention + mlp) + embeddings


class KernelSpeed(Spec):
    """How fast one device computes attention, for square causal blocks of one length.

    Attributes:
        block_length: queries and keys of the block.
        forward_tflops: 10^12 FLOP/s of the forward pass, counting visible pairs only.
        backward_tflops: the same for the backward pass, counting 2.5 x the forward's FLOPs.
    """

    block_length: Count
    forward_tflops: Rate
    backward_tflops: Rate


class DeviceSpec(Spec):
    """One device.

    Attributes:
        name: what to call it.
        memory_gib: its memory, GiB.
        peak_tflops: dense half-precision peak, 10^12 FLOP/s.
        memory_gb_per_s: bandwidth of its memory, 10^9 bytes/s.
        attention: speed of the attention kernel by block length, ascending; between them it is interpolated.
        head_dim: size of the heads that this was measured with.
        launch_us: time to launch one kernel call, microseconds: what a short tile costs at least.
        merge_bytes: bytes of memory traffic for each element of a block's output that is merged into the total.
    """

    name: str = "custom"
    memory_gib: Rate
    peak_tflops: Rate
    memory_gb_per_s: Rate
    attention: tuple[KernelSpeed, ...]
    head_dim: Annotated[int, Field(ge=1, le=2**16)] = 128
    launch_us: Delay = 30.0
    merge_bytes: Delay = 32.0

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        lengths = [point.block_length for point in self.attention]
        if not lengths or lengths != sorted(set(lengths)):
            raise ValueError(f"attention: there must be block lengths, and they must ascend, got {lengths}")
        return self

    @property
    def memory_bytes(self) -> int:
        """Its memory, bytes."""
        return int(self.memory_gib * 2**30)


class SpanSpeed(Spec):
    """Bandwidth in a group that spans so many neighbouring devices.

    Attributes:
        devices: devices from the first to the last member of the group.
        gb_per_s: bytes each device sends to others, 10^9 bytes/s.
    """

    devices: Count
    gb_per_s: Rate


class LinkSpec(Spec):
    """What connects devices. Bandwidths are per device and one direction.

    Attributes:
        name: what to call it.
        gb_per_s: of any traffic that is not listed below, 10^9 bytes/s.
        ring: of a hop, where every member sends to the next, by how many devices the ring spans (PCIe differs by switch
            and socket); a span that is not listed has the speed of the next longer one, beyond the last the last.
        all_to_all: of an all-to-all, likewise; between nodes, only what leaves the node is counted.
        latency_us: fixed cost of a message or of a collective, microseconds.
        full_duplex: whether sending and receiving do not slow each other down.
        overlap: share of a transfer's time that computing at the same time hides: 1 where it costs the device nothing,
            0 where it is the device's own work (sockets on a CPU).
    """

    name: str = "custom"
    gb_per_s: Rate
    ring: tuple[SpanSpeed, ...] = ()
    all_to_all: tuple[SpanSpeed, ...] = ()
    latency_us: Delay = 20.0
    full_duplex: bool = True
    overlap: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 1.0

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        for kind, speeds in (("ring", self.ring), ("all_to_all", self.all_to_all)):
            spans = [point.devices for point in speeds]
            if spans != sorted(set(spans)):
                raise ValueError(f"{kind}: devices must ascend, got {spans}")
        return self

    def speed(self, kind: Literal["ring", "all_to_all"], devices: int) -> float:
        """Bandwidth of a ring's hop or of an all-to-all that spans so many devices, 10^9 bytes/s."""
        speeds = getattr(self, kind)
        last = speeds[-1].gb_per_s if speeds else self.gb_per_s
        return next((point.gb_per_s for point in speeds if point.devices >= devices), last)


MOST_NODES = 2**16
"""Of a cluster: what is beyond is a slip of the pen."""


class ClusterSpec(Spec):
    """Equal nodes of equal devices.

    Attributes:
        name: what to call it.
        nodes: number of nodes.
        gpus_per_node: devices of each.
        device: the device.
        intra: what connects the devices of a node.
        inter: what connects nodes, per device.
    """

    name: str = "custom"
    nodes: Annotated[int, Field(ge=1, le=MOST_NODES)] = 1
    gpus_per_node: Annotated[int, Field(ge=1, le=2**16)] = 8
    device: DeviceSpec
    intra: LinkSpec
    inter: LinkSpec

    @property
    def gpus(self) -> int:
        """Number of devices."""
        return self.nodes * self.gpus_per_node


class Workload(Spec):
    """What the model is run on.

    Attributes:
        seq_len: global number of tokens of a sequence; "128K" and "1M" are understood, as in `chunk` and so on.
        batch: sequences of a sequence-parallel group at a time.
        is_causal: as in `usp.attention`.
        window_size: (left, right), as in `usp.attention`; -1 or None: no bound.
        chunk: tokens of a chunk outside of which nothing is seen, as in `Mask.chunks`; None: no chunks.
        sinks: first tokens that queries see besides their window and chunk, as in `Mask.streaming`.
        prefix: first tokens that all queries see, those before them too, as in `Mask.prefix_lm`.
        documents: lengths of packed documents, as in `Mask.documents`; empty: one document.
        mode: "train" is forward and backward with an optimizer, "inference" the forward pass alone.
        tensor_parallel: degree of tensor parallelism; its ranks are neighbours in a node.
        data_parallel: number of sequence-parallel groups.
        checkpointing: "none" keeps all activations, "full" keeps each layer's input and runs the layer again in the
            backward pass, "selective" also keeps the attention's output, so that the ring is not walked again.
        loss_chunks: in how many pieces logits and loss are computed; 1 is all logits at once.
        zero_stage: what is sharded over the data- and sequence-parallel ranks: 1 optimizer states, 2 also gradients,
            3 also parameters (FSDP), 0 nothing.
    """

    seq_len: Size
    batch: Count = 1
    is_causal: bool = True
    window_size: tuple[int | None, int | None] | None = None
    chunk: Size | None = None
    sinks: Part = 0
    prefix: Part = 0
    documents: tuple[Count, ...] = ()
    mode: Literal["train", "inference"] = "train"
    tensor_parallel: Annotated[int, Field(ge=1, le=2**16)] = 1
    data_parallel: Annotated[int, Field(ge=1, le=2**16)] = 1
    checkpointing: Literal["none", "selective", "full"] = "full"
    loss_chunks: Count = 1
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 3

    @model_validator(mode="after")
    def _masks(self) -> Self:
        for name in ("sinks", "prefix"):
            if getattr(self, name) > self.seq_len:
                raise ValueError(f"{name}={getattr(self, name)} is more than seq_len={self.seq_len}")
        if self.chunk is not None and self.seq_len > self.chunk * MOST_CHUNKS:
            least = -(-self.seq_len // MOST_CHUNKS)
            cuts = f"chunk={self.chunk} cuts seq_len={self.seq_len} into more than {MOST_CHUNKS:,} chunks"
            raise ValueError(f"{cuts}: use {least:,} or more")
        self.mask.check(self.seq_len)
        return self

    @property
    def mask(self) -> Mask:
        """Which keys a query sees.

        Causal or not, of that the window, of that the chunk; in addition the sinks, but causal ones only, and the
        prefix; and of all that what lies in the query's document.
        """
        mask = order = Mask.causal() if self.is_causal else Mask.full()
        if self.window_size is not None:
            mask &= Mask.window(*self.window_size)
        if self.chunk is not None:
            mask &= Mask.chunks(self.chunk, self.seq_len)
        mask |= Mask.keys(0, self.sinks) & order
        mask = Mask.keys(0, self.prefix) | mask
        return mask & Mask.documents(self.documents) if self.documents else mask


def explain(error: ValidationError, kind: type[BaseModel]) -> str:
    """What is wrong with a specification, in one line: each field, what is wanted, and what it holds."""
    problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    return " ".join("; ".join(_explain(problem, kind) for problem in problems[:4]).split())


def _explain(problem: Any, kind: type[BaseModel]) -> str:
    path = [str(part) for part in problem["loc"]]
    field = ".".join(part[:60] for part in path) or kind.__name__
    if problem["type"] == "extra_forbidden":
        known = _fields(kind, path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1)
        return f"{field}: unknown; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")
    wanted = problem["msg"].removeprefix("Value error, ")
    shown = repr(problem["input"])
    given = "" if problem["type"] in ("missing", "value_error") else f", got {shown[:60]}"
    return f"{field}: {wanted}{given}"


def _fields(kind: type[BaseModel], path: list[str]) -> list[str]:
    """Names of the fields at a path through nested specifications."""
    for part in path:
        annotation = kind.model_fields[part].annotation if part in kind.model_fields else None
        kind = next((k for k in _specs(annotation)), kind)
    return list(kind.model_fields)


def _specs(annotation: Any) -> list[type[BaseModel]]:
    """The specifications that an annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [kind for argument in getattr(annotation, "__args__", ()) for kind in _specs(argument)]
