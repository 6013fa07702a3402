"""Memory of this machine that can still be had."""

from __future__ import annotations

import contextlib
from pathlib import Path

GROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""where a control group of either version says its limit, what is used of it, and how much of that are files it can
forget"""


def host_bytes(system: Path = Path("/")) -> int | None:
    """Host memory that can still be had, by the kernel and by the limit that this process's group is under; None: not
    known."""

    def number(path: str, name: str) -> int:
        lines = (line.split() for line in (system / path).read_text(encoding="ascii").splitlines())
        return next(int(words[1]) for words in lines if words[0] == name)

    rows = []
    with contextlib.suppress(OSError, StopIteration, ValueError, IndexError):
        rows.append(1024 * number("proc/meminfo", "MemAvailable:"))
    for limit, used, stat, files in GROUPS:
        with contextlib.suppress(OSError, StopIteration, ValueError, IndexError):  # 'max' is no limit, and no number
            most, now = (int((system / "sys/fs/cgroup" / name).read_text(encoding="ascii")) for name in (limit, used))
            rows.append(most - now + number(f"sys/fs/cgroup/{stat}", files))
    return max(0, min(rows)) if rows else None
