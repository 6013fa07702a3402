"""What a trace says of one (step, layer, KV head, span): the rows behind the reasons, gathered and put in the order of
events.

A span's state in the trace is the one at the end of a step. What matters is where it lay while the step attended: a KV
head that reads what the step before selected moves and gives up spans only after its attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kvlens.lens.own import Own
from kvlens.store.reader import TraceReader

ROUNDING = 1e-4
"""regret above it is no rounding of the two masses it is the difference of"""
NOTHING = 1e-6
"""mass up to which a recorded zero may be a small mass, rounded"""
HOT = ("resident", "reconstructed")
ARRIVALS = {"recall", "prefetch", "correction", "zoom_in"}
DEPARTURES = {"release", "zoom_out"}


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

    @classmethod
    def of(cls, reader: TraceReader, step: int, layer: int, kv_head: int, span: int) -> Ranking:
        frame = reader.scores(step, layer, kv_head)
        row = frame[frame["span"] == span]
        known = len(row) > 0
        return cls(
            frame.attrs["candidates"],
            len(frame),
            int(frame["chosen"].sum()) if len(frame) else 0,
            int(row["rank"].iloc[0]) if known else None,
            float(row["score"].iloc[0]) if known else None,
            bool(row["chosen"].iloc[0]) if known else False,
        )

    def words(self) -> str:
        """' (rank 3 of 45)', or nothing where no ranking was recorded."""
        if self.candidates is None:
            return ""
        return (
            f" (rank {self.rank} of {self.candidates})"
            if self.rank
            else f" (below the {self.listed} best of {self.candidates})"
        )

    def cut(self) -> str:
        """The sentence about rank and cut. How many of all candidates were chosen is known only where all that are
        chosen are listed."""
        if self.candidates is None:
            return "its rank was not recorded"
        least = "at least " if self.chosen == self.listed < self.candidates else ""
        whole = self.listed == self.candidates or least
        many = (
            f"{least}{self.chosen} of {self.candidates} candidates"
            if whole
            else f"{self.chosen} of the {self.listed} best"
        )
        if self.rank is None:
            return f"it was not among the {self.listed} best recorded of {self.candidates} candidates, {many} chosen"
        of = "" if whole else f" of {self.candidates} candidates"
        return (
            f"rank {self.rank}{of} (score {self.score:.4g}), {many} chosen, this one was{'' if self.wanted else ' not'}"
        )


@dataclass(frozen=True)
class Facts:
    """The recorded rows of one (step, layer, KV head, span)."""

    reader: TraceReader
    step: int
    layer: int
    kv_head: int
    span: int
    kind: str
    why: str
    """of the span: what made it, and why it begins and ends where it does"""
    born: int
    summarised: bool
    """it has a summary entry on the device"""
    events: pd.DataFrame
    """of this span and KV head up to the step"""
    states: dict[int, str]
    """where all spans lay for the KV head while the step attended"""
    waits: bool
    """this KV head read what the step before had selected; what this step selects is moved after its attention"""
    similarity: float | None
    """of the queries, where the head's selection waits because they are similar enough"""
    ranking: Ranking
    listed: pd.DataFrame
    """full attention and mass by query head of the group, of those that list the span"""

    @classmethod
    def of(cls, reader: TraceReader, step: int, layer: int, kv_head: int, span: int) -> Facts:
        row = reader.spans().set_index("span").loc[span]
        events = reader.events(step=None, layer=layer, kv_head=kv_head)
        mine = events[(events["span"] == span) & (events["step"] <= step)]
        similarity = _uncorrected(reader, step, layer, kv_head)
        waits = similarity is not None or bool(Own.of(reader).say("waits", reader.meta.config))
        heads = reader.oracle_step(step)
        listed = heads[(heads["layer"] == layer) & (heads["kv_head"] == kv_head) & (heads["span"] == span)]
        return cls(
            reader,
            step,
            layer,
            kv_head,
            span,
            str(row["kind"]),
            str(row["reason"]),
            int(row["born_step"]),
            row["state"] == "coarse",
            mine,
            _states(reader, step, layer, kv_head, events, waits),
            waits,
            similarity,
            Ranking.of(reader, step, layer, kv_head, span),
            listed,
        )

    def told(self, step: int) -> set[str]:
        """Kinds of the span's events of a step."""
        return set(self.events.loc[self.events["step"] == step, "kind"])

    @property
    def state(self) -> str | None:
        """Where the span lay while the step attended."""
        return self.states.get(self.span)

    def dropped_at(self) -> int | None:
        """The last step at which this KV head dropped tokens of the span, -1 for the end of prefill; None: no cut was
        recorded."""
        rows = self.reader.cuts(self.step, self.layer, self.kv_head, self.span)
        return None if rows.empty else int(rows["step"].iloc[-1])

    def unasked(self, at: int | None) -> str:
        """', before the question was known' of what was evicted at a step (-1: the end of prefill) at which the
        question had not been fed to its end; nothing where it was part of what was read."""
        known_from = self.reader.meta.asked_steps
        return ", before the question was known" if known_from and at is not None and at < known_from else ""

    @property
    def held(self) -> bool:
        """A counterfactual held it."""
        return any(
            hold.span == self.span and (self.layer, self.kv_head) in hold.heads and self.step >= hold.from_step
            for hold in self.reader.meta.hold
        )

    @property
    def before(self) -> Ranking:
        """The ranking of the step before."""
        return Ranking.of(self.reader, self.step - 1, self.layer, self.kv_head, self.span)

    @property
    def refused(self) -> bool:
        """The selection that this step read wanted it, and it did not fit."""
        return "refused" in self.told(self.step - 1 if self.waits else self.step)

    @property
    def given_up(self) -> bool:
        """The device's copy went at this step."""
        return bool(self.told(self.step) & DEPARTURES)

    @property
    def moving(self) -> bool:
        """A copy of it to the device began at this step, behind its back."""
        rows = self.reader.transfers(self.step, self.layer, self.kv_head)
        return bool(((rows["span"] == self.span) & (rows["direction"] == "h2d") & ~rows["blocking"].astype(bool)).any())

    @property
    def read(self) -> bool | None:
        """Whether any query head of the group put mass on it: what is hidden from a head has none at all. None: not
        recorded, or full attention wanted so little of it that no mass does not tell."""
        if (self.listed["mass"] > 0).any():
            return True
        return False if (self.listed["full"] > NOTHING).any() else None

    @property
    def exact_only(self) -> bool:
        """No summary in this run takes mass from exact tokens, so that what is attended whole gets no less than full
        attention gives it."""
        return not (self.reader.spans()["state"] == "coarse").any()

    @property
    def short(self) -> bool:
        """A query head of the group gave it less than full attention does."""
        return bool((self.listed["regret"] > ROUNDING).any())

    @property
    def q_head(self) -> int | None:
        """The query head of the group that missed most; None: not recorded."""
        return None if self.listed.empty else int(self.listed["q_head"].iloc[int(self.listed["regret"].argmax())])

    @property
    def averaged(self) -> float:
        """Share of `q_head`'s output that a mean value stood for; 0 where there is none, or it was not recorded."""
        if self.q_head is None:
            return 0.0
        line = self.reader.head_timeline(self.layer, self.q_head).set_index("step")["mass_mean"]
        share = float(line.get(self.step, np.nan))
        return 0.0 if np.isnan(share) else share

    @property
    def fine(self) -> bool | None:
        """Whether `q_head` read it token by token, where the head's number of such spans tells: none, or all that are
        on the device. None: not recorded."""
        if self.q_head is None:
            return None
        line = self.reader.head_timeline(self.layer, self.q_head).set_index("step")["n_zoomed"]
        zoomed = float(line.get(self.step, np.nan))
        if np.isnan(zoomed):
            return None
        if zoomed == 0:
            return False
        return True if zoomed == self._hot() else None

    def _hot(self) -> int:
        """Spans with a summary that were on the device for this KV head while the step attended."""
        spans = self.reader.spans()
        coarse = set(spans.loc[spans["state"] == "coarse", "span"].astype(int))
        return sum(state in HOT for span, state in self.states.items() if span in coarse)

    def rebuilt(self) -> str:
        """'rebuilt from factors of rank ...', with their errors."""
        rows = self.reader.span_heads(self.layer, self.kv_head)
        rows = rows[rows["span"] == self.span]
        if rows.empty:
            return "rebuilt from low-rank factors whose rank and error were not recorded"
        row: Any = rows.iloc[0]
        return (
            f"rebuilt from factors of rank {int(row['rank_k'])} (keys, relative error {row['err_k']:.2f}) and "
            f"{int(row['rank_v'])} (values, relative error {row['err_v']:.2f})"
        )


def _uncorrected(reader: TraceReader, step: int, layer: int, kv_head: int) -> float | None:
    """Similarity of the queries of a KV head that was not corrected at the step; None: it was, or the method does not
    correct."""
    line = reader.head_timeline(layer, kv_head * (reader.q_heads // reader.kv_heads)).set_index("step")
    similarity, corrected = (float(line[name].get(step, np.nan)) for name in ("similarity", "corrected"))
    return similarity if corrected == 0 and not np.isnan(similarity) else None


def _states(
    reader: TraceReader, step: int, layer: int, kv_head: int, events: pd.DataFrame, waits: bool
) -> dict[int, str]:
    """Where each span lay while the step attended. events: of the KV head."""
    frame = reader.span_states(step, layer, kv_head)
    states = {int(span): str(state) for span, state in zip(frame["span"], frame["state"], strict=True)}
    now = events[events["step"] == step]
    left = set(now.loc[now["kind"].isin(DEPARTURES), "span"].astype(int)) if waits else set()
    if not left:
        return states
    came = set(now.loc[now["kind"].isin(ARRIVALS), "span"].astype(int))
    forms = reader.span_heads(layer, kv_head)
    factors = set(forms.loc[forms["form"] == "factors", "span"].astype(int))
    frame = reader.span_states(step - 1, layer, kv_head)
    earlier = dict(zip(frame["span"].astype(int), frame["state"].astype(str), strict=True))
    for span in left:
        states[span] = ("reconstructed" if span in factors else "resident") if span in came else earlier[span]
    return states
