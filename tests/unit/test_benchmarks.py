"""The page that is made from the benchmark's results, from results made by hand."""

from typing import Any

import pytest

from benchmarks.report import draw, page, problems

PROBLEM = {"seq_len": 4096, "causal": True, "dtype": "float32", "kv_heads": 2, "heads": 8, "head_dim": 64}


def row(side: str, ratios: list[float], **changes: Any) -> dict[str, Any]:
    """A side of two ranks that took half a second for out and its gradients."""
    return {
        "problem": PROBLEM, "environment": "", "side": side, "grid": {"ulysses": 2, "ring": 1}, "is_peer": False,
        "reason": "", "seconds_forward": 0.125, "seconds_forward_backward": 0.5, "ratio_forward": 0.75,
        "ratio": sorted(ratios)[len(ratios) // 2], "ratios": ratios, "target": None,
        "errors": {"out": 3e-7, "dq": 4e-7, "dk": 2e-7, "dv": 1e-7}, "foreign_load": [0.01], "idle_side_load": [0.0],
        "disturbance": 0.01,
    } | changes  # fmt: skip


def failing(side: str, reason: str) -> dict[str, Any]:
    """What is written of a side that has no times."""
    keys = "problem", "environment", "grid", "is_peer"
    made = row(side, [1.0], is_peer=True)
    return {key: made[key] for key in keys} | {"side": side, "reason": reason}


@pytest.fixture
def data() -> dict[str, Any]:
    results = [
        row("SDPA, 2 threads", [1.0, 1.0, 1.0], grid=None),
        row("usp ulysses 2", [0.9, 1.1, 0.95], target=0.94),
        row("other ring 2", [0.2, 0.2], is_peer=True, errors={"out": 3e-7, "dq": 4e-7, "dk": 1.0, "dv": 1.5}),
        failing("third ulysses 2", "fails: ValueError: no <such> heads"),
        failing("fourth ring 2", "not run: 12 x slower at S 1024"),
    ]
    machine = {"cpu": "A processor", "cores": 2, "torch": "2.13.0", "python": "3.11.7"}
    settings = {"quiet": 0.05, "all_sides_up_to": 8192, "peers": {"other": "1.2"}}
    return {"machine": machine, "settings": settings, "results": results}


def test_table(data):
    expected = """## 4,096 tokens, causal, 8:2 heads of 64, float32

| side | seconds | ratio | range | rounds | target | forward ratio | error |
|---|---|---|---|---|---|---|---|
| SDPA, 2 threads | 0.500 | 1.00 | | 3 | | 1.00 | 4.0e-07 |
| usp ulysses 2 | 0.500 | 0.95 | 0.90-1.10 | 3 | >= 0.94 | 0.75 | 4.0e-07 |
| other ring 2 | 0.500 | 0.20 | 0.20-0.20 | 2 |  | 0.75 | 1.5e+00 **wrong** |

- third ulysses 2 fails: `ValueError: no <such> heads`
- fourth ring 2 not run: 12 x slower at S 1024
"""
    text = page(data)
    assert text.endswith(expected)
    assert "Made by `benchmarks/report.py`" in text and "A processor, 2 cores" in text and "Peers: other 1.2." in text


def test_nan_is_wrong(data):
    data["results"][1]["errors"] |= {"dk": float("nan")}
    assert page(data).count("**wrong** |") == 2


def test_noise_is_told(data):
    assert "not a measurement to quote" not in page(data)
    data["results"][1]["disturbance"] = 0.3
    assert "Up to 30% of the cores went to other programs: not a measurement to quote." in page(data)


def test_a_section_for_each_problem(data):
    data["results"].append(row("SDPA, 2 threads", [1.0], grid=None, problem=PROBLEM | {"causal": False}))
    data["results"].append(row("SDPA, 2 threads", [1.0], grid=None, environment="with AMX"))
    assert [(title, len(rows)) for title, rows in problems(data)] == [
        ("4,096 tokens, causal, 8:2 heads of 64, float32", 5),
        ("4,096 tokens, full, 8:2 heads of 64, float32", 1),
        ("4,096 tokens, causal, 8:2 heads of 64, float32 with AMX", 1),
    ]


def test_picture(data, tmp_path):
    draw(data, tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")
