"""What a result depends on beside the code: the processor and the versions."""

import os
import platform
from pathlib import Path

import torch


def describe() -> dict[str, str | int]:
    """The machine, for a table or a file."""
    model, cpuinfo = platform.processor(), Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = (line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line)
        model = next(names, model)
    return {
        "cpu": model,
        "cores": os.cpu_count() or 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
