"""Fixtures shared by all tests."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.pool import Pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests run where there is a GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and torch.cuda.is_available() is False"))


@pytest.fixture(scope="module")
def pool() -> Iterator[Callable[[int], Pool]]:
    """`pool(n)`: n gloo processes, started once a module (and again after a failure).

    Not once a session: every group has a thread that wakes 60 times a second, and idle pools would use half a core.
    """
    pools: dict[int, Pool] = {}

    def get(world_size: int) -> Pool:
        if world_size not in pools or not pools[world_size].alive:
            pools[world_size] = Pool(world_size)
        return pools[world_size]

    yield get
    for made in pools.values():
        if made.alive:
            made.close()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For modules whose tensors are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
