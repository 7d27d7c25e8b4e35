"""Workers are killed; torchrun starts them anew, with other degrees, and the losses are those of an undisturbed run."""

from tests.faults.elastic import train

STEPS = 8


def test_a_run_goes_on_after_kills_with_other_degrees(tmp_path):
    whole = train(tmp_path / "whole", STEPS, lambda step, kills: False, timeout=100)
    assert whole.exit_code == 0, whole.errors
    assert sorted(whole.steps) == list(range(STEPS))
    assert whole.steps[STEPS - 1][0][0] < whole.steps[0][0][0]  # it learns
    killed = train(tmp_path / "killed", STEPS, lambda step, kills: step == (2, 5, None)[kills], timeout=180)
    assert killed.exit_code == 0, killed.errors
    assert killed.kills == 2
    assert killed.attempts == ["2x2", "4x1", "1x4"]
    assert not killed.differing(whole)
    assert killed.left == []
    assert [path.name for path in (tmp_path / "killed").iterdir()] == [str(STEPS)]
