"""What went wrong, in one sentence, and what to do about it."""

from __future__ import annotations

import torch


def sentence(problem: BaseException, smaller: str) -> tuple[str, str | None]:
    """(reason, what to do or None). `smaller`: the setting that takes less memory."""
    first = next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
    if isinstance(problem, torch.OutOfMemoryError):
        return f"The device ran out of memory: {first}", smaller
    if isinstance(problem, MemoryError):
        return "The host ran out of memory.", smaller
    if ("pin" in first.lower() and "memory" in first.lower()) or "cudaHost" in first:
        return f"Pinned host memory could not be had: {first}", "raise the limit on locked memory (ulimit -l), or free host memory"
    return f"{type(problem).__name__}: {first}", None
