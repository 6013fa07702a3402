"""Why a span that full attention wanted was not attended exactly: read from what the run recorded, never guessed.

One reason per (step, layer, KV head, span). What the trace does not hold is said to be not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvlens.lens.journalreasons import FROM_JOURNAL
from kvlens.store.reader import TraceReader

KINDS = {
    "held": "a counterfactual held it exactly resident",
    "attended": "its tokens were attended exactly; the mass went elsewhere",
    "evicted": "gone from both tiers",
    "partly_evicted": "some of its tokens are gone",
    "refused": "wanted, but there was no room for it within the budget",
    "not_corrected": "this step read what the step before had selected, and the queries were taken for similar enough",
    "one_step_late": "wanted now, moved behind the step's back, readable from the next step on",
    "below_the_cut": "scored below what was chosen",
    "coarse_only": "only its summary was attended",
    "rank_truncated": "attended through low-rank factors",
    "unknown": "not recorded",
}
"""kind -> what it means"""


@dataclass(frozen=True)
class Reason:
    """kind: one of KINDS; says: one sentence without its full stop, of recorded figures."""

    kind: str
    says: str


def explain(reader: TraceReader, step: int, layer: int, kv_head: int, span: int) -> Reason:
    """Why the span was not attended exactly by a KV head at a step."""
    events = reader.events(step=None, layer=layer, kv_head=kv_head)
    mine = events[(events["span"] == span) & (events["step"] <= step)]
    now = set(mine.loc[mine["step"] == step, "kind"])
    states = reader.span_states(step, layer, kv_head).set_index("span")["state"]
    state = str(states[span]) if span in states.index else None
    ranking = _ranking(reader, step, layer, kv_head, span)
    if _held(reader, step, layer, kv_head, span):
        return Reason("held", "it was held exactly resident for this KV head by the counterfactual")
    if state == "evicted":
        return Reason("evicted", _evicted(reader, mine, span))
    found = FROM_JOURNAL.get(str(reader.meta.get("method")))
    if found is not None and (told := found(reader, step, layer, span, state)) is not None:
        return Reason(*told)
    if state == "partial":
        return Reason("partly_evicted", "part of its tokens were evicted; which ones was not recorded")
    if "refused" in now:
        return Reason("refused", f"it was wanted{ranking.words()} but did not fit the budget's room for recalled tokens")
    late = _late(reader, step, layer, kv_head, span, now, ranking)
    if late is not None:
        return late
    if state == "coarse":
        return Reason("coarse_only", f"only its summary was attended: {ranking.cut()}")
    if state == "reconstructed":
        return Reason("rank_truncated", _truncated(reader, layer, kv_head, span))
    if state == "cold":
        given_up = ", the device's copy given up at this step" if "release" in now else ""
        return Reason("below_the_cut", f"it lay in the cold tier{given_up}: {ranking.cut()}")
    if state == "resident" and _read(reader, step, layer, kv_head, span):
        return Reason("attended", "its tokens were on the device and attended exactly; this head's mass went to other entries")
    if state == "resident" and ranking.candidates is not None:
        return Reason("below_the_cut", f"it was on the device but not read: {ranking.cut()}")
    return Reason("unknown", "where it lay, or why it was not read, was not recorded")


@dataclass(frozen=True)
class Ranking:
    """What a step's ranking of a KV head says of one span."""

    candidates: int | None
    """spans that were ranked; None: no ranking was recorded"""
    listed: int
    """of these, how many were recorded, best first"""
    chosen: int
    """among the recorded"""
    rank: int | None
    """1 = best; None: not among the recorded"""
    score: float | None
    wanted: bool

    def words(self) -> str:
        """' (rank 3 of 45)', or nothing where no ranking was recorded."""
        if self.candidates is None:
            return ""
        return f" (rank {self.rank} of {self.candidates})" if self.rank else f" (below the {self.listed} best of {self.candidates})"

    def cut(self) -> str:
        """The sentence about rank and cut."""
        if self.candidates is None:
            return "its rank was not recorded"
        least = "at least " if self.chosen == self.listed < self.candidates else ""
        many = f"{least}{self.chosen} of {self.candidates} candidates chosen"
        if self.rank is None:
            return f"it was not among the {self.listed} best recorded, {many}"
        verb = "was chosen, but was not there in time" if self.wanted else "was not"
        return f"rank {self.rank} (score {self.score:.4g}), {many}, this one {verb}"


def _ranking(reader: TraceReader, step: int, layer: int, kv_head: int, span: int) -> Ranking:
    frame = reader.scores(step, layer, kv_head)
    row = frame[frame["span"] == span]
    known = len(row) > 0
    return Ranking(
        frame.attrs["candidates"], len(frame), int(frame["chosen"].sum()) if len(frame) else 0, int(row["rank"].iloc[0]) if known else None,
        float(row["score"].iloc[0]) if known else None, bool(row["chosen"].iloc[0]) if known else False,
    )  # fmt: skip


def _held(reader: TraceReader, step: int, layer: int, kv_head: int, span: int) -> bool:
    return any(
        hold["span"] == span and [layer, kv_head] in hold["heads"] and step >= hold["from_step"] for hold in reader.meta.get("hold") or []
    )


def _evicted(reader: TraceReader, mine: pd.DataFrame, span: int) -> str:
    gone = mine[mine["kind"] == "evict"]
    when = "at a step that was not recorded"
    if len(gone):
        step = int(gone["step"].iloc[-1])
        when = "at the end of prefill" if step < 0 else f"at step {step}"
    row = reader.spans().set_index("span").loc[span]
    why = str(row["reason"]).rstrip(".")
    return f"it was evicted {when} ({why})"


def _late(reader: TraceReader, step: int, layer: int, kv_head: int, span: int, now: set[str], ranking: Ranking) -> Reason | None:
    """What a method that reads the last step's selection knew at the time; None where this head read its own."""
    group = reader.q_heads // reader.kv_heads
    line = reader.head_timeline(layer, kv_head * group).set_index("step")
    similarity, corrected = (float(line.loc[step, name]) for name in ("similarity", "corrected"))
    if not np.isnan(similarity) and corrected == 0:
        tau = (reader.meta.get("config") or {}).get("tau")
        said = f"not corrected: query similarity {similarity:.2f} is not below tau {tau}, so it read what step {step - 1} had selected"
        if ranking.wanted:
            return Reason("not_corrected", f"{said}; this step would have chosen it{ranking.words()}, one step late")
        before = _ranking(reader, step - 1, layer, kv_head, span)
        return Reason("not_corrected", f"{said}: {before.cut()}")
    if ranking.wanted and now & {"prefetch", "recall"} and not _read(reader, step, layer, kv_head, span):
        return Reason("one_step_late", f"it was selected{ranking.words()} and moved behind this step's back, to be read from the next on")
    return None


def _truncated(reader: TraceReader, layer: int, kv_head: int, span: int) -> str:
    rows = reader.span_heads(layer, kv_head)
    rows = rows[rows["span"] == span]
    if rows.empty:
        return "it was attended through low-rank factors whose rank and error were not recorded"
    row = rows.iloc[0]
    return (
        f"it was attended as rebuilt from factors of rank {int(row['rank_k'])} (keys, relative error {row['err_k']:.2f}) and "
        f"{int(row['rank_v'])} (values, relative error {row['err_v']:.2f})"
    )


def _read(reader: TraceReader, step: int, layer: int, kv_head: int, span: int) -> bool:
    """Whether any query head of the group put mass on it; what is hidden from a head has none at all."""
    heads = reader.oracle_step(step)
    return bool(((heads["layer"] == layer) & (heads["kv_head"] == kv_head) & (heads["span"] == span) & (heads["mass"] > 0)).any())
