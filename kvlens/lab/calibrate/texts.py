"""Texts that calibrations are made of."""

from __future__ import annotations

import re


def sentences(text: str) -> list[str]:
    """Sentences of a text, one space between words."""
    return [part for part in re.split(r"(?<=[.!?])\s+", " ".join(text.split())) if part]
