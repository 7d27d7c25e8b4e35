"""Exact attention over a sequence sharded across processes: hybrid Ulysses + Ring sequence parallelism.

`usp.positions`, `usp.shard`, `usp.attention` and `usp.check` are functions, although modules of those names exist
beside them (`from usp.positions import ...` reaches the module). Names load on first use: arithmetic needs no torch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from usp.version import __version__ as __version__

if TYPE_CHECKING:
    from usp.attention import USPAttention, attention
    from usp.batch import check_batch, shard_batch
    from usp.check import CheckReport, check
    from usp.decode import decode, extend
    from usp.errors import (
        AgreementError,
        InputError,
        KernelError,
        NumericsError,
        TopologyError,
        TransportError,
        USPError,
    )
    from usp.kv_cache import KVCache
    from usp.layouts import layout_for
    from usp.loss import check_replicas, count_targets, cross_entropy, linear_cross_entropy
    from usp.mask import Band, Mask
    from usp.planner.plan import Plan, plan
    from usp.planner.spec import ClusterSpec, ModelSpec, Workload
    from usp.schedule import Schedule
    from usp.shard import positions, shard, unshard
    from usp.topology import Topology

__all__ = [
    "AgreementError",
    "Band",
    "CheckReport",
    "ClusterSpec",
    "InputError",
    "KVCache",
    "KernelError",
    "Mask",
    "ModelSpec",
    "NumericsError",
    "Plan",
    "Schedule",
    "Topology",
    "TopologyError",
    "TransportError",
    "USPAttention",
    "USPError",
    "Workload",
    "attention",
    "check",
    "check_batch",
    "check_replicas",
    "count_targets",
    "cross_entropy",
    "decode",
    "extend",
    "layout_for",
    "linear_cross_entropy",
    "plan",
    "positions",
    "shard",
    "shard_batch",
    "unshard",
]

_HOME = {
    "AgreementError": "errors",
    "Band": "mask",
    "CheckReport": "check",
    "ClusterSpec": "planner.spec",
    "InputError": "errors",
    "KVCache": "kv_cache",
    "KernelError": "errors",
    "Mask": "mask",
    "ModelSpec": "planner.spec",
    "NumericsError": "errors",
    "Plan": "planner.plan",
    "Schedule": "schedule",
    "Topology": "topology",
    "TopologyError": "errors",
    "TransportError": "errors",
    "USPAttention": "attention",
    "USPError": "errors",
    "Workload": "planner.spec",
    "attention": "attention",
    "check": "check",
    "check_batch": "batch",
    "check_replicas": "loss",
    "count_targets": "loss",
    "cross_entropy": "loss",
    "decode": "decode",
    "extend": "decode",
    "layout_for": "layouts",
    "linear_cross_entropy": "loss",
    "plan": "planner.plan",
    "positions": "shard",
    "shard": "shard",
    "shard_batch": "batch",
    "unshard": "shard",
}


class _Package(ModuleType):
    """Keeps a submodule from taking the name of a public function when it is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
