"""Machines by name: devices and links, a handful of physical constants each.

Where a figure is from: [N] nominal, by the vendor; [P] published measurement; [F] fitted by hand to half of the
published comparisons that `benchmarks/planner_truth.py` reads (it names the half). What is not marked is [N].
Bandwidths are per device and one direction, 10^9 bytes/s; speeds are 10^12 FLOP/s. A measured file (`usp probe`) beats
all of it, above all for PCIe, where the wiring decides and no name tells it.
"""

import difflib
from collections.abc import Mapping
from typing import TypeVar

from usp.errors import InputError
from usp.planner.spec import MOST_NODES, ClusterSpec, DeviceSpec, KernelSpeed, LinkSpec, SpanSpeed

T = TypeVar("T")


def _measured(*points: tuple[int, float, float]) -> tuple[KernelSpeed, ...]:
    return tuple(KernelSpeed(block_length=n, forward_tflops=f, backward_tflops=b) for n, f, b in points)


def _rates(forward: float, backward: float) -> tuple[KernelSpeed, ...]:
    """A curve of which only the long end is known: L / (L + 300) of it forward and L / (L + 700) backward [F]."""
    lengths = [2**n for n in range(8, 18)]
    return _measured(*((n, forward * n / (n + 300), backward * n / (n + 700)) for n in lengths))


def _spans(speeds: Mapping[int, float]) -> tuple[SpanSpeed, ...]:
    return tuple(SpanSpeed(devices=devices, gb_per_s=speed) for devices, speed in speeds.items())


# FlashAttention-3 and cuDNN, 64 query and 8 kv heads of 128, causal: MagiAttention's benchmark pages [P].
_HOPPER = _measured(
    (1024, 287, 211), (2048, 586, 355), (4096, 663, 463), (8192, 658, 519), (16384, 673, 563), (32768, 680, 586)
)
_BLACKWELL = _measured(
    (1024, 135, 182), (2048, 537, 338), (4096, 922, 507), (8192, 1149, 645), (16384, 1241, 711), (32768, 1287, 738)
)

# launch_us: 60 where a compiled model was measured, 100 to 180 for eager PyTorch on older hosts [F].
DEVICES: Mapping[str, DeviceSpec] = {
    device.name: device
    for device in (
        # FlashAttention-2 at head_dim 128: 205 forward, 180 backward, yunchang's tables [P].
        DeviceSpec(
            name="a100", memory_gib=80, peak_tflops=312, memory_gb_per_s=2000, attention=_rates(205, 180), launch_us=100
        ),
        DeviceSpec(
            name="h100", memory_gib=80, peak_tflops=989, memory_gb_per_s=3350, attention=_HOPPER, launch_us=60
        ),
        DeviceSpec(
            name="h200", memory_gib=141, peak_tflops=989, memory_gb_per_s=4800, attention=_HOPPER, launch_us=60
        ),
        DeviceSpec(name="h20", memory_gib=96, peak_tflops=148, memory_gb_per_s=4000, attention=_rates(120, 110)),
        DeviceSpec(
            name="b200", memory_gib=180, peak_tflops=2250, memory_gb_per_s=8000, attention=_BLACKWELL, launch_us=60
        ),
        DeviceSpec(
            name="gb200", memory_gib=186, peak_tflops=2500, memory_gb_per_s=8000, attention=_BLACKWELL, launch_us=60
        ),
        # 95 and 61 to 143 are published for L20 and 4090 (yunchang, ring-flash-attention); the rest by the peak [F].
        DeviceSpec(
            name="l20", memory_gib=48, peak_tflops=119.5, memory_gb_per_s=864, attention=_rates(95, 85), launch_us=180
        ),
        DeviceSpec(
            name="l40", memory_gib=48, peak_tflops=181, memory_gb_per_s=864, attention=_rates(130, 115), launch_us=180
        ),
        DeviceSpec(
            name="rtx4090", memory_gib=24, peak_tflops=165, memory_gb_per_s=1008, attention=_rates(143, 125),
            launch_us=180,
        ),
        # Splash attention at an assumed 55 % of the peak.
        DeviceSpec(
            name="tpu-v5p", memory_gib=95, peak_tflops=459, memory_gb_per_s=2765, attention=_rates(250, 230),
            launch_us=30,
        ),
    )
}  # fmt: skip

LINKS: Mapping[str, LinkSpec] = {
    link.name: link
    for link in (
        # Nominal 300, 200, 450, 900; what NCCL reaches is 60 to 80 % of it [P: nccl-tests, papers' tables].
        LinkSpec(name="nvlink3", gb_per_s=180, all_to_all=_spans({8: 200}), latency_us=40),
        LinkSpec(name="nvlink3-a800", gb_per_s=120, all_to_all=_spans({8: 130}), latency_us=40),
        LinkSpec(name="nvlink4", gb_per_s=250, all_to_all=_spans({8: 300}), latency_us=40),
        LinkSpec(name="nvlink4-h800", gb_per_s=120, all_to_all=_spans({8: 130}), latency_us=40),
        LinkSpec(name="nvlink5", gb_per_s=450, all_to_all=_spans({8: 500}), latency_us=40),
        # One root complex of at most four devices [F: A100 PCIe, diffusers' and xDiT's boxes].
        LinkSpec(name="pcie4", gb_per_s=14, all_to_all=_spans({4: 22}), latency_us=60, overlap=0.4),
        # Two sockets of four: an all-to-all slows down with its span far more than a ring [F: L20, L40].
        LinkSpec(
            name="pcie4-two-sockets", gb_per_s=7, latency_us=60, overlap=0.7,
            ring=_spans({4: 11, 8: 7}), all_to_all=_spans({2: 12, 3: 7, 4: 4.2, 8: 1.25}),
        ),
        # Without peer-to-peer every byte passes through host memory [F: RTX 4090D].
        LinkSpec(
            name="pcie4-no-p2p", gb_per_s=7, latency_us=60, overlap=0.7, all_to_all=_spans({4: 10, 8: 5})
        ),
        LinkSpec(name="ici", gb_per_s=90, latency_us=20),
        # 25 and 50 nominal, one adapter a device; 12.5 where four adapters serve eight devices; 80 % is usable [P].
        LinkSpec(name="infiniband-hdr", gb_per_s=20, latency_us=60),
        LinkSpec(name="infiniband-hdr-shared", gb_per_s=10, latency_us=60),
        LinkSpec(name="infiniband-ndr", gb_per_s=40, latency_us=60),
        LinkSpec(name="roce-400g", gb_per_s=40, latency_us=80),
        # 12.5 nominal over TCP, shared by the eight devices of a node.
        LinkSpec(name="ethernet-100g", gb_per_s=1.2, latency_us=100),
    )
}  # fmt: skip

_USUAL = {
    "a100": ("nvlink3", "infiniband-hdr"),
    "h100": ("nvlink4", "infiniband-ndr"),
    "h200": ("nvlink4", "infiniband-ndr"),
    "h20": ("nvlink4", "infiniband-ndr"),
    "b200": ("nvlink5", "infiniband-ndr"),
    "gb200": ("nvlink5", "infiniband-ndr"),
    "l20": ("pcie4", "ethernet-100g"),
    "l40": ("pcie4", "ethernet-100g"),
    "rtx4090": ("pcie4-no-p2p", "ethernet-100g"),
    "tpu-v5p": ("ici", "ici"),
}


def cluster(
    gpu: str, gpus: int, gpus_per_node: int = 8, intra: str | None = None, inter: str | None = None
) -> ClusterSpec:
    """A cluster of preset parts.

    Args:
        gpu: name of a device, one of `DEVICES`.
        gpus: how many there are.
        gpus_per_node: how many of them a node has; fewer if there are not so many.
        intra: what connects them inside a node, one of `LINKS`; None: what is usual for the device.
        inter: what connects nodes, likewise.

    Raises:
        InputError: there is no preset of that name, or the devices do not fill whole nodes, or more than 65,536.
    """
    device = find(DEVICES, "GPU", gpu)
    gpus_per_node = min(gpus, gpus_per_node)
    if gpus < 1 or gpus_per_node < 1 or gpus % gpus_per_node:
        raise InputError(f"gpus={gpus} do not fill nodes of gpus_per_node={gpus_per_node}")
    if gpus > MOST_NODES * gpus_per_node:
        raise InputError(f"gpus={gpus} with gpus_per_node={gpus_per_node} are more than {MOST_NODES} nodes")
    usual_intra, usual_inter = _USUAL[device.name]
    if usual_intra == "pcie4" and gpus_per_node > 4:
        usual_intra = "pcie4-two-sockets"
    return ClusterSpec.read(
        {
            "name": f"{gpus // gpus_per_node} x {gpus_per_node} {device.name}",
            "nodes": gpus // gpus_per_node,
            "gpus_per_node": gpus_per_node,
            "device": device.model_dump(),
            "intra": find(LINKS, "link", usual_intra if intra is None else intra).model_dump(),
            "inter": find(LINKS, "link", usual_inter if inter is None else inter).model_dump(),
        }
    )


def find(presets: Mapping[str, T], kind: str, name: str) -> T:
    """The preset of that name.

    Raises:
        InputError: there is none; the message lists those there are.
    """
    if (key := name.lower()) in presets:
        return presets[key]
    near = difflib.get_close_matches(key, presets, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise InputError(f"unknown {kind} {name!r}: {hint}there are {', '.join(presets)}")
