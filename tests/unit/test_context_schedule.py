"""Context schedules: what is read and refused, where a step lies, and the plans of the stages."""

import math
import subprocess
import sys
from typing import Any

import pytest

from usp.data.schedule import PRESETS, ContextSchedule, ContextStage
from usp.errors import InputError
from usp.planner import hardware
from usp.planner.spec import ModelSpec

STAGES = [
    {"seq_len": "4K", "steps": 100, "rope_theta": 1e4, "batch": 8},
    {"seq_len": "16K", "steps": 50, "rope_theta": 1e5, "batch": 4, "ulysses_degree": 2, "ring_degree": 2},
    {"seq_len": "1M", "steps": 7, "rope_theta": 5e7, "ulysses_degree": 4, "ring_degree": 4, "layout": "zigzag"},
]
MODEL = ModelSpec(name="small", heads=8, kv_heads=4, head_dim=64, layers=2, hidden=512, intermediate=1024, vocab=1000)


def read(*stages: dict[str, Any]) -> ContextSchedule:
    return ContextSchedule.read({"stages": list(stages)})


def stage(**changes: Any) -> dict[str, Any]:
    return {"seq_len": 4096, "steps": 10} | changes


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_lengths_with_suffixes_and_defaults():
    first, second, third = read(*STAGES).stages
    assert (first.seq_len, second.seq_len, third.seq_len) == (4096, 16_384, 1_048_576)
    assert (first.ulysses_degree, first.ring_degree, first.layout, first.sequence_degree) == (None,) * 4
    assert (third.batch, third.sequence_degree, second.layout) == (1, 16, None)


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_written_and_read_again(tmp_path, suffix):
    schedule = read(*STAGES)
    schedule.write(tmp_path / f"schedule.{suffix}")
    assert ContextSchedule.read(tmp_path / f"schedule.{suffix}") == schedule


def test_theta_as_people_write_it_in_yaml(tmp_path):
    """YAML 1.1 reads 5e7 as text and 50000000 as a whole number."""
    path = tmp_path / "schedule.yaml"
    path.write_text(
        "stages:\n- {seq_len: 32K, steps: 1, rope_theta: 5e7}\n- {seq_len: 64K, steps: 1, rope_theta: 50000000}\n"
    )
    assert [stage.rope_theta for stage in ContextSchedule.read(path).stages] == [5e7, 5e7]


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([], "stages: "),
        ([stage(), stage()], r"stages.1.seq_len: lengths ascend, got 4096 after 4096"),
        ([stage(), stage(seq_len=8192), stage(seq_len=8191)], r"stages.2.seq_len: lengths ascend, got 8191 after 8192"),
        ([stage(rope_theta=1e5), stage(seq_len="8K", rope_theta=1e4)], r"stages.1.rope_theta: .* got 10000 after 1"),
        ([stage(steps=0)], r"stages.0.steps: .* greater than or equal to 1, got 0"),
        ([stage(seq_len=0)], r"stages.0.seq_len: .* got 0"),
        ([stage(seq_len="4X")], r"stages.0.seq_len: '4X' is not a number of tokens"),
        ([stage(batch=-1)], r"stages.0.batch: .* got -1"),
        ([stage(rope_theta=1)], r"stages.0.rope_theta: .* greater than 1, got 1"),
        ([stage(rope_theta="50M")], r"stages.0.rope_theta: .* valid number, got '50M'"),
        ([stage(rope_theta="inf")], r"stages.0.rope_theta: "),
        ([stage(rope_theta="nan")], r"stages.0.rope_theta: "),
        ([stage(ulysses_degree=2)], r"stages.0: ulysses_degree and ring_degree go together"),
        ([stage(ulysses_degree=2, ring_degree=0)], r"stages.0.ring_degree: .* got 0"),
        ([stage(layout="zigzig")], r"stages.0: unknown layout 'zigzig': .*did you mean 'zigzag'"),
        ([stage(sequence=4)], r"stages.0.sequence: unknown"),
    ],
)
def test_what_is_refused(stages, words):
    with pytest.raises(InputError, match=words) as caught:
        read(*stages)
    assert len(str(caught.value).splitlines()) == 1


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_where_a_step_lies():
    schedule = read(*STAGES)
    first, second, third = schedule.stages
    assert schedule.steps == 157
    assert [schedule.stage_at(step) for step in (0, 99)] == [(first, 0), (first, 99)]
    assert [schedule.stage_at(step) for step in (100, 149)] == [(second, 0), (second, 49)]
    assert [schedule.stage_at(step) for step in (150, 156)] == [(third, 0), (third, 6)]


def test_a_run_resumes_from_any_step():
    schedule = read(*STAGES)
    walked = [(stage, step) for stage, steps in schedule.remaining() for step in steps]
    assert [step for _, step in walked] == list(range(157))
    for start in (0, 1, 99, 100, 120, 150, 156, 157):
        assert [(stage, step) for stage, steps in schedule.remaining(start) for step in steps] == walked[start:]
    assert list(schedule.remaining(120)) == [
        (schedule.stages[1], range(120, 150)),
        (schedule.stages[2], range(150, 157)),
    ]


@pytest.mark.parametrize("step", [-1, 157, 158])
def test_steps_that_there_are_not(step):
    with pytest.raises(InputError, match=rf"global step {step} .* 157 steps"):
        read(*STAGES).stage_at(step)


def test_remaining_refuses_what_lies_outside():
    assert list(read(*STAGES).remaining(157)) == []
    with pytest.raises(InputError, match="global step 158 is outside the schedule of 157 steps"):
        next(read(*STAGES).remaining(158))


def test_tokens():
    schedule = read(*STAGES)
    assert schedule.stages[0].tokens == 4096 * 8 * 100
    assert schedule.tokens == 4096 * 8 * 100 + 16_384 * 4 * 50 + 1_048_576 * 7
    assert schedule.stages[2].tokens_per_rank() == 65_536
    assert schedule.stages[0].tokens_per_rank(4, 8) == 128
    assert schedule.stages[2].tokens_per_rank(ring_degree=2) == 131_072
    for degrees, words in (((), "ulysses_degree=None and ring_degree=None"), ((0, 2), "ulysses_degree=0 and")):
        with pytest.raises(InputError, match=words):
            schedule.stages[0].tokens_per_rank(*degrees)


@pytest.mark.parametrize(
    ("layout", "longest"),
    # 11 tokens on a ring of 2: contiguous 6 + 5; striped 6 + 5; zigzag cuts 3, 3, 3, 2 and pairs first with last.
    [("contiguous", 2), ("striped", 2), ("zigzag", 2)],
)
def test_tokens_of_uneven_shards(layout, longest):
    uneven = ContextStage(seq_len=11, steps=1, layout=layout)
    assert uneven.tokens_per_rank(3, 2) == longest
    assert uneven.tokens_per_rank(2, 2) == 3


def test_inverse_frequencies():
    found = ContextStage(seq_len=8, steps=1, rope_theta=1e4).inverse_frequencies(8)
    assert found == pytest.approx((1.0, 0.1, 0.01, 0.001), rel=1e-15)
    assert ContextStage(seq_len=8, steps=1, rope_theta=5e7).inverse_frequencies(128)[-1] == pytest.approx(
        math.exp(-math.log(5e7) * 126 / 128), rel=1e-14
    )
    for head_dim in (0, -2, 7):
        with pytest.raises(InputError, match=f"even and positive, got {head_dim}"):
            ContextStage(seq_len=8, steps=1).inverse_frequencies(head_dim)


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_stages_with_degrees_get_their_choices():
    cluster = hardware.cluster("h100", 16)
    plans = read(*STAGES).plans(MODEL, cluster)
    assert [plan.workload.seq_len for plan in plans] == [4096, 16_384, 1_048_576]
    assert [plan.workload.data_parallel for plan in plans[1:]] == [4, 1]
    assert {(c.ulysses_degree, c.ring_degree) for c in plans[1].choices} == {(2, 2)}
    assert {(c.ulysses_degree, c.ring_degree, c.layout) for c in plans[2].choices} == {(4, 4, "zigzag")}
    assert all(plan.workload.is_causal and plan.best for plan in plans)


def test_a_stage_without_degrees_gets_the_shortest_step():
    """Of the legal numbers of groups, none makes a step shorter: each runs batch / groups sequences in turn."""
    cluster = hardware.cluster("h100", 8)
    fields = {"seq_len": 32_768, "steps": 1, "batch": 4}
    free = read(fields).plans(MODEL, cluster)[0]
    seconds = {}
    for groups in (1, 2, 4):
        size = 8 // groups
        for u in (u for u in (1, 2, 4, 8) if u <= size):
            fixed = read(fields | {"ulysses_degree": u, "ring_degree": size // u}).plans(MODEL, cluster)[0]
            assert fixed.workload.data_parallel == groups and fixed.best
            seconds[groups, u] = fixed.best.seconds * 4 / groups
    assert free.best
    chosen = free.workload.data_parallel, free.best.ulysses_degree
    assert seconds[chosen] == min(seconds.values()) < max(seconds.values())


def test_longer_stages_get_more_ranks_a_sequence():
    wide = read(*({"seq_len": n, "steps": 1, "batch": 2**20 // n} for n in (2**16, 2**18, 2**20)))
    plans = wide.plans(MODEL, hardware.cluster("h100", 16))
    assert [plan.workload.data_parallel for plan in plans] == [16, 4, 1]
    assert [plan.best.ulysses_degree * plan.best.ring_degree for plan in plans if plan.best] == [1, 4, 16]


def test_a_layout_alone_narrows_the_choices():
    plan = read(stage(seq_len=65_536, layout="striped")).plans(MODEL, hardware.cluster("h100", 4))[0]
    assert {c.layout for c in plan.choices if c.ring_degree > 1} == {"striped"}
    assert any(c.ring_degree == 1 for c in plan.choices)


def test_further_fields_of_the_workload():
    cluster = hardware.cluster("h100", 16)
    plan = read(stage(batch=4)).plans("llama3-8b", cluster, {"tensor_parallel": 4, "batch": 2, "is_causal": False})[0]
    assert (plan.workload.tensor_parallel, plan.workload.batch, plan.workload.is_causal) == (4, 2, False)
    assert plan.workload.data_parallel in (1, 2)  # 4 would have 1 sequence each, and 2 are taken at a time


@pytest.mark.parametrize(
    ("fields", "workload", "words"),
    [
        (stage(ulysses_degree=3, ring_degree=1), {}, "8 ranks in groups of 3 x 1 = 3 ranks .* 8 is no multiple"),
        (stage(ulysses_degree=2, ring_degree=1, batch=6), {}, "6 sequences a step.* 4 groups do not divide them"),
        (stage(batch=3), {"batch": 2}, "3 sequences a step, 2 at a time"),
        (stage(), {"seq_len": 8}, "seq_len follow from the stages"),
        (stage(), {"data_parallel": 2}, "data_parallel follow from the stages"),
        (stage(), {"batchs": 2}, "batchs: unknown; did you mean batch"),
        (stage(), {"tensor_parallel": 3}, "tensor_parallel x data_parallel = 3 x 1 does not divide the 8 devices"),
    ],
)
def test_plans_that_there_are_not(fields, workload, words):
    with pytest.raises(InputError, match=words) as caught:
        read(fields).plans(MODEL, hardware.cluster("h100", 8), workload)
    assert len(str(caught.value).splitlines()) == 1


def test_degrees_that_are_not_legal_for_the_model():
    with pytest.raises(InputError, match="the stage of 4096 tokens: U=16 is more than the 8 query heads"):
        read(stage(ulysses_degree=16, ring_degree=1)).plans(MODEL, hardware.cluster("h100", 16))


# ---- presets ---------------------------------------------------------------------------------------------------------


def test_the_large_world_model():
    """Table 11 of arXiv 2402.08268: 4M tokens a step; billions of tokens rounded there, with 4M as 4 x 10^6."""
    lwm = PRESETS["lwm-text"]
    assert lwm.name == "lwm-text" and lwm.steps == 8370
    assert [stage.seq_len for stage in lwm.stages] == [2**15, 2**17, 2**18, 2**19, 2**20]
    assert [stage.rope_theta for stage in lwm.stages] == [1e6, 1e7, 1e7, 2.5e7, 5e7]
    assert [stage.steps * 4e6 / 1e9 for stage in lwm.stages] == pytest.approx([4.8, 12, 12, 3, 1.8], rel=0.05)
    assert all(stage.tokens == stage.steps * 2**22 for stage in lwm.stages)
    assert ContextSchedule.read(lwm.model_dump(mode="json")) == lwm


def test_a_schedule_needs_no_torch():
    code = "import sys, usp.data.schedule as s; s.PRESETS['lwm-text'].stage_at(5); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
