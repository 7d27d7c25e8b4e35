"""The first of the random configurations: a failure prints its seed; `Case(...)` in tests/cases.py replays it."""

import pytest

from tests.cases import check_all
from tests.random_configurations import draw, failing

COUNT = 300
MORE = range(10_000, 10_200)
"""Seeds of those that run over threads."""


@pytest.mark.parametrize("world", [2, 3, 4, 6, 8])
def test_random_configurations(pool, world):
    cases = [case for size, case in map(draw, range(COUNT)) if size == world]
    wrong = pool(world).run(check_all, cases, timeout=280)
    assert not wrong[0], f"{len(wrong[0])} of {len(cases)}\n" + "\n".join(wrong[0])


def test_how_many_are_drawn():
    assert COUNT >= 300
    assert {world for world, _ in map(draw, range(COUNT))} == {2, 3, 4, 6, 8}


@pytest.mark.usefixtures("one_thread")
def test_more_over_threads():
    wrong = [found for found in map(failing, MORE) if found]
    assert not wrong, "\n".join(wrong)
