"""The state of each span for each KV head at a step, from the events before it."""

from __future__ import annotations

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
