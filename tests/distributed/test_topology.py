"""Groups and coordinates on real processes."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import usp
from tests.cases import Case, failures, run
from tests.pool import Pool
from usp.errors import TopologyError


def coordinates(topology):
    return topology.data_rank, topology.ring.rank, topology.ulysses.rank


def build(rank, ulysses, ring, nodes=None):
    own = dict(nodes=nodes, timeout=timedelta(seconds=99))  # arguments that no other test on these processes uses
    before = len(dist.distributed_c10d._world.pg_names)
    topology = usp.Topology.build(ulysses, ring, **own)
    made = len(dist.distributed_c10d._world.pg_names) - before
    assert usp.Topology.build(ulysses, ring, **own) is topology
    assert len(dist.distributed_c10d._world.pg_names) == before + made  # asked twice, built once
    for axis in (topology.ulysses, topology.ring):
        assert axis.ranks[axis.rank] == rank
        assert (axis.group is None) == (axis.degree == 1)
        if axis.group is not None:
            assert dist.get_process_group_ranks(axis.group) == list(axis.ranks)
            assert axis.group.rank() == axis.rank
    return coordinates(topology), made, topology.describe()


def test_ulysses_is_innermost_and_the_rest_is_data_parallel(pool):
    results = pool(8).run(build, 2, 2)
    assert [place for place, _, _ in results] == [(d, r, u) for d in (0, 1) for r in (0, 1) for u in (0, 1)]
    assert {made for _, made, _ in results} == {2}  # one of each axis


def test_axes_of_size_one_make_no_group_and_the_whole_world_has_one_of_its_own(pool):
    assert {made for _, made, _ in pool(4).run(build, 1, 4)} == {1}
    assert {made for _, made, _ in pool(4).run(build, 1, 1)} == {0}


@pytest.mark.parametrize(
    "nodes",
    [
        ("a", "b", "a", "b"),  # dealt round robin
        ("a", "b", "b", "a"),  # a ring whose ranks do not ascend
    ],
)
def test_ulysses_groups_lie_inside_nodes_however_ranks_are_dealt(pool, nodes):
    results = pool(4).run(build, 2, 2, nodes)
    for rank, (place, _, text) in enumerate(results):
        assert place[1] == "ab".index(nodes[rank])
        assert "ulysses groups that cross nodes: none" in text


def exact(rank, nodes):
    case = Case(2, 2, 50, ":0", "zigzag")
    return failures(case, run(case, usp.Topology.build(2, 2, nodes=nodes)))


@pytest.mark.parametrize("nodes", [("a", "b", "a", "b"), ("a", "b", "b", "a")])
def test_attention_is_exact_however_ranks_are_dealt(pool, nodes):
    assert pool(4).run(exact, nodes) == [[]] * 4


def refused(rank, ulysses, ring, nodes, allowed):
    with pytest.raises(TopologyError) as caught:
        usp.Topology.build(ulysses, ring, nodes=nodes)
    if allowed:
        text = usp.Topology.build(ulysses, ring, nodes=nodes, allow_cross_node=True).describe()
        assert "ulysses groups that cross nodes: [" in text
    return str(caught.value)


def test_nodes_of_different_sizes(pool):
    message = pool(4).run(refused, 2, 2, ("a", "a", "a", "b"), True)[3]
    assert "a: 3 ranks (0, 1, 2)" in message
    assert "b: 1 ranks (3)" in message
    assert "1 x 4 would fit" in message
    assert "allow_cross_node=True" in message


def test_degrees_that_do_not_divide_the_world(pool):
    message = pool(4).run(refused, 3, 1, None, False)[0]
    assert "3 x 1 = 3 does not divide the 4 ranks there are" in message
    assert "1 x 4, 2 x 2, 4 x 1" in message


@pytest.mark.parametrize("nodes", [(), ("a",), ("a",) * 5])
def test_nodes_that_name_another_number_of_ranks(pool, nodes):
    message = pool(4).run(refused, 2, 2, nodes, False)[0]
    assert f"nodes names {len(nodes)} ranks and the world has 4" in message


def detected(rank):
    return usp.Topology.build(2, 2).describe()


def test_nodes_are_found_from_torchruns_environment():
    """Two agents on one host are two nodes; ranks dealt round robin."""
    pool = Pool(4, environment=lambda rank: {"GROUP_RANK": str(rank % 2)})
    try:
        texts = pool.run(detected)
    finally:
        pool.close()
    assert len(set(texts)) == 1
    lines = texts[0].splitlines()
    assert lines[0].startswith("ring 2 x ulysses 2 x data 1")
    assert lines[1].endswith("/0 | 0: d0 r0 u0 | 2: d0 r0 u1")
    assert lines[2].endswith("/1 | 1: d0 r1 u0 | 3: d0 r1 u1")
    assert lines[3:] == ["  ulysses groups that cross nodes: none", "  ring groups that cross nodes: [(0, 1), (2, 3)]"]


def from_meshes(rank):
    found = {}
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ring", "ulysses"))
    found["3-D"] = coordinates(usp.Topology.from_mesh(mesh))
    tensor_parallel = init_device_mesh("cpu", (2, 2, 1, 2), mesh_dim_names=("outer", "cp", "sp", "tp"))
    topology = usp.Topology.from_mesh(tensor_parallel, ulysses="sp", ring="cp")
    found["4-D"] = coordinates(topology), topology.ring.ranks
    transposed = DeviceMesh(
        "cpu", torch.arange(8).view(2, 2, 2).permute(2, 0, 1), mesh_dim_names=("ulysses", "dp", "ring")
    )
    found["ulysses outermost"] = (
        coordinates(usp.Topology.from_mesh(transposed)),
        usp.Topology.from_mesh(transposed).grids,
    )
    only = usp.Topology.from_mesh(mesh, ulysses=None, ring="ring")
    found["ring only"] = only.ulysses.degree, only.ring.degree, only.data_degree
    with pytest.raises(TopologyError, match=r"no axis 'sp'; its axes are \('dp', 'ring', 'ulysses'\)"):
        usp.Topology.from_mesh(mesh, ulysses="sp")
    case = Case(1, 1, 37, ":0", "striped", kv_heads=1)
    found["wrong"] = [failures(case, run(case, t)) for t in (usp.Topology.from_mesh(mesh), topology, only)]
    return found


def test_axes_of_the_users_mesh(pool):
    results = pool(8).run(from_meshes, timeout=120)
    for rank, found in enumerate(results):
        d, r, u = rank // 4, rank // 2 % 2, rank % 2
        assert found["3-D"] == (d, r, u)
        assert found["4-D"] == ((2 * d + u, r, 0), (4 * d + u, 4 * d + 2 + u))
        assert found["ulysses outermost"][0] == (d, r, u)
        assert found["ulysses outermost"][1] == (((0, 1), (2, 3)), ((4, 5), (6, 7)))
        assert found["ring only"] == (1, 2, 4)
        assert found["wrong"] == [[], [], []]


def two_at_once(rank):
    """Two topologies in one process, used in turn."""
    wrong = []
    for ulysses, ring in ((4, 1), (1, 4), (2, 2), (4, 1)):
        case = Case(ulysses, ring, 41, "-7:0", "zigzag", heads=5, kv_heads=5)
        wrong += failures(case, run(case, usp.Topology.build(ulysses, ring)))
    return wrong


def test_several_topologies_in_one_process(pool):
    assert pool(4).run(two_at_once) == [[]] * 4


def test_without_a_process_group():
    q, k, v = (torch.randn(1, 10, 2, 8) for _ in range(3))
    attn = usp.USPAttention()
    expected = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    torch.testing.assert_close(attn(q, k, v, is_causal=True), expected.transpose(1, 2))
    assert torch.equal(usp.unshard(usp.shard(q, attn.topology), attn.topology), q)
    assert "data 1" in attn.topology.describe()
    with pytest.raises(TopologyError, match=r"torchrun --nproc-per-node 8 your_script.py.*init_process_group"):
        usp.USPAttention(ulysses_degree=2, ring_degree=4)
