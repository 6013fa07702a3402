"""What the player is sent of a run's loss: the track of divergence, the places worth jumping to, one span's masses over
time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from kvlens.lens.verdict import Verdict
from kvlens.store.reader import TraceReader
from kvlens.ui.common.state import Selection

#: Kinds of events behind the jumps 'correction' and 'recall'. A zoom brings a span from the cold tier as a recall does.
JUMP_EVENTS = {"correction": ("correction",), "recall": ("recall", "zoom_in")}


def loss_track(reader: TraceReader, arrays: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """The track of KL(full || this run), steps without a loss NaN, marks where another token was most probable; [] when
    not recorded."""
    loss = reader.loss()
    if loss.empty:
        return []
    steps = loss["step"].to_numpy(np.int64)
    values = np.full(reader.n_steps, np.nan)
    values[steps] = loss["kl"].to_numpy(np.float64)
    arrays["track:kl"] = values
    arrays["marks:kl"] = steps[~loss["agrees"].to_numpy(bool)].astype(np.int32)
    return [
        {
            "name": "kl",
            "title": "KL(full KV ‖ this run); ▼ another token than full KV's is most probable",
            "unit": "nats",
            "dots": True,
            "zero": True,
            "marks": "kl",
        }
    ]


def diverged(reader: TraceReader) -> int | None:
    """The step at which a freely decoding run left full KV's: the last that was compared, when the run went on after it
    and another token was most probable or taken there. From the next step on contexts differ."""
    loss = reader.loss()
    if loss.empty or reader.meta.forced:
        return None
    last = loss.iloc[-1]
    tokens = reader.tokens()
    own = tokens.loc[tokens["step"] == last["step"], "token_id"]
    left = not last["agrees"] or (len(own) and int(own.iloc[0]) != int(last["ref_token"]))
    return int(last["step"]) if left and int(last["step"]) + 1 < reader.n_steps else None


def jumps(reader: TraceReader, found: Verdict | None) -> list[dict[str, Any]]:
    """Where the player may jump: {kind, step, layer, head, span}, None where the selection stays. At most one place per
    kind and step.

    Kinds: loss (the step of loss), lost (later steps that were lost), regret (the query head and step with the most
    regret), correction, recall."""
    places: list[dict[str, Any]] = []
    if found is not None:
        missed = found.missed
        at = (None, None, None) if missed is None else (missed.layer, missed.q_head, missed.span)
        places.append(_place("loss", found.step, *at))
        loss = reader.loss()
        later = loss.loc[~loss["agrees"].astype(bool) & (loss["step"] > found.step), "step"]
        places += [_place("lost", int(step), None, None, None) for step in later]
    if (worst := _worst_regret(reader)) is not None:
        places.append(worst)
    events = reader.events()
    group = reader.q_heads // reader.kv_heads
    for kind, names in JUMP_EVENTS.items():
        first = events[events["kind"].isin(names) & (events["step"] >= 0)].drop_duplicates("step")
        for _, row in first.iterrows():
            head = _whole(row["q_head"])
            if head is None and (kv_head := _whole(row["kv_head"])) is not None:
                head = kv_head * group
            places.append(_place(kind, int(row["step"]), _whole(row["layer"]), head, _whole(row["span"])))
    return places


def _worst_regret(reader: TraceReader) -> dict[str, Any] | None:
    by_step = reader.regret_by_step()
    if by_step.empty or not (by_step["regret_max"] > 0).any():
        return None
    worst = by_step.loc[by_step["regret_max"].idxmax()]
    step, layer, head = int(worst["step"]), int(worst["layer"]), int(worst["q_head"])
    listed = reader.oracle(step, layer, head)
    span = int(listed.loc[listed["regret"].idxmax(), "span"]) if len(listed) else None
    return _place("regret", step, layer, head, span)


def _place(kind: str, step: int, layer: int | None, head: int | None, span: int | None) -> dict[str, Any]:
    return {"kind": kind, "step": step, "layer": layer, "head": head, "span": span}


def _whole(value: Any) -> int | None:
    return None if pd.isna(value) else int(value)


def span_history(reader: TraceReader, chosen: Selection) -> dict[str, np.ndarray]:
    """Masses on the selected span of the selected head over steps, float32 [steps], NaN where the span was not listed;
    {} without one."""
    if chosen.span is None or not reader.meta.oracle:
        return {}
    table = reader.oracle_history(chosen.layer or 0, chosen.head or 0, chosen.span)
    arrays = {name: np.full(reader.n_steps, np.nan, np.float32) for name in ("span_full", "span_mass")}
    steps = table["step"].to_numpy(np.int64)
    arrays["span_full"][steps], arrays["span_mass"][steps] = table["full"], table["mass"]
    return arrays
