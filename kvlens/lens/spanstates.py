"""The state of each span for each KV head at a step, from the events before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from kvlens.store.reader import TraceReader

HOT = ("resident", "reconstructed")


ARRIVALS = {"recall", "prefetch", "correction", "zoom_in"}


DEPARTURES = {"release", "zoom_out"}


def states_of(
    reader: TraceReader, step: int, layer: int, kv_head: int, events: pd.DataFrame, waits: bool
) -> dict[int, str]:
    """Where each span lay while the step attended. events: of the KV head.

    Traces of schema 5 and before have the state at the end of a step; there what went after the attention is known by
    how the method waits.
    """
    frame = reader.span_states(step, layer, kv_head)
    states = {int(span): str(state) for span, state in zip(frame["span"], frame["state"], strict=True)}
    now = events[events["step"] == step]
    if now["after_attention"].notna().any():
        return states
    rows = set(now.loc[now["kind"].isin(DEPARTURES), "span"].astype(int)) if waits else set()
    if not rows:
        return states
    came = set(now.loc[now["kind"].isin(ARRIVALS), "span"].astype(int))
    forms = reader.span_heads(layer, kv_head)
    factors = set(forms.loc[forms["form"] == "factors", "span"].astype(int))
    frame = reader.span_states(step - 1, layer, kv_head)
    earlier = dict(zip(frame["span"].astype(int), frame["state"].astype(str), strict=True))
    for span in rows:
        states[span] = ("reconstructed" if span in factors else "resident") if span in came else earlier[span]
    return states


def uncorrected(reader: TraceReader, step: int, layer: int, kv_head: int) -> float | None:
    """Similarity of the queries of a KV head that was not corrected at the step; None: it was, or the method does not
    correct."""
    line = reader.head_timeline(layer, kv_head * (reader.q_heads // reader.kv_heads)).set_index("step")
    similarity, corrected = (float(line[name].get(step, np.nan)) for name in ("similarity", "corrected"))
    return similarity if corrected == 0 and not np.isnan(similarity) else None


def rebuilt(reader: TraceReader, layer: int, kv_head: int, span: int) -> str:
    """'rebuilt from factors of rank ...', with their errors."""
    rows = reader.span_heads(layer, kv_head)
    rows = rows[rows["span"] == span]
    if rows.empty:
        return "rebuilt from low-rank factors whose rank and error were not recorded"
    row: Any = rows.iloc[0]
    return (
        f"rebuilt from factors of rank {int(row['rank_k'])} (keys, relative error {row['err_k']:.2f}) and "
        f"{int(row['rank_v'])} (values, relative error {row['err_v']:.2f})"
    )
