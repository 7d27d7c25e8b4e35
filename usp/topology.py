"""The 2-D grid of processes: which rank is where on the Ulysses and the ring axis, and the groups that connect them.

Ranks on the Ulysses axis exchange heads (all-to-all, inside a node), ranks on the ring axis pass keys and values on
(across nodes). What remains of the world is data parallel. Mesh axes are named ("ring", "ulysses"), ulysses innermost.
"""

import atexit
import json
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, lru_cache, partial
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh

from usp.agreement import Agreement, Facts, Options
from usp.errors import TopologyError
from usp.placement import Grid, columns, describe, place, rows
from usp.transports.base import Group
from usp.transports.p2p import label
from usp.version import __version__

GroupMaker = Callable[[str, tuple[int, ...], int], Group]


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis of the grid as this rank sees it.

    Attributes:
        name: "ulysses" or "ring".
        ranks: global ranks along it, in order.
        rank: this rank's index on it.
        group: their group; None for an axis of size 1.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    group: Group = field(repr=False)

    @property
    def degree(self) -> int:
        """Number of ranks along the axis."""
        return len(self.ranks)


@dataclass(frozen=True, eq=False)
class Topology:
    """A world cut into grids of ring x ulysses ranks. Made by `build` or `from_mesh`.

    Attributes:
        rank: this process's global rank.
        grids: every grid as global ranks, `grids[data][ring][ulysses]`.
        nodes: the node of every global rank, "?" where unknown.
        ulysses: the axis inside the node.
        ring: the axis across nodes.
        agreement: how the ranks of this grid compare arguments; None for a grid of one rank, or without checks.
        debug: whether attention refuses values that are not finite.
        process: the process that it belongs to.
    """

    rank: int
    grids: tuple[Grid, ...]
    nodes: tuple[str, ...]
    ulysses: Axis
    ring: Axis
    agreement: Agreement | None = field(repr=False)
    debug: bool = False
    process: int = field(default_factory=os.getpid, repr=False)

    @classmethod
    def build(
        cls,
        ulysses_degree: int = 1,
        ring_degree: int = 1,
        *,
        allow_cross_node: bool = False,
        nodes: Sequence[str] | None = None,
        check: str | None = None,
        timeout: timedelta = Options.timeout,
    ) -> "Topology":
        """Builds the grids over the default process group; every rank of it must call. The rest is data parallel.

        The same arguments asked for twice give the same object, and groups are built once.

        Args:
            ulysses_degree: ranks of a Ulysses group.
            ring_degree: ranks of a ring.
            allow_cross_node: accept Ulysses groups that span nodes.
            nodes: the node of every global rank; by default the ranks tell each other their host names and torchrun's
                GROUP_RANK.
            check: when ranks compare the arguments of a call: "first" time, "always", "off", or "debug", which is
                "always" and also refuses what is not finite; by default what the environment variable USP_CHECK says,
                else "first".
            timeout: how long they wait for each other: for arguments, and with gloo for every message.

        Raises:
            TopologyError: the degrees do not fit the world or its nodes, or no process group is initialised.
            AgreementError: the ranks do not ask for the same, or run different versions; or one did not come.
        """
        if not dist.is_initialized():
            if (ulysses_degree, ring_degree) != (1, 1):
                raise TopologyError(
                    f"ulysses_degree={ulysses_degree} x ring_degree={ring_degree} needs a process group and none is "
                    "initialised: start with `torchrun --nproc-per-node "
                    f"{ulysses_degree * ring_degree} your_script.py` and call torch.distributed.init_process_group() "
                    "first, or try it in one process with usp.transports.local.run"
                )
            return assemble(0, (((0,),),), ("?",), None, lambda *_: None, Options.of(check))
        named = None if nodes is None else tuple(nodes)
        wanted = ulysses_degree, ring_degree, allow_cross_node, named, Options.of(check, timeout)
        built = _built(world := dist.distributed_c10d._get_default_group())
        if wanted not in built:
            built[wanted] = _build(world, *wanted)
        return built[wanted]

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        ulysses: str | None = "ulysses",
        ring: str | None = "ring",
        *,
        check: str | None = None,
        timeout: timedelta = Options.timeout,
    ) -> "Topology":
        """Takes the axes from a DeviceMesh, whose groups are used as they are.

        Args:
            mesh: any mesh, of any number of dimensions; the other ones count as data parallel. Leave a tensor-parallel
                axis out (`mesh["dp", "ring", "ulysses"]`): its ranks share their samples.
            ulysses: name of the Ulysses axis, or None for degree 1.
            ring: name of the ring axis, or None for degree 1.
            check: as in `build`.
            timeout: how long ranks wait for each other's arguments; for messages they wait as long as the groups of
                the mesh were made to.

        Raises:
            TopologyError: the mesh has no such axis, or this rank is not in the mesh.
            AgreementError: the ranks do not ask for the same, or run different versions; or one did not come.
        """
        names = mesh.mesh_dim_names or ()
        for axis in (ulysses, ring):
            if axis is not None and axis not in names:
                raise TopologyError(
                    f"the mesh has no axis {axis!r}; its axes are {names or 'unnamed'}: "
                    "name them with mesh_dim_names, or pass None for an axis of degree 1"
                )
        if mesh.get_coordinate() is None:
            raise TopologyError(f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}")
        wanted = [names.index(axis) for axis in (ring, ulysses) if axis is not None]
        others = [dim for dim in range(mesh.ndim) if dim not in wanted]
        shape = [1 if axis is None else mesh.size(names.index(axis)) for axis in (ring, ulysses)]
        grids = mesh.mesh.permute(*others, *wanted).reshape(-1, *shape).tolist()
        grids = tuple(tuple(tuple(row) for row in grid) for grid in grids)
        by_name = {"ulysses": ulysses, "ring": ring}

        options = Options.of(check, timeout)
        store = dist.distributed_c10d._get_default_store()
        asked = {"mesh": tuple(mesh.shape), "axes": names, "ulysses": ulysses, "ring": ring}
        members = tuple(sorted(mesh.mesh.flatten().tolist()))
        _compare(store, members, options, asked)
        nodes = _nodes(store, members, options)

        def group(axis: str, ranks: tuple[int, ...], rank: int) -> Group:
            if len(ranks) == 1:
                return None
            found = mesh.get_group(by_name[axis])
            found._set_group_desc(label(axis, ranks, nodes))
            return found

        return assemble(dist.get_rank(), grids, nodes, store, group, options)

    def __deepcopy__(self, memo: dict) -> "Topology":
        """A topology stands for process groups, of which there is one: copies of a model share it."""
        return self

    @property
    def data_rank(self) -> int:
        """Which grid this rank is in: ranks of one grid hold shards of the same samples. `rank` of a sampler."""
        return next(i for i, grid in enumerate(self.grids) if any(self.rank in row for row in grid))

    @property
    def data_degree(self) -> int:
        """Number of grids: how many different samples there are at a time. `num_replicas` of a sampler."""
        return len(self.grids)

    @property
    def sequence_degree(self) -> int:
        """Number of ranks that share a sequence: ring degree x Ulysses degree."""
        return self.ring.degree * self.ulysses.degree

    def confirm(self, facts: Facts) -> None:
        """Compares the arguments of a collective call with the other ranks of this grid, before it communicates.

        Does nothing inside torch.compile, where a call to the store would break the graph.

        Raises:
            TopologyError: this is a fork of the process that the topology was built in.
            AgreementError: they differ, or a rank did not come.
        """
        if torch.compiler.is_compiling():
            return
        if self.sequence_degree > 1 and self.process != os.getpid():
            raise TopologyError(
                f"the topology was built in process {self.process} and this is a fork of it, {os.getpid()}: the "
                "connections belong to that one, and messages of both would mix; start processes that communicate with "
                'the method "spawn", and build their groups in them'
            )
        if self.agreement is not None:
            self.agreement.confirm(facts)

    def object(self, error: BaseException) -> None:
        """Tells ranks that wait in `confirm` that this one refused its arguments."""
        if self.agreement is not None and not torch.compiler.is_compiling():
            self.agreement.object(str(error))

    @cached_property
    def ring_neighbours(self) -> int | None:
        """How many neighbours on a ring share a node, if all rings of the world have as many in each of their nodes."""
        runs = {len(list(run)) for ring in columns(self.grids) for _, run in groupby(self.nodes[rank] for rank in ring)}
        return runs.pop() if len(runs) == 1 else None

    def describe(self) -> str:
        """A table of nodes and their ranks with everyone's coordinates, and which groups cross nodes."""
        return describe(self.grids, self.nodes)


def assemble(
    rank: int,
    grids: tuple[Grid, ...],
    nodes: tuple[str, ...],
    store: Store | None,
    group: GroupMaker,
    options: Options,
) -> Topology:
    """The topology as `rank` sees it; `group(axis, ranks, rank)` gives the group of an axis."""
    grid = next(grid for grid in grids if any(rank in row for row in grid))
    r, row = next((r, row) for r, row in enumerate(grid) if rank in row)
    u = row.index(rank)
    column = tuple(other[u] for other in grid)
    members = [member for line in grid for member in line]
    agreement = None
    if store is not None and len(members) > 1 and options.check != "off":
        agreement = Agreement(store, "attention", members, rank, options)
    return Topology(
        rank, grids, nodes, Axis("ulysses", row, u, group("ulysses", row, rank)),
        Axis("ring", column, r, group("ring", column, rank)), agreement, options.check == "debug",
    )  # fmt: skip


@lru_cache(maxsize=1)
def _built(world: dist.ProcessGroup) -> dict[tuple, Topology]:
    """The topologies of the default process group, so that each layer may ask and groups are built once.

    They go with the next world, or before the interpreter does: a thread of gloo that lets go of a tensor while Python
    ends aborts the process, and a group waits for its threads only when it is deleted.
    """
    return {}


atexit.register(_built.cache_clear)


def _build(
    world: dist.ProcessGroup,
    ulysses_degree: int,
    ring_degree: int,
    allow_cross_node: bool,
    nodes: tuple[str, ...] | None,
    options: Options,
) -> Topology:
    store = dist.distributed_c10d._get_default_store()
    everyone = tuple(range(world.size()))
    asked = {"ulysses_degree": ulysses_degree, "ring_degree": ring_degree, "allow_cross_node": allow_cross_node}
    _compare(store, everyone, options, {**asked, "nodes": nodes})
    if nodes is None:
        nodes = _nodes(store, everyone, options)
    elif len(nodes) != len(everyone):
        raise TopologyError(f"nodes names {len(nodes)} ranks and the world has {len(everyone)}: name each rank's node")
    grids = place(nodes, ulysses_degree, ring_degree, allow_cross_node)
    # Their own, also where one has all ranks: with its time-out and, with NCCL, beside what else the world sends.
    groups: dict[tuple[int, ...], Group] = {}
    for axis, lines in (("ulysses", rows(grids)), ("ring", columns(grids))):
        for ranks in lines:  # every rank creates every group, in the same order
            if len(ranks) > 1:
                new = partial(dist.new_group, list(ranks), options.timeout, group_desc=label(axis, ranks, nodes))
                # sort_ranks is newer than the oldest torch this runs on
                groups[ranks] = new() if sorted(ranks) == list(ranks) else new(sort_ranks=False)
    return assemble(world.rank(), grids, nodes, store, lambda _, ranks, __: groups.get(ranks), options)


def _compare(store: Store, ranks: tuple[int, ...], options: Options, asked: Facts) -> None:
    """Raises AgreementError if not all ranks ask for the same, with the same versions. With "off" none is asked."""
    if options.check != "off":
        versions = {"usp": __version__, "torch": torch.__version__.split("+")[0], "backend": dist.get_backend()}
        facts = {**asked, "check": options.check, "timeout": options.timeout, **versions}
        Agreement(store, "topology", ranks, dist.get_rank(), options).confirm(facts)


def _nodes(store: Store, ranks: tuple[int, ...], options: Options) -> tuple[str, ...]:
    """The node of every global rank: its host name, and torchrun's number of its agent where a host has several.

    Ranks outside `ranks` are on "?".
    """
    here = Agreement(store, "nodes", ranks, dist.get_rank(), options)
    note = json.dumps([socket.gethostname(), os.environ.get("GROUP_RANK", "0")])
    told = dict(zip(ranks, map(json.loads, here.gather(note)), strict=True))
    agents: dict[str, set[str]] = defaultdict(set)
    for host, agent in told.values():
        agents[host].add(agent)
    names = {rank: host if len(agents[host]) == 1 else f"{host}/{agent}" for rank, (host, agent) in told.items()}
    return tuple(names.get(rank, "?") for rank in range(dist.get_world_size()))
