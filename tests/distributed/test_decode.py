"""Inference over a sharded cache on real processes: a few of the sessions that run over threads in tests/ring."""

import pytest
import torch
from torch import Tensor

import usp
from tests.cases import BOUNDS
from tests.dense import relative_error
from tests.ring.test_decode import ALL, MASKS, Session, draw, expected, play


def outputs(rank: int, sessions: list[Session]) -> list[list[Tensor]]:
    return [play(session, usp.Topology.build(*session.degrees))[0] for session in sessions]


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2), (4, 1), (2, 2), (1, 4)], ids=str)
def test_processes_equal_the_definition_and_each_other(pool, degrees):
    masks = ("causal", "streaming", "documents")
    sessions = [Session(1, degrees, ALL, (str(MASKS[name]),), ("sinks",), heads=(6, 2)) for name in masks]
    sessions += [session for session in map(draw, range(400)) if session.degrees == degrees][:4]
    ranks = pool(degrees[0] * degrees[1]).run(outputs, sessions, timeout=120)
    for i, session in enumerate(sessions):
        steps = [step for step in session.steps if step.how not in ("prefill", "append")]
        for j, (step, reference) in enumerate(zip(steps, expected(session), strict=True)):
            for rank in ranks:
                assert relative_error(rank[i][j], reference) <= BOUNDS[session.dtype], (session, step)
                assert step.how != "decode" or torch.equal(rank[i][j], ranks[0][i][j])


def decode_and_compare(rank: int) -> list[str]:
    """A call that all ranks make alike, and one that rank 0 makes with other heads."""
    topology = usp.Topology.build(2, 2)
    cache, k = usp.KVCache(topology), torch.randn(1, 4, 2, 8)
    cache.append(k, k)
    found = []
    for heads in (4, 8 if rank else 2):
        try:
            found.append(str(tuple(usp.decode(torch.randn(1, 1, heads, 8), cache).shape)))
        except usp.AgreementError as error:
            found.append(str(error))
    return found


def test_ranks_that_disagree_are_told(pool):
    for good, bad in pool(4).run(decode_and_compare, timeout=60):
        assert good == "(1, 1, 4, 8)"
        assert "rank 1 has heads 8 where rank 0 has 2" in bad
