"""Where a sweep's trials are run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where trials are run: what a worker must know, picklable."""

    model: str
    device: str
    dtype: str
    origins: dict[str, str]
    """method -> what makes its trials comparable"""
    runs: str | None
    """folder of the runs; None: no traces are stored"""
