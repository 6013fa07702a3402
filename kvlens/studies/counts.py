"""Counts of decisions in the record of one decode step: recalls, reuse, corrections."""

from __future__ import annotations

import numpy as np

from kvlens.records import StepRecord

Count = tuple[float, float]
"""a part and the whole that it is of"""


def missed(record: StepRecord) -> Count:
    """Return (units that were recalled, units that were selected and attended), summed over layers and KV heads.

    A unit that is on the device in part counts as recalled. Selected units that found no room count in neither."""
    recalled = float(record.kv["n_recalled"].sum())
    return recalled, recalled + float(record.kv["n_reused"].sum())


def reused(record: StepRecord) -> tuple[np.ndarray, np.ndarray]:
    """Return (selected tokens that were on the device, all selected tokens), both float64 [L, Hkv]."""
    on_device = record.kv["reused_tokens"]
    return on_device, on_device + record.kv["recalled_tokens"]


def corrected(record: StepRecord) -> Count:
    """Return ((layer, query head)s whose KV head waited for its recall, those that speculate).

    The column `corrected` has a value per query head, equal within a group, and NaN where nothing is speculated."""
    values = record.head["corrected"]
    return float(np.nansum(values)), float(np.isfinite(values).sum())
