"""Arrays behind the Heads page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvlens.store.reader import TraceReader

AGGREGATES = ("mean", "max", "min", "sum")


@dataclass(frozen=True)
class Series:
    """One head's metric over all steps: `values` [steps], NaN = not recorded."""

    values: np.ndarray


def series(reader: TraceReader, name: str, layer: int, head: int) -> Series:
    """The metric of one query head (or of its KV head) at every step."""
    frame = reader.head_timeline(layer, head)
    values = np.full(reader.n_steps, np.nan)
    if name in frame and len(frame):
        values[frame["step"].to_numpy(np.int64)] = frame[name].to_numpy(np.float64, na_value=np.nan)
    return Series(values)
