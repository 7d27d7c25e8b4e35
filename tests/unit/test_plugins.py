"""Files found by name."""

import sys

import pytest

from usp import plugins
from usp.errors import InputError

BASE = "class Widget: pass\n"
ROUND = """
from things.widgets.base import Widget

LIMIT = 3

class Helper: pass

class Round(Widget): pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A package `things.widgets` with a base, a private file, and two widgets."""
    widgets = tmp_path / "things" / "widgets"
    widgets.mkdir(parents=True)
    (widgets.parent / "__init__.py").write_text("")
    (widgets / "__init__.py").write_text("")
    (widgets / "base.py").write_text(BASE)
    (widgets / "_shared.py").write_text("raise RuntimeError('not a widget')\n")
    (widgets / "round.py").write_text(ROUND)
    (widgets / "broken.py").write_text("import a_package_that_is_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield widgets
    for name in [name for name in sys.modules if name.split(".")[0] == "things"]:
        del sys.modules[name]
    plugins.load_class.cache_clear()


def test_names_leaves_out_base_and_private_files(folder):
    assert plugins.names("things.widgets") == ["broken", "round"]


def test_names_imports_nothing(folder):
    plugins.names("things.widgets")
    assert not {"things.widgets.round", "things.widgets.broken", "things.widgets.base"} & set(sys.modules)


def test_a_new_file_is_found_without_registration(folder):
    (folder / "square.py").write_text(ROUND.replace("Round", "Square"))
    assert plugins.names("things.widgets") == ["broken", "round", "square"]


def test_load_gives_the_module(folder):
    module = plugins.load("things.widgets", "round")
    assert module.__name__ == "things.widgets.round" and module.LIMIT == 3


@pytest.mark.parametrize("name", ["base", "_shared", "__init__", "rond", ""])
def test_load_refuses_what_is_not_a_plugin(folder, name):
    with pytest.raises(InputError, match=rf"^unknown widget {name!r}: there are broken, round"):
        plugins.load("things.widgets", name)


def test_a_near_miss_is_guessed(folder):
    with pytest.raises(InputError, match=r"unknown widget 'rond': there are broken, round; did you mean 'round'\?$"):
        plugins.load("things.widgets", "rond")
    with pytest.raises(InputError, match=r"unknown widget 'hexagon': there are broken, round$"):
        plugins.load("things.widgets", "hexagon")


def test_a_name_that_is_no_string_is_refused_too(folder):
    with pytest.raises(InputError, match="unknown widget None: there are broken, round"):
        plugins.load("things.widgets", None)  # pyright: ignore[reportArgumentType]


def test_load_class_gives_the_subclass_that_the_file_defines(folder):
    base = plugins.load("things.widgets", "round").Widget
    found = plugins.load_class("things.widgets", "round", base)
    assert found.__name__ == "Round" and issubclass(found, base) and found is not base


def test_a_plugin_whose_package_is_missing_says_which(folder):
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_installed"):
        plugins.load("things.widgets", "broken")
