"""Values of a stored record as a person reads them."""

from __future__ import annotations

from typing import Any


def value_text(value: Any) -> str:
    """Return 'window 8, kernel 7' of a dictionary, 'yes' of True, items with commas; '' where nothing is recorded."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {text}" for name, item in value.items() if (text := value_text(item)))
    if isinstance(value, list | tuple):
        return ("; " if any(isinstance(item, dict) for item in value) else ", ").join(map(value_text, value))
    return str(value)
