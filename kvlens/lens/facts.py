"""What a trace says of one (step, layer, KV head, span): the rows behind the reasons, gathered and put in the order of
events.

What matters is where a span lay while the step attended: a KV head that reads what the step before selected moves and
gives up spans only after its attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvlens.holds import joined, without
from kvlens.lens.method_reasons import MethodReasons
from kvlens.lens.place import Ranking
from kvlens.lens.spanstates import DEPARTURES, HOT, states_of, uncorrected
from kvlens.metaparts import Held
from kvlens.store.reader import TraceReader

ROUNDING = 1e-4
"""regret above it is no rounding of the two masses it is the difference of"""
NOTHING = 1e-6
"""mass up to which a recorded zero may be a small mass, rounded"""


@dataclass(frozen=True)
class Facts:
    """The recorded rows of one (step, layer, KV head, span)."""

    reader: TraceReader
    step: int
    layer: int
    kv_head: int
    span: int
    kind: str
    tokens: tuple[int, int]
    """[start, end) at its birth"""
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
    """full attention and mass by query head of the group, of those that list the span; regret and unread are of the
    own-query mass, as a head reads with the run's query and no other"""

    @classmethod
    def gather(cls, reader: TraceReader, step: int, layer: int, kv_head: int, span: int) -> Facts:
        row = reader.span(span)
        events = reader.events(step=None, layer=layer, kv_head=kv_head)
        own_rows = events[(events["span"] == span) & (events["step"] <= step)]
        similarity = uncorrected(reader, step, layer, kv_head)
        waits = similarity is not None or bool(MethodReasons.load(reader).ask("waits", reader.meta.config))
        heads = reader.oracle_step(step)
        listed = heads[(heads["layer"] == layer) & (heads["kv_head"] == kv_head) & (heads["span"] == span)]
        listed = listed.assign(**{name: listed[f"own_{name}"] for name in ("regret", "unread")})
        return cls(
            reader,
            step,
            layer,
            kv_head,
            span,
            row.kind,
            (row.tok_start, row.tok_end),
            row.reason,
            row.born_step,
            row.state == "coarse" and "kept" not in set(own_rows["kind"]),
            own_rows,
            states_of(reader, step, layer, kv_head, events, waits),
            waits,
            similarity,
            Ranking.read(reader, step, layer, kv_head, span),
            listed,
        )

    def list_kinds(self, step: int) -> set[str]:
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

    def unasked(self, position: int | None) -> str:
        """', before the question was known' of what was evicted at a step (-1: the end of prefill) at which the
        question had not been fed to its end; nothing where it was part of what was read."""
        known_from = self.reader.meta.asked_steps
        return (
            ", before the question was known" if known_from and position is not None and position < known_from else ""
        )

    @property
    def held(self) -> bool:
        """A counterfactual held all of it."""
        return any(hold.whole for hold in self._holds())

    @property
    def held_tokens(self) -> tuple[tuple[int, int], ...]:
        """Ranges [start, end) of it that a counterfactual held, where that is not all of it."""
        return joined((hold.tok_start, hold.tok_end) for hold in self._holds())

    def _holds(self) -> list[Held]:
        """The holds of tokens of this span that are kept for this KV head at the step."""
        here, position = self.span, (self.layer, self.kv_head)
        return [h for h in self.reader.meta.hold if h.span == here and position in h.heads and self.step >= h.from_step]

    @property
    def dropped_tokens(self) -> tuple[tuple[int, int], ...]:
        """Ranges [start, end) of it that a counterfactual dropped for this KV head by the step; of the window, of what
        it holds at the step beside the step's own token, which is attended whatever was dropped."""
        position = self.layer, self.kv_head
        own_rows = joined(
            (d.tok_start, d.tok_end) for d in self.reader.meta.drop if position in d.heads and self.step >= d.from_step
        )
        start, end = self.tokens
        pairs: list[tuple[int, int]] = []
        if self.kind == "window":
            end += self.step
            spans = self.reader.spans()
            remaining = spans[(spans["span"] != self.span) & (spans["born_step"] <= self.step)]
            pairs = list(zip(remaining["tok_start"].astype(int), remaining["tok_end"].astype(int), strict=True))
            cuts = self.reader.cuts(self.step, *position, self.span)
            pairs += [(int(pos), int(pos) + 1) for pos in cuts.loc[cuts["dropped"] == 1, "pos"]]
        inside = (
            (max(start, first_item), min(end, last))
            for first_item, last in own_rows
            if first_item < end and last > start
        )
        return tuple(piece for item in inside for piece in without(item, pairs))

    @property
    def on_device(self) -> int | None:
        """How many of its tokens the device has, where it has some and not all; None: not so, or not
        recorded."""
        if self.state != "partly_recalled":
            return None
        rows = self.events[(self.events["kind"] == "part") & ~self.events["after_attention"].eq(True)]
        return None if rows.empty else int(rows["value"].iloc[-1])

    @property
    def previous_ranking(self) -> Ranking:
        """The ranking of the step before."""
        return Ranking.read(self.reader, self.step - 1, self.layer, self.kv_head, self.span)

    @property
    def refused(self) -> bool:
        """The selection that this step read wanted it, and it did not fit."""
        return "refused" in self.list_kinds(self.step - 1 if self.waits else self.step)

    @property
    def given_up(self) -> bool:
        """The device's copy went at this step."""
        return bool(self.list_kinds(self.step) & DEPARTURES)

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
        return False if (self.listed["own"] > NOTHING).any() else None

    @property
    def readings(self) -> dict[int, str]:
        """Query head of the group -> whether it attended 'all', 'part' or 'none' of the span's tokens, by full
        attention's mass on those that it did not. Only heads that list the span with more than a rounded zero; empty
        where it was not recorded."""
        recorded = self.listed[(self.listed["own"] > NOTHING) & self.listed["unread"].notna()]
        part = np.where(recorded["mass"] > 0, "part", "none")
        words = np.where(recorded["unread"] > 0, part, "all")
        return {int(head): str(word) for head, word in zip(recorded["q_head"], words, strict=True)}

    @property
    def exact_only(self) -> bool:
        """No summary in this run takes mass from exact tokens, nor do packed or rebuilt ones: what is attended whole
        gets no less than full attention gives it."""
        rebuilt = (self.reader.span_heads(self.layer, self.kv_head)["form"] == "factors").any()
        packed = self.reader.spans()["state"].isin(("coarse", "quantised")).any() or "rewritten" in self.states.values()
        return not rebuilt and not packed

    def rewritten(self) -> str:
        """Return with what error the cache rewrote keys or values of the span by the step."""
        rows = self.events[self.events["kind"] == "rewrite"]["value"]
        error = f"relative error up to {float(rows.iloc[-1]):.2f}" if len(rows) else "error not recorded"
        return f"some as other keys or values than the model wrote ({error})"

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
