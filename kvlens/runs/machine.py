"""What machine a figure was measured on, in words that name no host."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Processor model, cores, system, and torch's threads where torch is loaded."""
    import sys

    facts: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": (f"{platform.system()} {platform.machine()}"),
    }
    if "torch" in sys.modules:
        facts["threads"] = sys.modules["torch"].get_num_threads()
    return facts


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
