"""The planner's seconds against times worked out by hand, and against a simulation that counts pair by pair.

The device computes 10^12 FLOP/s whatever the block, and the links carry what makes the times easy to say: `UNIT` is how
long a visible pair of one head takes.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.strategies import examples, flat, layout_texts, unions, visible
from usp.errors import InputError
from usp.mask import CAUSAL, FULL, Band, Mask
from usp.placement import columns, place, rows
from usp.planner import hardware
from usp.planner.cost import (
    BUDGET,
    Machine,
    Seconds,
    Span,
    all_to_all_seconds,
    kernel_seconds,
    message_seconds,
    seconds,
    span,
)
from usp.planner.models import find
from usp.planner.problem import Problem, locate
from usp.planner.spec import ClusterSpec, DeviceSpec, KernelSpeed, LinkSpec, ModelSpec, SpanSpeed, Workload
from usp.planner.survey import survey
from usp.planner.traffic import Layer, Shape
from usp.schedule import Schedule
from usp.tiles import Tile

UNIT = 2 * (128 + 128) / 1e12
"""Seconds of a visible pair: a product with a key and one with a value, each of 128 multiplications and additions."""
TOKEN = (128 + 128) * 2
"""Bytes of a token's key and value in bfloat16, of one head."""
ALONE = Span(1, 1, 1, 1)


def device(**changes: Any) -> DeviceSpec:
    """10^12 FLOP/s forward, 2.5 times that backward, so that both passes take as long; no other cost."""
    speed = KernelSpeed(block_length=1, forward_tflops=1, backward_tflops=2.5)
    fields = {"memory_gib": 80, "peak_tflops": 1, "memory_gb_per_s": 1e9, "attention": (speed,), "launch_us": 0}
    return DeviceSpec(**{**fields, "merge_bytes": 0, **changes})


def link(gb_per_s: float = 1, **changes: Any) -> LinkSpec:
    return LinkSpec(gb_per_s=gb_per_s, **{"latency_us": 0, **changes})


def machine(
    intra: LinkSpec, inter: LinkSpec | None = None, ulysses: Span = ALONE, ring: Span = ALONE, **on_device: Any
) -> Machine:
    return Machine(ClusterSpec(device=device(**on_device), intra=intra, inter=inter or link(1e-9)), ulysses, ring)


def layer(schedule: Schedule, ulysses_degree: int = 1, transport: str = "p2p", **shape: int) -> Layer:
    fields = {"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 128, "value_dim": 128, "dtype_bytes": 2, **shape}
    return Layer(Shape(**fields), schedule, ulysses_degree, transport)


def moving(tokens: int, takes: float, **changes: Any) -> LinkSpec:
    """A link that takes so long for the keys and values of so many tokens."""
    return link(tokens * TOKEN / takes / 1e9, **changes)


def inside(size: int) -> Span:
    """A group of neighbours in one node."""
    return Span(size, size, size, size)


# ---- the ring --------------------------------------------------------------------------------------------------------

every_ratio = pytest.mark.parametrize("ratio", [0, 0.5, 1, 1.5, 4])
"""How long a block of keys and values travels, over how long a block is computed with."""


def full_ring(transport: str = "p2p", ring: int = 4, **shape: int) -> Layer:
    """Blocks of 8 tokens: every hop takes 64 `UNIT`s."""
    return layer(Schedule(Mask.full(), "contiguous", 8 * ring, ring), transport=transport, **shape)


def taking(ratio: float, **changes: Any) -> LinkSpec:
    """A link on which a block of 8 tokens takes `ratio` hops of 64 `UNIT`s."""
    return moving(8, ratio * 64 * UNIT, **changes) if ratio else link(1e9, **changes)


@every_ratio
def test_a_hop_takes_as_long_as_the_longer_of_computing_and_fetching(ratio):
    """Three blocks are fetched while the three before are used: the first one's time hides a fetch too."""
    found = seconds(full_ring(), machine(taking(ratio), ring=inside(4)))
    hop = 64 * UNIT
    assert found.compute == pytest.approx(4 * hop)
    assert found.ring == pytest.approx(3 * max(ratio - 1, 0) * hop, abs=1e-6 * hop)
    assert found.total == pytest.approx(hop + 3 * max(1, ratio) * hop, rel=1e-5)


@every_ratio
def test_gradients_travel_one_hop_behind_and_come_home_beside_what_was_kept(ratio):
    """Float32 gradients are twice a block: 1 block beside half a hop, 1, 1 + 2 and 2 beside hops, 2 beside the half."""
    found = seconds(full_ring(), machine(taking(ratio), ring=inside(4)), backward=True)
    hop = 64 * UNIT
    beside = [max(blocks * ratio - part, 0) for blocks, part in ((1, 0.5), (1, 1), (3, 1), (2, 1), (2, 0.5))]
    assert found.compute == pytest.approx(4 * hop)
    assert found.ring == pytest.approx(sum(beside) * hop, abs=1e-5 * hop)


@pytest.mark.parametrize(("dtype_bytes", "blocks"), [(2, 2), (4, 1), (8, 1)])
def test_gradients_are_float32_or_wider(dtype_bytes, blocks):
    """Beside the hops of a slow link 1 block, 1, 1 + `blocks`, `blocks`, and then once more those."""
    slow = link(8 * 256 * dtype_bytes / 1e9)  # a second a block
    found = seconds(full_ring(dtype_bytes=dtype_bytes), machine(slow, ring=inside(4)), backward=True)
    assert found.ring == pytest.approx(1 + 1 + (1 + blocks) + 2 * blocks, rel=1e-6)


@every_ratio
@pytest.mark.parametrize("overlap", [0, 0.4, 1])
def test_what_does_not_overlap_is_added(ratio, overlap):
    found = seconds(full_ring(), machine(taking(ratio, overlap=overlap), ring=inside(4)))
    hop = 64 * UNIT
    each = max(ratio - 1, 0) + (1 - overlap) * min(ratio, 1)
    assert found.ring == pytest.approx(3 * each * hop, abs=1e-5 * hop)


def test_without_overlap_computing_and_fetching_follow_each_other():
    for ratio in (0.5, 2):
        found = seconds(full_ring(), machine(taking(ratio, overlap=0), ring=inside(4)))
        assert found.total == pytest.approx((4 + 3 * ratio) * 64 * UNIT)


def test_half_duplex_takes_twice_as_long():
    found = seconds(full_ring(), machine(taking(2, full_duplex=False), ring=inside(4)))
    assert found.ring == pytest.approx(3 * (2 * 2 - 1) * 64 * UNIT)


def test_every_message_has_its_latency():
    """Of a link that is as good as infinitely fast: three blocks forward; backward as many, one beside a gradient's,
    the fourth hop's gradients and those on their way home, which is five messages beside the computing of four hops.
    """
    late = machine(link(1e9, latency_us=1), ring=inside(4))  # a hop is 33 ns
    hop, message = 64 * UNIT, 1e-6
    assert seconds(full_ring(), late).ring == pytest.approx(3 * (message - hop))
    assert seconds(full_ring(), late, backward=True).ring == pytest.approx(5 * message - 4 * hop)


@every_ratio
def test_an_all_gather_is_beside_the_first_block_only(ratio):
    """Three blocks at once, and backward the gradients for three others, each beside half of the first block."""
    gathered, on = full_ring("all_gather"), machine(taking(ratio), ring=inside(4))
    hop = 64 * UNIT
    assert seconds(gathered, on).ring == pytest.approx(max(3 * ratio - 1, 0) * hop, abs=1e-5 * hop)
    assert seconds(gathered, on, backward=True).ring == pytest.approx(
        (max(3 * ratio - 0.5, 0) + max(3 * 2 * ratio - 0.5, 0)) * hop, abs=1e-5 * hop
    )


def test_every_hop_waits_for_its_slowest_rank():
    """Causal, contiguous, blocks of 4: 10 pairs, then at every hop the last rank sees 16; zigzag 10, 8, 8."""
    fast = machine(link(1e9), ring=inside(3))
    for layout, seq_len, pairs in (("contiguous", 12, [10, 16, 16]), ("zigzag", 12, [10, 8, 8])):
        found = seconds(layer(Schedule(Mask.causal(), layout, seq_len, 3)), fast)
        assert found.compute == pytest.approx(sum(pairs) * UNIT)
        # And a fetch of 12 pairs' time is hidden by what is computed meanwhile at this hop, not by the average.
        found = seconds(
            layer(Schedule(Mask.causal(), layout, seq_len, 3)), machine(moving(4, 12 * UNIT), ring=inside(3))
        )
        assert found.ring == pytest.approx(sum(max(12 - n, 0) for n in pairs[:2]) * UNIT)


def test_blocks_stop_moving_where_no_rank_sees_more():
    """A window of 3 back over blocks of 8: one hop, of 6 pairs, after 8 x 4 - 6. An all-gather moves all blocks."""
    schedule, slow = Schedule(Mask.window(3, 0), "contiguous", 32, 4), machine(moving(8, 1), ring=inside(4))
    assert seconds(layer(schedule), slow).ring == pytest.approx(1 - 26 * UNIT)
    assert seconds(layer(schedule), slow).compute == pytest.approx((26 + 6) * UNIT)
    # Backward: a block, and after the second hop a gradient of twice its size, each beside half of the first block.
    assert seconds(layer(schedule), slow, True).ring == pytest.approx(1 + 2 - 26 * UNIT)
    gathered = layer(schedule, transport="all_gather")
    assert seconds(gathered, slow).ring == pytest.approx(3 - 26 * UNIT)
    assert seconds(gathered, slow, True).ring == pytest.approx(3 + 2 - 26 * UNIT)  # gradients for one other rank


def test_a_sampled_ring_takes_as_long_as_a_whole_one():
    """128 blocks of 4 tokens, causal: 10 pairs, then always 16. A fetch takes 20 pairs' time."""
    long = layer(Schedule(Mask.causal(), "contiguous", 512, 128))
    assert len(survey(long.schedule, BUDGET).hops) < 128
    found = seconds(long, machine(moving(4, 20 * UNIT), ring=inside(128)))
    assert found.compute == pytest.approx((10 + 127 * 16) * UNIT)
    assert found.ring == pytest.approx(((20 - 10) + 126 * (20 - 16)) * UNIT)


def test_documents_that_fill_the_ranks_need_no_ring():
    schedule = Schedule(Mask.causal() & Mask.documents([8, 8]), "contiguous", 16, 2)
    found = seconds(layer(schedule), machine(link(1e-9), ring=inside(2)), backward=True)
    assert (found.compute, found.ring, found.all_to_all) == (pytest.approx(36 * UNIT), 0, 0)


def test_a_ring_across_nodes_is_on_the_slow_link():
    crossing = Span(devices=2, reach=4, local=2, size=4)
    found = seconds(full_ring(), machine(link(1e9), taking(2), ring=crossing))
    assert found.ring == pytest.approx(3 * 64 * UNIT)
    assert seconds(full_ring(), machine(taking(2), link(1e9), ring=crossing)).ring == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("devices", "block_seconds"), [(2, 1), (4, 1), (5, 2), (8, 2), (9, 2)])
def test_a_ring_is_as_fast_as_its_span_allows(devices, block_seconds):
    """A listed span, the next longer one, or the last."""
    block = 8 * TOKEN / 1e9
    speeds = (SpanSpeed(devices=4, gb_per_s=block), SpanSpeed(devices=8, gb_per_s=block / 2))
    fine, wrong = link(1e-6, ring=speeds), (SpanSpeed(devices=4, gb_per_s=1e9),)
    hop = 64 * UNIT
    group = Span(devices, 99, 4, 4)
    found = seconds(full_ring(), machine(fine.model_copy(update={"all_to_all": wrong}), ring=group))
    assert found.ring == pytest.approx(3 * (block_seconds - hop))
    across = Span(1, devices, 1, 4)
    assert seconds(full_ring(), machine(link(1e9), fine, ring=across)).ring == pytest.approx(3 * (block_seconds - hop))


# ---- kernels and merging ---------------------------------------------------------------------------------------------


def square(n: int, band: Band = FULL) -> Tile:
    return Tile(slice(0, n), slice(0, n), band)


CURVE = (
    KernelSpeed(block_length=1024, forward_tflops=100, backward_tflops=50),
    KernelSpeed(block_length=4096, forward_tflops=400, backward_tflops=200),
)


@pytest.mark.parametrize(
    ("tile", "tflops"),
    [
        (square(1023, CAUSAL), 100),  # rows of 512 on average, as in a causal square of 1,024
        (square(4095, CAUSAL), 400),
        (square(2047, CAUSAL), 200),  # half way between the logarithms
        (square(512), 100),  # a full square is like a causal one of twice its length
        (square(1024), 200),
        (square(8192), 400),  # nothing is known beyond the longest
        (square(511, CAUSAL), 50),  # in proportion below the shortest
        (Tile(slice(0, 64), slice(0, 8192), FULL), 100 * 128 / 1024),  # few rows
        (Tile(slice(0, 8192), slice(0, 64), FULL), 100 * 128 / 1024),  # few columns
        (Tile(slice(9, 8201), slice(0, 8192), Band(-511, 0)), 100 * (1024 - 511 / 8192 * 512) / 1024),  # a window
    ],
)
def test_the_speed_of_a_tile(tile, tflops):
    """At 2 FLOPs x 2 matrices x 128, and 2.5 times that at half the speed."""
    on = device(attention=CURVE)
    flops = 4 * 128 * tile.area * 3 * 7
    assert kernel_seconds(tile, 3, 7, 256, on) == pytest.approx(flops / (tflops * 1e12), rel=1e-3)
    assert kernel_seconds(tile, 3, 7, 256, on, backward=True) == pytest.approx(5 * flops / (tflops * 1e12), rel=1e-3)


@pytest.mark.parametrize(
    ("dims", "relative"),
    [
        (64, (32 / 54) / (128 / 150)),
        (128, (64 / 86) / (128 / 150)),
        (256, 1),
        (512, 1),
        (192 + 128, 1),
        (128 + 64, (96 / 118) / (128 / 150)),
    ],
)
def test_small_heads_are_slower(dims, relative):
    on = device(attention=CURVE)
    flops = 2 * dims * 512**2
    assert kernel_seconds(square(512), 1, 1, dims, on) == pytest.approx(flops / (100e12 * relative))


def test_a_speed_that_was_measured_with_small_heads_is_theirs():
    on = device(attention=CURVE, head_dim=64)
    flops = 2 * 128 * 512**2
    assert kernel_seconds(square(512), 1, 1, 128, on) == pytest.approx(flops / 100e12)
    assert kernel_seconds(square(512), 1, 1, 256, on) == pytest.approx(2 * flops / (100e12 * (128 / 150) / (64 / 86)))


def test_a_kernel_takes_no_less_than_its_launch():
    """Blocks of 8: 64 pairs take 33 ns. One call a hop, of which the first is also the only one of a ring of one."""
    slow = machine(link(1e9), ring=inside(2), launch_us=5)
    assert seconds(full_ring(ring=1), slow).total == pytest.approx(5e-6)
    assert seconds(full_ring(ring=2), slow).compute == pytest.approx(2 * 5e-6)
    fast = machine(link(1e9), ring=inside(2), launch_us=0.03)
    assert seconds(full_ring(ring=2), fast).compute == pytest.approx(2 * 64 * UNIT)


def test_merging_is_memory_traffic_and_a_launch():
    """2 sequences x 8 rows x 3 heads x 64 of a value head, in both blocks; twice as much backward."""
    on = machine(link(1e9), ring=inside(2), merge_bytes=10, memory_gb_per_s=1e-3)
    ring = full_ring(ring=2, batch=2, heads=3, kv_heads=3, head_dim=192, value_dim=64)
    once = 2 * 8 * 3 * 64 * 10 / 1e6
    assert seconds(ring, on).merge == pytest.approx(2 * once)
    assert seconds(ring, on, backward=True).merge == pytest.approx(4 * once)
    on = machine(link(1e9), ring=inside(2), merge_bytes=10, memory_gb_per_s=1e-3, launch_us=100)
    assert seconds(ring, on).merge == pytest.approx(2 * (once + 100e-6))
    alone = full_ring(ring=1, batch=2)
    assert seconds(alone, on).merge == seconds(alone, on, backward=True).merge == 0


def test_only_the_rows_of_a_block_that_see_something_are_merged():
    """A window of 4 back over blocks of 8: all rows at hop 0, and at hop 1 those of positions 8 to 11."""
    on = machine(link(1e9), ring=inside(2), merge_bytes=1, memory_gb_per_s=1e-3)
    found = seconds(layer(Schedule(Mask.causal() & Mask.window(4, 0), "contiguous", 16, 2)), on)
    assert found.merge == pytest.approx((8 + 4) * 128 / 1e6)


def test_merging_hides_transfers_too():
    on = {"merge_bytes": 1, "memory_gb_per_s": 128 * 8 / 1e9}  # a second a hop
    found = seconds(full_ring(), machine(moving(8, 1.5), ring=inside(4), **on))
    assert found.ring == pytest.approx(3 * 0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ulysses_degree", "q_heads", "calls"),
    [
        (8, 8, 4, 2, 1),
        (8, 2, 4, 2, 1),
        (5, 5, 2, 3, 1),  # shares of 3 and 2
        (28, 4, 8, 4, 2),  # heads 4 to 7 are three of kv head 0 and one of kv head 1
        (40, 8, 16, 3, 2),  # 3, 3 and 2 heads of groups of 5: 3 to 5 are two of kv head 0 and one of kv head 1
    ],
)
def test_the_rank_with_most_heads_counts(heads, kv_heads, ulysses_degree, q_heads, calls):
    alone = layer(Schedule(Mask.full(), "contiguous", 64, 1), ulysses_degree, heads=heads, kv_heads=kv_heads)
    group = inside(ulysses_degree)
    assert seconds(alone, machine(link(1e9), ulysses=group)).compute == pytest.approx(q_heads * 64**2 * UNIT)
    late = machine(link(1e9), ulysses=group, launch_us=1000)
    assert seconds(alone, late).compute == pytest.approx(calls * 1e-3)


# ---- the all-to-all --------------------------------------------------------------------------------------------------


def exchange(heads: int, kv_heads: int, degree: int, tokens: int = 8, **shape: int) -> Layer:
    schedule = Schedule(Mask.full(), "contiguous", tokens, 1)
    return layer(schedule, degree, heads=heads, kv_heads=kv_heads, **shape)


def test_an_exchange_inside_a_node():
    """Two ranks of 4 tokens: 2 of 4 query heads and 1 of 2 kv heads go, and the output of 2 heads comes back.

    Backward its gradient goes, and those of q, k and v come back.
    """
    on = machine(link(1e-6), ulysses=inside(2))  # 1,000 bytes a second
    q, kv, output = 4 * 2 * 128 * 2, 4 * 1 * 256 * 2, 4 * 2 * 128 * 2
    assert all_to_all_seconds(exchange(4, 2, 2), on) == pytest.approx(((q + kv) / 1000, output / 1000))
    assert all_to_all_seconds(exchange(4, 2, 2), on, True) == pytest.approx((output / 1000, (q + kv) / 1000))
    assert seconds(exchange(4, 2, 2), on).all_to_all == pytest.approx((q + kv + output) / 1000)
    value = exchange(4, 2, 2, head_dim=192, value_dim=64, batch=3, dtype_bytes=4)
    assert all_to_all_seconds(value, on) == pytest.approx(
        (3 * 4 * 4 * (2 * 192 + 1 * 256) / 1000, 3 * 4 * 4 * 2 * 64 / 1000)
    )


def test_every_exchange_has_its_latency_and_half_duplex_doubles_it():
    late = machine(link(1e9, latency_us=50), ulysses=inside(2))
    assert all_to_all_seconds(exchange(4, 2, 2), late) == pytest.approx((50e-6, 50e-6), rel=1e-6)
    once = sum(all_to_all_seconds(exchange(4, 2, 2), machine(link(1e-6), ulysses=inside(2))))
    twice = sum(all_to_all_seconds(exchange(4, 2, 2), machine(link(1e-6, full_duplex=False), ulysses=inside(2))))
    assert twice == pytest.approx(2 * once)


def test_packing_is_two_reads_and_two_writes_of_what_is_sent():
    sent = 4 * (2 * 128 + 256) * 2, 4 * 2 * 128 * 2
    on = machine(link(1e9), ulysses=inside(2), memory_gb_per_s=1e-6)
    assert all_to_all_seconds(exchange(4, 2, 2), on) == pytest.approx([4 * size / 1000 for size in sent])


@pytest.mark.parametrize(("intra", "inter"), [(1e-6, 1e-6), (1e-6, 1e-3), (1e9, 1e-6)])
def test_only_what_leaves_the_node_is_on_the_slow_link(intra, inter):
    """Four ranks on two nodes send a third to the one beside them and two thirds away, both at the same time."""
    group = Span(devices=2, reach=4, local=2, size=4)
    before, after = 2 * (6 * 128 + 3 * 256) * 2, 6 * 2 * 128 * 2  # 2 tokens of the others' heads, 6 others' tokens
    found = all_to_all_seconds(exchange(8, 4, 4), machine(link(intra), link(inter), ulysses=group))
    expected = [max(sent / 3 / (intra * 1e9), sent * 2 / 3 / (inter * 1e9)) for sent in (before, after)]
    assert found == pytest.approx(expected)


def test_the_links_of_an_exchange_are_those_of_its_spans():
    """Inside a node by the devices there, across by all of them; a ring's speeds are of no concern."""
    before, after = 2 * (6 * 128 + 3 * 256) * 2, 6 * 2 * 128 * 2

    def spans(**speeds: float) -> LinkSpec:
        table = tuple(SpanSpeed(devices=int(name[1:]), gb_per_s=speed) for name, speed in speeds.items())
        return link(1e-9, all_to_all=table, ring=(SpanSpeed(devices=99, gb_per_s=1e9),))

    intra, inter = spans(_2=1e9, _4=1e-6, _8=1e-7), spans(_4=1e9, _8=1e-6, _16=1e-7)
    alone = all_to_all_seconds(exchange(8, 4, 4), machine(intra, inter, ulysses=Span(3, 3, 4, 4)))
    assert alone == pytest.approx((before / 1000, after / 1000))
    across = all_to_all_seconds(exchange(8, 4, 4), machine(intra, inter, ulysses=Span(2, 7, 2, 4)))
    assert across == pytest.approx((before * 2 / 3 / 1000, after * 2 / 3 / 1000))


def test_kv_heads_that_go_to_several_ranks_are_sent_to_each():
    """4 query heads and 2 kv heads on 4 ranks: of 2 tokens 3 query heads go, and 3 kv heads, one of them twice."""
    on = machine(link(1e-6), ulysses=inside(4))
    before, after = 2 * (3 * 128 + 3 * 256) * 2, 6 * 1 * 128 * 2
    assert all_to_all_seconds(exchange(4, 2, 4), on) == pytest.approx((before / 1000, after / 1000))


def test_uneven_heads_are_sent_as_they_are():
    """Of 5 heads the busiest rank computes 3: it sends 2 heads of its 4 tokens, and 3 heads of the 4 others back."""
    on = machine(link(1e-6), ulysses=inside(2))
    assert all_to_all_seconds(exchange(5, 5, 2), on) == pytest.approx(
        (4 * 2 * (128 + 256) * 2 / 1000, 4 * 3 * 128 * 2 / 1000)
    )


def test_one_rank_exchanges_nothing():
    assert all_to_all_seconds(exchange(4, 4, 1), machine(link(1e-9, latency_us=1e6))) == (0, 0)


def test_a_message():
    slow = link(2, latency_us=10)
    assert message_seconds(slow, "ring", 4, 6e9) == pytest.approx(3 + 1e-5)
    assert message_seconds(slow.model_copy(update={"full_duplex": False}), "ring", 4, 6e9) == pytest.approx(6 + 1e-5)


# ---- where groups lie ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ulysses_degree", "ring_degree", "per_node", "ulysses", "ring"),
    [
        # 12 ranks on nodes of 6. Groups of 4: 0-3 | 4 5, 6 7 | 8-11; the rings 0 4 | 8, 1 5 | 9, 2 | 6 10, 3 | 7 11.
        (4, 3, 6, Span(4, 4, 2, 4), Span(5, 9, 1, 3)),
        (6, 2, 6, Span(6, 6, 6, 6), Span(1, 7, 1, 2)),
        (3, 4, 6, Span(3, 3, 3, 3), Span(4, 10, 2, 4)),
        (2, 6, 6, Span(2, 2, 2, 2), Span(5, 11, 3, 6)),
        (12, 1, 6, Span(6, 12, 6, 12), Span(1, 1, 1, 1)),
        (1, 12, 6, Span(1, 1, 1, 1), Span(6, 12, 6, 12)),
        (2, 2, 4, Span(2, 2, 2, 2), Span(3, 3, 2, 2)),
        (1, 2, 1, Span(1, 1, 1, 1), Span(1, 2, 1, 2)),
    ],
)
def test_spans(ulysses_degree, ring_degree, per_node, ulysses, ring):
    size = ulysses_degree * ring_degree
    nodes = [str(rank // per_node) for rank in range(size)]
    grids = place(nodes, ulysses_degree, ring_degree, allow_cross_node=True)
    assert span(rows(grids), per_node, 1) == ulysses
    assert span(columns(grids), per_node, 1) == ring
    wide = span(columns(grids), per_node, 2)
    assert (wide.devices, wide.reach) == (2 * ring.devices, 2 * ring.reach)
    assert (wide.local, wide.size) == (ring.local, ring.size)
    located = locate(
        hardware.cluster("h100", -(-size // per_node) * per_node, per_node), ulysses_degree, ring_degree, 1, size
    )
    assert (located.ulysses, located.ring) == (ulysses, ring)
    assert ulysses.crosses == (ulysses_degree in (4, 12) and per_node == 6)


def test_a_tensor_parallel_group_is_a_rank():
    """16 devices on 2 nodes, tensor parallel 2: 4 ranks a node. 4 x 2: Ulysses groups fill a node."""
    located = locate(hardware.cluster("h100", 16), 4, 2, 2, 8)
    assert (located.ulysses, located.ring) == (Span(8, 8, 4, 4), Span(2, 10, 1, 2))
    located = locate(hardware.cluster("h100", 16), 2, 2, 2, 8)  # and data parallel 2: groups inside nodes
    assert (located.ulysses, located.ring) == (Span(4, 4, 2, 2), Span(6, 6, 2, 2))


@pytest.mark.parametrize("tensor_parallel", [8, 16])
def test_a_tensor_parallel_group_that_fills_its_nodes_leaves_none_beside_it(tensor_parallel):
    located = locate(
        hardware.cluster("h100", 64), 2, 64 // tensor_parallel // 2, tensor_parallel, 64 // tensor_parallel
    )
    assert (located.ulysses.local, located.ring.local) == (1, 1)
    assert located.ulysses.crosses and located.ring.crosses


# ---- a problem -------------------------------------------------------------------------------------------------------


def problem(model: str, gpus: int = 8, per_node: int = 8, **workload: Any) -> Problem:
    return Problem(find(model), hardware.cluster("h100", gpus, per_node), Workload(**{"seq_len": 2**17, **workload}))


def test_degrees_use_all_devices():
    assert problem("llama3-8b", 12, 6).degrees == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    assert problem("llama3-8b", 16, tensor_parallel=2, data_parallel=2).degrees == [(1, 4), (2, 2), (4, 1)]


def test_no_rank_is_without_a_head():
    """Four tensor-parallel ranks of 40 heads have 10 each, two of 28 heads 14."""
    assert [problem("qwen2.5-14b", tensor_parallel=4).objection(n, 1) for n in (1, 8, 10)] == ["", "", ""]
    assert problem("qwen2.5-14b", tensor_parallel=4).objection(11, 1) == (
        "U=11 is more than the 10 query heads each of 4 tensor-parallel ranks has: some ranks would have none"
    )
    assert problem("qwen2.5-7b").objection(32, 1) == "U=32 is more than the 28 query heads: some ranks would have none"


def test_windowed_layers_are_layers_of_their_own():
    """Of gpt-oss every other layer sees the last 128 tokens, the token itself included."""
    found = problem("gpt-oss-20b").layers(4, 2, "zigzag", "all_gather")
    assert [count for count, _ in found] == [12, 12]
    assert [str(layer.schedule.mask) for _, layer in found] == [":0", "-127:0"]
    assert {(layer.ulysses_degree, layer.schedule.ring_degree, layer.transport) for _, layer in found} == {
        (4, 2, "all_gather")
    }
    assert [count for count, _ in problem("llama3-8b").layers(8, 1, "contiguous", "p2p")] == [32]
    every = Problem(
        ModelSpec(heads=8, kv_heads=8, hidden=1, intermediate=1, layers=5, window=10, windowed_layers=5),
        hardware.cluster("h100", 8),
        Workload(seq_len=4096),
    )
    assert [(n, str(layer.schedule.mask)) for n, layer in every.layers(8, 1, "contiguous", "p2p")] == [(5, "-10:0")]


@pytest.mark.parametrize(
    ("workload", "passes"),
    [
        ({"mode": "inference"}, {"forward": 1}),
        ({"mode": "inference", "checkpointing": "full"}, {"forward": 1}),
        ({"checkpointing": "none"}, {"forward": 1, "exchange": 0, "backward": 1}),
        ({"checkpointing": "full"}, {"forward": 2, "exchange": 0, "backward": 1}),
        ({"checkpointing": "selective"}, {"forward": 1, "exchange": 1, "backward": 1}),
    ],
)
def test_what_is_run_again(workload, passes):
    assert problem("llama3-8b", **workload).passes == passes


@pytest.mark.parametrize(
    ("ring_degree", "layout", "expected"),
    [(4, "contiguous", 3.5 / 2), (4, "zigzag", 1), (4, "striped", 1), (8, "contiguous", 7.5 / 4), (1, "zigzag", 1)],
)
def test_imbalance(ring_degree, layout, expected):
    """Contiguous: half a block and then R - 1 whole ones, of R / 2 that each rank has to compute on average."""
    assert problem("llama3-8b").imbalance(ring_degree, layout) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("per_node", "workload", "message"),
    [
        (
            6,
            {"data_parallel": 5},
            "tensor_parallel x data_parallel = 1 x 5 does not divide the 24 devices of 4 nodes x 6",
        ),
        (
            6,
            {"tensor_parallel": 4},
            "tensor_parallel=4 neither divides the 6 devices of a node nor is a multiple of it",
        ),
        (3, {"tensor_parallel": 3}, "tensor_parallel=3 does not divide the 32 heads: use 1, 2, 4, 8, 16, 32"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(per_node, workload, message):
    with pytest.raises(InputError) as caught:
        problem("llama3-8b", 24, per_node, **workload)
    assert str(caught.value) == message


# ---- a simulation ----------------------------------------------------------------------------------------------------


def simulated(layer: Layer, block_seconds: float, backward: bool) -> tuple[float, float]:
    """(kernels, ring not hidden) on the busiest rank, each visible pair counted and each message followed."""
    schedule, shape = layer.schedule, layer.shape
    ring, most_heads = schedule.ring_degree, -(-shape.heads // layer.ulysses_degree)
    held = [flat(schedule.positions(rank)) for rank in range(ring)]
    work = [max(int(visible(schedule.mask, held[r], held[r - hop]).sum()) for r in range(ring)) for hop in range(ring)]
    last = max((hop for hop in range(ring) if work[hop]), default=0)
    busy = [work[hop] * most_heads * UNIT for hop in range(last + 1)]
    if not last:
        return sum(busy), 0.0
    gradient = 2 * block_seconds if backward else 0.0
    kept = busy[0] / 2 if backward else 0.0
    if layer.transport == "all_gather":
        return sum(busy), max((ring - 1) * block_seconds - busy[0] + kept, 0) + max(last * gradient - kept, 0)
    clock, block_here = 0.0, 0.0
    for hop in range(last + 1):
        start = max(clock, block_here)  # what comes with the block was sent while the one before was used
        sent = (block_seconds if hop < last else 0) + (gradient if hop > 1 else 0)
        clock, block_here = start + busy[hop] - (0 if hop else kept), start + sent
    return sum(busy), max(clock, block_here) + max(gradient, kept) - sum(busy)


@examples(120)
@given(
    data=st.data(),
    ring=st.integers(1, 5),
    chunk=st.integers(1, 4),
    heads=st.sampled_from([(1, 1, 1), (4, 4, 2), (6, 3, 3), (7, 1, 2)]),
    transport=st.sampled_from(["p2p", "all_gather"]),
    ratio=st.floats(0.1, 5),
    backward=st.booleans(),
)
def test_seconds_are_those_of_a_simulation(data, ring, chunk, heads, transport, ratio, backward):
    seq_len, (q, kv, degree) = 2 * ring * chunk, heads
    schedule = Schedule(data.draw(unions(seq_len)), data.draw(layout_texts(seq_len)), seq_len, ring)
    shown = layer(schedule, degree, transport, heads=q, kv_heads=kv)
    block_seconds = ratio * (2 * chunk) ** 2 * UNIT
    speed = 2 * chunk * -(-kv // degree) * TOKEN / block_seconds / 1e9
    found = seconds(shown, machine(link(speed), ring=inside(ring), ulysses=inside(degree)), backward)
    compute, exposed = simulated(shown, block_seconds, backward)
    assert found.compute == pytest.approx(compute)
    assert found.ring == pytest.approx(exposed, abs=1e-6 * block_seconds)


def test_sums():
    one, two = Seconds(1, 2, 3, 4), Seconds(10, 20, 30, 40)
    assert one + two == Seconds(11, 22, 33, 44)
    assert one * 3 == Seconds(3, 6, 9, 12)
    assert (one.total, (one + two).total) == (10, 110)
