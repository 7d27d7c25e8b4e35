"""`usp probe`: measures the devices and links under torchrun and writes the cluster file that `usp plan` reads."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from usp.cli.output import AsJson, console, document
from usp.cli.processes import place, progress, this_device
from usp.errors import InputError
from usp.files import named
from usp.planner.spec import DTYPE_BYTES, ClusterSpec

EXAMPLES = (
    "Examples: `torchrun --nproc-per-node 8 -m usp.cli probe` on one node; with `--nnodes 2` and torchrun's other "
    "options on each of two; then `usp plan --cluster cluster.yaml`."
)


def probe(
    output: Annotated[Path, typer.Option("--output", "-o", help="The cluster file to write.")] = Path("cluster.yaml"),
    heads: Annotated[int, typer.Option(min=1, help="Heads of the attention that is measured.")] = 8,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Their size; 64 on CPU, 128 on CUDA.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of q, k, v; float32 on CPU, bfloat16 on CUDA.")] = None,
    max_length: Annotated[int | None, typer.Option(min=256, help="Longest block; 4096 on CPU, 32768 on CUDA.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure for less time, and less exactly.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure the devices and links of the processes that torchrun started, and write them to a cluster file."""
    _, world_size = place()
    if world_size < 2:
        raise InputError(
            "one process has no links to measure: start two or more with "
            "`torchrun --nproc-per-node 2 -m usp.cli probe`, one for each device"
        )
    if dtype is not None and dtype not in DTYPE_BYTES:
        raise InputError(f"dtype is {dtype!r}: it must be one of {', '.join(DTYPE_BYTES)}")
    import torch
    import torch.distributed as dist

    from usp.collect import gather
    from usp.probe import TIMEOUT, Meter, Problem, measure

    device = this_device()
    cuda = device.type == "cuda"
    usual_dim, usual_dtype, usual_length = (128, "bfloat16", 32768) if cuda else (64, "float32", 4096)
    problem = Problem(heads, head_dim or usual_dim, getattr(torch, dtype or usual_dtype), max_length or usual_length)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT)
    try:
        first = dist.get_rank() == 0
        refusal, *_ = gather(_refusal(output, force) if first else None)
        if refusal is not None:  # all ranks end here, or none: nobody measures alone
            raise InputError(refusal)
        with progress(first) as track:
            cluster = measure(problem, Meter(device, 0.05 if quick else 0.15, track))
        if first:
            _show(cluster, as_json)
            cluster.write(output)
            console(as_json).print(f"written to {output}")
    finally:
        dist.destroy_process_group()


def _refusal(output: Path, force: bool) -> str | None:
    """Why the file must not or cannot be written, if so."""
    if output.is_dir() or not output.parent.is_dir():
        wrong = f"{named(output)} is a folder" if output.is_dir() else f"there is no folder {named(output.parent)}"
        return f"{wrong}: give the name of a file in a folder that exists as --output"
    if output.exists() and not force:
        return f"{named(output)} exists: give --force to overwrite it, or another --output"
    return None


def _show(cluster: ClusterSpec, as_json: bool) -> None:
    """The tables; with --json also the document."""
    device = cluster.device
    speeds = Table("block", "forward TFLOP/s", "backward TFLOP/s", title="causal attention")
    for point in device.attention:
        speeds.add_row(*(f"{number:g}" for number in (point.block_length, point.forward_tflops, point.backward_tflops)))
    links = Table("link", "latency us", "overlap", "ring", "all-to-all", title="links, GB/s by devices spanned")
    for name, link in (("in a node", cluster.intra), ("across nodes", cluster.inter)):
        speeds_by_span = (
            ", ".join(f"{point.devices}: {point.gb_per_s:g}" for point in kind) for kind in (link.ring, link.all_to_all)
        )
        if link.name == "measured":
            links.add_row(name, f"{link.latency_us:g}", f"{link.overlap:.2f}", *speeds_by_span)
        else:
            links.caption = f"{name}: {link.name}"
    out = console(as_json)
    out.print(
        f"{cluster.name}\n"
        f"  a device: {device.memory_gib:g} GiB at {device.memory_gb_per_s:g} GB/s, peak {device.peak_tflops:g} "
        f"TFLOP/s, {device.launch_us:g} us a kernel call, {device.merge_bytes:g} bytes an element merged"
    )
    out.print(speeds, links)
    if as_json:
        document(cluster.model_dump(mode="json", exclude_none=True))
