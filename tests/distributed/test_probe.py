"""What `usp probe` measures: who sends to whom, how it is counted, and that real measurements make a cluster file."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool
from usp.errors import TopologyError
from usp.planner.spec import ClusterSpec, SpanSpeed
from usp.probe import MESSAGE_BYTES, Meter, Problem, attention_speed, by_node, fit, measure, measure_device

TINY = Problem(heads=2, head_dim=8, dtype=torch.float32, max_length=256)


@pytest.mark.parametrize("latency", [0.0, 20e-6, 3e-3])
def test_the_fit_is_exact_where_times_are(latency):
    found = fit([(size, latency + size / 2.5e9) for size in MESSAGE_BYTES])
    assert found == pytest.approx((latency, 2.5e9), rel=1e-6, abs=1e-12)


def test_the_fit_weighs_short_messages_as_long_ones():
    """A long message that took twice as long moves the latency by less than a tenth."""
    points = [(size, 1e-3 + size / 1e9) for size in MESSAGE_BYTES]
    points[-1] = (points[-1][0], 2 * points[-1][1])
    latency, bandwidth = fit(points)
    assert latency == pytest.approx(1e-3, rel=0.1)
    assert 0.5e9 < bandwidth < 1e9


@pytest.mark.parametrize(
    "points",
    [
        [(1000, 1e-6), (2000, 4e-6), (3000, 9e-6)],  # a line through them has a latency below 0
        [(1000, 9e-6), (2000, 4e-6), (3000, 1e-6)],  # longer messages were faster
    ],
)
def test_the_fit_is_a_time_that_a_link_can_have(points):
    latency, bandwidth = fit(points)
    assert latency == 0
    slope = sum(n / t for n, t in points) / sum((n / t) ** 2 for n, t in points)  # least (slope n / t - 1)^2, by hand
    assert bandwidth == pytest.approx(1 / slope)


def test_lengths_double_up_to_the_longest():
    assert Problem(1, 8, torch.float32, 1024).lengths == [256, 512, 1024]
    assert Problem(1, 8, torch.float32, 2000).lengths == [256, 512, 1024]
    assert TINY.lengths == [256]


def test_nodes():
    assert by_node(["a", "b", "a", "b"]) == [[0, 2], [1, 3]]
    with pytest.raises(TopologyError, match=r"different numbers of ranks \(a: 2, b: 1\): start as many on each"):
        by_node(["a", "b", "a"])


class Exact(Meter):
    """Links of known speed, by the node of each rank, and calls of one second. Times are made up, not measured.

    A message in a node takes 1 ms + bytes / (1 GB/s). Between nodes it takes 2 ms + bytes / (0.1 GB/s), of which only
    what goes to the other node is counted.
    """

    def __init__(self, nodes=()):
        super().__init__(torch.device("cpu"), 0.0, lambda items, _: items)
        self.nodes, self.seen = nodes, []

    def messages(self, targets, sources, bytes_sent):
        me = dist.get_rank()
        self.seen.append((tuple(targets), tuple(sources)))
        outside = bytes_sent * sum(self.nodes[peer] != self.nodes[me] for peer in targets) / len(targets)
        seconds = 2e-3 + outside / 1e8 if outside else 1e-3 + bytes_sent / 1e9
        return lambda: SimpleNamespace(wait=lambda: seconds)

    def clock(self, work):
        seconds = work()
        slowest = torch.tensor(seconds if isinstance(seconds, float) else 1.0, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    once = clock


def count(rank):
    speed = attention_speed(TINY, Exact(), 256)
    return speed, measure_device(TINY, Exact(), 2)


def test_how_it_is_counted(pool):
    """Every call takes a second."""
    speed, device = pool(2).run(count)[0]
    flops = 4 * 2 * 8 * (256 * 257 // 2)
    assert speed.forward_tflops == pytest.approx(flops / 1e12, rel=1e-3)
    assert speed.backward_tflops == pytest.approx(2.5 * flops / 1e12, rel=1e-3)
    assert device.attention == (speed,)
    assert device.launch_us == 1e6
    assert device.memory_gb_per_s == pytest.approx(2 * 2**26 / 1e9, rel=1e-3)  # read and written
    assert device.merge_bytes == pytest.approx(2 * 2**26 / (256 * 2 * 8), rel=1e-3)
    assert device.peak_tflops == pytest.approx(2 * 1024**3 / 1e12, rel=1e-3)


def links(rank):
    from usp.topology import Topology

    meter = Exact(Topology.build().nodes)
    cluster = measure(TINY, meter)
    return cluster, list(dict.fromkeys(meter.seen))


def test_who_sends_to_whom():
    """Ranks 0, 2, 4 are on one node, 1, 3, 5 on another."""
    pool = Pool(6, environment=lambda rank: {"GROUP_RANK": str(rank % 2)})
    try:
        results = pool.run(links)
    finally:
        pool.close()
    cluster, seen = results[2]
    assert all(other == cluster for other, _ in results)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.name) == (2, 3, "measured: 2 x 3 cpu")
    assert (cluster.intra.gb_per_s, cluster.intra.latency_us, cluster.intra.full_duplex) == (1.0, 1000.0, True)
    assert cluster.intra.ring == cluster.intra.all_to_all == (SpanSpeed(devices=3, gb_per_s=1.0),)
    assert (cluster.inter.gb_per_s, cluster.inter.latency_us) == (0.1, 2000.0)
    assert cluster.inter.all_to_all == (
        SpanSpeed(devices=4, gb_per_s=0.1),  # one device of each node: ranks 2 and 3, fourth from each other
        SpanSpeed(devices=6, gb_per_s=0.1),  # all of both
    )
    assert seen == [
        ((4,), (0,)),  # round the ring of the node, and round that of all
        ((0, 4), (0, 4)),  # its all-to-all
        ((3,), (3,)),  # round the ring of two nodes, and the all-to-all of the same two
        ((0, 4, 1, 3, 5), (0, 4, 1, 3, 5)),  # all-to-all of all
    ]
    assert ((1,), (2,)) in results[4][1]  # the ring of all leaves the node here


def measured(rank):
    return measure(TINY, Meter(torch.device("cpu"), 0.001, lambda items, _: items))


def test_real_measurements_make_a_cluster_file(pool, tmp_path):
    first, second = pool(2).run(measured)
    assert first == second
    assert (first.nodes, first.gpus_per_node) == (1, 2)
    assert first.inter == first.intra.model_copy(update={"name": "not measured (one node)"})
    assert [point.block_length for point in first.device.attention] == [256]
    assert [span.devices for span in first.intra.all_to_all] == [2]
    assert first.intra.gb_per_s > 0.001  # loopback, however busy the machine is
    first.write(tmp_path / "cluster.yaml")
    assert ClusterSpec.read(tmp_path / "cluster.yaml") == first


def test_one_device_a_node():
    pool = Pool(2, environment=lambda rank: {"GROUP_RANK": str(rank)})
    try:
        cluster = pool.run(links)[0][0]
    finally:
        pool.close()
    assert (cluster.nodes, cluster.gpus_per_node) == (2, 1)
    assert [span.devices for span in cluster.inter.all_to_all] == [2]
    assert cluster.intra == cluster.inter.model_copy(update={"name": "not measured (one device a node)"})
