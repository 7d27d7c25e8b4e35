"""Machines by name: what there is, whether its figures can be true, and how a cluster is put together from parts."""

from itertools import pairwise

import pytest

from usp.errors import InputError
from usp.planner.hardware import DEVICES, LINKS, cluster, find
from usp.planner.spec import ClusterSpec

PUBLISHED = {
    "a100": (80, 312, 2039),
    "h100": (80, 989, 3352),
    "h200": (141, 989, 4800),
    "h20": (96, 148, 4000),
    "b200": (180, 2250, 8000),
    "gb200": (186, 2500, 8000),
    "l20": (48, 119.5, 864),
    "l40": (48, 181, 864),
    "rtx4090": (24, 165, 1008),
    "tpu-v5p": (95, 459, 2765),
}
"""Memory in GB, dense bf16 peak in TFLOP/s and memory bandwidth in GB/s, from the vendors' data sheets."""
NOMINAL = {
    "nvlink3": 300, "nvlink3-a800": 200, "nvlink4": 450, "nvlink4-h800": 200, "nvlink5": 900, "pcie4": 32,
    "pcie4-two-sockets": 32, "pcie4-no-p2p": 32, "ici": 300, "infiniband-hdr": 25, "infiniband-hdr-shared": 12.5,
    "infiniband-ndr": 50, "roce-400g": 50, "ethernet-100g": 12.5,
}  # fmt: skip
"""What a device can send in one direction at best, GB/s."""

every_device = pytest.mark.parametrize("name", DEVICES)
every_link = pytest.mark.parametrize("name", LINKS)


@every_device
def test_devices_are_what_they_are_sold_as(name):
    memory, peak, bandwidth = PUBLISHED[name]
    device = DEVICES[name]
    assert device.name == name
    assert (device.memory_gib, device.peak_tflops) == (memory, peak)
    assert device.memory_gb_per_s == pytest.approx(bandwidth, rel=0.03)


@every_device
def test_kernels_are_slower_than_the_peak_and_faster_with_longer_blocks(name):
    device = DEVICES[name]
    for kind in ("forward_tflops", "backward_tflops"):
        speeds = [getattr(point, kind) for point in device.attention]
        assert max(speeds) < 0.9 * device.peak_tflops
        assert max(speeds) > 0.25 * device.peak_tflops
        assert all(later >= 0.99 * earlier for earlier, later in pairwise(speeds))
    assert all(point.backward_tflops < 1.4 * point.forward_tflops for point in device.attention)
    assert 10 <= device.launch_us <= 200


@every_link
def test_links_are_no_faster_than_they_are_sold_as(name):
    link = LINKS[name]
    assert link.name == name
    speeds = [link.gb_per_s, *(point.gb_per_s for point in (*link.ring, *link.all_to_all))]
    assert max(speeds) <= 0.85 * NOMINAL[name]
    assert 1 <= link.latency_us <= 200
    assert link.full_duplex


@every_link
def test_the_wider_a_group_the_slower(name):
    for speeds in (LINKS[name].ring, LINKS[name].all_to_all):
        figures = [point.gb_per_s for point in speeds]
        assert figures == sorted(figures, reverse=True)


@every_device
@pytest.mark.parametrize(("gpus", "per_node"), [(1, 8), (4, 4), (8, 8), (12, 6), (64, 8)])
def test_every_device_makes_a_cluster(name, gpus, per_node):
    made = cluster(name, gpus, per_node)
    assert made.gpus == gpus and made.gpus_per_node == min(gpus, per_node)
    assert made.name == f"{made.nodes} x {made.gpus_per_node} {name}"
    assert made.device == DEVICES[name]
    assert made.intra in LINKS.values() and made.inter in LINKS.values()
    assert made.intra.gb_per_s >= made.inter.gb_per_s
    assert ClusterSpec.read(made.model_dump()) == made


def test_links_can_be_chosen():
    made = cluster("H100", 16, 8, intra="nvlink4-h800", inter="RoCE-400G")
    assert (made.intra, made.inter) == (LINKS["nvlink4-h800"], LINKS["roce-400g"])
    assert made.device.name == "h100"


def test_more_than_four_devices_on_pcie_are_two_sockets():
    assert cluster("l20", 4, 4).intra.name == "pcie4"
    assert cluster("l20", 8).intra.name == "pcie4-two-sockets"
    assert cluster("l20", 4).intra.name == "pcie4"  # four of them, in a node that could hold eight
    assert cluster("l20", 8, intra="pcie4").intra.name == "pcie4"
    assert cluster("h100", 8).intra.name == "nvlink4"


@pytest.mark.parametrize(("gpus", "per_node"), [(0, 8), (-8, 8), (8, 0), (8, -1), (12, 8), (9, 2)])
def test_devices_fill_whole_nodes(gpus, per_node):
    with pytest.raises(InputError, match=rf"^gpus={gpus} do not fill nodes of gpus_per_node=") as caught:
        cluster("h100", gpus, per_node)
    assert "\n" not in str(caught.value)


def test_too_many_nodes_are_refused():
    with pytest.raises(InputError, match=r"^gpus=1000000000000 with gpus_per_node=8 are more than 65536 nodes$"):
        cluster("h100", 10**12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("h1000", 8), "unknown GPU 'h1000': did you mean h100? there are a100, h100, h200"),
        (("quantum", 8), "unknown GPU 'quantum': there are a100"),
        (("h100", 8, 8, "nvlnk4"), "unknown link 'nvlnk4': did you mean nvlink4? there are nvlink3"),
        (("h100", 8, 8, None, "infiniband"), "unknown link 'infiniband': did you mean infiniband-"),
    ],
)
def test_unknown_parts_are_pointed_at(arguments, message):
    with pytest.raises(InputError) as caught:
        cluster(*arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_find_is_of_any_mapping():
    assert find({"a": 1}, "letter", "A") == 1
    with pytest.raises(InputError, match=r"^unknown letter 'b': there are a$"):
        find({"a": 1}, "letter", "b")
