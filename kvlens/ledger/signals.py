"""Signals of one step that a run can know without a reference, beside whether the step's token was lost. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlens.records import StepRecord

SIGNALS: dict[str, str] = {
    "entropy": "entropy of the next-token distribution, nats",
    "varentropy": "variance of the surprisal under the next-token distribution, nats squared",
    "query_change": "1 - cosine of the step's queries and the last step's, mean over query heads",
    "fetched": "1 - reuse: share of the selected spans that had to be recalled",
    "unread": "own-query mass on tokens attended in no form, mean over query heads",
}
"""name -> what it is; a larger value is taken to foresee a loss"""


def signals_of(record: StepRecord, logits: Any = None) -> dict[str, float | None]:
    """Return each signal of a step, None where it was not recorded. logits: float32 [V] of the step, an array or a
    tensor on any device; without them there is no varentropy."""
    logits = logits.cpu() if hasattr(logits, "cpu") else logits
    reused, fetched = (_sum(record.kv.get(name)) for name in ("n_reused", "n_recalled"))
    moved = None if reused is None or fetched is None or reused + fetched == 0 else fetched / (reused + fetched)
    change = _mean(record.head.get("qcos"))
    return {
        "entropy": record.next_entropy,
        "varentropy": None if logits is None else varentropy(np.asarray(logits, np.float64)),
        "query_change": None if change is None else 1 - change,
        "fetched": moved,
        "unread": _mean(record.head.get("unread")),
    }


def varentropy(logits: np.ndarray) -> float:
    """Return the variance of -log p under p, in nats squared. logits [V]."""
    shifted = logits - logits.max()
    log_p = shifted - np.log(np.exp(shifted).sum())
    p = np.exp(log_p)
    entropy = -(p * np.where(p > 0, log_p, 0)).sum()
    return float((p * np.where(p > 0, log_p + entropy, 0) ** 2).sum())


def _mean(values: np.ndarray | None) -> float | None:
    if values is None or np.isnan(values).all():
        return None
    return float(np.nanmean(values))


def _sum(values: np.ndarray | None) -> float | None:
    if values is None or np.isnan(values).all():
        return None
    return float(np.nansum(values))
