"""The loss of a sharded model, and whether ranks that should agree do.

Data parallelism averages gradients over W ranks, data parallel and sequence parallel alike. The gradient is what one
process would have if every rank returns

    loss_r = W * (sum of its own tokens' losses) / N

where N is the number of valid targets on ALL of those ranks, over all micro-batches of the step. The mean of `loss_r`
over the ranks is the loss to log. `weights` make both sums weighted ones.

Targets are shifted before they are sharded: the target of a shard's last token is on another rank. One step:

    total = sum(usp.count_targets(batch["shift_labels"]) for batch in micro_batches)  # of the shards, not the whole
    for batch in micro_batches:
        logits = model(batch["input_ids"], batch["position_ids"])
        usp.cross_entropy(logits, batch["shift_labels"], total).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # after averaging: then every rank has the same norm
    optimizer.step()

With DDP, all micro-batches but the last run inside `model.no_sync()`. DDP averages over its process group, FSDP2 over
the flattened (data x sequence) mesh: never over the data axis alone. Gradients are clipped once a step, when they are
averaged, since the parts on the ranks have other norms. With FSDP2, `clip_grad_norm_` returns a DTensor: log its
`full_tensor()`.

B batch, S tokens of this rank, D width of the model, V vocabulary; N = B * S below.
"""

import ctypes
import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import TypedDict, Unpack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from usp.collect import broadcast, gather
from usp.errors import AgreementError, InputError


class LossOptions(TypedDict, total=False):
    """What `count_targets`, `cross_entropy` and `linear_cross_entropy` share; give all of them the same.

    Attributes:
        weights: a factor on every token's loss, shaped like the targets.
        ignore_index: a target that does not count.
        group: the ranks whose gradients are averaged; the default process group if left out, and one process alone
            where there is none.
    """

    weights: Tensor | None
    ignore_index: int
    group: ProcessGroup | None


def count_targets(
    targets: Tensor, *, weights: Tensor | None = None, ignore_index: int = -100, group: ProcessGroup | None = None
) -> Tensor:
    """Number of valid targets, or the sum of their weights, over all ranks of a group. Collective over the group.

    Args:
        targets: this rank's shard, of any shape, shifted already.
        weights: a factor on every token's loss, shaped like the targets.
        ignore_index: a target that does not count.
        group: the ranks whose gradients are averaged; default: the default process group, or this process alone.

    Returns:
        A tensor of one number, the same on every rank: int64, or with weights a floating dtype of at least 32 bits.

    Raises:
        InputError: targets are not integers, weights are of another shape, or this rank is not in the group.
    """
    factors, ranks = _terms(targets.shape, targets, weights=weights, ignore_index=ignore_index, group=group)
    total = factors.sum(dtype=None if weights is None else torch.promote_types(factors.dtype, torch.float32))
    if ranks > 1:
        dist.all_reduce(total, group=group)
    return total


def cross_entropy(logits: Tensor, targets: Tensor, total: Tensor | float, **options: Unpack[LossOptions]) -> Tensor:
    """This rank's part of the mean cross entropy over all ranks' tokens: W * sum / total. Does not communicate.

    Args:
        logits: (..., V), any floating dtype.
        targets: (...), integers; the targets of these logits, shifted already.
        total: what `count_targets` gives, added up over the micro-batches of the step.
        **options: weights, ignore_index and group, see `LossOptions`.

    Returns:
        A scalar, float32 (float64 for float64). It is 0, and so are its gradients, for a shard without valid targets.

    Raises:
        InputError: shapes or dtypes that do not fit, or this rank is not in the group.
    """
    _refuse_dtensors(logits=logits)
    factors, ranks = _terms(logits.shape[:-1], targets, **options)
    wide = torch.promote_types(logits.dtype, torch.float32)
    chosen = targets.where(factors != 0, 0).long().flatten()
    losses = F.cross_entropy(logits.reshape(-1, logits.shape[-1]).to(wide), chosen, reduction="none")
    return _scaled((losses * factors.flatten().to(wide)).sum(), ranks, total)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    total: Tensor | float,
    *,
    bias: Tensor | None = None,
    chunk: int = 1024,
    **options: Unpack[LossOptions],
) -> Tensor:
    """`cross_entropy(F.linear(hidden, weight, bias), ...)` that never holds more than (chunk, V) logits.

    The gradients are computed chunk by chunk in the forward pass and kept for the backward pass, which only scales them
    (as in Liger Kernel, Hsu et al. 2024): the logits are computed once. What is kept is the gradient of `hidden`, in
    its dtype, and that of `weight`, summed in float32 (float64 for float64); no more than is asked for, nothing under
    `torch.no_grad()`. The op's handle for selective checkpointing is `torch.ops.usp.linear_cross_entropy.default`.

    Inside `torch.autocast` it computes in autocast's dtype, as `F.linear` does; elsewhere dtypes must be equal.

    Args:
        hidden: (..., D), the input of the last linear layer.
        weight: (V, D), the weight of that layer, which may be tied to the embedding. With FSDP2 call this inside the
            forward of the module that was given to `fully_shard` and holds the weight, where it is whole.
        targets: (...), integers; the targets of these tokens, shifted already.
        total: what `count_targets` gives, added up over the micro-batches of the step.
        bias: (V,), the bias of the layer.
        chunk: tokens whose logits are held at a time.
        **options: weights, ignore_index and group, see `LossOptions`.

    Returns:
        A scalar, float32 (float64 for float64). It is 0, and so are its gradients, for a shard without valid targets.

    Raises:
        InputError: shapes or dtypes that do not fit, a DTensor, or this rank is not in the group; in a backward pass
            with `create_graph=True`, as there is no second derivative.
    """
    _refuse_dtensors(hidden=hidden, weight=weight, bias=bias)
    _check_layer(hidden, weight, bias, chunk)
    dtype = _dtype(hidden, weight, bias)
    factors, ranks = _terms(hidden.shape[:-1], targets, **options)
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    chosen = targets.where(factors != 0, 0).long().flatten()
    factors = factors.flatten().to(torch.promote_types(dtype, torch.float32))
    rows = hidden.reshape(-1, hidden.shape[-1])
    loss, *_ = torch.ops.usp.linear_cross_entropy(rows, weight, bias, chosen, factors, dtype, chunk, wanted)
    return _scaled(loss, ranks, total)


def _terms(
    shape: torch.Size,
    targets: Tensor,
    *,
    weights: Tensor | None = None,
    ignore_index: int = -100,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, int]:
    """The factor on every token's loss, 0 where there is no target, and W."""
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise InputError(f"targets must be token numbers of an integer dtype, got {targets.dtype}")
    if targets.shape != shape:
        raise InputError(
            f"targets have shape {tuple(targets.shape)} and the tokens {tuple(shape)}: shift the targets of the whole "
            "sequence, then shard them as the tokens are"
        )
    factors = targets != ignore_index
    if weights is not None:
        if weights.shape != targets.shape:
            raise InputError(
                f"weights have shape {tuple(weights.shape)} and the targets {tuple(targets.shape)}: "
                "every target has one weight"
            )
        if weights.requires_grad:
            raise InputError("weights require a gradient, and the loss gives them none: pass weights.detach()")
        factors = weights.where(factors, 0)
    return factors, _size(group)


def _size(group: ProcessGroup | None) -> int:
    """Number of ranks in a group; 1 without processes."""
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    if size < 1:
        raise InputError("this rank is not in the group: pass a group of ranks that it belongs to")
    return size


def _scaled(loss: Tensor, ranks: int, total: Tensor | float) -> Tensor:
    """W * sum / N; where no rank has a target, the sum is 0 and so is this."""
    total = torch.as_tensor(total, dtype=loss.dtype, device=loss.device)
    return loss * ranks / total.where(total != 0, 1)


def _refuse_dtensors(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            raise InputError(
                f"{name} is a DTensor, {tensor.placements}: with fully_shard, compute the loss inside the forward of "
                f"the module that holds {name}; with tensor parallelism, pass {name}.full_tensor()"
            )


def _check_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> None:
    if weight.ndim != 2 or hidden.ndim == 0 or hidden.shape[-1] != weight.shape[-1]:
        raise InputError(
            "hidden must be (..., D) and weight (V, D), as in F.linear: "
            f"got hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"bias must be (V,) = {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    if chunk < 1:
        raise InputError(f"chunk is {chunk}: it is the number of tokens whose logits are held at a time, 1 at least")


def _dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """The dtype of the products, as `F.linear` would have it."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise InputError(
                f"hidden has dtype {hidden.dtype} and {name} {tensor.dtype}: convert one, or compute in torch.autocast"
            )
    return hidden.dtype


# ---- the op ----------------------------------------------------------------------------------------------------------


def loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    factors: Tensor,
    dtype: torch.dtype,
    chunk: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum of the losses of a linear layer's outputs, and its gradients, from one chunk of logits at a time.

    Args:
        hidden: (N, D).
        weight: (V, D).
        bias: (V,).
        targets: (N,), int64, all of them in the vocabulary.
        factors: (N,), on every row's loss, in the dtype in which sums are made.
        dtype: of the products.
        chunk: rows at a time.
        wanted: whether a gradient is asked for, of hidden, weight and bias.

    Returns:
        The sum, and the gradients of hidden, in its dtype, and of weight and bias, in the dtype of the factors; each of
        shape (0,) where it is not wanted.
    """
    loss, d_hidden, d_weight, d_bias = _results(hidden, weight, factors, wanted)
    for total in (loss, d_weight, d_bias):
        total.zero_()
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    for start in range(0, hidden.shape[0], chunk):
        rows = slice(start, start + chunk)
        x, target, factor = hidden[rows].to(dtype), targets[rows].unsqueeze(1), factors[rows].unsqueeze(1)
        log_p = F.linear(x, weight, bias).log_softmax(1, dtype=factors.dtype)
        loss -= (log_p.gather(1, target) * factor).sum()
        if any(wanted):
            # (softmax - one hot) * factor, in the memory of log_p.
            d_logits = log_p.exp_().scatter_add_(1, target, -torch.ones_like(factor)).mul_(factor)
            if wanted[2]:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(dtype)
            if wanted[1]:
                d_weight += d_logits.T @ x
            if wanted[0]:
                d_hidden[rows] = d_logits @ weight
            del d_logits
        del log_p  # or it would live until the next chunk's is there
    return loss, d_hidden, d_weight, d_bias


def _results(
    hidden: Tensor, weight: Tensor, factors: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for the sum and the gradients."""
    likes = (hidden, hidden.shape), (factors, weight.shape), (factors, weight.shape[:1])
    d_hidden, d_weight, d_bias = (
        like.new_empty(shape if wish else (0,)) for (like, shape), wish in zip(likes, wanted, strict=True)
    )
    return factors.new_empty(()), d_hidden, d_weight, d_bias


_op = torch.library.custom_op("usp::linear_cross_entropy", loss_and_gradients, mutates_args=())


@_op.register_fake
def _(hidden, weight, bias, targets, factors, dtype, chunk, wanted):
    return _results(hidden, weight, factors, wanted)


def _setup_context(ctx, inputs, output) -> None:
    hidden, weight, bias, *_, ctx.wanted = inputs
    ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _backward(ctx, grad, *_):
    if torch.is_grad_enabled():  # create_graph=True, which would treat the kept gradients as constants
        raise InputError("linear_cross_entropy has no second derivative: with create_graph=True use cross_entropy")
    # Widened first: in a product with a half-precision tensor a device may round the scalar to half precision too.
    gradients = (
        (saved.to(grad.dtype) * grad).to(dtype) if wish else None
        for saved, dtype, wish in zip(ctx.saved_tensors, ctx.dtypes, ctx.wanted, strict=True)
    )
    return *gradients, None, None, None, None, None


_op.register_autograd(_backward, setup_context=_setup_context)


# ---- replicas --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Held:
    """What a rank holds under a name.

    Attributes:
        place: which part of a DTensor; () for a plain tensor, which is whole.
        kind: its dtype and shape, or that it is None.
        digest: of its bytes.
    """

    place: tuple[int, ...]
    kind: str
    digest: str

    @classmethod
    def of(cls, tensor: Tensor | None, parameter: Tensor) -> "_Held":
        """For a parameter or its gradient."""
        like, place = parameter if tensor is None else tensor, ()
        if isinstance(like, DTensor):
            coordinate = like.device_mesh.get_coordinate() or ()
            pairs = zip(coordinate, like.placements, strict=False)  # outside its mesh a rank has no coordinate
            place = tuple(index for index, placement in pairs if not placement.is_replicate())
        if tensor is None:
            return cls(place, "None", "")
        local = _local(tensor)
        data = ctypes.string_at(local.data_ptr(), local.nbytes)
        return cls(place, f"{local.dtype} {tuple(local.shape)}", hashlib.blake2b(data, digest_size=16).hexdigest())


@torch.no_grad()
def check_replicas(
    module: nn.Module, group: ProcessGroup | DeviceMesh | None = None, *, gradients: bool = True
) -> None:
    """Compares parameters, bit by bit, between all ranks that hold the same ones. Collective over the group.

    Call it after the first backward pass, and again after some steps. Ranks that hold the same part of a DTensor are
    compared, ranks that hold different parts are not. With FSDP2 over the flattened (data x sequence) mesh every part
    is held once, so all is well; over the data axis alone, which is a mistake, the ranks of a sequence drift apart.

    Args:
        module: the model, wrapped by DDP or FSDP2 or not.
        group: the ranks that should agree: a process group, a mesh of one axis, or None for the default process group.
        gradients: compare gradients too. They agree when they are averaged: after backward, outside `no_sync`.

    Raises:
        AgreementError: on every rank of the group; names the first parameter that differs, the ranks, and by how much.
        InputError: a mesh of several axes, or this rank is not in the group.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InputError(f"the mesh has axes {group.mesh_dim_names}: pass one of them, such as mesh['sp']")
        group = group.get_group()
    if _size(group) == 1:
        return
    tensors = {name: (tensor, parameter) for name, tensor, parameter in _tensors(module, gradients)}
    told = gather({name: astuple(_Held.of(*pair)) for name, pair in tensors.items()}, group)
    everyone = [{name: _Held(tuple(place), *rest) for name, (place, *rest) in held.items()} for held in told]
    ranks = dist.get_process_group_ranks(group)
    for name in dict.fromkeys(name for held in everyone for name in held):
        lacking = [rank for rank, held in zip(ranks, everyone, strict=True) if name not in held]
        if lacking:
            raise AgreementError(
                f"{_named(lacking)} without {name}, which other ranks have: build the same model on all"
            )
        source, others = _disagreement([held[name] for held in everyone])
        if others:
            kinds = [everyone[i][name].kind for i in (source, others[0])]
            where = f"{_named([ranks[i] for i in others])} from rank {ranks[source]}"
            how = f"{kinds[1]} instead of {kinds[0]}"
            if kinds[0] == kinds[1]:
                how = f"by up to {_distance(tensors[name][0], source, others, group):.3g}"
            raise AgreementError(
                f"{name} differs on {where}: {how}. Start all ranks from the same values, and average gradients over "
                "all of them, those that share a sequence included"
            )


def _tensors(module: nn.Module, gradients: bool) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    """What is compared: name, tensor, and the parameter that it belongs to."""
    for name, parameter in module.named_parameters():
        yield f"parameter {name!r}", parameter, parameter
    for name, parameter in module.named_parameters() if gradients else ():
        yield f"the gradient of {name!r}", parameter.grad, parameter


def _disagreement(held: list[_Held]) -> tuple[int, list[int]]:
    """The index of a rank, and those of the ranks that differ from it in the same way; none where all agree."""
    places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, mine in enumerate(held):
        places[mine.place].append(i)
    for source, *others in places.values():
        others = [i for i in others if held[i] != held[source]]
        if others:
            return source, [i for i in others if held[i].kind == held[others[0]].kind]
    return 0, []


def _distance(tensor: Tensor | None, source: int, others: list[int], group: ProcessGroup | None) -> float:
    """Largest difference of one element between a rank and others. Collective."""
    mine = None if tensor is None else _local(tensor)
    theirs, distance = broadcast(mine, source, group), 0.0
    if mine is not None and dist.get_rank(group) in others:
        distance = (mine.double() - theirs.view(mine.dtype).view(mine.shape).double()).abs().max().item()
    return torch.tensor(gather(distance, group)).max().item()  # unlike Python's, this maximum shows a NaN


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, on the CPU."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().cpu().contiguous()


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
