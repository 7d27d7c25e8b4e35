"""Every error that usp raises on purpose.

    USPError
    ├── InputError        an argument that cannot be right           (also a ValueError)
    ├── TopologyError     degrees, meshes or nodes that do not fit   (also a ValueError)
    ├── KernelError       no kernel takes this call                  (also a RuntimeError)
    ├── TransportError    a peer did not send what was awaited       (also a RuntimeError)
    ├── NumericsError     a value that is not finite                 (also a FloatingPointError)
    └── AgreementError    ranks called with different arguments      (also a RuntimeError)

A message says what was given, what is required, and what would work.
"""


class USPError(Exception):
    """Base of every error raised by this library."""


class InputError(USPError, ValueError):
    """An argument that cannot be right, found before any communication."""


class TopologyError(USPError, ValueError):
    """Degrees, a mesh or a placement on nodes that do not fit together."""


class KernelError(USPError, RuntimeError):
    """Every kernel that was considered refused the call."""


class TransportError(USPError, RuntimeError):
    """A peer did not deliver within the time-out, or failed."""


class NumericsError(USPError, FloatingPointError):
    """A value that is not finite, with the rank, the hop and the tile in which it first appeared."""


class AgreementError(USPError, RuntimeError):
    """The ranks of one group called with different arguments, or one of them did not come."""
