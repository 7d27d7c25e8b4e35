"""A guard against values that are not finite, for `check="debug"`: an error where one first appears."""

from collections.abc import Mapping

import torch
from torch import Tensor

from usp.errors import NumericsError


def check_finite(where: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises NumericsError if a tensor has a value that is not finite; but -inf is an lse that saw no key.

    Args:
        where: who computes what, which the message begins with.
        tensors: by the names that a message has for them.
    """
    for name, tensor in tensors.items():
        wrong = ~torch.isfinite(tensor)
        if name == "lse":
            wrong &= tensor != -torch.inf
        if wrong.any():
            first = tuple(wrong.nonzero()[0].tolist())
            raise NumericsError(
                f"{where}: {name} has {int(wrong.sum())} of {tensor.numel()} values that are not finite, the first is "
                f"{tensor[first].item()} at {first}"
            )
