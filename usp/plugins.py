"""Layouts, kernels and transports are files found by name: adding one is adding a file."""

import difflib
import importlib
import pkgutil
from types import ModuleType

from usp.errors import InputError


def names(package: str) -> list[str]:
    """Names of the modules in `package`, its `base` and private ones left out."""
    path = importlib.import_module(package).__path__
    return sorted(m.name for m in pkgutil.iter_modules(path) if m.name != "base" and not m.name.startswith("_"))


def load(package: str, name: str) -> ModuleType:
    """The module `name` of `package`.

    Raises:
        InputError: there is none; the message lists those there are.
    """
    known = names(package)
    if name not in known:
        kind = package.rsplit(".", 1)[-1].removesuffix("s")
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"unknown {kind} {name!r}: there are {', '.join(known)}{hint}")
    return importlib.import_module(f"{package}.{name}")
