"""What a study keeps of a trial's run: a few numbers, read from its trace when it has ended."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvlens.lens.answers import full_right, is_cut_off
from kvlens.lens.severity import outcome
from kvlens.store.reader import TraceReader
from kvlens.studies.means import output_figures


def figures_of(reader: TraceReader) -> dict[str, Any]:
    """Return the figures of a stored run; what was not recorded is missing. The names are those of FIGURES, and others.

    outcome (words), kinds (of kvlens.lens.severity.KINDS), right (the output is the expected answer), cut_off (it is
    not, and ended at the limit of new tokens), full_right (full KV's is right), same_output (the output is full KV's),
    lost_at_step (the first step whose most probable token is not full KV's), kl_at_loss_nats, margin_there and
    at_stop_token (at that step), output (its beginning), batched (prompts that shared its steps, at most),
    checks_passed.
    """
    came, meta, steps, loss = outcome(reader), reader.meta, reader.steps(), reader.loss()
    full = float(meta.full_kv_bytes or math.nan)
    output = meta.output_text or ""
    figures: dict[str, Any] = {
        "outcome": came.words,
        "kinds": list(came.kinds),
        "right": came.right,
        "cut_off": None if came.right is None else is_cut_off(meta),
        "full_right": full_right(reader),
        "same_output": None if meta.reference_output is None else output == meta.reference_output,
        "lost_at_step": came.lost_at,
        **output_figures(output),
        "kl_at_loss_nats": came.kl,
        "margin_there": came.margin,
        "at_stop_token": came.stop,
        "prompt_tokens": (meta.prompt_tokens or 0) + meta.asked_steps,
        "steps": reader.n_steps,
        "kl_mean_nats": _mean(loss["kl"]) if len(loss) else None,
        "compared_steps": int(np.isfinite(loss["kl"].to_numpy(np.float64)).sum()) or None,
        "coverage": _head_mean(reader, "coverage"),
        "selection_recall": _head_mean(reader, "selection_recall"),
        "regret": _head_mean(reader, "regret"),
        "resident_share": float(steps["peak_bytes"].max()) / full,
        "resident_bytes": float(steps["peak_bytes"].max()),
        "read_bytes_per_step": _kv_sum(reader, "read_bytes"),
        "read_share": _kv_sum(reader, "read_bytes") / full,
        "moved_bytes_per_step": _mean(steps["h2d_bytes"]),
        "moved_share": _mean(steps["h2d_bytes"]) / full,
        "cold_share": _mean(steps["cold_bytes"]) / full,
        "offloaded_bytes_per_step": _mean(steps["d2h_bytes"]),
        "attended_tokens": _kv_mean(reader, "attended_tokens"),
        "corrected_share": _corrected(reader),
        "reused_share": _reused(reader),
        "batched": meta.batched,
        "ms_per_step": None if meta.batched else _mean(steps["dur_us"]) / 1000,
        "checks_passed": bool(reader.self_checks()["passed"].all()),
    }
    return {name: value for name, value in figures.items() if _is_there(value)}


FIGURES = {
    "right": ("share of prompts with the right answer", "share"),
    "cut_off": ("share of prompts whose wrong answer was cut off by the limit of new tokens", "share"),
    "same_output": ("share of prompts with full KV's output", "share"),
    "kl_mean_nats": ("KL(full KV || method), mean over the steps whose contexts are the same", "nats"),
    "compared_steps": ("steps whose contexts are the same as full KV's, of which kl_mean_nats is the mean", "steps"),
    "score": ("score by the prompt's own task", "share"),
    "coverage": ("full attention's mass on tokens attended exactly, mean over steps, layers and query heads", "share"),
    "selection_recall": (
        "of as many tokens with most of full attention's mass as were attended, the share that was attended",
        "share",
    ),
    "regret": ("full attention's mass that a query head misses, mean over steps, layers and query heads", "share"),
    "resident_share": ("most KV bytes on the device inside a step, as a share of full KV", "share"),
    "resident_bytes": ("most KV bytes on the device inside a step", "bytes"),
    "read_share": ("KV bytes that a step reads, as a share of full KV", "share"),
    "moved_bytes_per_step": ("bytes copied to the device per step", "bytes"),
    "moved_share": ("bytes copied to the device per step, as a share of full KV", "share"),
    "cold_share": ("KV bytes in host memory, mean over steps, as a share of full KV", "share"),
    "offloaded_bytes_per_step": ("bytes copied to the host per step", "bytes"),
    "read_bytes_per_step": ("KV bytes that a step reads", "bytes"),
    "attended_tokens": ("tokens in the softmax per step and KV head", "tokens"),
    "corrected_share": ("corrections among the decisions of query heads that speculate", "share"),
    "reused_share": ("selected tokens that were on the device already", "share"),
    "lost_at_step": ("first step whose most probable token is not full KV's", "step"),
    "ms_per_step": ("time of a step on this machine, recording included", "ms"),
    "prompt_tokens": ("tokens of the prompt", "tokens"),
    "steps": ("decode steps", "steps"),
}
"""name of a figure -> (what it is, its unit)"""


def _is_there(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _mean(values: Any) -> float:
    numbers = np.asarray(values, np.float64)
    return float(np.nanmean(numbers)) if np.isfinite(numbers).any() else math.nan


def _head_mean(reader: TraceReader, metric: str) -> float:
    return _mean(reader.head_summary(metric)) if metric in reader.metrics() else math.nan


def _cube(reader: TraceReader, metric: str) -> np.ndarray | None:
    """[steps, L, H_kv]; None where it is not recorded."""
    recorded = reader.meta.trace_level != "summary" and metric in reader.kv_metrics()
    return np.asarray(reader.kv_cube(metric), np.float64) if recorded else None


def _kv_mean(reader: TraceReader, metric: str) -> float:
    cube = _cube(reader, metric)
    return math.nan if cube is None else _mean(cube)


def _kv_sum(reader: TraceReader, metric: str) -> float:
    """Sum over layers and KV heads, mean over steps."""
    cube = _cube(reader, metric)
    return math.nan if cube is None or not len(cube) else float(np.nansum(cube, (1, 2)).mean())


def _reused(reader: TraceReader) -> float:
    """At the first step nothing can be on the device yet: it does not count."""
    reused, recalled = (_cube(reader, name) for name in ("reused_tokens", "recalled_tokens"))
    if reused is None or recalled is None:
        return math.nan
    part, whole = np.nansum(reused[1:]), np.nansum(reused[1:] + recalled[1:])
    return float(part / whole) if whole else math.nan


def _corrected(reader: TraceReader) -> float:
    if "corrected" not in reader.metrics():
        return math.nan
    values = np.asarray(reader.head_cube("corrected"), np.float64)[1:]
    decided = np.isfinite(values).sum()
    return float(np.nansum(values) / decided) if decided else math.nan
