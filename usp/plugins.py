"""Layouts, kernels and transports are files found by name: adding one is adding a file."""

import difflib
import importlib
import pkgutil
from functools import cache
from typing import Any, TypeVar

from usp.errors import InputError

T = TypeVar("T")


def names(package: str) -> list[str]:
    """Names of the modules in `package`, its `base` and private ones left out."""
    path = importlib.import_module(package).__path__
    return sorted(m.name for m in pkgutil.iter_modules(path) if m.name != "base" and not m.name.startswith("_"))


@cache  # attention asks on every call
def load(package: str, name: str) -> Any:
    """The module `name` of `package`.

    Raises:
        InputError: there is none; the message lists those there are.
    """
    known = names(package)
    if name not in known:
        kind = package.rsplit(".", 1)[-1].removesuffix("s")
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"unknown {kind} {repr(name)[:200]}: there are {', '.join(known)}{hint}")
    return importlib.import_module(f"{package}.{name}")


@cache
def load_class(package: str, name: str, base: type[T]) -> type[T]:
    """The subclass of `base` in the module `name` of `package` that is called like it: FlashAttn in flash_attn.

    Raises:
        InputError: there is no such module.
    """
    module, wanted = load(package, name), name.replace("_", "")
    kinds = (thing for thing in vars(module).values() if isinstance(thing, type) and issubclass(thing, base))
    return next(kind for kind in kinds if kind.__name__.lower() == wanted)
