"""What the player is sent of a run's loss: the track of divergence, the places worth jumping to, what full attention
wanted and could not be attended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kvlens.lens.verdict import Verdict
from kvlens.player.codec import quantise
from kvlens.player.sparse import sparse
from kvlens.recording.sampling import words
from kvlens.store.reader import TraceReader

LEAST_HOLE = 0.01
"""share of a query head's attention; what some head lost below it is not sent"""
#: Kinds of events behind the jump 'recall'. A zoom brings a span from the cold tier as a recall does.
RECALLS = ("recall", "zoom_in")


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
    regret), recall. Corrections are many and go as an array (`corrections`)."""
    places: list[dict[str, Any]] = []
    if found is not None:
        missed = found.missed
        at = (None, None, None) if missed is None else (missed.layer, missed.q_head, missed.span)
        places.append(_place("loss", found.step, *at))
        loss = reader.loss()
        later = loss.loc[~loss["agrees"].astype(bool) & (loss["step"] > found.step), "step"]
        places += [_place("lost", int(step), None, None, None) for step in later]
    if (worst := worst_regret(reader)) is not None:
        places.append(worst)
    events = reader.events()
    group = reader.q_heads // reader.kv_heads
    recalls = events[events["kind"].isin(RECALLS) & (events["step"] >= 0)].drop_duplicates("step")
    for _, row in recalls.iterrows():
        head = _whole(row["q_head"])
        if head is None and (kv_head := _whole(row["kv_head"])) is not None:
            head = kv_head * group
        places.append(_place("recall", int(row["step"]), _whole(row["layer"]), head, _whole(row["span"])))
    return places


def corrections(reader: TraceReader) -> np.ndarray:
    """Return where a selection was made anew, int32 [n, 3] in the order of steps: step, layer and first query head of
    each correction; of a reconstruction, which is for all layers and heads, layer and query head are -1. A trace
    without decisions has only the corrections that moved something."""
    if reader.records_decisions():
        rows = pd.concat([reader.decisions(kind) for kind in ("correction", "reconstruction")])
        rows = rows[rows["step"] >= 0]
    else:
        events = reader.events()
        rows = events[events["kind"] == "correction"].drop_duplicates(["step", "layer", "kv_head"])
    places = rows[["step", "layer", "kv_head"]].astype(float).fillna(-1).to_numpy(np.int32)
    group = reader.q_heads // reader.kv_heads
    places[:, 2] = np.where(places[:, 2] < 0, -1, places[:, 2] * group)
    return places[np.lexsort(places.T[::-1])]


def worst_regret(reader: TraceReader) -> dict[str, Any] | None:
    """The place of the query head and step with the most regret, with its span of most regret; None where nothing was
    missed or it was not recorded."""
    by_step = reader.regret_by_step()
    if by_step.empty or not (by_step["regret_max"] > 0).any():
        return None
    worst = by_step.iloc[int(by_step["regret_max"].argmax())]
    step, layer, head = int(worst["step"]), int(worst["layer"]), int(worst["q_head"])
    listed = reader.oracle(step, layer, head)
    span = int(listed["span"].iloc[int(listed["regret"].argmax())]) if len(listed) else None
    return _place("regret", step, layer, head, span)


def _place(kind: str, step: int, layer: int | None, head: int | None, span: int | None) -> dict[str, Any]:
    return {"kind": kind, "step": step, "layer": layer, "head": head, "span": span}


def _whole(value: Any) -> int | None:
    return None if pd.isna(value) else int(value)


def sampling(reader: TraceReader) -> str:
    """What of full attention a run recorded, as the end of a sentence."""
    sampled = reader.meta.oracle
    if not sampled:
        return ": this run did not record them"
    if "oracle" in reader.meta.left_out:
        return ": they were left out when this run was handed on"
    if reader.meta.trace_level == "summary":
        return ": the trace level summary stores none"
    return f"; recorded were {words(sampled, reader.n_layers)}"


def sampled_steps(reader: TraceReader) -> list[bool]:
    """Return whether full attention by span of each step is in the file."""
    steps = set(reader.regret_by_step()["step"].astype(int)) if reader.meta.sampled else set()
    return [step in steps for step in range(reader.n_steps)]


@dataclass(frozen=True)
class Wanted:
    """What full attention would have read with one query head, and what the head could not attend."""

    listed: pd.DataFrame
    """step, span, full, own, mass (this run's), regret, unread; by step, the largest `full` first"""
    lost: pd.DataFrame
    """step, pos, mass of the tokens with most unread mass; by step"""
    tails: pd.DataFrame
    """step, tail_full: full attention's mass on the spans that are not listed"""


def read_wanted(reader: TraceReader, layer: int, head: int) -> Wanted | None:
    """Return the records of one query head; None if the run recorded no full attention."""
    if not reader.meta.sampled:
        return None
    return Wanted(reader.oracle_head(layer, head), reader.lost_by_head(layer, head), reader.oracle_tails(layer, head))


def wanted_arrays(records: Wanted | None, n_steps: int, index: pd.Series) -> dict[str, np.ndarray]:
    """Return the records as arrays for the player: rows of spans (`index`: span -> its place) with full, own, mass,
    regret and hole (of full, the share attended in no form), the lost tokens, and the tails float32 [steps], NaN if not
    recorded."""
    if records is None:
        return {}
    table = records.listed.assign(hole=records.listed["unread"].fillna(records.listed["regret"]))
    tail = np.full(n_steps, np.nan, np.float32)
    tail[records.tails["step"].to_numpy(np.int64)] = records.tails["tail_full"]
    rows = sparse("wanted", table, n_steps, index, ("full", "own", "mass", "hole", "regret"))
    return rows | lost_rows(records.lost, n_steps) | {"wanted_tail": tail}


def lost_rows(lost: pd.DataFrame, n_steps: int) -> dict[str, np.ndarray]:
    """Tokens lost (step, pos, mass), in the order of steps, as row starts [steps + 1], positions and codes of 0..1."""
    return {
        "lost_start": np.searchsorted(lost["step"].to_numpy(np.int64), np.arange(n_steps + 1)).astype(np.int32),
        "lost_pos": lost["pos"].to_numpy(np.int32),
        "lost_mass": quantise(lost["mass"].to_numpy(np.float64), 0.0, 1.0),
    }


def worst(reader: TraceReader, index: pd.Series) -> dict[str, np.ndarray]:
    """Return of every step and span what the query head that lost most did not attend, whether a summary stood for it
    there, and which head it is: layer * Hq + head. {} without full attention."""
    if not reader.meta.sampled:
        return {}
    holes = reader.holes(LEAST_HOLE)
    lost = holes.assign(summary=False)
    if len(shortfalls := _summary_losses(reader, holes)):
        lost = pd.concat([lost, shortfalls], ignore_index=True)
    table = lost.rename(columns={"mass": "hole"})
    if len(table):
        table = table.loc[table.groupby(["step", "span"])["hole"].idxmax()]
    heads = (table["layer"].to_numpy(np.int64) * reader.q_heads + table["q_head"].to_numpy(np.int64)).astype(np.int32)
    more = {"worst_head": heads, "worst_summary": table["summary"].to_numpy(np.uint8)}
    return sparse("worst", table, reader.n_steps, index, ("hole",)) | more


def _summary_losses(reader: TraceReader, holes: pd.DataFrame) -> pd.DataFrame:
    """Return the largest of `reader.summary_losses` of each step and span, where the span was a summary for that KV
    head and the loss is above the hole there, with summary = True. holes: `reader.holes`, at most one of a step and
    span. States are read layer by layer, the largest loss first: the layers of smaller ones are not read."""
    lost = reader.summary_losses(LEAST_HOLE).merge(holes[["step", "span", "mass"]], "left", ["step", "span"])
    above = lost[~(lost["mass_x"] <= lost["mass_y"])].rename(columns={"mass_x": "mass"}).drop(columns="mass_y")
    table = above.sort_values("mass", ascending=False, kind="stable")
    parts = [table.iloc[:0]]
    while len(table):
        largest = ~table.duplicated(["step", "span"])
        candidates = table[largest]
        summary = _attended_as_summaries(reader, candidates)
        parts.append(candidates[summary])
        rest, summaries = table[~largest], candidates.loc[summary, ["step", "span"]]
        listed = pd.MultiIndex.from_frame(rest[["step", "span"]]).isin(pd.MultiIndex.from_frame(summaries))
        table = rest[~listed]
    return pd.concat(parts).sort_values("mass", ascending=False, kind="stable").assign(summary=True)


def _attended_as_summaries(reader: TraceReader, losses: pd.DataFrame) -> np.ndarray:
    """Return whether each row's step attended the row's span as a summary, bool [rows]. losses: columns step, layer,
    q_head, span."""
    summary = np.zeros(len(losses), np.bool_)
    steps, heads, spans = (losses[name].to_numpy(np.int64) for name in ("step", "q_head", "span"))
    layers, group = losses["layer"].to_numpy(np.int64), reader.q_heads // reader.kv_heads
    for layer in np.unique(layers):
        here = np.flatnonzero(layers == layer)
        states = reader.attended_states(int(layer), steps[here], heads[here] // group, spans[here])
        summary[here] = [state == "coarse" for state in states]
    return summary
