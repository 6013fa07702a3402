"""The signals of stored runs that were compared with full KV, step by step, beside whether the token was lost."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kvlens import methods
from kvlens.ledger.foresight import Track
from kvlens.store.errors import TraceError
from kvlens.store.reader import TraceReader


def track_of(reader: TraceReader) -> Track:
    """Return the signals of every step of a stored run that was compared with full KV, without those that feed a
    question."""
    loss, tokens = reader.loss().set_index("step"), reader.tokens()
    tokens = tokens[tokens["step"].notna()]
    entropy = dict(zip(tokens["step"].astype(int), tokens["next_entropy"].astype(float), strict=True))
    compared = [step for step in loss.index if step >= reader.meta.asked_steps]
    change, unread = (_head_means(reader, name) for name in ("qcos", "unread"))
    fetched, reused = (_kv_sums(reader, name) for name in ("n_recalled", "n_reused"))
    rows: Track = []
    for step in compared:
        moved = _value_at(fetched, step) + _value_at(reused, step)
        rows.append(
            {
                "lost": not bool(loss.at[step, "agrees"]),
                "entropy": _known(entropy.get(step, float("nan"))),
                "varentropy": None,
                "query_change": _known(1 - _value_at(change, step)),
                "fetched": _known(_value_at(fetched, step) / moved) if moved > 0 else None,
                "unread": _known(_value_at(unread, step)),
            }
        )
    return rows


def _value_at(values: np.ndarray | None, step: int) -> float:
    return float("nan") if values is None or step >= len(values) else float(values[step])


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value


def _head_means(reader: TraceReader, metric: str) -> np.ndarray | None:
    """float64 [T]: mean over layers and query heads; None where it is not recorded."""
    if metric not in reader.metrics() or reader.meta.trace_level == "summary":
        return None
    cube = np.asarray(reader.head_cube(metric), np.float64)
    means = np.full(len(cube), np.nan)
    recorded = np.isfinite(cube).any((1, 2))
    means[recorded] = np.nanmean(cube[recorded], (1, 2))
    return means


def _kv_sums(reader: TraceReader, metric: str) -> np.ndarray | None:
    """float64 [T]: sum over layers and KV heads; None where it is not recorded."""
    if metric not in reader.kv_metrics() or reader.meta.trace_level == "summary":
        return None
    return np.asarray(np.nansum(np.asarray(reader.kv_cube(metric), np.float64), (1, 2)))


def tracks_of_runs(runs_dir: Path, uids: Iterable[str]) -> list[Track]:
    """Return the tracks of those of the runs that were compared with full KV; full KV's own, and runs that cannot be
    read, are left out."""
    tracks = []
    for uid in uids:
        try:
            with TraceReader.open(runs_dir, uid) as reader:
                if len(reader.loss()) and reader.meta.method != methods.REFERENCE:
                    tracks.append(track_of(reader))
        except TraceError:
            continue
    return [track for track in tracks if track]
