"""Which ranks take the same samples, on real processes."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler

import usp
from usp.batch import check_batch, shard_batch
from usp.errors import AgreementError


def take(rank, shape, by_rank=False):
    """This rank's shards of an epoch of 8 samples of 6 tokens, on a mesh of data x tensor x ring."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor", "ring"))
    topology = usp.Topology.from_mesh(mesh["data", "ring"], ulysses=None, check="always")
    samples = [torch.full((6,), i) for i in range(8)]
    number, size = (rank, 4) if by_rank else (topology.data_rank, topology.data_degree)
    sampler = DistributedSampler(samples, size, number, shuffle=True, seed=3)  # pyright: ignore[reportArgumentType]
    taken = []
    for ids in DataLoader(samples, batch_size=1, sampler=sampler):  # pyright: ignore[reportArgumentType]
        try:
            check_batch({"input_ids": ids}, topology)
        except AgreementError as error:
            return str(error)
        taken.append(shard_batch({"input_ids": ids}, topology)["input_ids"].tolist()[0])
    return taken


def test_ranks_of_a_sequence_take_the_same_samples(pool):
    a, b, c, d = pool(4).run(take, (2, 1, 2))
    assert a == b and c == d and all(len(shard) == 3 for shard in a + c)
    assert sorted(shard[0] for shard in a + c) == list(range(8))  # every sample once an epoch, between the two grids


def test_tensor_parallel_ranks_take_the_same_samples_too(pool):
    a, b, c, d = pool(4).run(take, (1, 2, 2))
    assert a == b == c == d and sorted(shard[0] for shard in a) == list(range(8))


def test_a_sampler_that_deals_by_rank_is_found(pool):
    for message in pool(4).run(take, (2, 1, 2), True):
        assert "has input_ids (1, 6) of checksum" in message
