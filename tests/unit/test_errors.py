"""The tree of exceptions is the one that the docstring draws."""

import builtins
import pickle
import re

import pytest

import usp
from usp import errors
from usp.errors import USPError

DRAWN = dict(re.findall(r"[├└]── (\w+) .*\(also a (\w+)\)", errors.__doc__ or ""))
DEFINED = {name for name, thing in vars(errors).items() if isinstance(thing, type)}


def test_every_exception_is_drawn_and_public():
    assert {"USPError", *DRAWN} == DEFINED
    assert all(getattr(usp, name) is getattr(errors, name) for name in DEFINED)


@pytest.mark.parametrize(("name", "also"), DRAWN.items())
def test_an_exception_is_what_the_drawing_says(name, also):
    kind = getattr(errors, name)
    assert kind.__bases__ == (USPError, getattr(builtins, also))
    with pytest.raises(getattr(builtins, also), match="seven is not eight"):
        raise kind("seven is not eight")


def test_the_root_is_a_plain_exception():
    assert USPError.__bases__ == (Exception,)


@pytest.mark.parametrize("name", sorted(DEFINED))
def test_an_exception_travels_between_processes(name):
    """A process pool or a data loader hands a worker's exception on as a pickle."""
    error = pickle.loads(pickle.dumps(getattr(errors, name)("4 heads, 8 ranks")))
    assert type(error) is getattr(errors, name) and str(error) == "4 heads, 8 ranks"
