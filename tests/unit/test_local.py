"""Ranks as threads, and the contract of a transport over everything that can run without processes."""

import functools
import math
import threading
import time
from collections.abc import Sequence

import pytest
import torch

import usp
from usp import plugins, transports
from usp.errors import InputError, TransportError
from usp.transports import local
from usp.transports.base import Transport, flatten, unflatten

SIZES = range(1, 6)


def run_on(name: str, size: int, work, **options) -> list:
    """`work(transport)` on every rank of a ring."""
    return local.run(lambda topology: work(transport_of(name, topology)), ring_degree=size, **options)


def transport_of(name: str, topology) -> Transport:
    group = topology.ring.group
    if name == "local" and group is None:  # an axis of size 1 has no group
        group = local.LocalGroup(local.Hub(5.0), "ring", (0,), 0)
    return transports.load(name, group)


def kinds(name: str) -> tuple[type, ...]:
    return plugins.load_class("usp.transports", name, Transport).group_types


ENDS = [
    (name, size)
    for name in transports.names()
    for size in SIZES
    if name != "double_ring" and (local.LocalGroup in kinds(name) or (size == 1 and type(None) in kinds(name)))
] + [("double_ring:2", 4), ("double_ring:2", 6), ("double_ring:3", 6)]
"""Transports between threads, and those that take None as the group of an axis of one rank."""

every_transport = pytest.mark.parametrize(("name", "size"), ENDS)


def test_something_runs_without_processes():
    assert {("local", size) for size in SIZES} | {("p2p", 1), ("all_gather", 1)} <= set(ENDS)


# ---- run -------------------------------------------------------------------------------------------------------------


def test_results_come_in_rank_order():
    def work(topology):
        time.sleep(0.05 * (5 - topology.rank))  # the last rank ends first
        return topology.rank, topology.ring.rank, topology.ulysses.rank

    assert local.run(work, ulysses_degree=2, ring_degree=3) == [
        (0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1), (4, 2, 0), (5, 2, 1),
    ]  # fmt: skip


def test_one_rank_alone():
    assert local.run(lambda topology: (topology.ring.group, topology.sequence_degree)) == [(None, 1)]


def test_ranks_run_at_the_same_time():
    barrier = threading.Barrier(4)
    assert sorted(local.run(lambda topology: barrier.wait(10), ulysses_degree=2, ring_degree=2)) == [0, 1, 2, 3]


def test_two_runs_at_once_do_not_mix():
    def sum_of_ranks(offset: float, topology) -> float:
        transport = transports.load("auto", topology.ring.group)
        stops = transport.circulate([torch.tensor([offset + topology.rank])], [[(1,)]] * 3, 2)
        return sum(stop.tensors[0].item() for stop in stops)

    def work(topology):
        return local.run(functools.partial(sum_of_ranks, 10.0 * topology.rank), ring_degree=3)

    assert local.run(work, ring_degree=2) == [[3.0] * 3, [33.0] * 3]


def fail_on(rank: int, wait) -> None:
    """Rank `rank` fails at once; the others wait for it in the way of `wait`."""

    def work(topology):
        if topology.rank == rank:
            raise ZeroDivisionError(f"rank {rank} divides by zero")
        wait(topology)

    before = threading.active_count()
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match=f"rank {rank} divides by zero"):
        local.run(work, ring_degree=3, timeout_seconds=8)
    assert time.monotonic() - start < 5, "the others went on waiting"
    assert threading.active_count() == before


def await_peers(topology) -> None:
    transport = transports.load("auto", topology.ring.group)
    peers = [peer for peer in range(3) if peer != topology.rank]
    transport.exchange({}, {peer: torch.empty(1) for peer in peers}).wait()


def attend(topology) -> None:
    q = torch.zeros(1, 4, 2, 8)
    usp.attention(q, q, q, topology=topology)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_failure_is_raised_and_stops_those_that_wait_for_a_message(rank):
    fail_on(rank, await_peers)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_failure_is_raised_and_stops_those_that_wait_for_an_agreement(rank):
    """The first thing attention does is to compare arguments: that is where a rank waits for one that failed before."""
    fail_on(rank, attend)


def test_the_first_failure_is_the_one_that_is_raised():
    """Not the complaint of a rank that waited for it."""

    def work(topology):
        if topology.rank == 2:
            time.sleep(0.3)
            raise KeyError("the cause")
        await_peers(topology)

    with pytest.raises(KeyError, match="the cause"):
        local.run(work, ring_degree=3, timeout_seconds=30)


def test_a_peer_that_sends_nothing_is_named_after_the_time_out():
    def work(topology):
        if topology.rank == 0:
            transports.load("auto", topology.ring.group).exchange({}, {1: torch.empty(1)}).wait()

    start = time.monotonic()
    with pytest.raises(TransportError, match=r"^rank 1 sent nothing for 0\.3 s$"):
        local.run(work, ring_degree=2, timeout_seconds=0.3)
    assert time.monotonic() - start < 3


# ---- exchange --------------------------------------------------------------------------------------------------------


@every_transport
def test_exchange_delivers_to_every_peer(name, size):
    def work(transport):
        me = transport.rank
        assert transport.size == size
        peers = [peer for peer in range(size) if peer != me]
        received = {peer: torch.full((peer + me + 1,), -1.0) for peer in peers}
        sent = {peer: torch.full((peer + me + 1,), 10.0 * me + peer) for peer in peers}
        transport.exchange(sent, received).wait()
        return {peer: tensor.tolist() for peer, tensor in received.items()}

    for me, received in enumerate(run_on(name, size, work)):
        assert received == {peer: [10.0 * peer + me] * (peer + me + 1) for peer in range(size) if peer != me}


@every_transport
def test_messages_arrive_in_the_order_of_the_exchanges(name, size):
    """With several under way, and what was sent overwritten once its flight is over."""

    def work(transport):
        after, before = (transport.rank + 1) % size, (transport.rank - 1) % size
        if after == transport.rank:
            return None
        sent = [torch.tensor([float(step), float(transport.rank)]) for step in range(4)]
        received = [torch.empty(2) for _ in sent]
        flights = [transport.exchange({after: s}, {before: r}) for s, r in zip(sent, received, strict=True)]
        for flight, tensor in zip(flights, sent, strict=True):
            flight.wait()
            tensor.fill_(torch.nan)
        return [tensor.tolist() for tensor in received]

    for rank, received in enumerate(run_on(name, size, work)):
        assert received is None if size == 1 else received == [[step, (rank - 1) % size] for step in range(4)]


@every_transport
@pytest.mark.parametrize(("sent", "awaited"), [(True, True), (True, False), (False, True)])
def test_nothing_is_sent_for_an_empty_tensor(name, size, sent, awaited):
    """So neither end need name it, and none is left behind for the next exchange."""

    def work(transport):
        after, before = (transport.rank + 1) % size, (transport.rank - 1) % size
        if after == transport.rank:
            return 0.0
        empty = torch.empty(0)
        transport.exchange({after: empty} if sent else {}, {before: empty} if awaited else {}).wait()
        received = torch.empty(2)
        transport.exchange({after: torch.full((2,), float(transport.rank))}, {before: received}).wait()
        return received.sum().item() / 2

    assert run_on(name, size, work, timeout_seconds=20) == [float((rank - 1) % size) for rank in range(size)]


# ---- circulate -------------------------------------------------------------------------------------------------------

UNEQUAL = [3, 0, 5, 1, 2, 4]


def shapes_of(lengths: list[int]) -> list[list[tuple[int, ...]]]:
    """Every rank's block: two tensors, as keys and values are."""
    return [[(n, 2), (1, n, 3)] for n in lengths]


def block_of(owner: int, lengths: list[int]) -> list[torch.Tensor]:
    """Values that tell the owner, the tensor and the place in it."""
    return [
        100.0 * owner + 50.0 * which + torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        for which, shape in enumerate(shapes_of(lengths)[owner])
    ]


def share_of(rank: int, owner: int, lengths: list[int]) -> list[torch.Tensor]:
    """What `rank` adds to the gradient of `owner`'s block; powers of two, so that every sum tells its terms."""
    return [2.0**rank * (1.0 + x.double()) for x in block_of(owner, lengths)]


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def owners_at(name: str, size: int, rank: int, hops: int, again: bool = False) -> list[int]:
    """The order in which blocks come by: round the ring, or round each node of a ring of rings, by the definition.

    With `again` the first comes once more at the end; and that of each other round at the end of the round.
    """
    if not hops or ":" not in name:
        return [(rank - hop) % size for hop in range(hops + 1)] + [rank] * (again and hops > 0)
    width = int(name.rpartition(":")[2])
    node, place = divmod(rank, width)
    found = []
    for turn in range(size // width):
        begin = (node - turn) % (size // width) * width
        found += [begin + (place - step) % width for step in range(width + (again and turn > 0))]
    return found + [rank] * again


@every_transport
@pytest.mark.parametrize("lengths", [UNEQUAL, [4] * 6, [0] * 6, [0, 0, 0, 7, 0, 0]], ids=str)
@pytest.mark.parametrize("with_gradients", [False, True])
def test_circulate_hands_out_every_owners_block(name, size, lengths, with_gradients):
    """For every number of hops; gradients, in a wider dtype, come home summed, while the own block is here again."""
    lengths = lengths[:size]

    def work(transport, hops):
        me, stops = transport.rank, []
        own = block_of(me, lengths)
        for stop in transport.circulate(own, shapes_of(lengths), hops):
            again = any(stop is other for other in stops)
            assert not (again and stop.comes_again)
            stops.append(stop)
            assert same(stop.tensors, block_of(stop.owner, lengths)), f"block of {stop.owner} at rank {me}"
            assert (stop.gradients is None) != again
            if with_gradients:
                stop.gradients = [(1 + again) * share for share in share_of(me, stop.owner, lengths)]
        assert same(own, block_of(me, lengths)), "the caller's block was overwritten"
        return [stop.owner for stop in stops], stops[0].gradients

    for hops in range(size):
        results = run_on(name, size, lambda transport, hops=hops: work(transport, hops), timeout_seconds=20)
        for rank, (owners, gradients) in enumerate(results):
            assert owners == owners_at(name, size, rank, hops, with_gradients)
            if not with_gradients:
                assert gradients is None
                continue
            givers = [
                giver for giver in range(size) for seen in owners_at(name, size, giver, hops, True) if seen == rank
            ]
            shares = [share_of(giver, rank, lengths) for giver in givers]
            assert same(gradients, [sum(parts) for parts in zip(*shares, strict=True)])
            assert all(gradient.dtype == torch.float64 for gradient in gradients)


@every_transport
def test_the_next_block_may_arrive_while_this_one_is_used(name, size):
    """Ranks of different speed: what is handed out stays what it is until the next step is asked for."""

    def work(transport):
        for stop in transport.circulate(block_of(transport.rank, UNEQUAL), shapes_of(UNEQUAL[:size]), size - 1):
            time.sleep(0.02 * ((transport.rank + stop.owner) % 3))
            assert same(stop.tensors, block_of(stop.owner, UNEQUAL))
            stop.gradients = share_of(transport.rank, stop.owner, UNEQUAL)
            time.sleep(0.02 * ((2 * transport.rank + stop.owner) % 3))

    run_on(name, size, work)


# ---- names and messages ----------------------------------------------------------------------------------------------


def test_auto_is_the_one_for_the_kind_of_group():
    assert transports.select("auto", None) == "p2p"
    assert local.run(lambda topology: transports.select("auto", topology.ring.group), ring_degree=2) == ["local"] * 2


def test_a_transport_that_cannot_serve_the_group_says_which_can():
    with pytest.raises(
        InputError,
        match=r"^transport 'local' does not run over a group of type NoneType; of .*local.* these do: .*p2p",
    ):
        transports.select("local", None)
    with pytest.raises(
        InputError, match=r"'p2p' does not run over a group of type LocalGroup; .* these do: double_ring, local$"
    ):
        local.run(lambda topology: transports.select("p2p", topology.ring.group), ring_degree=2)


@pytest.mark.parametrize("text", ["double_ring", "double_ring:1", "double_ring:4", "double_ring:3"])
def test_a_double_ring_says_what_would_fit(text):
    with pytest.raises(InputError, match=rf"^{text}:? over a ring of 4: .* be neither 1 nor all; 2 would$"):
        local.run(lambda topology: transports.load(text, topology.ring.group), ring_degree=4)


@pytest.mark.parametrize("text", ["double_ring:x", "p2p:2", "double_ring:-2"])
def test_only_a_double_ring_takes_a_number(text):
    with pytest.raises(InputError, match=rf"^unknown transport '{text}': only double_ring takes a number, as in"):
        transports.select(text, None)


def test_an_unknown_transport_lists_those_there_are():
    with pytest.raises(
        InputError, match=r"unknown transport 'pp': there are all_gather, double_ring, local, p2p; did you mean 'p2p'"
    ):
        transports.select("pp", None)


def test_flatten_and_unflatten():
    tensors = [torch.arange(6.0).view(2, 3).t(), torch.empty(0, 4), torch.ones(2, 1, 2)]
    message = flatten(tensors)
    assert message.shape == (10,) and message.is_contiguous()
    parts = unflatten(message, [t.shape for t in tensors])
    assert all(torch.equal(part, tensor) for part, tensor in zip(parts, tensors, strict=True))
    parts[0].zero_()
    assert message[:6].eq(0).all(), "the parts are views of the message"
