"""With check="debug" the first value that is not finite is an error that says where it is."""

import functools

import pytest
import torch

import usp
from usp import ring
from usp.errors import AgreementError, NumericsError
from usp.transports import local


@pytest.fixture
def debug(monkeypatch):
    """Threads whose topology is made in debug mode."""
    monkeypatch.setenv("USP_CHECK", "debug")
    return functools.partial(local.run, ring_degree=3)


def attend(topology, spoil=lambda topology, tensors: None):
    make = torch.Generator().manual_seed(topology.rank)  # the ranks are threads, which share torch's own generator
    tensors = [torch.randn(1, 4, 2, 8, generator=make, requires_grad=True) for _ in range(3)]
    spoil(topology, tensors)
    out = usp.attention(*tensors, topology=topology)
    out.sum().backward()
    return out


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("index", "name"), list(enumerate(["query", "key", "value"])))
def test_an_input_is_refused_on_every_rank_before_anything_is_sent(debug, index, name, bad):
    def spoil(topology, tensors):
        if topology.rank == 1:
            with torch.no_grad():
                tensors[index][0, 3, 1, 2] = bad

    def work(topology):
        with pytest.raises((NumericsError, AgreementError)) as caught:
            attend(topology, spoil)
        return str(caught.value)

    first, culprit, last = debug(work)
    assert culprit == (f"rank 1: {name} has 1 of 64 values that are not finite, the first is {bad} at (0, 3, 1, 2)")
    assert first == last == f"rank 1: {culprit}"


def test_the_hop_and_the_tile_are_named(debug):
    """Numbers that are finite, and the product of which is not: of rank 2's queries with rank 1's keys."""

    def spoil(topology, tensors):
        with torch.no_grad():
            if topology.rank > 0:
                tensors[2 - topology.rank].fill_(1e30)

    with pytest.raises(NumericsError, match=r"^rank 2, hop 1, the block of rank 1, Tile\(.*\): out has 64 of 64"):
        debug(lambda topology: attend(topology, spoil))


def test_the_gradient_that_comes_in_is_checked(debug):
    def spoiled(topology):
        tensors = [torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3)]
        out = usp.attention(*tensors, topology=topology)
        out.backward(torch.full_like(out, float("nan") if topology.rank == 0 else 1.0))

    with pytest.raises(NumericsError, match=r"^rank 0, backward: dout has 64 of 64 values"):
        debug(spoiled)


def test_rows_that_see_nothing_are_all_right(debug):
    mask = usp.Mask.offsets(usp.Band(None, -3))

    def work(topology):
        x = torch.randn(1, 4, 2, 8)
        out, lse = usp.attention(x, x, x, topology=topology, mask=mask, return_lse=True)
        return out, lse

    results = debug(work)
    assert any((lse == -torch.inf).any() for _, lse in results)


def test_debug_changes_no_number(debug, monkeypatch):
    guarded = debug(attend)
    monkeypatch.setenv("USP_CHECK", "off")
    assert all(torch.equal(a, b) for a, b in zip(guarded, debug(attend), strict=True))


def test_without_debug_nothing_is_checked(debug, monkeypatch):
    monkeypatch.setenv("USP_CHECK", "always")
    monkeypatch.setattr(ring, "check_finite", None)
    debug(attend)
