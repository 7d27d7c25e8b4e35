"""The planner against published measurements, and the arithmetic of that comparison against examples made by hand."""

import csv
from collections import Counter
from collections.abc import Mapping
from random import Random
from statistics import mean, median
from typing import Any

import pytest

from benchmarks import planner_truth
from benchmarks.planner_truth import (
    FITTED,
    RULES,
    TRUTH,
    Comparison,
    Row,
    compare,
    listing,
    of_plain_rings,
    page,
    problem_of,
    read,
    relative,
    scores,
    setting,
    summary,
)
from usp.planner import hardware
from usp.planner.spec import DeviceSpec, LinkSpec


@pytest.fixture(scope="module")
def comparisons() -> list[Comparison]:
    return compare(read(TRUTH))


def within(regrets: list[float]) -> float:
    """Share of the choices that are within 5 % of the best."""
    return sum(regret <= 1.05 for regret in regrets) / len(regrets)


def ninth(regrets: list[float]) -> float:
    """The smallest regret that nine tenths of all do not exceed."""
    return next(r for r in sorted(regrets) if sum(other <= r for other in regrets) >= 0.9 * len(regrets))


# ---- what is published -----------------------------------------------------------------------------------------------


def test_the_file_holds_what_it_should():
    with TRUTH.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (len(rows), len({row["group"] for row in rows})) == (739, 214)
    groups = read(TRUTH)
    assert sum(map(len, groups)) == 739 and len(groups) == 214
    for group in groups:
        assert len({row["group"] for row in group}) == 1
        for field in (
            "source",
            "gpu",
            "nodes",
            "gpus_per_node",
            "heads",
            "kv_heads",
            "head_dim",
            "seq",
            "batch",
            "better",
        ):
            assert len({row[field] for row in group}) == 1, (field, group[0]["group"])
        assert all(float(row["value"]) > 0 and row["better"] in ("lower", "higher") for row in group)


def test_the_scored_groups_are_those_that_should_be(comparisons):
    """Counted from the file: not of low confidence, a ring of point-to-point hops, the best 5 % before the next."""
    counted = Counter()
    for group in read(TRUTH):
        times: dict[tuple[str, str], list[float]] = {}
        for row in of_plain_rings(group):
            value = float(row["value"])
            times.setdefault((row["ulysses"], row["ring"]), []).append(value if row["better"] == "lower" else 1 / value)
        best = sorted(min(values) for values in times.values())
        counted["choice"] += len(best) > 1
        clear = len(best) > 1 and best[1] >= 1.05 * best[0]
        counted["scored"] += clear and not any(row["confidence"] == "low" for row in group)
    assert sum(one.scored for one in comparisons) == counted["scored"] == 89
    assert sum(len({key[:2] for key in one.measured}) > 1 for one in comparisons) == counted["choice"]


def test_the_choices_are_good(comparisons):
    regrets = [one.regret for one in comparisons if one.scored]
    assert median(regrets) <= 1.03
    assert ninth(regrets) <= 1.20
    assert within(regrets) >= 0.85


def test_the_choices_are_as_good_on_sources_that_nothing_was_fitted_to(comparisons):
    regrets = [one.regret for one in comparisons if one.scored and one.source not in FITTED]
    assert len(regrets) >= 20
    assert median(regrets) <= 1.03 + 0.05
    assert ninth(regrets) <= 1.20 + 0.05
    assert within(regrets) >= 0.85 - 0.05


def test_half_of_the_sources_were_fitted_to(comparisons):
    sources = {row["source"] for group in read(TRUTH) for row in group}
    assert sources >= FITTED
    scored = {one.source for one in comparisons if one.scored}
    assert len(FITTED & scored) <= len(scored) * 0.6


@pytest.mark.parametrize("rule", RULES)
def test_simple_rules_are_worse(comparisons, rule):
    ours = [one.regret for one in comparisons if one.scored]
    theirs = [one.by_rule(RULES[rule]) for one in comparisons if one.scored]
    assert mean(theirs) > mean(ours) + 0.3
    assert ninth(theirs) > 2 > 1.2 > ninth(ours)
    assert within(theirs) < within(ours) - 0.2


def scaled(link: LinkSpec, random: Random) -> LinkSpec:
    def near(value: float) -> float:
        return value * random.uniform(0.8, 1.2)

    tables = {
        kind: tuple(point.model_copy(update={"gb_per_s": near(point.gb_per_s)}) for point in getattr(link, kind))
        for kind in ("ring", "all_to_all")
    }
    return link.model_copy(update={**tables, "gb_per_s": near(link.gb_per_s), "latency_us": near(link.latency_us)})


def scaled_device(device: DeviceSpec, random: Random) -> DeviceSpec:
    by = {
        name: getattr(device, name) * random.uniform(0.8, 1.2)
        for name in ("memory_gb_per_s", "launch_us", "merge_bytes")
    }
    return device.model_copy(update=by)


@pytest.mark.parametrize("seed", range(5))
def test_the_choices_do_not_hang_on_the_constants(monkeypatch, seed):
    """Every bandwidth and every fixed time is off by up to 20 %, each by its own amount."""
    random = Random(seed)
    links: Mapping[str, LinkSpec] = {name: scaled(link, random) for name, link in hardware.LINKS.items()}
    devices = {name: scaled_device(device, random) for name, device in hardware.DEVICES.items()}
    monkeypatch.setattr(hardware, "LINKS", links)
    monkeypatch.setattr(hardware, "DEVICES", devices)
    regrets = [one.regret for one in compare(read(TRUTH)) if one.scored]
    assert len(regrets) == 89
    assert within(regrets) >= 0.85
    assert median(regrets) <= 1.03


# ---- regret and what is scored ---------------------------------------------------------------------------------------

A, B, C = (8, 1, "any"), (4, 2, "zigzag"), (4, 2, "contiguous")


def row(**fields: Any) -> Row:
    usual = {
        "group": "g", "source": "yunchang README media/benchmark_results.png", "confidence": "high", "gpu": "A100",
        "nodes": "1", "gpus_per_node": "8", "intra_link": "NVLink", "inter_link": "", "task": "fwd+bwd", "causal": "1",
        "batch": "1", "seq": "8192", "heads": "32", "kv_heads": "8", "head_dim": "128", "ulysses": "8", "ring": "1",
        "layout": "zigzag", "value": "1", "better": "lower", "extra": "",
    }  # fmt: skip
    return usual | {name: str(value) for name, value in fields.items()}


def comparison(measured: dict[Any, float], predicted: dict[Any, float], confidence: str = "high") -> Comparison:
    return Comparison([row(), row(confidence=confidence)], measured, predicted)


def test_regret_is_the_measured_time_of_what_is_chosen():
    one = comparison({A: 1.0, B: 1.3, C: 1.1}, {A: 1.2, B: 1.0, C: 1.5})
    assert one.chosen == B
    assert one.regret == 1.3
    assert comparison({A: 1.0, B: 1.3}, {A: 1.0, B: 7.0}).regret == 1.0


@pytest.mark.parametrize(
    ("measured", "confidence", "scored"),
    [
        ({A: 1.0, B: 1.05}, "high", True),
        ({A: 1.0, B: 1.049}, "high", False),
        ({A: 1.0, B: 1.06}, "low", False),
        ({A: 1.0, B: 1.06}, "medium", True),
        ({B: 1.0, C: 2.0}, "high", False),  # one pair of degrees in two layouts is no choice of degrees
        ({A: 1.02, B: 1.0, C: 2.0}, "high", False),  # the better layout of each pair counts
        ({A: 1.2, B: 1.0, C: 1.01}, "high", True),
        ({A: 1.0}, "high", False),
    ],
)
def test_what_is_scored(measured, confidence, scored):
    assert comparison(measured, measured, confidence).scored == scored


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("largest U that fits the node and divides kv_heads", 1.2),  # of 8 kv heads 4 is the largest measured
        ("always Ulysses", 3.0),
        ("always ring", 1.0),
    ],
)
def test_rules_take_the_best_layout_of_their_degree(rule, expected):
    times = {(16, 1, "any"): 3.0, (4, 4, "zigzag"): 1.2, (4, 4, "contiguous"): 1.4, (1, 16, "zigzag"): 1.0}
    assert comparison(times, times).by_rule(RULES[rule]) == expected


def test_the_largest_fitting_degree():
    rule = RULES["largest U that fits the node and divides kv_heads"]
    assert rule([1, 2, 4, 8], row(kv_heads=8)) == 8
    assert rule([1, 2, 4, 8], row(kv_heads=4)) == 4
    assert rule([1, 2, 4, 8], row(kv_heads=8, gpus_per_node=4)) == 4
    assert rule([2, 3, 6], row(kv_heads=8, gpus_per_node=6)) == 2
    assert rule([3, 6], row(kv_heads=8, gpus_per_node=6)) == 3  # where none fits, the smallest


def test_scores_by_hand():
    assert scores([1.2, 1.0, 1.0, 2.0, 1.04]) == "5 | 1.040 | 2.00 | 60% | 1.248 | 2.00"
    assert scores([1.0] * 18 + [1.3, 1.5]) == "20 | 1.000 | 1.30 | 90% | 1.040 | 1.50"
    assert scores([1.05]) == "1 | 1.050 | 1.05 | 100% | 1.050 | 1.05"


def test_the_summary_counts_what_it_says():
    other = {"source": "elsewhere"}
    good, bad = {A: 1.0, B: 1.5}, {A: 1.5, B: 1.0}
    made = [
        Comparison([row()], good, good),
        Comparison([row(**other)], good, bad),
        Comparison([row(**other)], {A: 1.0, B: 1.01}, bad),  # too near to be scored
        Comparison([row(**other)], {A: 1.0}, {A: 1.0}),  # no choice
    ]
    lines = summary(made)
    assert lines[2:6] == [
        "| the planner | 2 | 1.250 | 1.50 | 50% | 1.250 | 1.50 |",
        "| the planner, sources it was fitted to | 1 | 1.000 | 1.00 | 100% | 1.000 | 1.00 |",
        "| the planner, sources it was not fitted to | 1 | 1.500 | 1.50 | 0% | 1.500 | 1.50 |",
        "| the planner, all groups with a choice, scored or not | 3 | 1.010 | 1.50 | 67% | 1.170 | 1.50 |",
    ]
    assert [line.split(" | ")[1] for line in lines[6:]] == ["2"] * 3


def test_misses_are_listed(comparisons):
    missed = [one for one in comparisons if one.scored and one.regret > 1.05]
    written = page(comparisons)
    misses = written.split("## Misses")[1].split("## All groups")[0]
    rows = [line for line in misses.splitlines() if line.startswith("| 1.") or line.startswith("| 2.")]
    assert len(rows) == len(missed)
    assert all(one.name in misses for one in missed)
    assert sum(line.startswith("scored") for line in listing(comparisons)) == 89


# ---- from rows to comparisons ----------------------------------------------------------------------------------------


def compared(rows: list[Row], monkeypatch: pytest.MonkeyPatch, **predicted: float) -> list[Comparison]:
    monkeypatch.setattr(planner_truth, "predict", lambda row: predicted[f"u{row['ulysses']}"])
    return compare([rows])


def test_times_are_relative_to_the_best(monkeypatch):
    rows = [row(value=30), row(value=20, ulysses=4, ring=2)]
    [one] = compared(rows, monkeypatch, u8=5, u4=10)
    assert one.measured == {A: 1.5, B: 1.0}
    assert one.predicted == {A: 1.0, B: 2.0}
    assert (one.chosen, one.regret, one.scored) == (A, 1.5, True)


def test_throughput_is_turned_round(monkeypatch):
    rows = [row(value=200, better="higher"), row(value=100, ulysses=4, ring=2, better="higher")]
    [one] = compared(rows, monkeypatch, u8=1, u4=1)
    assert one.measured == {A: 1.0, B: 2.0}


def test_a_ring_of_one_that_was_measured_under_every_layout_counts_once(monkeypatch):
    rows = [row(value=value, layout=layout) for value, layout in ((10, "zigzag"), (12, "basic"), (30, "stripe"))]
    [one] = compared([*rows, row(value=24, ulysses=4, ring=2)], monkeypatch, u8=1, u4=2)
    assert one.measured == {A: 1.0, B: 2.0}


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"extra": "all-gather KV"}, 1),
        ({"layout": "all-gather"}, 1),
        ({"extra": "pass-Q"}, 1),
        ({"layout": "double ring"}, 1),
        ({"layout": "zigzag", "extra": "anything"}, 2),
    ],
)
def test_other_transports_are_left_out(fields, kept):
    assert len(of_plain_rings([row(ulysses=4, ring=2), row(ulysses=4, ring=2, **fields)])) == kept


def test_a_double_ring_stands_for_a_plain_one_that_was_not_measured():
    double = row(ulysses=4, ring=2, layout="zigzag double-ring")
    assert of_plain_rings([row(ulysses=2, ring=4), double])[1:] == [double]
    assert len(of_plain_rings([row(ulysses=4, ring=2), double])) == 1


def test_a_group_of_other_transports_alone_is_no_comparison(monkeypatch):
    assert compared([row(extra="all-gather")], monkeypatch, u8=1) == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"ulysses": 8, "ring": 1, "layout": "stripe"}, (8, 1, "any")),
        ({"ulysses": 4, "ring": 2, "layout": "stripe"}, (4, 2, "striped")),
        ({"ulysses": 4, "ring": 2, "layout": "basic"}, (4, 2, "contiguous")),
        ({"ulysses": 1, "ring": 8, "layout": "zigzag something"}, (1, 8, "zigzag")),
    ],
)
def test_settings(fields, expected):
    assert setting(row(**fields)) == expected


def test_what_the_planner_is_told_of_a_row():
    problem = problem_of(row(gpu="L20", intra_link="PCIe", ulysses=4, ring=4, nodes=2, batch=3, causal=0))
    assert (problem.model.heads, problem.model.kv_heads, problem.model.head_dim) == (32, 8, 128)
    assert (problem.cluster.nodes, problem.cluster.gpus_per_node, problem.cluster.device.name) == (2, 8, "l20")
    assert (problem.workload.seq_len, problem.workload.batch, problem.workload.is_causal) == (8192, 3, False)
    assert problem_of(row(gpu="H100", intra_link="NVLink4")).cluster.intra.name == "nvlink4"
    packed = problem_of(row(extra="varlen"))
    assert (packed.workload.seq_len, packed.workload.batch) == (1024, 8)
    tensor = problem_of(row(extra="TP8 in node", ulysses=1, ring=4))
    assert (tensor.workload.tensor_parallel, tensor.cluster.gpus) == (8, 32)


def test_relative():
    assert relative({A: 3.0, B: 2.0}) == {A: 1.5, B: 1.0}
