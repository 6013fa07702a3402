"""Names of files where the name of a method is expected."""

from __future__ import annotations

SUFFIX = ".py"


def is_method_file(name: str) -> bool:
    """Return True for 'FILE.py' and 'FILE.py:NAME', False for a method's name."""
    return name.partition(f"{SUFFIX}:")[0].endswith(SUFFIX) or name.partition(f"{SUFFIX}:")[1] != ""
