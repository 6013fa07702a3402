"""What the Compare page's figures draw, read from the runs. No Streamlit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvlens.app.compare.pair import Pair
from kvlens.app.figures.comparetracks import Track
from kvlens.player.payload import cube, per_step_metrics
from kvlens.recording.metrics import head_label, metric_of
from kvlens.store.reader import TraceReader

#: How a map may be summed up over the steps, besides one step.
AGGREGATES = ("mean", "max", "min")


def metrics(pair: Pair) -> dict[str, str]:
    """Metrics that either run recorded per step and head, those of both first -> 'both', 'A only' or 'B only'."""
    metrics_a, second = per_step_metrics(pair.a), per_step_metrics(pair.b)
    owners = dict.fromkeys((name for name in metrics_a if name in second), "both")
    owners |= dict.fromkeys((name for name in metrics_a if name not in second), "A only")
    return owners | dict.fromkeys((name for name in second if name not in metrics_a), "B only")


def map_of(
    reader: TraceReader, metric: str, step: int | None, agg: str = "mean", stop: int | None = None
) -> np.ndarray:
    """float32 [L, Hq] at one step, or over the steps [0, stop) when `step` is None; NaN = not recorded, in this run or
    beyond its end."""
    if metric not in per_step_metrics(reader):
        return np.full((reader.n_layers, reader.q_heads), np.nan, np.float32)
    values = cube(reader, metric)
    if step is not None:
        return values[step] if step < len(values) else np.full(values.shape[1:], np.nan, np.float32)
    values = values[:stop]
    out = np.full(values.shape[1:], np.nan, np.float32)
    recorded = np.isfinite(values).any(axis=0)
    shown = values[:, recorded]
    if agg == "mean":
        out[recorded] = np.nanmean(shown, axis=0)
    else:
        out[recorded] = np.nanmax(shown, axis=0) if agg == "max" else np.nanmin(shown, axis=0)
    return out


def tracks(runs: Sequence[TraceReader], metric: str | None, layer: int, head: int) -> list[Track]:
    """The curves of the page: the selected head's metric, KL from full KV, bytes to the device, bytes on the device."""
    curves = []
    if metric is not None:
        about = metric_of(metric)
        label = head_label(layer, head, runs[0].q_heads // runs[0].kv_heads)
        values = tuple(_head(reader, metric, layer, head) for reader in runs)
        curves.append(Track(f"{about.title}, {label}", about.unit, values))
    curves.append(Track("KL(full KV ‖ run) of the next token", "nats", tuple(_loss(reader) for reader in runs)))
    for column, title in (
        ("h2d_bytes", "Moved to the device"),
        ("peak_bytes", "KV on the device, peak inside the step"),
    ):
        values = tuple(reader.steps()[column].to_numpy(np.float64) for reader in runs)
        curves.append(Track(title, "bytes", values))
    return curves


def _head(reader: TraceReader, metric: str, layer: int, head: int) -> np.ndarray:
    if metric not in per_step_metrics(reader):
        return np.full(reader.n_steps, np.nan)
    values = cube(reader, metric)
    return (
        values[:, layer, head] if layer < values.shape[1] and head < values.shape[2] else np.full(len(values), np.nan)
    )


def _loss(reader: TraceReader) -> np.ndarray:
    """KL by step, NaN where the run was not compared with full KV."""
    out = np.full(reader.n_steps, np.nan)
    loss = reader.loss()
    out[loss["step"].to_numpy(np.int64)] = loss["kl"].to_numpy(np.float64)
    return out
