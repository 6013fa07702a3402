"""A metric summed up over steps, by layer and query head."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np

from kvlens.recording.metrics import metric_of
from kvlens.store.reader import TraceReader

_REDUCE: dict[str, Callable[..., np.ndarray]] = {"mean": np.nanmean, "max": np.nanmax, "min": np.nanmin}


def summary(reader: TraceReader, name: str, agg: str, start: int, stop: int) -> np.ndarray:
    """float32 [L, Hq]: a metric over steps [start, stop), NaN where nothing was recorded.

    A metric of KV heads is repeated for every query head of its group."""
    if metric_of(name).level == "q":
        return reader.head_summary(name, start, stop, agg)
    reduced = reduce_steps(reader.kv_cube(name)[start:stop], agg)
    return np.repeat(reduced, reader.q_heads // reader.kv_heads, axis=1)


def reduce_steps(values: np.ndarray, agg: str) -> np.ndarray:
    """[steps, L, H] over its first axis; steps that were not recorded are left out, all of them missing gives NaN."""
    if agg == "sum":
        return np.where(np.isfinite(values).any(axis=0), np.nansum(values, axis=0), np.nan)
    if not values.shape[0]:
        return np.full(values.shape[1:], np.nan, values.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all-NaN columns: NaN is the answer
        return np.asarray(_REDUCE[agg](values, axis=0))
