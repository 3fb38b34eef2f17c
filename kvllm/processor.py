"""The name of the processor."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """As /proc/cpuinfo has it; the architecture where there is no such file."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
