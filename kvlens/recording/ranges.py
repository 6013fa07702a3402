"""The range of every figure of a step, checked before it is recorded: shares in 0..1, counts and bytes from 0 on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvlens.methods.faults import FIGURE, MethodFault
from kvlens.recording.metrics import METRICS
from kvlens.rows import StepRecord

TOLERANCE = 1e-3
"""error allowed beyond a range, as of sums of masses (selfcheck.py)"""
SHARE = (0.0, 1.0)
SIZE = (0.0, float("inf"))
RANGES = {
    "share": SHARE,
    "0 or 1": SHARE,
    "cosine": (-1.0, 1.0),
    **dict.fromkeys(("nats", "spans", "bytes", "entries", "tokens"), SIZE),
}
"""unit of a metric -> its range"""
HOOKS = {"corrected": "select", "similarity": "select", "read_bytes": "select"}
"""metric -> the hook whose answer it is made of; the others are measured of all that the method's hooks did"""


def check_figures(method: str, record: StepRecord) -> None:
    """Raise MethodFault with the code FIGURE if a figure of a step lies outside its range. It names the metric, its
    value, and the layer where it has one. NaN is not recorded, and in no range."""
    for name, values, (low, high) in _figures(record):
        with np.errstate(invalid="ignore"):
            wrong = (values < low - TOLERANCE) | (values > high + TOLERANCE) | np.isinf(values)
        if not wrong.any():
            continue
        place = np.unravel_index(int(wrong.argmax()), wrong.shape)
        layer = int(place[0]) if wrong.ndim > 1 else None
        problem, expected = f"leads to a wrong {name}", f"{low:g} to {high:g}" if high < SIZE[1] else f"{low:g} or more"
        actual = f"{float(values[place]):g}"
        raise MethodFault(FIGURE, method, HOOKS.get(name, "step"), problem, expected, actual, layer, record.step)


def _figures(record: StepRecord) -> Iterator[tuple[str, np.ndarray, tuple[float, float]]]:
    """Name, values and range of each figure."""
    for columns in (record.head, record.kv):
        for name, values in columns.items():
            metric = METRICS.get(name)
            if metric is not None and metric.unit in RANGES:
                yield name, values, RANGES[metric.unit]
    yield "top_mass", record.top_mass, SHARE
    yield "tail_mass", record.tail_mass, SHARE
    for name in ("resident_bytes", "peak_bytes", "cold_bytes"):
        yield name, np.array([getattr(record, name)]), SIZE
    yield "transfer", np.array([row.bytes for row in record.transfers]), SIZE
    if record.oracle is not None:
        for name in ("full", "mass", "tail_full", "unread", "lost_mass"):
            values = getattr(record.oracle, name)
            if values is not None:
                yield f"full attention ({name})", values, SHARE
