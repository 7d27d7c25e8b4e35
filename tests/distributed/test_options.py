"""Changes of scores, cross attention, joint tokens and masks of rows over processes: the ops, and compiled."""

import pytest
import torch

import usp
from tests.dense import relative_error
from tests.ring.test_combinations import Combination, draw, errors, run
from usp.mask import Mask
from usp.topology import Topology

EVERYTHING = ("softcap", "sinks", "slopes")
CASES = [
    Combination(1, (2, 2), "zigzag", (8, 2), (16, 8), (61, 0), (":0",), EVERYTHING),
    Combination(2, (4, 1), "contiguous", (5, 1), (8, 8), (37, 0), ("-6:0@0,30,37", ":0@0,4,20,37"), ("sinks",)),
    Combination(3, (1, 4), "striped", (4, 4), (8, 8), (50, 11), (":",), EVERYTHING, "joint front"),
    Combination(4, (2, 2), "zigzag", (6, 3), (24, 24), (33, 7), (str(Mask.prefix_lm(9)),), (), "joint rear"),
    Combination(5, (2, 2), "striped", (4, 2), (8, 16), (45, 26), (":",), ("softcap", "sinks"), "cross", "zigzag"),
    Combination(6, (2, 2), "zigzag", (4, 2), (8, 8), (64, 0), (str(Mask.streaming(3, 9)),), ("slopes",)),
]


def sharded(rank, cases):
    return [run(case, Topology.build(*case.degrees)) for case in cases]


def test_over_processes(pool):
    cases = [*CASES, *(case for case in map(draw, range(200, 260)) if case.degrees in ((1, 4), (2, 2), (4, 1)))]
    assert len(cases) > 15
    by_rank = pool(4).run(sharded, cases, timeout=200)
    for case, results in zip(cases, zip(*by_rank, strict=True), strict=True):
        bound = 1e-12 if case.dtype == torch.float64 else 2e-6
        above = {name: error for name, error in errors(case, list(results)).items() if not error <= bound}
        assert not above, (case, above)


def compiled(rank, dynamic):
    """Largest relative difference between a compiled call with everything at once and the same not compiled."""
    topology = Topology.build(2, 2)
    attend = usp.USPAttention(topology=topology, layout="zigzag")
    make = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 64, heads, 8, generator=make, dtype=torch.float64) for heads in (4, 2, 2)]
    joint = [torch.randn(2, 5, heads, 8, generator=make, dtype=torch.float64) for heads in (4, 2, 2)]
    sinks, slopes = (torch.randn(4, generator=make, dtype=torch.float64) for _ in range(2))
    leaves = [usp.shard(t, topology, layout="zigzag") for t in whole] + joint + [sinks]
    for t in leaves:
        t.requires_grad_()

    def call(q, k, v, *rest):
        *joint, sinks = rest
        out, text = attend(
            q, k, v, mask=[Mask.causal(), Mask.prefix_lm(9)], softcap=2, sinks=sinks, alibi_slopes=slopes, joint=joint
        )
        return (out * out).sum() + text.sin().sum()

    expected = torch.autograd.grad(call(*leaves), leaves)
    torch._dynamo.reset()
    if dynamic:
        for t in leaves[:3]:
            torch._dynamo.mark_dynamic(t, 1)
    found = torch.autograd.grad(torch.compile(call, backend="aot_eager", fullgraph=True)(*leaves), leaves)
    return max(relative_error(x, reference) for x, reference in zip(found, expected, strict=True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(pool, dynamic):
    assert max(pool(4).run(compiled, dynamic, timeout=200)) < 1e-12
