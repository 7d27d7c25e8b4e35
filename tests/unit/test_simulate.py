"""Timelines against times worked out by hand, and against recurrences and sums that know nothing of events."""

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.strategies import examples
from tests.unit.test_planner_cost import ALONE, UNIT, device, inside, layer, link, machine, moving
from usp.errors import InputError
from usp.mask import Mask
from usp.planner.cost import Machine, Span, all_to_all_seconds, seconds
from usp.planner.programs import SAMPLED, Program, Step, Work, build
from usp.planner.simulate import GENERATORS, LONGEST, Wires, simulate, timeline
from usp.planner.spec import ClusterSpec, LinkSpec
from usp.planner.timeline import Timeline
from usp.planner.traffic import TRANSPORTS, bytes_ring, transport_kind
from usp.schedule import Schedule

BYTE = LinkSpec(gb_per_s=1e-9, latency_us=0)
"""A byte a second."""
CAUSAL, FULL = Mask.causal(), Mask.full()


def wires(intra: LinkSpec = BYTE, nodes: int = 1, devices: int = 4, rank_devices: int = 1, sharing: int = 1) -> Wires:
    """Between nodes a byte a second."""
    cluster = ClusterSpec(nodes=nodes, gpus_per_node=devices, device=device(), intra=intra, inter=BYTE)
    size = nodes * devices // rank_devices
    return Wires(Machine(cluster, ALONE, Span(devices, nodes * devices, size // nodes, size)), rank_devices, sharing)


def spans(program: Program, on: Wires) -> dict[str, tuple[float, float]]:
    """When what is called so begins and ends; not the waiting."""
    found = timeline(program, on, 0.0).spans
    return {i.label: (pytest.approx(i.start), pytest.approx(i.stop)) for i in found if i.kind != "wait"}


# ---- messages and links ----------------------------------------------------------------------------------------------


def test_messages_of_a_rank_go_one_after_another_and_latencies_at_once():
    program = Program(2)
    program.send(0, 1, 2, "a", ())
    program.send(0, 1, 3, "b", ())
    program.send(1, 0, 4, "other way", ())
    assert spans(program, wires()) == {"a": (0, 2), "b": (2, 5), "other way": (0, 4)}
    late = wires(LinkSpec(gb_per_s=1e-9, latency_us=1e6))
    assert spans(program, late) == {"a": (0, 3), "b": (3, 6), "other way": (0, 5)}


def test_a_part_of_a_collective_has_no_latency_of_its_own():
    program = Program(3)
    first = program.send(0, 1, 2, "a", ())
    program.send(1, 2, 2, "b", first, onward=True)
    assert spans(program, wires(LinkSpec(gb_per_s=1e-9, latency_us=1e6))) == {"a": (0, 3), "b": (3, 5)}


def test_messages_to_one_rank_share_its_side():
    """2 and 4 bytes at half a byte a second: after 4 s the second has 2 left, and the side to itself."""
    program = Program(3)
    program.send(0, 2, 2, "a", ())
    program.send(1, 2, 4, "b", ())
    assert spans(program, wires()) == {"a": (0, 4), "b": (0, 6)}


def test_half_duplex_shares_one_side_for_both_ways():
    program = Program(2)
    program.send(0, 1, 3, "a", ())
    program.send(1, 0, 3, "b", ())
    assert spans(program, wires(LinkSpec(gb_per_s=1e-9, latency_us=0, full_duplex=False))) == {"a": (0, 6), "b": (0, 6)}


@pytest.mark.parametrize(("overlap", "moved", "computed"), [(1, 2, 4), (0.5, 3, 5), (0, 4, 6)])
def test_what_does_not_overlap_slows_down_both(overlap, moved, computed):
    """A call of 4 s beside a message of 2 s takes 4 + 2 (1 - overlap), whoever of both ends computes."""
    for computing in (0, 1):
        program = Program(3)
        program.send(0, 1, 2, "message", ())
        program.compute(computing, 4, "call", ())
        program.compute(2, 4, "elsewhere", ())
        on = wires(LinkSpec(gb_per_s=1e-9, latency_us=0, overlap=overlap))
        assert spans(program, on) == {"message": (0, moved), "call": (0, computed), "elsewhere": (0, 4)}


@pytest.mark.parametrize(
    ("rank_devices", "sharing", "messages", "takes"),
    [
        (1, 1, [(0, 2), (1, 3)], 4),  # an adapter each
        (1, 2, [(0, 2), (1, 3)], 4),  # one of twice the speed for both
        (1, 2, [(1, 2)], 2),  # which is free for one
        (2, 2, [(0, 1)], 4),  # but for the ring of the other Ulysses rank
        (1, 2, [(0, 2), (1, 0)], 2),  # a message inside a node is in nobody's way
    ],
)
def test_devices_that_share_an_adapter(rank_devices, sharing, messages, takes):
    """Seconds of the first of some messages of 4 bytes."""
    program = Program(4)
    for number, (source, target) in enumerate(messages):
        program.send(source, target, 4, f"{number}", ())
    on = wires(nodes=2, devices=2, rank_devices=rank_devices, sharing=sharing)
    assert spans(program, on)["0"] == (0, takes)


# ---- programs, by hand -----------------------------------------------------------------------------------------------


def work(schedule: Schedule, intra: LinkSpec, backward: bool = False, transport: str = "p2p", **shape: Any) -> Work:
    return Work(
        layer(schedule, transport=transport, **shape), machine(intra, ring=inside(schedule.ring_degree)), backward
    )


def starts(line: Timeline, rank: int) -> list[float]:
    """When a rank's calls start, in `UNIT`s."""
    return [i.start / UNIT for i in line.spans if (i.rank, i.kind) == (rank, "compute")]


def test_a_causal_ring_of_three():
    """Blocks of 4 tokens: 10 pairs of a rank's own, 16 of what it sees whole. A block travels as long as 20 pairs.

    All blocks are under way until 20, and again until 40; the last rank needs both.
    """
    line = simulate(work(Schedule(CAUSAL, "contiguous", 12, 3), moving(4, 20 * UNIT)))
    assert starts(line, 2) == pytest.approx([0, 20, 40])
    assert starts(line, 1) == pytest.approx([0, 20, 40])
    assert line.seconds == pytest.approx(56 * UNIT)
    assert [t / UNIT for t in line.totals("compute")] == pytest.approx([10, 26, 42])
    assert [t / UNIT for t in line.totals("wait")] == pytest.approx([46, 30, 14])
    assert [t / UNIT for t in line.totals("transfer")] == pytest.approx([40, 40, 40])
    assert line.efficiency == pytest.approx((10 + 26 + 42) / 3 / 56)
    assert line.hidden == pytest.approx(1 - 90 / 120)


def test_a_block_moves_on_when_both_ends_have_come_to_the_hop():
    """Blocks travel as long as 4 pairs. Rank 0 has nothing to do after its own 10, and could pass on what it got by 14.

    But rank 1 still computes 16 pairs from 10 on, and has no room for another block before 26.
    """
    line = simulate(work(Schedule(CAUSAL, "contiguous", 16, 4), moving(4, 4 * UNIT)))
    passed = [i for i in line.spans if (i.rank, i.kind) == (0, "transfer")]
    assert [i.label for i in passed] == ["k, v of 0", "k, v of 3", "k, v of 2"]
    assert [i.start / UNIT for i in passed] == pytest.approx([0, 10, 26])


@pytest.mark.parametrize("ratio", [0.25, 0.75, 1.5])
def test_backward_over_two_ranks(ratio):
    """Full blocks of 8: 64 pairs. A block moves beside half of the first, its gradients in 2a beside the other half."""
    line = simulate(work(Schedule(FULL, "contiguous", 16, 2), moving(8, ratio * 64 * UNIT), True))
    assert line.seconds / UNIT / 64 == pytest.approx(max(0.5, ratio) + 1 + max(0.5, 2 * ratio))


def test_an_all_gather_waits_for_all_blocks_and_sends_gradients_at_the_end():
    schedule, slow = Schedule(FULL, "contiguous", 24, 3), moving(8, 64 * UNIT)
    forward = simulate(work(schedule, slow, transport="all_gather"))
    assert starts(forward, 0) == pytest.approx([0, 128, 192])
    backward = simulate(work(schedule, slow, True, "all_gather"))
    # Two blocks come beside the half of the first, and gradients for two, each twice a block, go home beside the rest.
    assert backward.seconds == pytest.approx((2 * 64 + 2 * 64 + 2 * 2 * 64) * UNIT)


def test_exchanges_before_and_after():
    """Two Ulysses ranks: 8 tokens of both of 2 heads each."""
    both = layer(Schedule(FULL, "contiguous", 16, 1), ulysses_degree=2, heads=4, kv_heads=4)
    on = machine(moving(64, 64 * UNIT), ulysses=inside(2))
    before, after = all_to_all_seconds(both, on)
    computing = 256 * 2 * UNIT
    assert 0 < after < before < computing
    assert simulate(Work(both, on)).seconds == pytest.approx(before + computing + after)


def nodes_of_two(transport: str, intra: LinkSpec, inter: LinkSpec, backward: bool = False, nodes: int = 2) -> Work:
    """Full blocks of 8: each is 64 pairs."""
    cluster = ClusterSpec(nodes=nodes, gpus_per_node=2, device=device(), intra=intra, inter=inter)
    ring = layer(Schedule(FULL, "contiguous", 16 * nodes, 2 * nodes), transport=transport)
    return Work(ring, Machine(cluster, ALONE, Span(2, 2 * nodes, 2, 2 * nodes)), backward)


def test_a_double_ring_crosses_during_a_whole_round():
    """A block crosses in two hops' time: three times one after another, or once beside the first two hops."""
    slow = moving(8, 2 * 64 * UNIT)
    assert simulate(nodes_of_two("p2p", link(1e9), slow)).seconds == pytest.approx((1 + 3 * 2) * 64 * UNIT, rel=1e-5)
    assert simulate(nodes_of_two("double_ring:2", link(1e9), slow)).seconds == pytest.approx(4 * 64 * UNIT, rel=1e-5)


def test_gradients_of_a_double_ring():
    """Three nodes of two. A block moves inside in 1/4 of a call and across in 3/2; its gradients take twice as long.

    Rounds are 1/2 + 1, which then waits 1/2 for gradients on their way home inside, and twice 1/2 + 1 + 1/2, where they
    come beside the last half. Beside the first round (2) and the second (2) a block crosses (3/2), and beside the third
    (2) the gradients of the second (3). Those of the third go home in 3, while the kept 1/2 is computed.
    """
    work = nodes_of_two("double_ring:2", moving(8, 16 * UNIT), moving(8, 96 * UNIT), True, nodes=3)
    line = simulate(work)
    assert line.seconds == pytest.approx((2 + 2 + 3 + 3) * 64 * UNIT)
    assert seconds(work.layer, work.machine, backward=True).total == pytest.approx(line.seconds)
    assert line.totals("compute") == pytest.approx([6 * 64 * UNIT] * 6)


# ---- any program -----------------------------------------------------------------------------------------------------

schedules = st.builds(
    Schedule,
    st.sampled_from([CAUSAL, FULL, Mask.window(9, 0), CAUSAL & Mask.documents((30, 12, 22))]),
    st.sampled_from(["contiguous", "zigzag", "striped"]),
    st.just(64),
    st.integers(1, 6),
)
every_transport = pytest.mark.parametrize("transport", GENERATORS)


def placed(schedule: Schedule, backward: bool, transport: str, gb_per_s: float, overlap: float = 1.0) -> Work:
    """In nodes of two, if they divide the ring."""
    ring, wire = schedule.ring_degree, link(gb_per_s, overlap=overlap)
    if transport == "double_ring":
        transport = "double_ring:2" if ring in (4, 6, 8) else "p2p"
    cluster = ClusterSpec(nodes=max(1, ring // 2), gpus_per_node=2 if ring % 2 == 0 else ring, device=device(),
                          intra=wire, inter=wire)  # fmt: skip
    local = 2 if ring % 2 == 0 else ring
    where = Machine(cluster, ALONE, Span(local, ring, local, ring))
    return Work(layer(schedule, transport=transport, heads=2, kv_heads=2), where, backward)


def steps(one: Work) -> list[Step]:
    return build(one, GENERATORS[transport_kind(one.layer.transport)]).steps


@every_transport
@examples(40)
@given(schedules, st.booleans(), st.sampled_from([1e-3, 0.1, 10.0]), st.sampled_from([0, 0.5, 1]))
def test_no_faster_than_calls_or_wires(transport, schedule, backward, gb_per_s, overlap):
    one = placed(schedule, backward, transport, gb_per_s, overlap)
    line = simulate(one)
    kernels = [sum(schedule.pairs(r, owner) for owner in one.ranks) for r in one.ranks]
    alone = [pairs * 2 * UNIT for pairs in kernels]
    assert line.ideal_seconds == pytest.approx(sum(alone) / len(alone))
    for r in one.ranks:
        assert line.totals("compute")[r] >= alone[r] * (1 - 1e-9)
        assert line.totals("compute")[r] + line.totals("wait")[r] == pytest.approx(line.seconds)
    if overlap == 1:
        assert line.totals("compute") == pytest.approx(alone)
    sent = defaultdict(float)
    for step in steps(one):
        sent[step.rank] += step.bytes_sent
    for size in sent.values():  # on two wires at most, that inside the node and that between nodes
        assert line.seconds >= size / (gb_per_s * 1e9) / 2 * (1 - 1e-9)


@every_transport
@pytest.mark.parametrize("ring", [2, 3, 4, 6, 8])
def test_what_is_passed_on_has_come_and_every_share_of_a_gradient_comes_home(transport, ring):
    """By the labels and what each message waits for: blocks set out from their owner, and come to every rank."""
    all_steps = steps(placed(Schedule(FULL, "contiguous", 64, ring), True, transport, 1.0))
    been, shares = defaultdict(set), defaultdict(set)
    carried: dict[int, set[int]] = {}
    for index, step in enumerate(all_steps):
        what, _, owner = step.label.partition(" of ")
        if step.kind != "message":
            continue
        before = [n for n in step.after if all_steps[n].label == step.label and all_steps[n].target == step.rank]
        if what.startswith("d"):
            carried[index] = {step.rank}.union(*(carried[n] for n in before))
            if step.target == int(owner):
                shares[step.target] |= carried[index]
        else:
            assert step.rank == int(owner) or before
            been[owner].add(step.target)
    assert all(been[f"{owner}"] >= set(range(ring)) - {owner} for owner in range(ring))
    if transport != "all_gather":  # whose gradients are one exchange
        assert all(shares[owner] >= set(range(ring)) - {owner} for owner in range(ring))


@every_transport
@examples(30)
@given(schedules, st.booleans())
def test_wires_that_take_no_time_leave_the_slowest_rank(transport, schedule, backward):
    """Where work is even: elsewhere a rank may also wait for another to have room for the next block."""
    line = simulate(placed(schedule, backward, transport, 1e9))
    calls = line.totals("compute")
    assert line.seconds >= max(calls)
    if max(calls) - min(calls) < 1e-9 * max(calls) and schedule.mask == FULL:
        assert line.seconds == pytest.approx(max(calls), rel=1e-3)


@examples(60)
@given(schedules)
def test_blocks_move_on_when_both_ends_have_come_to_the_hop(schedule):
    """Over wires that take no time, by recurrence: a block arrives when both ends are ready for its hop."""
    ring = schedule.ring_degree
    come, done = [0.0] * ring, [0.0] * ring
    for hop in range(schedule.hops + 1):
        ready = [max(come[r], done[r]) for r in range(ring)]
        done = [ready[r] + schedule.pairs(r, (r - hop) % ring) for r in range(ring)]
        come = [max(ready[r - 1], ready[r]) for r in range(ring)]
    line = simulate(work(schedule, link(1e9)))
    assert line.seconds / UNIT == pytest.approx(max(done), abs=1e-3)


@examples(40)
@given(schedules, st.booleans())
def test_a_rank_sends_what_the_planner_counts(schedule, backward):
    for transport in TRANSPORTS:
        one = placed(schedule, backward, transport, 1.0)
        sent = [0.0] * schedule.ring_degree
        for step in steps(one):
            sent[step.rank] += step.bytes_sent
        if transport != "all_gather" or not backward:  # the gradients of an all-gather are one exchange
            assert sent == [bytes_ring(one.layer, r, 0, backward) for r in one.ranks]


@examples(60)
@given(
    st.sampled_from([(FULL, "contiguous"), (FULL, "striped"), (CAUSAL, "zigzag")]),
    st.integers(1, 8),
    st.sampled_from([0.1, 0.4, 1, 1.6, 4]),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.booleans(),
    st.sampled_from(["p2p", "all_gather"]),
)
def test_where_all_ranks_are_alike_the_planner_says_the_same(kind, ring, ratio, overlap, backward, transport):
    mask, layout = kind
    schedule = Schedule(mask, layout, 16 * ring, ring)
    one = work(schedule, moving(16, ratio * 256 * UNIT, overlap=overlap), backward, transport)
    planned = seconds(one.layer, one.machine, backward).total
    assert simulate(one).seconds == pytest.approx(planned, rel=0.03)


@examples(60)
@given(
    st.sampled_from([(FULL, "contiguous"), (CAUSAL, "zigzag"), (CAUSAL, "striped")]),
    st.integers(2, 4),
    st.integers(2, 4),
    st.sampled_from([0.1, 0.4, 1, 4]),
    st.sampled_from([0.1, 0.7, 2, 8]),
    st.booleans(),
)
def test_the_planner_says_the_same_of_a_double_ring(kind, nodes, width, inside, across, backward):
    """Inside and across a block of 16 moves so many calls long."""
    ring = nodes * width
    intra, inter = (moving(16, ratio * 256 * UNIT) for ratio in (inside, across))
    cluster = ClusterSpec(nodes=nodes, gpus_per_node=width, device=device(), intra=intra, inter=inter)
    shown = layer(Schedule(*kind, 16 * ring, ring), transport=f"double_ring:{width}")
    on = Machine(cluster, ALONE, Span(width, ring, width, ring))
    assert simulate(Work(shown, on, backward)).seconds == pytest.approx(seconds(shown, on, backward).total, rel=0.03)


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_contiguous_takes_up_to_two_minus_one_over_r_times_as_long(ring):
    """The longer the blocks, the less their diagonal weighs, and the less a message's latency."""
    ratios = []
    for tokens in (64, 512, 4096):
        wire = link(1e3, latency_us=0.05)
        contiguous, zigzag = (
            simulate(work(Schedule(CAUSAL, layout, tokens * ring, ring), wire)).seconds
            for layout in ("contiguous", "zigzag")
        )
        ratios.append(contiguous / zigzag)
    assert ratios == sorted(ratios)
    assert ratios[-1] == pytest.approx(2 - 1 / ring, rel=2e-3)


@pytest.mark.parametrize("share", [0.5, 0.9, 1.1, 2])
def test_blocks_of_f_over_b_tokens_hide_their_transfer(share):
    """Ring Attention (Liu et al. 2023): c >= F / B, full mask, MHA, two bytes an element."""
    flops, bytes_per_second = 1e12, 1e9
    tokens = round(share * flops / bytes_per_second)
    line = simulate(work(Schedule(FULL, "contiguous", 4 * tokens, 4), link(bytes_per_second / 1e9)))
    assert line.efficiency == pytest.approx(4 / (1 + 3 * max(1, flops / bytes_per_second / tokens)))
    assert (line.hidden == pytest.approx(1)) == (share > 1)


def test_long_rings_look_at_some_ranks():
    ring = 2 * SAMPLED
    schedule = Schedule(CAUSAL, "zigzag", 64 * ring, ring)
    line = simulate(work(schedule, link(1e9)))
    assert line.ranks == ring
    assert line.totals("compute") == pytest.approx([schedule.work(r) * UNIT for r in range(ring)], rel=1e-2)


def test_what_is_refused():
    one = work(Schedule(FULL, "contiguous", 2 * LONGEST, 2 * LONGEST), link())
    with pytest.raises(InputError, match=r"^R=1024 is more than the 512 ring ranks that are simulated: give a larger"):
        simulate(one)
    with pytest.raises(InputError, match=r"^unknown transport 'nccl': there are p2p, all_gather"):
        simulate(work(Schedule(FULL, "contiguous", 4, 2), link(), transport="nccl"))
