"""`usp trace` without processes: clocks, who belongs to which hop, the table, the hidden share, and Chrome events."""

from dataclasses import replace
from itertools import product

import pytest

from usp.cli.timeline_plot import chrome_events, draw
from usp.errors import InputError
from usp.mask import Mask
from usp.planner.messages import Message, messages
from usp.planner.timeline import Hop, Span, hidden, hops
from usp.planner.traffic import Layer, Shape, bytes_all_to_all, bytes_ring
from usp.schedule import Schedule
from usp.trace import Mark, align, assemble, read

# ---- clocks ----------------------------------------------------------------------------------------------------------


def test_clocks_are_bounded_by_barriers():
    """Rank 1's clock shows 100 s more. All leave when the last has entered, and rank 1 sees that 2 s later."""
    first = [(0.0, 5.0), (10.0, 11.0)]
    second = [(105.0, 107.0), (109.0, 113.0)]
    # From the first: it is at least 105 - 5 ahead, and at most 107 - 0. From the second: 109 - 11, and 113 - 10.
    assert align([first, second]) == ([0.0, 101.5], 1.5)


def test_the_truth_is_within_the_bounds():
    true, entries = -7.25, [(0.0, 0.3), (1.0, 0.9), (2.0, 2.0), (3.5, 3.1)]
    left = [max(pair) for pair in entries]
    first = [(entered, out + 0.01) for (entered, _), out in zip(entries, left, strict=True)]
    second = [(entered + true, out + 0.02 + true) for (_, entered), out in zip(entries, left, strict=True)]
    (zero, offset), error = align([first, second])
    assert zero == 0
    assert abs(offset - true) <= error < 0.02


def test_one_rank_is_its_own_clock():
    assert align([[(1.0, 2.0)]]) == ([0.0], 0.0)


# ---- from marks to spans ---------------------------------------------------------------------------------------------

FORWARD = [
    Mark("usp::attention", 0.0, 6.0),
    Mark("c10d::recv_", 0.5, 0.75),
    Mark("c10d::send", 0.75, 0.8),
    Mark("usp::ring hop 0: compute", 1.0, 3.0),
    Mark("usp::ring hop 0: wait", 3.0, 4.0),
    Mark("usp::ring hop 1: compute", 4.0, 5.0),
    Mark("usp::ring hop 1: wait", 5.0, 5.0),
]
BACKWARD = [
    Mark("usp::attention_backward", 10.0, 30.0),
    Mark("usp::ring hop 1: compute", 10.0, 12.0),
    Mark("usp::ring hop 1: wait", 12.0, 16.0, (Mark("aten::copy_", 13.0, 14.0), Mark("c10d::send", 14.5, 15.0))),
    Mark("usp::ring home: compute", 16.0, 17.0),
    Mark("usp::ring home: wait", 17.0, 20.0),
]


def test_an_exchange_belongs_to_the_hop_that_it_runs_under():
    assert [span for span in read(FORWARD[::-1], 3) if span.stop > span.start] == [
        Span(3, "start", 0.5, 1.0, "forward hop 0"),
        Span(3, "compute", 1.0, 3.0, "forward hop 0"),
        Span(3, "wait", 3.0, 4.0, "forward hop 0"),
        Span(3, "compute", 4.0, 5.0, "forward hop 1"),
    ]


def test_what_is_computed_in_a_wait_is_no_waiting():
    assert read(BACKWARD, 0) == [
        Span(0, "compute", 10.0, 12.0, "backward hop 1"),
        Span(0, "wait", 12.0, 13.0, "backward hop 1"),
        Span(0, "compute", 13.0, 14.0, "backward hop 1"),
        Span(0, "wait", 14.0, 14.5, "backward hop 1"),
        Span(0, "wait", 15.0, 16.0, "backward hop 1"),
        Span(0, "start", 14.5, 15.0, "backward home"),
        Span(0, "compute", 16.0, 17.0, "backward home"),
        Span(0, "wait", 17.0, 20.0, "backward home"),
    ]


def test_all_to_alls_are_named_in_their_order():
    parts = "pack", "own part", "wait", "unpack"
    marks = [
        Mark(f"usp::all_to_all: {part}", 4.0 * i + j, 4.0 * i + j + 1) for i in range(4) for j, part in enumerate(parts)
    ]
    found = read(marks, 0)
    assert [span.kind for span in found] == ["compute", "compute", "wait", "compute"] * 4
    names = [f"{where} all-to-all {way}" for where in ("forward", "backward") for way in ("in", "out")]
    assert [span.label for span in found[::4]] == names


def test_the_median_step_on_one_clock():
    """Rank 1's clock is 50 s ahead, and the second of three steps is the median one. Its hop 0 starts at 1.5."""

    def marks(ahead, late):
        found = [Mark("usp::trace barrier", ahead + 100, ahead + 100)]
        for number, length in enumerate((9.0, 7.0, 6.0)):
            begin = ahead + 200 + 20 * number + late
            found.append(Mark("usp::trace step", begin, begin + length))
            found += [m._replace(start=m.start + begin, stop=m.stop + begin) for m in FORWARD]
        return found

    trace = assemble([marks(0, 0), marks(50, 1)], {"forward hop 0": 2.5})
    assert (trace.step_seconds, trace.steps, trace.clock_error_seconds) == (7.0, (9.0, 7.0, 6.0), 0.0)
    assert [(s.rank, s.start, s.stop) for s in trace.spans if s.kind == "transfer"] == [(0, 0.5, 3.0), (1, 1.5, 4.0)]
    assert [(s.rank, s.start, s.stop) for s in trace.spans if s.kind == "wait" and s.stop > s.start] == [
        (0, 3.0, 4.0),
        (1, 4.0, 5.0),
    ]


# ---- the table -------------------------------------------------------------------------------------------------------

SPANS = [
    Span(0, "start", 0.0, 0.5, "forward hop 0"), Span(0, "compute", 0.5, 4.5, "forward hop 0"),
    Span(0, "wait", 4.5, 5.0, "forward hop 0"), Span(0, "wait", 5.5, 6.0, "forward hop 0"),
    Span(0, "transfer", 0.0, 8.0, "forward hop 0"), Span(0, "compute", 6.0, 8.0, "forward hop 1"),
    Span(1, "compute", 1.0, 3.0, "forward hop 0"), Span(1, "wait", 3.0, 6.0, "forward hop 0"),
    Span(1, "compute", 6.0, 7.0, "forward hop 1"),
]  # fmt: skip


def test_hops_are_means_over_ranks():
    assert hops(SPANS, {"forward hop 0": 8.0}) == [
        Hop("forward hop 0", 3.0, 0.25, 2.0, 8.0, 3.0, 1),
        Hop("forward hop 1", 1.5, 0.0, 0.0, 0.0, 0.0, 0),
    ]


def test_the_hidden_share():
    first, second = hops(SPANS, {"forward hop 0": 8.0})
    assert hidden([first]) == hidden([first, second]) == 1 - 2.25 / 8
    assert hidden([second]) is None
    assert hidden([first, replace(second, wait_seconds=9.0)]) == 1 - 2.25 / 8  # of no message
    assert hidden(hops(SPANS, {"forward hop 0": 1.5})) == -0.5  # ranks wait for each other


def test_all_to_alls_are_no_hops_of_the_ring():
    assert [
        hop.ring for hop in hops([Span(0, "wait", 0, 1, label) for label in ("backward home", "all-to-all")], {})
    ] == [
        True,
        False,
    ]


# ---- messages --------------------------------------------------------------------------------------------------------


def test_messages_of_a_ring_of_three():
    """6 tokens, 2 a rank, one kv head of 1 + 1: 4 elements a block, in 2 bytes, its gradients in 4."""
    layer = Layer(Shape(1, 1, 1, 1, 1, 2), Schedule(Mask.full(), "contiguous", 6, 3), 1)
    block, gradients = Message("ring", {2: 8}, {0: 8}), Message("ring", {2: 16}, {0: 16})
    assert messages(layer, 1, 0, True) == {
        "forward hop 0": [block],
        "forward hop 1": [block],
        "backward hop 0": [block],
        "backward hop 1": [block],
        "backward hop 2": [gradients],
        "backward home": [Message("ring", {2: 16}, {0: 16})],  # two hops on, to the owner: rank -1
    }
    assert list(messages(layer, 1, 0, False)) == ["forward hop 0", "forward hop 1"]


LAYERS = [
    Layer(Shape(2, 6, 2, 8, 4, 2), Schedule(mask, layout, 37, ring), ulysses)
    for mask, layout, ring, ulysses in [
        (Mask.causal(), "zigzag", 4, 2), (Mask.full(), "contiguous", 5, 1), (Mask.causal(), "zigzag", 1, 4),
        (Mask.causal() & Mask.window(9, 0), "contiguous", 4, 3), (Mask.causal(), "striped", 2, 6),
    ]
]  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.schedule} U{layer.ulysses_degree}")
def test_messages_are_the_traffic_and_both_ends_agree(layer):
    ranks = list(product(range(layer.schedule.ring_degree), range(layer.ulysses_degree)))
    found = {rank: messages(layer, *rank, True) for rank in ranks}
    assert len({tuple(of_rank) for of_rank in found.values()}) == 1
    for (ring, ulysses), of_rank in found.items():
        for where in ("forward", "backward"):
            sent = {"ring": 0, "in": 0, "out": 0}
            for label, each in of_rank.items():
                for index, (axis, sends, receives) in enumerate(each):
                    if label.startswith(where):
                        sent["ring" if axis == "ring" else label.split()[-1]] += sum(sends.values())
                    for peer, size in receives.items():
                        other = found[(peer, ulysses) if axis == "ring" else (ring, peer)]
                        assert other[label][index].sends[ring if axis == "ring" else ulysses] == size
            backward = where == "backward"
            assert sent["ring"] == bytes_ring(layer, ring, ulysses, backward)
            assert (sent["in"], sent["out"]) == bytes_all_to_all(layer, ring, ulysses, backward)


# ---- pictures --------------------------------------------------------------------------------------------------------


def test_chrome_events():
    events = chrome_events([SPANS[0], Span(1, "transfer", 0.25, 2.25, "backward home")])["traceEvents"]
    assert [e for e in events if e["ph"] == "X"] == [
        {"ph": "X", "name": "forward hop 0", "cat": "start", "pid": 0, "tid": 1, "ts": 0.0, "dur": 0.5e6},
        {"ph": "X", "name": "backward home", "cat": "transfer", "pid": 1, "tid": 2, "ts": 0.25e6, "dur": 2e6},
    ]
    named = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert named == {
        ("process_name", 0, 0): "rank 0", ("process_name", 1, 0): "rank 1",
        ("thread_name", 0, 0): "compute", ("thread_name", 0, 1): "wait", ("thread_name", 0, 2): "transfer",
        ("thread_name", 1, 0): "compute", ("thread_name", 1, 1): "wait", ("thread_name", 1, 2): "transfer",
    }  # fmt: skip


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    draw(SPANS, tmp_path / "trace.png", "a title")
    assert (tmp_path / "trace.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(InputError, match=r"cannot write .*trace\.nothing"):
        draw(SPANS, tmp_path / "trace.nothing", "a title")
