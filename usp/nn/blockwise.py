"""Token-wise work in chunks of the sequence, run again in the backward pass (Liu and Abbeel 2023, arXiv 2305.19370).

Norms, projections, feed-forward networks and losses look at one token at a time. Plain, each of them keeps activations
of all tokens for the backward pass; here only the inputs are kept, and one chunk's activations exist at a time.

A rank runs as many chunks as its shard needs, so what is cut must not communicate with ranks whose shards may differ in
length: `fully_shard` goes on a module that contains the cut, whose hooks then run once for all chunks.

DDP and FSDP2 see a parameter's gradient once, as the sum over chunks. That sum has the parameter's dtype: in bfloat16
it is rounded once a chunk, and the relative error of a weight's gradient grows like the root of the number of chunks
(0.2 % for one, 0.4 % for 8, 1 % for 64, measured on random numbers). Chunks of some thousand tokens keep it small.
"""

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from usp.errors import InputError


@overload
def blockwise(function: Callable[..., Tensor], *tensors: Tensor, chunk: int, dim: int = 1) -> Tensor: ...
@overload
def blockwise(
    function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor, chunk: int, dim: int = 1
) -> tuple[Tensor, ...]: ...
def blockwise(function: Callable[..., Any], *tensors: Tensor, chunk: int, dim: int = 1) -> Any:
    """`function(*tensors)` in chunks of the sequence, equal to it to rounding, values and gradients.

    The method is that of the Blockwise Parallel Transformer (Liu and Abbeel 2023, arXiv 2305.19370). Dropout draws the
    same numbers again in the backward pass, though not those of an uncut call.

    Args:
        function: what is token-wise: a token of its output depends on that token of its inputs alone. A module's own
            `forward` can be given: `mlp.forward = partial(blockwise, mlp.forward, chunk=1024)` changes no parameter's
            name.
        *tensors: its inputs, of one length along `dim`, which may be 0.
        chunk: tokens that are worked on at a time; the last chunk may be shorter.
        dim: the sequence dimension of inputs and outputs.

    Returns:
        What `function` returns: a tensor or a tuple of tensors, with the sequence at `dim`.

    Raises:
        InputError: `chunk` is below 1, the inputs differ in length, or an output is not as long as its inputs.
    """
    if chunk < 1:
        raise InputError(f"chunk must be 1 token or more, got {chunk}")
    if not tensors or any(t.shape[dim] != tensors[0].shape[dim] for t in tensors):
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors) or "no tensors"
        raise InputError(f"inputs must have one length along dimension {dim}, the sequence: got {shapes}")
    parts = zip(*(t.split(chunk, dim) for t in tensors), strict=True)
    done = [_run(function, part, dim) for part in parts]
    if isinstance(done[0], Tensor):
        return torch.cat(done, dim)
    return tuple(torch.cat(pieces, dim) for pieces in zip(*done, strict=True))


def _run(function: Callable[..., Any], part: tuple[Tensor, ...], dim: int) -> Any:
    out = checkpoint(function, *part, use_reentrant=False)
    for t in (out,) if isinstance(out, Tensor) else out:
        if t.shape[dim:][:1] != part[0].shape[dim:][:1]:
            raise InputError(
                f"not token-wise along dimension {dim}: a chunk of shape {tuple(part[0].shape)} gave {tuple(t.shape)}"
            )
    return out


class Blockwise(nn.Module):
    """A token-wise module that runs in chunks of the sequence, see `blockwise`.

    Its parameters are those of the module, and their names gain "module." in front. The module's own hooks run once a
    chunk: apply `fully_shard` to this wrapper or to what contains it.

    Args:
        module: any token-wise module: an MLP, a norm and an MLP, experts with their router, a head with its loss.
        chunk: tokens that are worked on at a time.
        dim: the sequence dimension of inputs and outputs.

    Raises:
        InputError: `chunk` is below 1.
    """

    def __init__(self, module: nn.Module, chunk: int, dim: int = 1) -> None:
        super().__init__()
        if chunk < 1:
            raise InputError(f"chunk must be 1 token or more, got {chunk}")
        self.module, self.chunk, self.dim = module, chunk, dim

    def forward(self, *tensors: Tensor) -> Any:
        """`module(*tensors)`: inputs of one length along `dim`, and outputs of that length."""
        return blockwise(self.module, *tensors, chunk=self.chunk, dim=self.dim)

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        return f"chunk={self.chunk}, dim={self.dim}"
