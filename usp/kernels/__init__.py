"""Kernels: one file each, found by name. A kernel computes one tile on one device and knows nothing of processes."""

from collections.abc import Mapping
from functools import cache

from usp import plugins
from usp.errors import KernelError
from usp.kernels.base import Call, Kernel

AUTO = ("sdpa", "reference")
"""What `kernel="auto"` tries, in order. Optional packages are used only when asked for by name."""


def names() -> list[str]:
    """The kernels in this folder."""
    return plugins.names(__name__)


@cache
def load(name: str) -> Kernel:
    """The kernel called `name`: one object, made once, as making it may look for packages.

    Raises:
        InputError: no file of this folder has that name.
    """
    return plugins.load_class(__name__, name, Kernel)()


def candidates(name: str) -> dict[str, Kernel]:
    """The kernels that `name` stands for, in order of preference: itself, or for "auto" those of `AUTO`.

    Raises:
        InputError: no kernel has that name.
    """
    return {candidate: load(candidate) for candidate in (AUTO if name == "auto" else (name,))}


def select(among: Mapping[str, Kernel], call: Call) -> str:
    """The name of the first kernel that does not refuse `call`.

    Raises:
        KernelError: every one refuses; the message has each one's reason.
    """
    refusals = []
    for name, kernel in among.items():
        reason = kernel.refuses(call)
        if reason is None:
            return name
        refusals.append(f"{name}: {reason}")
    raise KernelError(f"no kernel takes {call}; " + "; ".join(refusals))
