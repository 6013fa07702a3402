"""When SeKV's expanded spans are moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def waits(config: Mapping[str, Any]) -> bool:
    """What a step's queries expand is read from the next step on."""
    return config.get("zoom") == "next"
