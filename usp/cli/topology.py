"""`usp topology`: which rank sits where, of a cluster that is elsewhere or of the processes that are running."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from usp.cli.output import AsJson, console, document
from usp.errors import InputError
from usp.placement import Grid, columns, crossing, describe, place, rows
from usp.planner.problem import MOST_DEVICES
from usp.planner.spec import ClusterSpec

EXAMPLES = (
    "Examples: `usp topology -u 8 -r 2 --nodes 2 --gpus-per-node 8` for a cluster that is elsewhere; "
    "`torchrun --nproc-per-node 4 -m usp.cli topology -u 2 -r 2` for the processes that are running."
)


def topology(
    ulysses_degree: Annotated[int, typer.Option("--ulysses-degree", "-u", help="Ranks of a Ulysses group.")] = 1,
    ring_degree: Annotated[int, typer.Option("--ring-degree", "-r", help="Ranks of a ring.")] = 1,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes of a cluster that is elsewhere.")] = None,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of each of its nodes.")] = 8,
    cluster: Annotated[Path | None, typer.Option(help="A cluster file, as `usp probe` writes it.")] = None,
    allow_cross_node: Annotated[bool, typer.Option(help="Accept Ulysses groups that span nodes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show which rank sits where on the two axes, and which groups cross nodes.

    Under torchrun it shows the processes that are running; with --nodes or --cluster, a cluster by its size.
    """
    if cluster is not None:
        if nodes is not None:
            raise typer.BadParameter("give --nodes or --cluster, not both")
        spec = ClusterSpec.read(cluster)
        nodes, gpus_per_node = spec.nodes, spec.gpus_per_node
    if nodes is not None:
        if nodes * gpus_per_node > MOST_DEVICES:
            raise InputError(f"{nodes:,} nodes of {gpus_per_node:,} are more than {MOST_DEVICES:,} ranks: show fewer")
        names = [f"node{rank // gpus_per_node}" for rank in range(nodes * gpus_per_node)]
        _show(place(names, ulysses_degree, ring_degree, allow_cross_node), names, as_json)
        return
    if "RANK" not in os.environ:
        raise typer.BadParameter("give --nodes (and --gpus-per-node) or --cluster, or start it with torchrun")
    import torch.distributed as dist

    from usp.topology import Topology

    dist.init_process_group("gloo")
    try:
        built = Topology.build(ulysses_degree, ring_degree, allow_cross_node=allow_cross_node)
        if dist.get_rank() == 0:
            _show(built.grids, built.nodes, as_json)
    finally:
        dist.destroy_process_group()


def _show(grids: Sequence[Grid], nodes: Sequence[str], as_json: bool) -> None:
    console(as_json).print(describe(grids, nodes))
    if as_json:
        crosses = {"ulysses": crossing(rows(grids), nodes), "ring": crossing(columns(grids), nodes)}
        document({"grids": grids, "nodes": list(nodes), "groups_that_cross_nodes": crosses})
