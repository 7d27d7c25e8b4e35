"""`usp.check` against the oracle of the tests, and against attention that is wrong."""

import json
import math
import sys

import pytest
import torch
from typer.testing import CliRunner

import usp
from tests.dense import dense_attention, visible
from usp.check import Comparison, Problem, _compare
from usp.check import visible as visible_rows
from usp.cli.app import app
from usp.errors import InputError
from usp.mask import Band, Mask
from usp.ring import Ring
from usp.transports import local

ALONE = usp.Topology.build()
MASKS = {
    "full": Mask.full(),
    "causal": Mask.causal(),
    "window": Mask.window(5, 2),
    "documents": Mask.documents([7, 1, 29]),
    "causal documents": Mask.causal() & Mask.documents([20, 17]),
    "two bands": Mask.offsets(Band(None, -9), Band(0, 3)),
    "dead rows": Mask.offsets(Band(None, -4)),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_who_sees_whom(mask):
    rows = torch.tensor([0, 3, 4, 8, 36])
    assert torch.equal(visible_rows(mask, rows, 37), visible(mask, 37)[rows])


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("block", [2**23, 37 * 2 * 5])
def test_the_oracle_of_the_tests_has_no_error(mask, block, monkeypatch):
    """In one block of rows and in several: the reference is the same."""
    monkeypatch.setattr(sys.modules["usp.check"], "BLOCK", block)
    problem = Problem(37, batch=2, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64, mask=mask)
    whole = problem.tensors()
    out, _, dq, dk, dv = dense_attention(*whole, visible(mask, 37))
    errors, single = _compare(problem, ALONE, (whole, [out, dq, dk, dv]), lambda items, _: items)
    assert max(errors) < 1e-14
    assert max(single) < 1e-14


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [Mask.full(), Mask.causal(), Mask.window(9, 0)], ids=str)
def test_the_library_passes(dtype, mask):
    report = usp.check(ALONE, seq_len=67, heads=4, kv_heads=2, head_dim=16, dtype=dtype, mask=mask)
    assert report.passed, report
    assert [result.name for result in report.results] == ["out", "dq", "dk", "dv"]
    assert all(0 < result.error <= result.bound for result in report.results)


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_a_result_that_is_wrong_by_a_thousandth_fails(name, monkeypatch):
    def wrong(index, original):
        def changed(*args):
            results = list(original(*args))
            results[index] = results[index] * 1.001
            return type(original(*args))(results) if isinstance(original(*args), tuple) else results

        return changed

    if name == "out":
        monkeypatch.setattr(Ring, "forward", wrong(0, Ring.forward))
    else:
        monkeypatch.setattr(Ring, "backward", wrong(["dq", "dk", "dv"].index(name), Ring.backward))
    report = usp.check(ALONE, seq_len=40, heads=2, head_dim=8)
    assert not report.passed
    assert name in {result.name for result in report.results if not result.passed}
    assert report.worst.error == pytest.approx(1e-3, rel=0.05) or name == "out"
    assert f"{name} 1.0e-03 > 2.0e-06" in str(report)


@pytest.fixture
def answer(monkeypatch):
    """Lets attention answer with the oracle's results times a factor for each, for some of the rows."""

    def set_answer(*factors, rows=slice(None)):
        def attend(problem, topology, whole):
            out, _, *gradients = dense_attention(*whole, visible(problem.mask, problem.seq_len))
            return [x[:, rows] * factor for x, factor in zip((out, *gradients), factors, strict=True)]

        monkeypatch.setattr(sys.modules["usp.check"], "_attend", attend)

    return set_answer


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_an_error_is_told_as_it_is(mask, answer):
    """Also far below the bound of another dtype."""
    wrong = (1e-3, 1e-5, -1e-7, 1e-9)
    answer(*(1 + error for error in wrong))
    report = usp.check(ALONE, seq_len=37, batch=2, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64, mask=mask)
    assert [result.error for result in report.results] == pytest.approx(list(map(abs, wrong)), rel=1e-5)
    assert not any(result.passed for result in report.results)


def test_a_token_that_no_rank_holds_is_missed(answer, monkeypatch):
    """Though all rows that there are are right."""
    monkeypatch.setattr(sys.modules["usp.check"], "positions", lambda *_, **__: torch.arange(36))
    answer(1.0, 1.0, 1.0, 1.0, rows=slice(36))
    assert not any(result.passed for result in usp.check(ALONE, seq_len=37, head_dim=8).results)


def test_where_the_reference_is_rounding():
    """Queries that see one key have dq = dk = 0: an error of 1e-17 is not one of 100 %."""
    report = usp.check(ALONE, seq_len=37, head_dim=8, dtype=torch.float64, mask=Mask.window(0, 0))
    assert report.passed, report


@pytest.mark.parametrize(
    ("dtype", "error", "single", "bound"),
    [
        (torch.float64, 1e-13, 1e-10, 1e-12),  # what torch does is no excuse
        (torch.float32, 1e-7, 1e-7, 2e-6),
        (torch.float32, 1e-7, 4e-6, 6e-6),
        (torch.bfloat16, 1e-3, 2e-3, 3e-3),
    ],
)
def test_bounds(dtype, error, single, bound):
    found = Comparison.of("out", error, single, dtype)
    assert found.bound == pytest.approx(bound)
    assert found.passed
    assert not Comparison.of("out", bound * 1.01, single, dtype).passed
    assert not Comparison.of("out", math.nan, single, dtype).passed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(seq_len=0), "seq_len is 0"),
        (dict(seq_len=8, heads=3, kv_heads=2), "heads must be a multiple"),
        (dict(seq_len=8, dtype=torch.int64), "there is a bound for float64"),
        (dict(seq_len=8, mask=Mask.documents([4, 5])), "9"),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        usp.check(ALONE, **fields)


def test_threads_are_refused():
    with pytest.raises(InputError, match="this topology is of threads"):
        local.run(lambda topology: usp.check(topology, seq_len=8), ring_degree=2)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--seq-len", "40", "--heads", "2", "--head-dim", "8"], 0, "all within their bounds"),
        (["--seq-len", "40", "--heads", "2", "--head-dim", "8", "--sweep"], 0, "all within their bounds"),
        (["--seq-len", "40", "--sweep", "-u", "2"], 1, "give a degree that divides them, or none"),
        (["--seq-len", "40", "-u", "2", "-r", "2"], 1, "torchrun --nproc-per-node 4 -m usp.cli check"),
        (["--seq-len", "40", "--dtype", "int8"], 1, "dtype is 'int8'"),
        (["--seq-len", "40", "--device", "tpu"], 1, "device is 'tpu'"),
    ],
)
def test_the_command(args, code, words):
    result = CliRunner().invoke(app, ["check", *args])
    assert result.exit_code == code
    assert words in result.output + str(result.exception)


COMMAND = ["check", "--seq-len", "40", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--json"]


def test_a_failure_in_the_document(answer):
    """NaN is no number of JSON."""
    answer(1.0, 1.0, math.nan, 1.1)
    done = CliRunner().invoke(app, COMMAND)
    content = json.loads(done.stdout)
    (case,) = content["cases"]
    assert done.exit_code == 1
    assert content["passed"] is case["passed"] is False
    assert case["results"]["dk"]["error"] is None
    assert case["results"]["dv"]["error"] == pytest.approx(0.1, rel=1e-4)
    assert case["results"]["dv"]["bound_from"] == "fixed for float32"
    assert done.stderr.count("FAILS") == 2
    assert "1 of 1 past a bound" in done.stderr


def test_what_is_given_is_not_swept():
    done = CliRunner().invoke(app, [*COMMAND, "--sweep", "--layout", "zigzag", "--window", "9,0"])
    (case,) = json.loads(done.stdout)["cases"]
    assert (done.exit_code, case["layout"], case["mask"]) == (0, "zigzag", "causal, window 9 back and 0 ahead")


@pytest.mark.parametrize("args", [["--sweep"], ["--dtype", "bfloat16"]])
def test_tables_fit_a_terminal(args):
    done = CliRunner().invoke(app, [*COMMAND, *args])
    words = {"contiguous", "causal documents"} if "--sweep" in args else {"1.5 x single device"}
    assert done.exit_code == 0
    assert all(word in done.stderr for word in words)  # neither cut nor broken
    assert max(map(len, done.stderr.splitlines())) <= 80
