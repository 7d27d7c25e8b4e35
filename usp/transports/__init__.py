"""Transports: how blocks move between the ranks of one axis. One file each, found by name."""

from usp import plugins
from usp.errors import InputError
from usp.transports.base import Flight, Group, Transport

__all__ = ["AUTO", "Flight", "Group", "Transport", "load", "names", "select"]

AUTO = ("p2p", "local")
"""What `transport="auto"` is: the first of these that runs over the topology's groups."""


def names() -> list[str]:
    """The transports in this folder."""
    return plugins.names(__name__)


def load(name: str, group: Group) -> Transport:
    """This rank's end of `group` by the transport called `name` ("auto": the default one for that kind of group).

    Raises:
        InputError: no file of this folder has that name, it does not run over that kind of group, or its number of
            ranks in a node does not fit.
    """
    name, parameters = _parse(select(name, group))
    return _kind(name)(group, *parameters)


def select(name: str, group: Group) -> str:
    """The name of the transport to use over `group`: `name` itself, or for "auto" the first that runs over it.

    Raises:
        InputError: no file of this folder has that name, or it does not run over that kind of group.
    """
    for candidate in AUTO if name == "auto" else (name,):
        if isinstance(group, _kind(_parse(candidate)[0]).group_types):
            return candidate
    raise InputError(
        f"transport {name!r} does not run over a group of type {type(group).__name__}; "
        f"of {', '.join(names())} these do: {', '.join(n for n in names() if isinstance(group, _kind(n).group_types))}"
    )


def _parse(text: str) -> tuple[str, list[int]]:
    """The name of a transport, and what it has after a colon: "double_ring:8"."""
    name, _, parameter = text.partition(":")
    if parameter and not (name == "double_ring" and parameter.isdecimal() and len(parameter) < 10):
        raise InputError(f"unknown transport {text[:200]!r}: only double_ring takes a number, as in double_ring:8")
    return name, [int(parameter)] if parameter else []


def _kind(name: str) -> type[Transport]:
    return plugins.load_class(__name__, name, Transport)
