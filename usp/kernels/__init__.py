"""Kernels: one file each, found by name. A kernel computes one tile on one device and knows nothing of processes."""

from usp import plugins
from usp.errors import KernelError
from usp.kernels.base import Call, Kernel

AUTO = ("sdpa", "reference")
"""What `kernel="auto"` tries, in order. Optional packages are used only when asked for by name."""


def names() -> list[str]:
    """The kernels in this folder."""
    return plugins.names(__name__)


def load(name: str) -> Kernel:
    """The kernel called `name`.

    Raises:
        InputError: no file of this folder has that name.
    """
    return plugins.load_class(__name__, name, Kernel)()


def select(name: str, call: Call) -> str:
    """The name of the kernel to use for `call`: `name` itself, or for "auto" the first that does not refuse.

    Raises:
        InputError: no kernel has that name.
        KernelError: every kernel considered refuses; the message has each one's reason.
    """
    refusals = []
    for candidate in AUTO if name == "auto" else (name,):
        reason = load(candidate).refuses(call)
        if reason is None:
            return candidate
        refusals.append(f"{candidate}: {reason}")
    raise KernelError(f"no kernel takes {call}; " + "; ".join(refusals))
