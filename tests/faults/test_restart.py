"""Workers are killed; torchrun starts them anew, with other degrees, and the losses are those of an undisturbed run."""

import signal

from tests.faults.elastic import never, processes, train

STEPS = 8


def twice(step: int, kills: int) -> list[tuple[float, int]]:
    """Kills a worker after step 2, and one after step 5."""
    return [(0.0, 1)] if step == (2, 5, None)[kills] else []


def test_a_run_goes_on_after_kills_with_other_degrees(tmp_path):
    whole = train(tmp_path / "whole", STEPS, never, timeout=100)
    assert whole.exit_code == 0, whole.errors
    assert sorted(whole.steps) == list(range(STEPS))
    assert whole.steps[STEPS - 1][0][0] < whole.steps[0][0][0]  # it learns
    killed = train(tmp_path / "killed", STEPS, twice, timeout=180)
    assert killed.exit_code == 0, killed.errors
    assert killed.kills == 2
    assert killed.attempts == ["2x2", "4x1", "1x4"]
    assert not killed.differing(whole)
    assert killed.left == whole.left == []
    assert [path.name for path in (tmp_path / "killed").iterdir()] == [str(STEPS)]


def test_a_run_that_takes_too_long_is_ended_with_all_its_processes(tmp_path):
    late = train(tmp_path / "late", 10**6, never, timeout=12)
    assert len(late.left) >= 1
    assert late.exit_code == -signal.SIGKILL
    assert processes(tmp_path / "late") == []
