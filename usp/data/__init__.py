"""Data for long contexts: packing documents into sequences, and the schedule of context lengths.

Names load on first use: a schedule needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from usp.data.collator import LongContextCollator, Packed
    from usp.data.schedule import ContextSchedule, ContextStage

__all__ = ["ContextSchedule", "ContextStage", "LongContextCollator", "Packed"]

_HOME = {
    "ContextSchedule": "schedule",
    "ContextStage": "schedule",
    "LongContextCollator": "collator",
    "Packed": "collator",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
