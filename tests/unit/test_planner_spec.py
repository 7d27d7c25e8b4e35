"""Specifications: round trips, what is refused and in which words, whatever a file or a mapping holds."""

import json
import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.unit.strategies import examples, visible
from usp.errors import InputError
from usp.mask import Band, Mask
from usp.planner.spec import (
    ClusterSpec,
    DeviceSpec,
    KernelSpeed,
    LinkSpec,
    ModelSpec,
    SpanSpeed,
    Spec,
    Workload,
    load,
    parse_size,
)

MODEL = {
    "name": "small", "heads": 8, "kv_heads": 4, "head_dim": 64, "v_head_dim": 32, "layers": 8, "hidden": 512,
    "intermediate": 1024, "vocab": 100, "dtype": "float16", "gated": False, "experts": 8, "active_experts": 2,
    "tied_embeddings": True, "parameters": 10**7, "window": 63, "windowed_layers": 4,
}  # fmt: skip
SPEED = {"block_length": 1024, "forward_tflops": 300.0, "backward_tflops": 250.0}
DEVICE = {
    "name": "chip", "memory_gib": 80.0, "peak_tflops": 900.0, "memory_gb_per_s": 3000.0,
    "attention": [SPEED, SPEED | {"block_length": 8192}], "head_dim": 128, "launch_us": 20.0, "merge_bytes": 16.0,
}  # fmt: skip
SPAN = {"devices": 4, "gb_per_s": 200.0}
LINK = {
    "name": "wire", "gb_per_s": 50.0, "ring": [SPAN], "all_to_all": [SPAN, SPAN | {"devices": 8}], "latency_us": 5.0,
    "full_duplex": False, "overlap": 0.5,
}  # fmt: skip
CLUSTER = {"name": "few", "nodes": 2, "gpus_per_node": 4, "device": DEVICE, "intra": LINK, "inter": LINK}
WORKLOAD = {
    "seq_len": 64, "batch": 2, "is_causal": False, "window_size": [3, 0], "chunk": 16, "sinks": 2, "prefix": 5,
    "documents": [], "mode": "inference", "tensor_parallel": 2, "data_parallel": 3, "checkpointing": "selective",
    "loss_chunks": 4, "zero_stage": 1,
}  # fmt: skip
BASES: dict[type[Spec], dict[str, Any]] = {
    ModelSpec: MODEL, KernelSpeed: SPEED, DeviceSpec: DEVICE, SpanSpeed: SPAN, LinkSpec: LINK, ClusterSpec: CLUSTER,
    Workload: WORKLOAD,
}  # fmt: skip


def refusal(kind: type[Spec], source: Any) -> str:
    with pytest.raises(InputError) as caught:
        kind.read(source)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def names(message: str, field: str) -> bool:
    sides = ("window left is", "window right is") if field == "window_size" else ()
    return any(name in message for name in (field, *sides))


# ---- what fields hold ------------------------------------------------------------------------------------------------

Legal = Callable[[Any], bool]


def whole(least: int, most: int = 2**40) -> Legal:
    return lambda value: type(value) is int and least <= value <= most


def real(least: float, most: float) -> Legal:
    """A number from `least`, which is legal itself only if it is 0.0, not 0."""
    strict = isinstance(least, int)
    return lambda value: type(value) in (int, float) and (least < value if strict else least <= value) and value <= most


def either(*known: Any) -> Legal:
    return lambda value: any(type(value) is type(one) and value == one for one in known)


def maybe(legal: Legal) -> Legal:
    return lambda value: value is None or legal(value)


COUNT, SHARE, DEGREE, BOUND = whole(1), whole(0), whole(1, 2**16), whole(-1, 2**99)
RATE, DELAY, PART = real(0, 1e9), real(0.0, 1e9), real(0.0, 1.0)
TEXT: Legal = lambda value: type(value) is str  # noqa: E731
FLAG, EMPTY, NOTHING = either(True, False), either([]), either()

LEGAL: dict[type[Spec], dict[str, Legal]] = {
    ModelSpec: {
        "name": TEXT, "heads": COUNT, "kv_heads": COUNT, "head_dim": DEGREE, "v_head_dim": maybe(DEGREE),
        "layers": COUNT, "hidden": COUNT, "intermediate": COUNT, "vocab": SHARE,
        "dtype": either("bfloat16", "float16", "float32", "float64"), "gated": FLAG, "experts": COUNT,
        "active_experts": COUNT, "tied_embeddings": FLAG, "parameters": maybe(whole(1, 2**50)), "window": maybe(SHARE),
        "windowed_layers": SHARE,
    },
    KernelSpeed: {"block_length": COUNT, "forward_tflops": RATE, "backward_tflops": RATE},
    DeviceSpec: {
        "name": TEXT, "memory_gib": RATE, "peak_tflops": RATE, "memory_gb_per_s": RATE, "attention": NOTHING,
        "head_dim": DEGREE, "launch_us": DELAY, "merge_bytes": DELAY,
    },
    SpanSpeed: {"devices": COUNT, "gb_per_s": RATE},
    LinkSpec: {
        "name": TEXT, "gb_per_s": RATE, "ring": EMPTY, "all_to_all": EMPTY, "latency_us": DELAY, "full_duplex": FLAG,
        "overlap": PART,
    },
    ClusterSpec: {
        "name": TEXT, "nodes": DEGREE, "gpus_per_node": DEGREE, "device": NOTHING, "intra": NOTHING, "inter": NOTHING,
    },
    Workload: {
        "seq_len": COUNT, "batch": COUNT, "is_causal": FLAG,
        "window_size": maybe(lambda value: type(value) is list and len(value) == 2 and all(map(maybe(BOUND), value))),
        "chunk": maybe(COUNT), "sinks": whole(0, 64), "prefix": whole(0, 64), "documents": either([], [64], [40, 24]),
        "mode": either("train", "inference"), "tensor_parallel": DEGREE, "data_parallel": DEGREE,
        "checkpointing": either("none", "selective", "full"), "loss_chunks": COUNT, "zero_stage": whole(0, 3),
    },
}  # fmt: skip
"""What each field may hold on its own, written down a second time."""

BOUND_TO_OTHERS = {"heads", "kv_heads", "layers", "experts", "active_experts", "window", "windowed_layers", "seq_len"}
"""Fields whose legal values may still contradict another field."""

VALUES = [
    -1, 0, 1, 3, 4, 2**16, 2**16 + 1, 2**40, 2**40 + 1, 2**50, 2**50 + 1, 10**30, -(10**30), 10**400,
    -0.5, 0.0, 5e-324, 0.5, 1.0, 8.0, 1e9, 1e9 + 1, 1e30, math.nan, math.inf, -math.inf,
    True, False, None, "", "8", "x", "train", "full", "float16", "two\nlines", "1" * 400,
    [], [8], [64], [8, 8], [40, 24], [0, 64], [-5, 0], [-1, 65], [None], ["x"], [[]], [{}], [1.5, 2], [2**70] * 2,
    {}, {"x": 1}, {"name": 3},
]  # fmt: skip

FIELDS = [(kind, field) for kind, fields in LEGAL.items() for field in fields]


def test_every_field_is_in_the_table():
    ours = {kind for kind in Spec.__subclasses__() if kind.__module__ == Spec.__module__}
    assert set(LEGAL) == set(BASES) == ours
    for kind, fields in LEGAL.items():
        assert set(fields) == set(kind.model_fields) == set(BASES[kind]), kind


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=lambda part: getattr(part, "__name__", part))
def test_a_field_takes_what_is_legal_and_names_itself_when_it_refuses(kind, field):
    for value in VALUES:
        if field in ("seq_len", "chunk", "sinks", "prefix") and value == "8":  # sizes as text have tests of their own
            continue
        source = BASES[kind] | {field: value}
        if not LEGAL[kind][field](value):
            assert names(refusal(kind, source), field), (value, refusal(kind, source))
        elif field not in BOUND_TO_OTHERS:
            held = getattr(kind.read(source), field)
            assert (list(held) if isinstance(held, tuple) else held) == value
        else:
            try:
                assert getattr(kind.read(source), field) == value
            except InputError:
                assert names(refusal(kind, source), field), value


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=lambda part: getattr(part, "__name__", part))
def test_a_field_is_missing_only_if_it_has_no_default(kind, field):
    source = {key: value for key, value in BASES[kind].items() if key != field}
    bound = {"layers": "windowed_layers", "window": "windowed_layers", "experts": "active_experts"}
    required = {
        ModelSpec: {"heads", "kv_heads", "hidden", "intermediate"}, KernelSpeed: set(SPEED), SpanSpeed: set(SPAN),
        DeviceSpec: {"memory_gib", "peak_tflops", "memory_gb_per_s", "attention"}, LinkSpec: {"gb_per_s"},
        ClusterSpec: {"device", "intra", "inter"}, Workload: {"seq_len"},
    }  # fmt: skip
    if field in required[kind]:
        assert refusal(kind, source) == f"{field}: Field required"
    elif field in bound:  # their defaults contradict the base
        assert bound[field] in refusal(kind, source)
    else:
        assert isinstance(kind.read(source), kind)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@examples(800)
@given(st.sampled_from(FIELDS), JSON)
def test_any_value_is_read_or_refused_in_one_line_that_names_the_field(where, value):
    kind, field = where
    try:
        spec = kind.read(BASES[kind] | {field: value})
    except InputError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 1500
        assert names(str(error), field)
    else:
        assert kind.read(spec.model_dump(mode="json")) == spec


@examples(300)
@given(st.sampled_from(sorted(BASES, key=lambda kind: kind.__name__)), JSON)
def test_anything_at_all_is_read_or_refused_in_one_line(kind, value):
    source = value if isinstance(value, dict) else {"name": value}
    try:
        assert isinstance(kind.read(source), kind)
    except InputError as error:
        assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize(
    "source",
    [{"heads": 10**5000}, {(1, 2): 3}, {"name": "\ud800"}, {"heads": {(): 1}}, {1: 2, None: 3, 1.5: 4}],
    ids=["digits", "tuple key", "surrogate", "inner key", "odd keys"],
)
def test_what_json_cannot_hold_is_refused(source):
    assert refusal(ModelSpec, MODEL | source)


def test_any_mapping_is_read():
    nested = MappingProxyType(CLUSTER | {"intra": MappingProxyType(LINK)})
    assert ClusterSpec.read(nested) == ClusterSpec.read(CLUSTER)


# ---- strictness, words -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        (ModelSpec, MODEL | {"heads": "8"}, "heads: Input should be a valid integer, got '8'"),
        (ModelSpec, MODEL | {"layers": True}, "layers: Input should be a valid integer, got True"),
        (ModelSpec, MODEL | {"hidden": 512.0}, "hidden: Input should be a valid integer, got 512.0"),
        (ModelSpec, MODEL | {"gated": 1}, "gated: Input should be a valid boolean, got 1"),
        (ModelSpec, MODEL | {"name": 1}, "name: Input should be a valid string, got 1"),
        (LinkSpec, LINK | {"gb_per_s": True}, "gb_per_s: Input should be a valid number, got True"),
        (LinkSpec, LINK | {"gb_per_s": math.nan}, "gb_per_s: Input should be a finite number, got nan"),
        (ModelSpec, MODEL | {"heads": 7}, "ModelSpec: heads=7 is not a multiple of kv_heads=4"),
        (ModelSpec, MODEL | {"active_experts": 9}, "ModelSpec: active_experts=9 is more than experts=8"),
        (ModelSpec, MODEL | {"windowed_layers": 9}, "ModelSpec: windowed_layers=9 is more than layers=8"),
        (ModelSpec, MODEL | {"window": None}, "ModelSpec: windowed_layers=4 needs a window"),
    ],
)
def test_what_is_said(kind, source, message):
    assert refusal(kind, source) == message


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        (ModelSpec, MODEL | {"haeds": 8}, "haeds: unknown; did you mean heads?"),
        (Workload, WORKLOAD | {"seqlen": 8}, "seqlen: unknown; did you mean seq_len?"),
        (LinkSpec, LINK | {"colour": 1}, "colour: unknown; there are name, gb_per_s, ring, all_to_all"),
        (ClusterSpec, CLUSTER | {"intra": LINK | {"latency": 1}}, "intra.latency: unknown; did you mean latency_us?"),
        (
            ClusterSpec,
            CLUSTER | {"inter": LINK | {"all_to_all": [SPAN, SPAN | {"devices": 8, "gb_per_sec": 1}]}},
            "inter.all_to_all.1.gb_per_sec: unknown; did you mean gb_per_s?",
        ),
        (
            ClusterSpec,
            CLUSTER | {"device": DEVICE | {"attention": [SPEED | {"forwards_tflops": 1}]}},
            "device.attention.0.forwards_tflops: unknown; did you mean forward_tflops?",
        ),
        (ModelSpec, MODEL | {"he\nads": 8}, "he ads: unknown; did you mean heads?"),
    ],
)
def test_unknown_keys_are_refused_with_a_suggestion(kind, source, message):
    assert refusal(kind, source).startswith(message)


def test_an_unknown_key_is_not_lost_among_missing_ones():
    assert "haeds: unknown; did you mean heads?" in refusal(ModelSpec, {"haeds": 8})


def test_a_misspelt_required_field_is_missing_and_unknown():
    source = {"block_lenght": 1024, "forward_tflops": 300.0, "backward_tflops": 250.0}
    assert refusal(DeviceSpec, DEVICE | {"attention": [source]}) == (
        "attention.0.block_lenght: unknown; did you mean block_length?; attention.0.block_length: Field required"
    )


@pytest.mark.parametrize(
    ("path", "value"),
    [("device.memory_gib", -1), ("intra.latency_us", "5"), ("device.attention.1.block_length", 0),
     ("inter.all_to_all.0.devices", 1.5), ("intra.ring.0.gb_per_s", math.nan), ("device.name", None)],
)  # fmt: skip
def test_a_nested_field_is_named_with_its_path(path, value):
    source = json.loads(json.dumps(CLUSTER))
    *outer, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    inner = source
    for part in outer:
        inner = inner[part]
    inner[last] = value
    assert refusal(ClusterSpec, source).startswith(f"{path}: ")


@pytest.mark.parametrize("order", [[], [8192, 1024], [1024, 1024]])
def test_block_lengths_ascend(order):
    source = DEVICE | {"attention": [SPEED | {"block_length": length} for length in order]}
    assert "attention" in refusal(DeviceSpec, source) and str(order) in refusal(DeviceSpec, source)


@pytest.mark.parametrize("field", ["ring", "all_to_all"])
def test_spans_ascend(field):
    for order in ([8, 4], [4, 4]):
        source = LINK | {field: [SPAN | {"devices": devices} for devices in order]}
        assert refusal(LinkSpec, source) == f"LinkSpec: {field}: devices must ascend, got {order}"


@pytest.mark.parametrize("value", [b"8", object, {1, 2}], ids=["bytes", "class", "set"])
def test_text_is_not_made_of_other_things(value):
    assert "name" in refusal(ModelSpec, MODEL | {"name": value})


@pytest.mark.parametrize("field", ["heads", "gated", "dtype", "vocab"])
@pytest.mark.parametrize("value", [b"8", object, {1, 2}, ()], ids=["bytes", "class", "set", "tuple"])
def test_what_json_does_not_know_is_refused(field, value):
    assert field in refusal(ModelSpec, MODEL | {field: value})


def test_specifications_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        ModelSpec.read(MODEL).heads = 4  # pyright: ignore[reportAttributeAccessIssue]


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1", 1), ("131072", 131072), ("128K", 131072), ("128k", 131072), ("1M", 1048576), ("1.5K", 1536),
        ("0.25M", 262144), ("2G", 2147483648), (" 8K ", 8192), ("1,048,576", 1048576), ("1_048_576", 1048576),
        ("1,024K", 1048576),
    ],
)  # fmt: skip
def test_sizes(text, tokens):
    assert parse_size(text) == tokens
    assert Workload.read({"seq_len": text}).seq_len == tokens


@pytest.mark.parametrize(
    "text",
    ["", " ", "K", "x", "-1", "+1", "1e3", "0x10", "1KB", "1 K", "1T", "1.3", "0.3K", "1.", ".5K", "1,5K", "1,0000",
     "_1", "1__0", "nan", "inf", "٣K", "128K\n128K", "1" * 400, "0." + "1" * 400],
)  # fmt: skip
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is not a number of tokens: give one like 131072, 128K or 1M"):
        parse_size(text)
    assert refusal(Workload, {"seq_len": text}).startswith("seq_len: ")


@pytest.mark.parametrize("value", [5, 5.5, None, True, [1]])
def test_what_is_not_text_is_left_to_the_field(value):
    assert parse_size(value) is value


@pytest.mark.parametrize("text", ["0", "0K", "1025G"])
def test_a_size_out_of_range_is_refused(text):
    assert refusal(Workload, {"seq_len": text}).startswith("seq_len: Input should be")


# ---- what follows from the fields ------------------------------------------------------------------------------------


def test_parameters_by_hand():
    """Width 6: heads 4 of 3 and 2 of 3 for keys, values of 5; MLPs of width 7; 10 words; 2 layers."""
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 3, "v_head_dim": 5, "hidden": 6, "intermediate": 7, "layers": 2}
    attention = 6 * 4 * 3 + 6 * 2 * 3 + 6 * 2 * 5 + 4 * 5 * 6
    for extra, count in [
        ({}, 2 * (attention + 3 * 6 * 7)),
        ({"gated": False}, 2 * (attention + 2 * 6 * 7)),
        ({"experts": 8, "active_experts": 2}, 2 * (attention + 8 * 3 * 6 * 7)),
        ({"vocab": 10}, 2 * (attention + 3 * 6 * 7) + 2 * 10 * 6),
        ({"vocab": 10, "tied_embeddings": True}, 2 * (attention + 3 * 6 * 7) + 10 * 6),
        ({"parameters": 99}, 99),
    ]:
        assert ModelSpec.read(shape | extra).parameter_count == count, extra


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float16", 2), ("float32", 4), ("float64", 8)])
def test_bytes_of_an_element(dtype, size):
    assert ModelSpec.read(MODEL | {"dtype": dtype}).dtype_bytes == size


def test_value_heads_are_like_key_heads_unless_said():
    assert ModelSpec.read(MODEL).value_dim == 32
    assert ModelSpec.read(MODEL | {"v_head_dim": None}).value_dim == 64


def test_devices_of_a_cluster():
    assert ClusterSpec.read(CLUSTER).gpus == 8


def test_masks_of_a_workload():
    assert Workload.read({"seq_len": 8}).mask == Mask.causal()
    assert Workload.read({"seq_len": 8, "is_causal": False}).mask == Mask.full()
    assert Workload.read({"seq_len": 8, "window_size": [3, -1]}).mask == Mask.offsets(Band(-3, 0))
    assert Workload.read({"seq_len": 8, "is_causal": False, "window_size": [3, 2]}).mask == Mask.offsets(Band(-3, 2))
    assert Workload.read({"seq_len": 8, "documents": [5, 3]}).mask == Mask.causal() & Mask.documents([5, 3])


def test_masks_of_a_workload_by_hand():
    """Rows are queries: causal chunks of 3, of which a query sees itself and one before, a sink and a prefix of 2."""
    fields = {"seq_len": 7, "window_size": [1, -1], "chunk": 3}
    for more, rows in (
        ({}, "1000000 1100000 0110000 0001000 0001100 0000110 0000001"),
        ({"sinks": 1}, "1000000 1100000 1110000 1001000 1001100 1000110 1000001"),
        ({"prefix": 2}, "1100000 1100000 1110000 1101000 1101100 1100110 1100001"),
        ({"prefix": 2, "sinks": 4}, "1100000 1100000 1110000 1111000 1111100 1111110 1111001"),
        ({"prefix": 2, "documents": [5, 2]}, "1100000 1100000 1110000 1101000 1101100 0000010 0000001"),
        ({"is_causal": False, "sinks": 1}, "1110000 1110000 1110000 1001110 1001110 1000110 1000001"),
    ):
        mask = Workload.read(fields | more).mask
        found = visible(mask, list(range(7)), list(range(7)))
        assert ["".join(map(str, row)) for row in found.tolist()] == rows.split(), more


def test_masks_of_a_workload_are_the_named_ones():
    assert Workload.read({"seq_len": 9, "prefix": 4}).mask == Mask.prefix_lm(4)
    assert Workload.read({"seq_len": 9, "window_size": [3, 0], "sinks": 2}).mask == Mask.streaming(2, 3)
    assert Workload.read({"seq_len": 9, "chunk": 4}).mask == Mask.causal() & Mask.documents([4, 4, 1])
    assert Workload.read({"seq_len": "2K", "prefix": "1K", "sinks": "0.5K", "chunk": "1k"}) == Workload(
        seq_len=2048, prefix=1024, sinks=512, chunk=1024
    )


@pytest.mark.parametrize("field", ["sinks", "prefix"])
def test_first_tokens_are_of_the_sequence(field):
    assert refusal(Workload, {"seq_len": 8, field: 9}) == f"Workload: {field}=9 is more than seq_len=8"
    assert Workload.read({"seq_len": 8, field: 8}).mask == (Mask.causal() if field == "sinks" else Mask.prefix_lm(8))


def test_chunks_are_not_too_many_to_list():
    message = refusal(Workload, {"seq_len": 2**40, "chunk": 2**28 - 1})
    assert message == (
        "Workload: chunk=268435455 cuts seq_len=1099511627776 into more than 4,096 chunks: use 268,435,456 or more"
    )
    assert len(Workload.read({"seq_len": 2**40, "chunk": 2**28}).mask.regions[0].boundaries) == 2**12 + 1


@pytest.mark.parametrize(("documents", "total"), [([5], "5 tokens"), ([5, 4], "9 tokens")])
def test_documents_fill_the_sequence(documents, total):
    message = refusal(Workload, {"seq_len": 8, "documents": documents})
    assert "documents" in message and total in message and "has 8" in message


# ---- files -----------------------------------------------------------------------------------------------------------

counts, rates, delays = st.integers(1, 2**40), st.floats(0, 1e9, exclude_min=True), st.floats(0, 1e9)
degrees = st.integers(1, 2**16)


@st.composite
def model_specs(draw: st.DrawFn) -> ModelSpec:
    kv_heads, layers, experts = draw(st.integers(1, 99)), draw(st.integers(1, 99)), draw(st.integers(1, 99))
    return ModelSpec(
        name=draw(st.text()), heads=kv_heads * draw(st.integers(1, 9)), kv_heads=kv_heads, head_dim=draw(degrees),
        v_head_dim=draw(st.none() | degrees), layers=layers, hidden=draw(counts), intermediate=draw(counts),
        vocab=draw(st.integers(0, 2**40)), dtype=draw(st.sampled_from(["bfloat16", "float16", "float32", "float64"])),
        gated=draw(st.booleans()), experts=experts, active_experts=draw(st.integers(1, experts)),
        tied_embeddings=draw(st.booleans()), parameters=draw(st.none() | st.integers(1, 2**50)),
        window=draw(st.integers(0, 2**40)), windowed_layers=draw(st.integers(0, layers)),
    )  # fmt: skip


devices = st.builds(
    DeviceSpec, name=st.text(), memory_gib=rates, peak_tflops=rates, memory_gb_per_s=rates, launch_us=delays,
    merge_bytes=delays,
    attention=st.lists(
        st.builds(KernelSpeed, block_length=counts, forward_tflops=rates, backward_tflops=rates),
        min_size=1, max_size=3, unique_by=lambda point: point.block_length,
    ).map(lambda points: tuple(sorted(points, key=lambda point: point.block_length))),
)  # fmt: skip
spans = st.lists(
    st.builds(SpanSpeed, devices=counts, gb_per_s=rates), max_size=3, unique_by=lambda point: point.devices
).map(lambda points: tuple(sorted(points, key=lambda point: point.devices)))
links = st.builds(
    LinkSpec, name=st.text(), gb_per_s=rates, ring=spans, all_to_all=spans, latency_us=delays,
    full_duplex=st.booleans(), overlap=st.floats(0, 1),
)  # fmt: skip
clusters = st.builds(
    ClusterSpec, name=st.text(), nodes=degrees, gpus_per_node=degrees, device=devices, intra=links, inter=links
)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    documents = tuple(draw(st.lists(st.integers(1, 2**20), max_size=4)))
    bound = st.none() | st.integers(-1, 2**40)
    seq_len = sum(documents) or draw(counts)
    first = st.integers(0, seq_len)
    return Workload(
        seq_len=seq_len, chunk=draw(st.none() | st.integers(-(-seq_len // 99), 2**40)), sinks=draw(first),
        prefix=draw(first), batch=draw(counts), is_causal=draw(st.booleans()), documents=documents,
        window_size=draw(st.none() | st.tuples(bound, bound)), mode=draw(st.sampled_from(["train", "inference"])),
        tensor_parallel=draw(degrees), data_parallel=draw(degrees), zero_stage=draw(st.integers(0, 3)),
        checkpointing=draw(st.sampled_from(["none", "selective", "full"])),
    )  # fmt: skip


@pytest.mark.parametrize("suffix", ["json", "yaml"])
@examples(150)
@given(spec=model_specs() | clusters | workloads() | devices | links)
def test_what_is_written_is_read_back(tmp_path_factory, suffix, spec):
    path = tmp_path_factory.getbasetemp() / f"spec.{suffix}"
    spec.write(path)
    assert type(spec).read(path) == spec
    assert type(spec).read(str(path)) == spec
    if suffix == "json":
        assert type(spec).read(json.loads(path.read_text())) == spec


@pytest.mark.parametrize("kind", BASES, ids=lambda kind: kind.__name__)
def test_both_formats_are_what_their_names_say(tmp_path, kind):
    spec = kind.read(BASES[kind])
    spec.write(tmp_path / "a.json")
    spec.write(tmp_path / "a.yaml")
    expected = json.loads(json.dumps(BASES[kind]))
    assert json.loads((tmp_path / "a.json").read_text()) == expected
    assert yaml.safe_load((tmp_path / "a.yaml").read_text()) == expected


def test_numbers_of_json_are_read_as_json_means_them(tmp_path):
    path = tmp_path / "link.json"
    path.write_text('{"gb_per_s": 5e1, "latency_us": 1e-05}')
    assert LinkSpec.read(path) == LinkSpec(gb_per_s=50.0, latency_us=1e-05)


def test_a_yaml_mapping_in_braces(tmp_path):
    path = tmp_path / "link.yaml"
    path.write_text("{gb_per_s: 50.0, name: wire}")
    assert LinkSpec.read(path) == LinkSpec(gb_per_s=50.0, name="wire")


def test_sizes_are_understood_in_files(tmp_path):
    path = tmp_path / "work.yaml"
    path.write_text("seq_len: 1M\nwindow_size: [4095, 0]\n")
    assert Workload.read(path) == Workload(seq_len=2**20, window_size=(4095, 0))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "ModelSpec: Input should be an object, got None"),
        ("# nothing\n", "ModelSpec: Input should be an object, got None"),
        ("- heads: 8\n- 3\n", "ModelSpec: Input should be an object, got [{'heads': 8}, 3]"),
        ("heads", "ModelSpec: Input should be an object, got 'heads'"),
        ("[]", "ModelSpec: Input should be an object, got []"),
        ("heads: 8\nkv_haeds: 8\n", "kv_haeds: unknown; did you mean kv_heads?"),
        ("heads: 8\n", "kv_heads: Field required; hidden: Field required; intermediate: Field required"),
        ("heads: [8\nkv_heads: 4\n", "is neither JSON nor YAML"),
        ("heads: 8\n\tkv_heads: 4\n", "is neither JSON nor YAML"),
        ("{'heads", "is neither JSON nor YAML"),
        ("a: 1\n---\nb: 2\n", "is neither JSON nor YAML"),
        ("heads: \x01\n", "is neither JSON nor YAML"),
        ("heads: !!python/object/apply:os.getcwd []\n", "is neither JSON nor YAML"),
        ("heads: !!int abc\n", "is neither JSON nor YAML"),
        ("heads: 2024-13-45\n", "is neither JSON nor YAML"),
        ("heads: 0b_\n", "is neither JSON nor YAML"),
        ("heads: " + "9" * 5000 + "\n", "is neither JSON nor YAML"),
        ("heads: " + "[" * 5000 + "]" * 5000, "is neither JSON nor YAML"),
        ("heads: 2024-01-02\n", "heads: Input should be a valid integer"),
        ("heads: !!binary aGk=\n", "heads: Input should be a valid integer"),
        ("heads: &a [*a]\n", "its aliases stand for more than"),
        ("2024-01-01: 3\n", "ModelSpec"),
    ],
    ids=range(22),  # the texts would be the names of folders
)
def test_a_file_that_is_no_specification_is_refused_by_its_name(tmp_path, text, said):
    path = tmp_path / "model.yaml"
    path.write_text(text)
    message = refusal(ModelSpec, path)
    assert message.startswith(str(path)) and said in message


@pytest.mark.parametrize("content", [b"\xff\xfe\x00\x01", b"heads: \xe9\n", bytes(range(256))])
def test_a_binary_file_is_refused(tmp_path, content):
    path = tmp_path / "model.yaml"
    path.write_bytes(content)
    message = refusal(ModelSpec, path)
    assert "cannot read" in message and str(path) in message


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for path, said in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "Is a directory"), ("a\0b", "null")):
        assert "cannot read" in refusal(ModelSpec, path) and said in refusal(ModelSpec, path)
    assert "cannot read" in refusal(ModelSpec, "")
    assert "File name too long" in refusal(ModelSpec, "x" * 5000)


@examples(300)
@given(st.text(max_size=40) | st.text("{}[]:,-&*!|>'\"#%@`? \n\t01ax", max_size=24))
def test_any_text_in_a_file_is_loaded_or_refused_in_one_line(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, encoding="utf-8")
    try:
        load(path)
        ModelSpec.read(path)
    except InputError as error:
        assert len(str(error).splitlines()) == 1
