"""Machines by name: devices and links, a handful of physical constants each, with their source or fit.

[P] published, [F] fitted to published measurements by `benchmarks/planner_truth.py`, [N] nominal.
Bandwidths are per device and one direction, 10^9 bytes/s; speeds are 10^12 FLOP/s.
"""

from usp.planner.spec import DeviceSpec, KernelSpeed, LinkSpec, SpanSpeed


def _curve(*points: tuple[int, float, float]) -> tuple[KernelSpeed, ...]:
    return tuple(KernelSpeed(block_length=n, forward_tflops=f, backward_tflops=b) for n, f, b in points)


def _rate(forward: float, backward: float) -> tuple[KernelSpeed, ...]:
    """A curve that is known at its long end only: L / (L + 300) forward, L / (L + 700) backward [F]."""
    lengths = [2**n for n in range(8, 18)]
    return _curve(*((n, forward * n / (n + 300), backward * n / (n + 700)) for n in lengths))


A100 = DeviceSpec(
    name="A100 80 GB", memory_gib=80, peak_tflops=312, memory_gb_per_s=2000, attention=_rate(205, 180), launch_us=100
)
# MagiAttention's measurements of FlashAttention-3 and cuDNN, 64:8 heads, causal [P].
H100 = DeviceSpec(
    name="H100 80 GB", memory_gib=80, peak_tflops=989, memory_gb_per_s=3350, launch_us=60,
    attention=_curve(
        (1024, 287, 211), (2048, 586, 355), (4096, 663, 463), (8192, 658, 519), (16384, 673, 563), (32768, 680, 586)
    ),
)  # fmt: skip
H200 = H100.model_copy(update={"name": "H200", "memory_gib": 141.0, "memory_gb_per_s": 4800.0})
H20 = DeviceSpec(name="H20", memory_gib=96, peak_tflops=148, memory_gb_per_s=4000, attention=_rate(120, 110))
B200 = DeviceSpec(
    name="B200", memory_gib=180, peak_tflops=2250, memory_gb_per_s=8000, launch_us=60,
    attention=_curve(
        (1024, 135, 182), (2048, 537, 338), (4096, 922, 507), (8192, 1149, 645), (16384, 1241, 711), (32768, 1287, 738)
    ),
)  # fmt: skip
GB200 = B200.model_copy(update={"name": "GB200", "memory_gib": 186.0, "peak_tflops": 2500.0})
L20 = DeviceSpec(
    name="L20", memory_gib=48, peak_tflops=119.5, memory_gb_per_s=864, attention=_rate(95, 85), launch_us=180
)
L40 = DeviceSpec(
    name="L40", memory_gib=48, peak_tflops=181, memory_gb_per_s=864, attention=_rate(130, 115), launch_us=180
)
RTX4090 = DeviceSpec(
    name="RTX 4090", memory_gib=24, peak_tflops=165, memory_gb_per_s=1008, attention=_rate(143, 125), launch_us=180
)
TPU_V5P = DeviceSpec(name="TPU v5p", memory_gib=95, peak_tflops=459, memory_gb_per_s=2765, attention=_rate(250, 230))

NVLINK3 = LinkSpec(name="NVLink 3", gb_per_s=180, all_to_all=(SpanSpeed(devices=8, gb_per_s=200),), latency_us=40)
NVLINK4 = LinkSpec(name="NVLink 4", gb_per_s=250, all_to_all=(SpanSpeed(devices=8, gb_per_s=300),), latency_us=40)
NVLINK5 = LinkSpec(name="NVLink 5", gb_per_s=450, all_to_all=(SpanSpeed(devices=8, gb_per_s=500),), latency_us=40)


def _spans(**gb_per_s: float) -> tuple[SpanSpeed, ...]:
    return tuple(SpanSpeed(devices=int(name[1:]), gb_per_s=speed) for name, speed in gb_per_s.items())


PCIE_2_SOCKETS = LinkSpec(
    name="PCIe 4, two sockets", gb_per_s=8, latency_us=60, overlap=0.7,
    ring=_spans(_4=11, _8=7), all_to_all=_spans(_2=12, _3=7, _4=4.2, _8=1.25),
)  # fmt: skip
PCIE = LinkSpec(name="PCIe 4, one root", gb_per_s=14, latency_us=60, all_to_all=_spans(_4=22), overlap=0.4)
PCIE_NO_P2P = LinkSpec(
    name="PCIe 4 through host memory", gb_per_s=7, latency_us=60, all_to_all=_spans(_4=10, _8=5), overlap=0.7
)
ICI = LinkSpec(name="ICI torus", gb_per_s=90, latency_us=20)
INFINIBAND_HDR = LinkSpec(name="InfiniBand HDR", gb_per_s=20, latency_us=60)
INFINIBAND_NDR = LinkSpec(name="InfiniBand NDR", gb_per_s=40, latency_us=60)
ETHERNET_100G = LinkSpec(name="Ethernet 100 Gbit/s a node", gb_per_s=1.2, latency_us=100)
