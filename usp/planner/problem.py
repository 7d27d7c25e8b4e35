"""What a plan is made for, and its parts: the legal degrees, the layers as ranks run them, and where the groups lie."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from usp import layouts
from usp.errors import InputError
from usp.placement import columns, place, rows
from usp.planner.cost import BUDGET, Machine, span
from usp.planner.spec import ClusterSpec, ModelSpec, Workload
from usp.planner.survey import survey
from usp.planner.traffic import Layer, Shape
from usp.schedule import Schedule
from usp.tiles import pairs

MOST_DEVICES = 2**14
"""Devices of the largest cluster that is planned for: every one is placed."""
LONGEST_RING = 2**10
Pass = Literal["forward", "exchange", "backward"]
"""What is done with a layer: the forward or the backward pass, or only the exchange of q, k and v once more."""


@dataclass(frozen=True)
class Problem:
    """What a plan is made for.

    Raises:
        InputError: the degrees of tensor and data parallelism do not fit the cluster or the heads.
    """

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload

    def __post_init__(self) -> None:
        if why := refusal(self.model, self.cluster, self.workload.tensor_parallel, self.workload.data_parallel):
            raise InputError(why)

    @property
    def degrees(self) -> list[tuple[int, int]]:
        """Every (ulysses_degree, ring_degree) that uses all devices."""
        size = self.cluster.gpus // (self.workload.tensor_parallel * self.workload.data_parallel)
        return [(u, size // u) for u in range(1, size + 1) if size % u == 0]

    @property
    def shape(self) -> Shape:
        """The tensors of one tensor-parallel rank."""
        return Shape.of(self.model, self.workload)

    def objection(self, ulysses_degree: int, ring_degree: int) -> str:
        """Why a pair of degrees is not legal, or nothing."""
        heads, tensor, tokens = self.shape.heads, self.workload.tensor_parallel, self.workload.seq_len
        if ulysses_degree > heads:
            each = f" each of {tensor} tensor-parallel ranks has" if tensor > 1 else ""
            return f"U={ulysses_degree} is more than the {heads} query heads{each}: some ranks would have none"
        if ulysses_degree * ring_degree > tokens:
            return f"{ulysses_degree * ring_degree} ranks are more than the {tokens} tokens"
        if ring_degree > LONGEST_RING:
            return f"R={ring_degree} is more than the {LONGEST_RING:,} ring ranks that are planned for"
        return ""

    def layers(self, ulysses_degree: int, ring_degree: int, layout: str, transport: str) -> list[tuple[int, Layer]]:
        """The model's attention layers, and how many there are of each kind. All deal by the mask of the workload."""
        model, whole = self.model, self.workload.mask
        seq_len, dealt = self.workload.seq_len, layouts.layout_for(layout, whole)
        windowed = model.windowed_layers
        kinds = ((model.layers - windowed, whole), (windowed, whole & model.window_mask))
        return [
            (count, Layer(self.shape, Schedule(mask, dealt, seq_len, ring_degree), ulysses_degree, transport))
            for count, mask in kinds
            if count
        ]

    def transports(self, ulysses_degree: int, ring_degree: int, layout: str) -> list[str]:
        """What may move the blocks of a ring: a double one where all blocks are needed and nodes hold several ranks."""
        if ring_degree == 1:
            return ["p2p"]
        found, span = ["p2p", "all_gather"], self.machines[ulysses_degree, ring_degree].ring
        if span.crosses and span.local > 1 and ring_degree % span.local == 0:
            layers = self.layers(ulysses_degree, ring_degree, layout, "p2p")
            found += [f"double_ring:{span.local}"] * all(layer.schedule.hops == ring_degree - 1 for _, layer in layers)
        return found

    @cached_property
    def machines(self) -> dict[tuple[int, int], Machine]:
        """By degrees, the cluster with the groups of both axes where `Topology.build` would put them."""
        tensor = self.workload.tensor_parallel
        ranks = self.cluster.gpus // tensor
        return {degrees: locate(self.cluster, *degrees, tensor, ranks) for degrees in self.degrees}

    @property
    def passes(self) -> dict[Pass, int]:
        """How often one step does what with each layer. Recomputation is a part of the backward pass."""
        if self.workload.mode == "inference":
            return {"forward": 1}
        checkpointing = self.workload.checkpointing
        return {"forward": 1 + (checkpointing == "full"), "exchange": int(checkpointing == "selective"), "backward": 1}

    def imbalance(self, ring_degree: int, layout: str) -> float:
        """Work of the slowest rank of every hop, over an even share of it."""
        _, layer = self.layers(1, ring_degree, layout, "p2p")[0]
        whole = (range(self.workload.seq_len),)
        return survey(layer.schedule, BUDGET).slowest * ring_degree / pairs(whole, whole, layer.schedule.mask)


def nodes(cluster: ClusterSpec, tensor_parallel: int, ranks: int) -> list[str]:
    """The node of each of so many ranks, each a tensor-parallel group, dealt in order."""
    slots = _slots(cluster, tensor_parallel)
    return [str(rank // slots) for rank in range(ranks)]


def _slots(cluster: ClusterSpec, tensor_parallel: int) -> int:
    """Tensor-parallel groups of a node."""
    return max(1, cluster.gpus_per_node // tensor_parallel)


def locate(cluster: ClusterSpec, ulysses_degree: int, ring_degree: int, tensor_parallel: int, ranks: int) -> Machine:
    """The cluster, with the groups of so many ranks, each a tensor-parallel group, dealt to its nodes in order."""
    slots = _slots(cluster, tensor_parallel)
    grids = place(nodes(cluster, tensor_parallel, ranks), ulysses_degree, ring_degree, allow_cross_node=True)
    return Machine(cluster, span(rows(grids), slots, tensor_parallel), span(columns(grids), slots, tensor_parallel))


def refusal(model: ModelSpec, cluster: ClusterSpec, tensor: int, data: int) -> str:
    """Why degrees of tensor and data parallelism do not fit a cluster or the heads of a model, or nothing."""
    if cluster.gpus > MOST_DEVICES:
        return f"nodes x gpus_per_node = {cluster.gpus:,} is more than the {MOST_DEVICES:,} devices of the largest plan"
    if cluster.gpus % (tensor * data):
        return (
            f"tensor_parallel x data_parallel = {tensor} x {data} does not divide the {cluster.gpus} devices of "
            f"{cluster.nodes} nodes x {cluster.gpus_per_node}"
        )
    if cluster.gpus_per_node % tensor and tensor % cluster.gpus_per_node:
        return (
            f"tensor_parallel={tensor} neither divides the {cluster.gpus_per_node} devices of a node nor is a multiple "
            "of it"
        )
    if model.heads % tensor:
        fitting = ", ".join(str(n) for n in range(1, model.heads + 1) if model.heads % n == 0)
        return f"tensor_parallel={tensor} does not divide the {model.heads} heads: use {fitting}"
    return ""
