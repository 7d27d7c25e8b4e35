"""Which messages a rank has under way while it computes, hop by hop: what `Transport.circulate` and `exchange` send."""

from collections.abc import Mapping
from typing import NamedTuple

from usp.planner.traffic import Layer
from usp.positions import split

ALL_TO_ALLS = ("forward all-to-all in", "forward all-to-all out", "backward all-to-all in", "backward all-to-all out")
"""The exchanges of heads and sequence in a step, in their order."""


class Message(NamedTuple):
    """What a rank exchanges at once along an axis, "ring" or "ulysses": bytes by the peer's rank on it."""

    axis: str
    sends: Mapping[int, int]
    receives: Mapping[int, int]


def messages(layer: Layer, ring_rank: int, ulysses_rank: int, backward: bool) -> dict[str, list[Message]]:
    """What a rank has under way during each hop and in each all-to-all, as `circulate` and `exchange` send it."""
    shape, schedule, degree = layer.shape, layer.schedule, layer.ulysses_degree
    ring, hops, lengths = schedule.ring_degree, schedule.hops, schedule.lengths

    def move(hop: int, each: int, distance: int = 1) -> Message:
        """What a rank has at a hop, to the rank so far ahead."""
        here, there = (ring_rank - hop) % ring, (ring_rank - hop - distance) % ring
        bytes_of = [length * layer.token_elements(ulysses_rank) * each for length in lengths]
        peers = (ring_rank + distance) % ring, (ring_rank - distance) % ring
        return Message("ring", {peers[0]: bytes_of[here]}, {peers[1]: bytes_of[there]})

    found: dict[str, list[Message]] = {}
    for where in ("forward", "backward")[: 1 + backward]:
        for hop in range(hops):
            found[f"{where} hop {hop}"] = [move(hop, shape.dtype_bytes)]
    if backward and hops:
        for hop in range(2, hops + 1):
            found.setdefault(f"backward hop {hop}", []).append(move(hop - 1, shape.gradient_bytes))
        found["backward home"] = [move(hops, shape.gradient_bytes, -hops)]
    if degree > 1:
        tokens = [len(run) * shape.batch * shape.dtype_bytes for run in split(lengths[ring_rank], degree)]
        out = [layer.q_heads(rank) * shape.value_dim for rank in range(degree)]
        width = shape.head_dim + shape.value_dim
        qkv = [layer.q_heads(rank) * shape.head_dim + layer.kv_heads(rank) * width for rank in range(degree)]
        peers = [peer for peer in range(degree) if peer != ulysses_rank]
        for label, widths in zip(ALL_TO_ALLS[: 2 + 2 * backward], (qkv, out, out, qkv), strict=False):
            rows = {peer: tokens[peer] * widths[ulysses_rank] for peer in peers}
            heads = {peer: tokens[ulysses_rank] * widths[peer] for peer in peers}
            found[label] = [Message("ulysses", *((heads, rows) if label.endswith("in") else (rows, heads)))]
    return found
