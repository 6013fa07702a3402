"""The server's settings, one file for `kvlens app` and `streamlit run app.py`."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import kvlens.app

FILE = Path(kvlens.app.__file__).with_name("config.toml")
"""in Streamlit's format; .streamlit/config.toml of the repository is a link to it"""


@cache
def settings() -> dict[str, Any]:
    """Return the settings under Streamlit's names, e.g. {"server.address": "127.0.0.1"}."""
    return _flatten(tomllib.loads(FILE.read_text(encoding="utf-8")), "")


def _flatten(section: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values of nested sections under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in section.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
