"""What kvpress requires of an environment, and the command that installs what is missing."""

from __future__ import annotations

import importlib.metadata
import re
import shlex

REQUIRED = ("accelerate", "cachetools", "datasets", "fire", "peft", "requests")
"""what kvpress 0.5.5 requires beside what kvlens does"""


def missing_requirements() -> list[str]:
    """Return what kvpress requires and this environment lacks, as pip takes it; the versions of what is there are not
    asked for: kvpress wants an older transformers."""
    try:
        required = importlib.metadata.requires("kvpress") or []
    except importlib.metadata.PackageNotFoundError:
        required = list(REQUIRED)
    plain = [line.partition(";")[0].strip() for line in required if "extra ==" not in line]
    return [line for line in plain if not _is_installed(distribution(line))]


def distribution(requirement: str) -> str:
    """Return the name of a requirement's distribution."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def pip_commands(missing: list[str]) -> list[str]:
    """Return the command that installs what is missing; none where nothing is."""
    return [f"pip install {' '.join(shlex.quote(line) for line in missing)}"] if missing else []
