"""Plans: what is legal, how choices are ranked, what is said of them, and what makes none slower or what would fit."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schema import fits
from tests.unit.strategies import examples
from usp import tiles
from usp.errors import InputError
from usp.mask import Mask
from usp.planner import hardware, models
from usp.planner.plan import Choice, Plan, plan
from usp.planner.problem import Problem
from usp.planner.spec import ClusterSpec, DeviceSpec, KernelSpeed, LinkSpec, ModelSpec, SpanSpeed, Workload
from usp.planner.survey import survey

SCHEMA = Plan.model_json_schema()
GIB = 2**30


def model(heads: int = 8, kv_heads: int | None = None, **fields: Any) -> ModelSpec:
    shape = {"kv_heads": kv_heads or heads, "layers": 2, "hidden": heads * 128, "intermediate": heads * 512}
    return ModelSpec(heads=heads, **{**shape, **fields})


def work(seq_len: int = 2**15, **fields: Any) -> Workload:
    return Workload(seq_len=seq_len, **{"mode": "inference", **fields})


def by_degrees(made: Plan) -> dict[tuple[int, int], Choice]:
    """The best choice of each pair of degrees."""
    return {(c.ulysses_degree, c.ring_degree): c for c in reversed(made.choices)}


# ---- what every plan holds to ----------------------------------------------------------------------------------------


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


rates = st.floats(0.01, 2000, allow_nan=False)
delays = st.floats(0, 2000, allow_nan=False)


@st.composite
def speed_tables(draw: st.DrawFn) -> tuple[SpanSpeed, ...]:
    spans = sorted(draw(st.sets(st.integers(1, 16), max_size=3)))
    return tuple(SpanSpeed(devices=devices, gb_per_s=draw(rates)) for devices in spans)


links = st.builds(
    LinkSpec,
    gb_per_s=rates,
    ring=speed_tables(),
    all_to_all=speed_tables(),
    latency_us=delays,
    full_duplex=st.booleans(),
    overlap=st.floats(0, 1),
)


@st.composite
def devices(draw: st.DrawFn) -> DeviceSpec:
    lengths = sorted(draw(st.sets(st.integers(1, 2**15), min_size=1, max_size=4)))
    speeds = tuple(
        KernelSpeed(block_length=n, forward_tflops=draw(rates), backward_tflops=draw(rates)) for n in lengths
    )
    return DeviceSpec(
        memory_gib=draw(st.floats(1.51, 40)),
        peak_tflops=100,
        memory_gb_per_s=draw(rates),
        attention=speeds,
        launch_us=draw(delays),
        merge_bytes=draw(st.floats(0, 100)),
    )


clusters = st.builds(
    ClusterSpec, nodes=st.integers(1, 3), gpus_per_node=st.integers(1, 6), device=devices(), intra=links, inter=links
)


@st.composite
def problems(draw: st.DrawFn) -> tuple[ModelSpec, ClusterSpec, Workload]:
    """Models whose heads tensor parallelism divides, on clusters that all degrees divide."""
    cluster = draw(clusters)
    tensor = draw(st.sampled_from(divisors(cluster.gpus_per_node)))
    data = draw(st.sampled_from(divisors(cluster.gpus // tensor)))
    kv_heads = tensor * draw(st.integers(1, 3))
    window = draw(st.none() | st.integers(0, 5000))
    shape = model(
        kv_heads * draw(st.integers(1, 4)),
        kv_heads,
        head_dim=draw(st.sampled_from([64, 128])),
        v_head_dim=draw(st.none() | st.just(32)),
        vocab=draw(st.sampled_from([0, 32000])),
        dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        window=window,
        windowed_layers=0 if window is None else draw(st.integers(0, 2)),
    )
    seq_len = draw(st.integers(1, 2**16))
    workload = work(
        seq_len,
        batch=draw(st.integers(1, 3)),
        is_causal=draw(st.booleans()),
        window_size=draw(st.none() | st.tuples(st.integers(-1, 5000), st.integers(-1, 100))),
        prefix=draw(st.just(0) | st.integers(0, seq_len)),
        documents=draw(
            st.sampled_from([(), (seq_len,)]) if seq_len < 3 else st.sampled_from([(), (1, 1, seq_len - 2)])
        ),
        mode=draw(st.sampled_from(["train", "inference"])),
        checkpointing=draw(st.sampled_from(["none", "selective", "full"])),
        tensor_parallel=tensor,
        data_parallel=data,
        zero_stage=draw(st.integers(0, 3)),
    )
    return shape, cluster, workload


@examples(40)
@given(problems())
def test_a_plan_is_legal_complete_ranked_and_adds_up(problem):
    shape, cluster, workload = problem
    made = plan(*problem)
    outer = workload.tensor_parallel * workload.data_parallel
    heads = shape.heads // workload.tensor_parallel
    every = {(u, cluster.gpus // outer // u) for u in divisors(cluster.gpus // outer)}

    degrees = [(c.ulysses_degree, c.ring_degree) for c in made.choices]
    rejected = [(c.ulysses_degree, c.ring_degree) for c in made.rejected]
    assert set(degrees) | set(rejected) == every
    assert all(u * r * outer == cluster.gpus for u, r in degrees + rejected)
    assert all(u <= heads and u * r <= workload.seq_len for u, r in degrees)
    assert all(u > heads or u * r > workload.seq_len for u, r in rejected)
    for u, r in set(degrees):
        ways = sorted((c.layout, c.transport) for c in made.choices if (c.ulysses_degree, c.ring_degree) == (u, r))
        unlike = not workload.mask.relative  # tokens, whatever the offset
        dealt = ["contiguous", "striped", "zigzag", *["balanced"] * unlike]
        all_ways = [(layout, transport) for layout in dealt for transport in ("all_gather", "p2p")]
        plain = [way for way in ways if not way[1].startswith("double_ring:")]
        assert plain == (sorted(all_ways) if r > 1 else [("contiguous", "p2p")])

    assert [c.fits for c in made.choices] == sorted((c.fits for c in made.choices), reverse=True)
    for kind in (True, False):
        times = [c.seconds for c in made.choices if c.fits == kind]
        assert times == sorted(times)
    for c in made.choices:
        parts = (c.seconds_compute, c.seconds_merge, c.seconds_ring, c.seconds_all_to_all)
        assert sum(parts) == pytest.approx(c.seconds) and min(parts) >= 0 and c.seconds > 0
        assert sum(c.memory.values()) == c.memory_bytes
        assert c.fits == (c.memory_bytes <= cluster.device.memory_gib * GIB)
        assert c.slower == pytest.approx(c.seconds / made.choices[0].seconds)
        assert (c.ulysses_degree > 1) >= (c.seconds_all_to_all > 0) and (c.ring_degree > 1) >= (c.seconds_ring > 0)
    assert made.best == next((c for c in made.choices if c.fits), None)
    assert not (made.best and made.remedies)
    words = [*(c.why for c in made.choices), *(pair.why for pair in made.rejected), *made.remedies]
    assert all(text and "\n" not in text for text in words)


@examples(25)
@given(problems())
def test_a_plan_is_written_and_read_back(problem):
    made = plan(*problem)
    document = made.model_dump(mode="json")
    text = json.dumps(document, allow_nan=False)
    assert fits(json.loads(text), SCHEMA, SCHEMA) == []
    assert Plan.model_validate_json(text) == made
    assert json.loads(Plan.model_validate_json(text).model_dump_json()) == document


def test_a_document_that_is_no_plan_is_found():
    document = json.loads(plan(model(), hardware.cluster("h100", 2), work()).model_dump_json())
    first = document["choices"][0]
    for broken in (
        {**document, "more": 1},
        {name: value for name, value in document.items() if name != "rejected"},
        {**document, "choices": [{**first, "seconds": "1"}]},
        {**document, "choices": [{**first, "memory": {"parameters": 0.5}}]},
        {**document, "workload": {**document["workload"], "mode": "dream"}},
        {**document, "workload": {**document["workload"], "window_size": [1]}},
        {**document, "model": {**document["model"], "heads": 0}},
        {**document, "remedies": "none"},
    ):
        assert fits(broken, SCHEMA, SCHEMA)
    assert fits(document, SCHEMA, SCHEMA) == []


# ---- what never makes it slower --------------------------------------------------------------------------------------


def faster_link(link: LinkSpec, by: float, **changes: Any) -> LinkSpec:
    def table(speeds: tuple[SpanSpeed, ...]) -> tuple[SpanSpeed, ...]:
        return tuple(s.model_copy(update={"gb_per_s": s.gb_per_s * by}) for s in speeds)

    faster = {"gb_per_s": link.gb_per_s * by, "ring": table(link.ring), "all_to_all": table(link.all_to_all)}
    return link.model_copy(update={**faster, **changes})


def faster_kernels(device: DeviceSpec, which: int, by: float) -> DeviceSpec:
    """A faster point of the curve."""
    points = list(device.attention)
    point = points[which % len(points)]
    faster = {"forward_tflops": point.forward_tflops * by, "backward_tflops": point.backward_tflops * by}
    points[which % len(points)] = point.model_copy(update=faster)
    return device.model_copy(update={"attention": tuple(points)})


BETTER = {
    "bandwidth inside nodes": lambda c, by: {"intra": faster_link(c.intra, by)},
    "bandwidth between nodes": lambda c, by: {"inter": faster_link(c.inter, by)},
    "latency inside nodes": lambda c, by: {"intra": faster_link(c.intra, 1, latency_us=c.intra.latency_us / by)},
    "latency between nodes": lambda c, by: {"inter": faster_link(c.inter, 1, latency_us=c.inter.latency_us / by)},
    "full duplex": lambda c, by: {"intra": faster_link(c.intra, 1, full_duplex=True),
                                  "inter": faster_link(c.inter, 1, full_duplex=True)},
    "overlap": lambda c, by: {"intra": faster_link(c.intra, 1, overlap=1 - (1 - c.intra.overlap) / by),
                              "inter": faster_link(c.inter, 1, overlap=1 - (1 - c.inter.overlap) / by)},
    "memory bandwidth": lambda c, by: {
        "device": c.device.model_copy(update={"memory_gb_per_s": c.device.memory_gb_per_s * by})},
    "launches": lambda c, by: {"device": c.device.model_copy(update={"launch_us": c.device.launch_us / by})},
    "short blocks": lambda c, by: {"device": faster_kernels(c.device, 0, by)},
    "long blocks": lambda c, by: {"device": faster_kernels(c.device, -1, by)},
}  # fmt: skip


@pytest.mark.parametrize("kind", BETTER)
@examples(10)
@given(problem=problems(), by=st.floats(1, 20))
def test_a_better_machine_is_never_slower(kind, problem, by):
    shape, cluster, workload = problem
    before = plan(*problem)
    after = plan(shape, cluster.model_copy(update=BETTER[kind](cluster, by)), workload)
    least = [min((c.seconds for c in made.choices), default=0) for made in (before, after)]
    assert least[1] <= least[0] * (1 + 1e-9)
    key = [sorted(((c.ulysses_degree, c.ring_degree, c.layout, c.transport), c.seconds) for c in made.choices)
           for made in (before, after)]  # fmt: skip
    assert [name for name, _ in key[0]] == [name for name, _ in key[1]]
    assert all(now <= once * (1 + 1e-9) for (_, once), (_, now) in zip(*key, strict=True))


def test_the_better_machines_are_better():
    """Each of them makes a plan faster that depends on it."""
    points = (
        KernelSpeed(block_length=64, forward_tflops=1, backward_tflops=1),
        KernelSpeed(block_length=2**20, forward_tflops=1, backward_tflops=1),
    )
    slow = LinkSpec(gb_per_s=1, latency_us=1000, full_duplex=False, overlap=0.5)
    device = DeviceSpec(memory_gib=80, peak_tflops=100, memory_gb_per_s=1, attention=points, launch_us=10_000)
    cluster = ClusterSpec(nodes=2, gpus_per_node=2, device=device, intra=slow, inter=slow)
    kinds = {"latency inside nodes", "latency between nodes", "launches", "memory bandwidth"}
    for kind, change in BETTER.items():
        tokens = 256 if kind in kinds else 2**15
        sharded = model(8) if kind != "overlap" else model(1)  # one head: a ring is all there is
        times = [
            by_degrees(plan(sharded, c, work(tokens)))[degrees].seconds
            for degrees in (((1, 4),) if kind == "overlap" else ((2, 2),))
            for c in (cluster, cluster.model_copy(update=change(cluster, 2)))
        ]
        assert times[1] < times[0] * 0.999, kind


@examples(20)
@given(problem=problems(), more=st.floats(1, 100))
def test_more_memory_never_makes_the_best_choice_slower(problem, more):
    shape, cluster, workload = problem
    device = cluster.device.model_copy(update={"memory_gib": cluster.device.memory_gib * more})
    before = plan(*problem)
    after = plan(shape, cluster.model_copy(update={"device": device}), workload)
    assert {(c.ulysses_degree, c.layout, c.transport, c.seconds) for c in before.choices} == {
        (c.ulysses_degree, c.layout, c.transport, c.seconds) for c in after.choices
    }
    if before.best:
        assert after.best is not None and after.best.seconds <= before.best.seconds


# ---- seconds and bytes of a step -------------------------------------------------------------------------------------

FAST = hardware.cluster("h100", 4)


def test_a_step_is_all_passes_of_all_layers():
    """Recomputation runs forward again, with selective checkpointing only the exchange of q, k and v."""
    shape = model(8, 2)
    runs = {
        kind: by_degrees(plan(shape, FAST, work(mode="train", checkpointing=kind)))[2, 2]
        for kind in ("none", "selective", "full")
    }
    forward = by_degrees(plan(shape, FAST, work()))[2, 2]
    none, selective, full = runs["none"], runs["selective"], runs["full"]
    for part in ("seconds", "seconds_compute", "seconds_merge", "seconds_ring", "seconds_all_to_all", "bytes_ring"):
        assert getattr(full, part) - getattr(none, part) == pytest.approx(getattr(forward, part))
    for part in ("seconds_compute", "seconds_merge", "seconds_ring", "bytes_ring"):
        assert getattr(selective, part) == getattr(none, part)
    # Of what is exchanged forward, q, k and v are 4 + 2 heads and the output 4: without the latencies, 6 tenths.
    again = (selective.seconds_all_to_all - none.seconds_all_to_all) / forward.seconds_all_to_all
    assert 0.5 < again < 0.6
    # Backward computes 2.5 times as much, and not at the same speed.
    assert 2.5 * forward.seconds_compute < none.seconds_compute - forward.seconds_compute < 4 * forward.seconds_compute
    twice = by_degrees(plan(model(8, 2, layers=4), FAST, work()))[2, 2]
    assert twice.seconds == pytest.approx(2 * forward.seconds)
    assert (twice.bytes_ring, twice.bytes_all_to_all) == (2 * forward.bytes_ring, 2 * forward.bytes_all_to_all)


def test_bytes_of_a_step_by_hand():
    """2 layers, 8 query heads and 4 kv heads, 64 tokens over 2 x 2: a rank has 16 tokens, then 4 and 2 heads of 32.

    Round the ring goes one block of 32 tokens, and backward a block and its float32 gradients, on their way home.
    In the Ulysses group go q and kv of half the heads of 16 tokens, and back come 4 heads of 16 tokens.
    """
    block = 32 * 2 * 256 * 2
    qkv, output = 16 * (4 * 128 + 2 * 256) * 2, 16 * 4 * 128 * 2

    def sent(**workload: Any) -> tuple[int, int]:
        choice = by_degrees(plan(model(8, 4), FAST, work(64, **workload)))[2, 2]
        return choice.bytes_ring, choice.bytes_all_to_all

    assert sent() == (2 * block, 2 * (qkv + output))
    assert sent(mode="train", checkpointing="none") == (2 * (2 * block + 2 * block), 2 * 2 * (qkv + output))
    assert sent(mode="train", checkpointing="full") == (2 * (3 * block + 2 * block), 2 * 3 * (qkv + output))
    assert sent(mode="train", checkpointing="selective") == (
        2 * (2 * block + 2 * block),
        2 * (2 * (qkv + output) + qkv),
    )


def test_data_parallel_groups_run_side_by_side():
    """Two groups on a node each are as fast as one group on one node."""
    shape = model(16, 4)
    one = plan(shape, hardware.cluster("h100", 8), work())
    two = plan(shape, hardware.cluster("h100", 16), work(data_parallel=2))
    assert [c.seconds for c in two.choices] == [c.seconds for c in one.choices]
    assert not any(c.ulysses_crosses_nodes or c.ring_crosses_nodes for c in two.choices)


def test_tensor_parallel_ranks_have_a_share_of_the_heads():
    """Four ranks of 8 query and 2 kv heads on 32 devices: as fast as a quarter of the heads on every fourth device."""
    wide = plan(model(32, 8), hardware.cluster("h100", 32), work(tensor_parallel=4))
    narrow = plan(model(8, 2), hardware.cluster("h100", 8, 2), work())
    for degrees, choice in by_degrees(wide).items():
        other = by_degrees(narrow)[degrees]
        assert (choice.seconds, choice.bytes_ring, choice.bytes_all_to_all) == (
            pytest.approx(other.seconds), other.bytes_ring, other.bytes_all_to_all
        )  # fmt: skip


def test_windowed_layers_are_cheaper():
    """Of gpt-oss half the layers see 128 tokens: nearly half the time of a model without."""
    windowed = models.find("gpt-oss-20b")
    whole = windowed.model_copy(update={"window": None, "windowed_layers": 0})
    cluster = hardware.cluster("h100", 8)
    less, more = (by_degrees(plan(shape, cluster, work(2**17))) for shape in (windowed, whole))
    assert set(less) == set(more)
    for degrees in less:
        assert 0.5 < less[degrees].seconds_compute / more[degrees].seconds_compute < 0.56
        assert less[degrees].seconds < more[degrees].seconds
    assert min(c.seconds for c in less.values()) < 0.6 * min(c.seconds for c in more.values())


# ---- machines and models that others get wrong -----------------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["a100", "h100", "b200", "l20", "rtx4090"])
@pytest.mark.parametrize("name", ["llama3-8b", "qwen2.5-14b", "llama2-7b", "flux.1"])
@pytest.mark.parametrize("seq_len", ["8K", "256K"])
def test_nodes_of_six(gpu, name, seq_len):
    """Groups of 4 and 12 straddle the two nodes of six; they are chosen only where all others are slower."""
    cluster = hardware.cluster(gpu, 12, 6)
    made = plan(name, cluster, Workload.read({"seq_len": seq_len, "mode": "inference", "is_causal": name != "flux.1"}))
    assert {c.ulysses_degree for c in made.choices} == {1, 2, 3, 4, 6, 12}
    assert all(c.ulysses_crosses_nodes == (c.ulysses_degree in (4, 12)) for c in made.choices)
    assert all(c.ring_crosses_nodes == (c.ulysses_degree != 12) for c in made.choices)
    best = made.best
    assert best is not None
    inside = min(c.seconds for c in made.choices if not c.ulysses_crosses_nodes)
    assert not best.ulysses_crosses_nodes or best.seconds < inside


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200", "b200"])
@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b", "qwen2.5-7b", "qwen2.5-14b", "llama2-7b"])
def test_a_long_sequence_on_nodes_of_six_stays_inside_them(gpu, name):
    """The largest divisor that fits into 8 local ranks is 4, which straddles: it is never the choice."""
    made = plan(name, hardware.cluster(gpu, 12, 6), work(2**18))
    best, four = made.best, by_degrees(made)[4, 3]
    assert best is not None and not best.ulysses_crosses_nodes
    assert best.seconds < four.seconds
    four_slow = hardware.cluster(gpu, 12, 6, inter="ethernet-100g")
    slow = by_degrees(plan(name, four_slow, work(2**18)))[4, 3]
    assert "U=4 crosses nodes" in slow.why or "hops of R=3" in slow.why


USUAL = {
    "28/4 heads on 8": ("qwen2.5-7b", 8, {}),
    "40/8 heads on 16": ("qwen2.5-14b", 16, {}),
    "2 kv heads on 8": (model(16, 2, layers=24), 8, {}),
    "tensor parallel 4 of 8 kv heads": ("llama3-70b", 32, {"tensor_parallel": 4, "loss_chunks": 16}),
    "tensor parallel 8 of 4 kv heads": (model(32, 4), 16, {"tensor_parallel": 8}),
    "1 kv head": (model(24, 1), 8, {}),
}


@pytest.mark.parametrize("case", USUAL)
@pytest.mark.parametrize("seq_len", [2**14, 2**17])
def test_a_usable_plan_with_its_reasons(case, seq_len):
    shape, gpus, workload = USUAL[case]
    made = plan(shape, hardware.cluster("h100", gpus), work(seq_len, mode="train", **workload))
    best = made.best
    assert best is not None
    assert best.why.startswith("the fastest that fits; next is U=")
    assert len(by_degrees(made)) >= 2
    for choice in made.choices[1:]:
        assert re.match(
            r"a tie; |U=\d+ crosses nodes: |all-to-all of U=|hops of R=|R=\d+ joins |\w+ joins more or |contiguous: |"
            r"kernels take |needs ",
            choice.why,
        ), choice.why
        assert len(choice.why) < 250


def test_more_ranks_than_heads_are_rejected_and_said():
    made = plan("qwen2.5-7b", hardware.cluster("h100", 64), work(2**17))
    assert [(c.ulysses_degree, c.ring_degree) for c in made.rejected] == [(32, 2), (64, 1)]
    assert made.rejected[0].why == "U=32 is more than the 28 query heads: some ranks would have none"
    made = plan("llama3-70b", hardware.cluster("h100", 64), work(2**17, tensor_parallel=4))
    assert [c.ulysses_degree for c in made.rejected] == []
    made = plan("llama3-70b", hardware.cluster("h100", 64), work(2**17, tensor_parallel=8))
    assert made.best is not None and made.rejected == ()
    made = plan("llama3-70b", hardware.cluster("h100", 128), work(2**17, tensor_parallel=8))
    assert made.rejected[0].why == (
        "U=16 is more than the 8 query heads each of 8 tensor-parallel ranks has: some ranks would have none"
    )


# ---- why -------------------------------------------------------------------------------------------------------------


def choices(name: Any, cluster: ClusterSpec, workload: Workload) -> dict[tuple[int, int, str, str], Choice]:
    made = plan(name, cluster, workload)
    return {(c.ulysses_degree, c.ring_degree, c.layout, c.transport): c for c in made.choices}


def test_a_group_that_crosses_nodes_says_both_bandwidths():
    slow = choices("llama2-7b", hardware.cluster("h100", 16, inter="ethernet-100g"), work(2**17))
    assert slow[16, 1, "contiguous", "p2p"].why == "U=16 crosses nodes: all-to-all at 1.2 GB/s instead of 300"
    assert "crosses" not in slow[8, 2, "zigzag", "p2p"].why
    straddling = choices("llama3-8b", hardware.cluster("h100", 12, 6), work(2**17))[4, 3, "zigzag", "p2p"]
    assert straddling.why.removeprefix("a tie; ") == "U=4 crosses nodes: all-to-all at 40 GB/s instead of 300"


def test_hops_that_are_not_hidden_say_their_bandwidth():
    found = choices("llama2-7b", hardware.cluster("l20", 8), work(2**15))
    ring = found[1, 8, "zigzag", "p2p"]
    assert re.fullmatch(
        r"hops of R=8 at 7 GB/s: (\d\.\d\d s|[\d.]+ ms) not hidden instead of (\d\.\d\d s|[\d.]+ ms)", ring.why
    ), ring.why
    [exposed] = re.findall(r"(\d\.\d\d) s not hidden", ring.why)
    assert float(exposed) == pytest.approx(ring.seconds_ring, abs=0.005)


def test_an_exchange_inside_a_node_says_its_bandwidth():
    found = choices("llama2-7b", hardware.cluster("l20", 8), work(2**15))
    assert re.match(r"all-to-all of U=8 at 1.25 GB/s: [\d.]+ s instead of ", found[8, 1, "contiguous", "p2p"].why)


def test_joining_blocks_is_said():
    found = choices("llama3-8b", hardware.cluster("h100", 8), work(2**17))
    best = found[8, 1, "contiguous", "p2p"]
    assert best.why.startswith("the fastest that fits")
    merged = found[1, 8, "zigzag", "p2p"]
    assert merged.why == f"R=8 joins 8 blocks: {merged.seconds_merge * 1e3:.3g} ms instead of 0 ms"


def test_an_uneven_layout_says_how_uneven():
    """Causal, contiguous over 8: half a block and seven whole ones, of four and a half... 7.5 of 4 on average."""
    found = choices("llama3-8b", hardware.cluster("h100", 8), work(2**17))
    assert found[1, 8, "contiguous", "p2p"].why == "contiguous: the slowest ranks compute 1.87 x an even share"
    assert found[4, 2, "contiguous", "p2p"].why == "contiguous: the slowest ranks compute 1.50 x an even share"
    full = choices("llama3-8b", hardware.cluster("h100", 8), work(2**17, is_causal=False))
    assert "even share" not in full[1, 8, "contiguous", "p2p"].why


def test_ties_are_called_ties():
    plans = [plan("llama3-8b", hardware.cluster("h100", 12, 6), seq_len=length) for length in ("128K", "256K")]
    assert {"a tie; " in c.why for made in plans for c in made.choices if 1.02 < c.slower < 1.05} == {True, False}
    for made in plans:
        for choice in made.choices[1:]:
            assert choice.why.startswith("a tie; ") == (choice.seconds < 1.03 * made.choices[0].seconds), choice


def test_what_is_as_fast_says_so():
    """Full attention is even in every layout."""
    made = plan("flux.1", hardware.cluster("l20", 8), work(2**15, is_causal=False))
    best = made.choices[0]
    same = next(c for c in made.choices[1:] if c.ring_degree == best.ring_degree and c.transport == best.transport)
    assert same.seconds == best.seconds
    assert same.why == f"a tie; as fast, with {same.transport} and {same.layout}"


def test_the_best_says_how_far_the_next_degrees_are_behind():
    made = plan("llama3-8b", hardware.cluster("h100", 8), work(2**17))
    best = made.choices[0]
    other = next(c for c in made.choices if c.ulysses_degree != best.ulysses_degree)
    percent = round(100 * (other.seconds / best.seconds - 1))
    assert best.why == (
        f"the fastest that fits; next is U={other.ulysses_degree} R={other.ring_degree}, {percent}% slower"
    )
    alone = plan("llama3-8b", hardware.cluster("h100", 1), work(2**14))
    assert [c.why for c in alone.choices] == ["the fastest that fits"]


def test_uneven_heads_are_said():
    found = choices("qwen2.5-7b", hardware.cluster("h100", 8), work(2**17))
    assert "; 28 heads on U=8: some ranks compute 4, others 3" in found[8, 1, "contiguous", "p2p"].why
    assert "heads on" not in found[4, 2, "zigzag", "p2p"].why
    found = choices("qwen2.5-14b", hardware.cluster("h100", 16), work(2**17))
    assert "; 40 heads on U=16: some ranks compute 3, others 2" in found[16, 1, "contiguous", "p2p"].why


def test_kv_heads_that_go_to_several_ranks_are_said():
    """2 kv heads on 8 ranks go to four each. Of 4 kv heads with 7 query heads each, on 8 ranks of 4 or 3 query heads,
    the second (7 to 13) goes to those of 4-7, 8-11 and 12-15. On U=3 two of 8 kv heads go to two ranks each.
    """
    found = choices(model(16, 2), hardware.cluster("h100", 8), work())
    assert found[8, 1, "contiguous", "p2p"].why.endswith("; 2 kv heads on U=8: one goes to up to 4 ranks")
    assert found[4, 2, "zigzag", "p2p"].why.endswith("; 2 kv heads on U=4: one goes to up to 2 ranks")
    assert "kv heads" not in found[2, 4, "zigzag", "p2p"].why
    found = choices("qwen2.5-7b", hardware.cluster("h100", 8), work(2**17))
    assert found[8, 1, "contiguous", "p2p"].why.endswith("; 4 kv heads on U=8: one goes to up to 3 ranks")
    assert "kv heads" not in found[4, 2, "zigzag", "p2p"].why
    found = choices("llama3-8b", hardware.cluster("h100", 12, 6), work())
    assert found[3, 4, "zigzag", "p2p"].why.endswith("; 8 kv heads on U=3: one goes to up to 2 ranks")


def test_what_does_not_fit_says_what_is_largest():
    made = plan("llama3-70b", hardware.cluster("h100", 8), seq_len="1M")
    for choice in made.choices:
        first, second = sorted(choice.memory.items(), key=lambda row: -row[1])[:2]
        assert choice.why.startswith(
            f"needs {choice.memory_bytes / GIB:.1f} GiB of 80: {first[1] / GIB:.0f} of {first[0]} and "
            f"{second[1] / GIB:.0f} of {second[0]}"
        )


@pytest.mark.parametrize(
    ("degrees", "work_of", "offered"),
    [
        ((2, 8), {}, "double_ring:4"),
        ((4, 4), {}, "double_ring:2"),
        ((1, 16), {}, "double_ring:8"),
        ((8, 2), {}, None),  # one rank in each node
        ((16, 1), {}, None),
        ((1, 8), {"data_parallel": 2}, None),  # one node
        ((1, 16), {"window_size": (8, 0)}, None),  # blocks do not go all the way round
    ],
)
def test_a_double_ring_is_offered_where_a_ring_has_several_ranks_in_each_of_several_nodes(degrees, work_of, offered):
    one = Problem(model(16), hardware.cluster("h100", 16), work(is_causal=True, **work_of))
    found = one.transports(*degrees, "contiguous")
    assert found == ["p2p"] + ["all_gather"] * (degrees[1] > 1) + [offered] * (offered is not None)


def test_a_double_ring_is_chosen_where_heads_do_not_fill_a_node():
    """12 heads over two nodes of 8: U=4 leaves two ring ranks to each, and half as many blocks to the slow link."""
    made = plan(model(12), hardware.cluster("h100", 16, inter="ethernet-100g"), work(seq_len=2**15, is_causal=False))
    best = made.best
    assert best is not None and (best.ulysses_degree, best.transport) == (4, "double_ring:2")
    plain = next(c for c in made.choices if (c.ulysses_degree, c.transport) == (4, "p2p"))
    assert best.bytes_ring == plain.bytes_ring and best.memory_bytes > plain.memory_bytes
    assert best.seconds < 0.9 * plain.seconds


def test_what_fits_comes_before_what_is_faster():
    """One head on links of a long latency: an all-gather waits for one message and not for seven, and holds all blocks.

    Where the device has room for two blocks and not for eight, it is the slower choice that is the best.
    """
    cluster = hardware.cluster("h100", 8)
    late = cluster.model_copy(update={"intra": cluster.intra.model_copy(update={"latency_us": 1e5})})
    found = choices(model(1), late, work())
    hops, gathered = found[1, 8, "zigzag", "p2p"], found[1, 8, "zigzag", "all_gather"]
    assert gathered.seconds < hops.seconds / 5 and gathered.memory_bytes > hops.memory_bytes
    between = (hops.memory_bytes + gathered.memory_bytes) / 2 / GIB
    small = late.model_copy(update={"device": late.device.model_copy(update={"memory_gib": between})})
    made = plan(model(1), small, work())
    assert [(c.transport, c.fits) for c in made.choices] == [("p2p", True)] * 3 + [("all_gather", False)] * 3
    assert made.best is not None and made.best.seconds == hops.seconds and made.remedies == ()
    assert made.best.why == "the fastest that fits"
    for choice in made.choices[3:]:
        assert choice.slower < 0.2 and choice.why.startswith("needs 1.5 GiB of ")


# ---- what would make it fit ------------------------------------------------------------------------------------------


def apply(remedy: str, shape: ModelSpec, cluster: ClusterSpec, workload: Workload) -> Plan:
    """The plan after a remedy, read as a person would read it."""
    for change in remedy.split(", "):
        if match := re.fullmatch(r"(\w+)=(\d+|\w+)", change):
            value = int(match[2]) if match[2].isdigit() else match[2]
            workload = Workload.read({**workload.model_dump(), match[1]: value})
        elif match := re.fullmatch(r"(\d+) nodes \((\d+) devices\)", change):
            cluster = ClusterSpec.read({**cluster.model_dump(), "nodes": int(match[1])})
            assert cluster.gpus == int(match[2])
        elif match := re.fullmatch(r"(\d+) tokens", change):
            assert int(match[1]) < workload.seq_len
            workload = Workload.read({**workload.model_dump(), "seq_len": int(match[1])})
        else:
            raise AssertionError(f"not understood: {remedy}")
    return plan(shape, cluster, workload)


def test_70b_and_a_million_tokens_on_eight_gpus():
    shape, cluster, workload = models.find("llama3-70b"), hardware.cluster("h100", 8), Workload(seq_len=2**20)
    made = plan(shape, cluster, workload)
    assert made.best is None and not any(c.fits for c in made.choices)
    # 131,072 tokens a rank: 80 layers' inputs of 8,192 are 160 GiB; 128,256 logits in bfloat16 and three times in
    # float32 are 219; 70.6 billion parameters take 16 bytes with Adam, an eighth of them here.
    rows = {name: size / GIB for name, size in made.choices[0].memory.items()}
    assert rows["activations"] == 2**17 * 80 * 8192 * 2 / GIB == 160
    assert rows["logits"] == pytest.approx(2**17 * 128256 * 14 / GIB)
    states = rows["parameters"] + rows["gradients"] + rows["optimizer states"]
    assert states == pytest.approx(70.55e9 * 16 / 8 / GIB, rel=0.001)
    assert made.choices[0].why == "needs 524.7 GiB of 80: 219 of logits and 160 of activations"
    assert made.remedies
    for remedy in made.remedies:
        assert apply(remedy, shape, cluster, workload).best is not None, remedy


@pytest.mark.parametrize(
    ("name", "gpus", "per_node", "workload", "kinds"),
    [
        ("llama3-8b", 8, 8, {"seq_len": 2**19}, ["loss_chunks=16"]),
        ("llama3-8b", 8, 8, {"seq_len": 2**15, "zero_stage": 0, "loss_chunks": 16}, ["zero_stage=3"]),
        ("llama3-8b", 8, 8, {"seq_len": 2**17, "checkpointing": "none", "loss_chunks": 16}, ["checkpointing=full"]),
        ("llama3-8b", 8, 8, {"seq_len": 2**17, "batch": 64, "loss_chunks": 16}, ["batch=1"]),
        ("llama3-8b", 8, 8, {"seq_len": 2**18, "batch": 2, "mode": "inference", "data_parallel": 8}, ["batch=1"]),
        ("qwen2.5-7b", 8, 8, {"seq_len": 2**25}, ["nodes", "tokens"]),
        ("qwen2.5-7b", 12, 6, {"seq_len": 2**23}, ["nodes", "tokens"]),
        ("llama3-70b", 12, 6, {"seq_len": 2**22}, ["nodes"]),
        ("llama3-70b", 12, 6, {"seq_len": 2**17, "data_parallel": 4}, ["nodes"]),
        ("llama3-8b", 8, 8, {"seq_len": 2**22, "mode": "inference", "batch": 3}, []),
        ("llama3-405b", 64, 8, {"seq_len": 2**14, "zero_stage": 1, "checkpointing": "none"}, []),
        ("llama3-70b", 8, 8, {"seq_len": 2**12, "mode": "inference", "zero_stage": 0}, ["zero_stage=3"]),
    ],
)
def test_every_remedy_works(name, gpus, per_node, workload, kinds):
    """And each of those that take numbers is no larger than it need be."""
    shape, cluster, given = models.find(name), hardware.cluster("h100", gpus, per_node), Workload(**workload)
    made = plan(shape, cluster, given)
    assert made.best is None
    assert made.remedies, "nothing was found"
    for kind in kinds:
        assert any(kind in remedy for remedy in made.remedies), made.remedies
    for remedy in made.remedies:
        assert apply(remedy, shape, cluster, given).best is not None, remedy
        if match := re.search(r"(\d+) nodes", remedy):
            fewer = re.sub(
                r"\d+ nodes.*", f"{int(match[1]) // 2} nodes ({int(match[1]) // 2 * per_node} devices)", remedy
            )
            assert apply(fewer, shape, cluster, given).best is None, fewer
        if (match := re.search(r"(\d+) tokens", remedy)) and int(match[1]) * 2 < given.seq_len:
            assert apply(remedy.replace(match[1], str(2 * int(match[1]))), shape, cluster, given).best is None, remedy


@examples(25)
@given(problem=problems(), memory_gib=st.floats(1.5, 2))
def test_remedies_of_any_plan_work(problem, memory_gib):
    shape, cluster, workload = problem
    device = cluster.device.model_copy(update={"memory_gib": memory_gib})
    cluster = cluster.model_copy(update={"device": device})
    made = plan(shape, cluster, workload)
    for remedy in made.remedies:
        assert apply(remedy, shape, cluster, workload).best is not None, remedy


def test_documents_are_not_cut():
    made = plan("llama3-70b", hardware.cluster("h100", 8), Workload(seq_len=2**20, documents=(2**19, 2**19)))
    assert made.best is None and made.remedies
    assert not any("tokens" in remedy for remedy in made.remedies)


def test_what_nothing_helps_has_no_remedy():
    tiny = hardware.cluster("h100", 1)
    tiny = tiny.model_copy(update={"device": tiny.device.model_copy(update={"memory_gib": 1.0})})
    assert plan("llama3-8b", tiny, work(2**14)).remedies == ()


# ---- what is asked ---------------------------------------------------------------------------------------------------


def test_a_length_stands_for_a_training_step():
    cluster = hardware.cluster("h100", 8)
    made = plan("llama3-8b", cluster, seq_len="128K")
    assert made.workload == Workload(seq_len=131072)
    assert (
        made
        == plan(models.find("llama3-8b"), cluster, Workload(seq_len=131072))
        == plan("LLAMA3-8B", cluster, seq_len=131072)
    )
    assert plan("flux.1", cluster, seq_len=8192).workload.is_causal is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give either workload or seq_len"),
        ({"workload": Workload(seq_len=8), "seq_len": 8}, "give either workload or seq_len"),
        ({"seq_len": 0}, "Workload: seq_len|seq_len: "),
        ({"seq_len": "8x"}, "seq_len: '8x' is not a number of tokens"),
        ({"workload": Workload(seq_len=8, data_parallel=3)}, "tensor_parallel x data_parallel = 1 x 3 does not divide"),
        ({"workload": Workload(seq_len=8, tensor_parallel=3)}, "does not divide the 8 devices"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments, message):
    with pytest.raises(InputError, match=message) as caught:
        plan("llama3-8b", hardware.cluster("h100", 8), **arguments)
    assert "\n" not in str(caught.value)


def test_an_unknown_model_is_pointed_at():
    with pytest.raises(InputError, match=r"unknown model 'llama3-8'.* did you mean 'llama3-8b'"):
        plan("llama3-8", hardware.cluster("h100", 8), seq_len=8)


@pytest.mark.parametrize("seq_len", [64, 65, 67, 127, 129])
@pytest.mark.parametrize("is_causal", [True, False])
def test_hardly_more_tokens_than_ranks_are_planned(seq_len, is_causal):
    made = plan(model(8, 2), hardware.cluster("h100", 64), work(seq_len, is_causal=is_causal))
    assert made.best is not None and all(0 < c.seconds < 10 for c in made.choices)


def test_fewer_tokens_than_ranks_are_not():
    made = plan(model(8, 2), hardware.cluster("h100", 16), work(15))
    assert (made.choices, made.best) == ((), None)
    assert [pair.why for pair in made.rejected] == ["16 ranks are more than the 15 tokens"] * 4 + [
        "U=16 is more than the 8 query heads: some ranks would have none"
    ]


def test_rings_that_are_too_long_to_plan_are_said():
    made = plan(model(2), hardware.cluster("h100", 2**11), work(2**20))
    assert [(c.ulysses_degree, c.ring_degree) for c in made.choices[:1]] == [(2, 2**10)]
    assert made.rejected[0].why == "R=2048 is more than the 1,024 ring ranks that are planned for"


def test_clusters_that_are_too_large_to_plan_are_refused():
    with pytest.raises(
        InputError, match=r"^nodes x gpus_per_node = 32,768 is more than the 16,384 devices of the largest"
    ):
        plan("llama3-8b", hardware.cluster("h100", 2**15), seq_len="1M")


# ---- layouts that deal by a mask -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "offered"),
    [
        ({}, False),
        ({"is_causal": False}, False),
        ({"window_size": (4095, 0)}, False),
        ({"documents": (2**14, 2**14)}, True),
        ({"chunk": 2**13}, True),
        ({"sinks": 4, "window_size": (4095, 0)}, True),
        ({"prefix": 2**10}, True),
    ],
)
def test_balanced_is_offered_where_the_offset_alone_does_not_decide(fields, offered):
    made = plan(model(8), hardware.cluster("h100", 4), work(**fields))
    for u, r in ((1, 4), (2, 2), (4, 1)):
        names = {c.layout for c in made.choices if (c.ulysses_degree, c.ring_degree) == (u, r)}
        assert ("balanced" in names) == (offered and r > 1)


def test_all_layers_are_dealt_by_the_mask_of_the_workload():
    """Windowed ones too, so that tokens stay where they are from layer to layer."""
    workload = work(48, documents=(30, 9, 9), prefix=4)
    shape = model(8, window=5, windowed_layers=1)
    problem = Problem(shape, hardware.cluster("h100", 4), workload)
    (whole, first), (windowed, second) = problem.layers(1, 4, "balanced", "p2p")
    assert (whole, windowed) == (1, 1) and first.schedule.layout == f"balanced[{workload.mask}]"
    assert second.schedule.mask == workload.mask & Mask.window(5, 5) != first.schedule.mask
    for rank in range(4):
        assert first.schedule.positions(rank) == second.schedule.positions(rank)


def test_uneven_documents_are_dealt_evenly_and_why_is_said():
    made = plan(
        "llama3-8b", hardware.cluster("h100", 32), work(2**17, documents=(2**13, 2**16, 2**12, 2**12, 3 * 2**14))
    )
    best = made.best
    assert best is not None and (best.ulysses_degree, best.ring_degree, best.layout) == (8, 4, "balanced")
    why = {c.layout: c.why for c in made.choices if (c.ring_degree, c.transport) == (4, "p2p")}
    assert re.fullmatch(r"zigzag: the slowest ranks compute 1\.\d\d x an even share", why["zigzag"])
    assert re.fullmatch(r"contiguous: the slowest ranks compute 1\.\d\d x an even share", why["contiguous"])
    assert re.fullmatch(r"striped joins more or larger tiles: [\d.]+ ms instead of [\d.]+ ms", why["striped"])


# ---- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "most"), [("llama3-8b", 2**5), ("gpt-oss-20b", 2**6)])
def test_a_thousand_gpus_and_a_million_tokens_are_little_work(monkeypatch, name, most):
    """Blocks are compared some ten thousand times, where a ring of 1,024 has a million pairs of ranks."""
    compared = []
    inner = tiles._pieces
    monkeypatch.setattr(tiles, "_pieces", lambda *blocks: compared.append(1) or inner(*blocks))
    survey.cache_clear()
    made = plan(name, hardware.cluster("h100", 1024), Workload(seq_len=2**20 - 2**12))
    assert made.best is not None
    assert {c.ulysses_degree for c in made.choices} == {2**i for i in range(11) if 2**i <= most}
    assert 1000 < len(compared) < 50_000


def test_planning_needs_neither_torch_nor_numpy():
    code = (
        "import sys, usp\n"
        "from usp.planner import hardware\n"
        "assert usp.plan('llama3-8b', hardware.cluster('h100', 8), seq_len='16K').best\n"
        "print([name for name in ('torch', 'numpy', 'matplotlib', 'typer', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize(("gpu", "gpus"), [("h100", 32), ("a100", 16), ("l20", 16), ("rtx4090", 32), ("l20", 4)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (28, 4)])
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_the_transport_that_attention_takes_is_never_far_from_the_best(gpu, gpus, heads, kv_heads, mode):
    """`transport="auto"` is the double ring where there is one, else p2p: for no degrees and layout 10 % slower."""
    shape, cluster = model(heads, kv_heads), hardware.cluster(gpu, gpus)
    for seq_len in (2**11, 2**14, 2**17):
        found: dict[tuple[int, int, str], dict[str, float]] = {}
        for c in plan(shape, cluster, work(seq_len, mode=mode)).choices:
            found.setdefault((c.ulysses_degree, c.ring_degree, c.layout), {})[c.transport.split(":")[0]] = c.seconds
        for setting, seconds in found.items():
            taken = seconds.get("double_ring", seconds["p2p"])
            assert taken <= 1.1 * min(seconds.values()), (seq_len, setting, seconds)
