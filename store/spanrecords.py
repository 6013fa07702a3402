"""The part of the reader that returns a run's spans, their attention masses and their states."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np
import pandas as pd

from kvlens.rows import SpanRow
from kvlens.store import queries
from kvlens.store.errors import UnreadableRun
from kvlens.store.session import Session
from kvlens.store.states import changes, replay


class SpanRecords:
    """Base of TraceReader."""

    _db: Session
    uid: str
    n_layers: int
    q_heads: int
    kv_heads: int
    n_steps: int

    def _range(self, start: int, stop: int | None) -> tuple[int, int]:
        stop = self.n_steps if stop is None else stop
        return max(0, int(start)), min(int(stop), self.n_steps)

    def spans(self) -> pd.DataFrame:
        """All spans that ever were."""
        return self._db.frame(queries.SPANS)

    def span_rows(self) -> tuple[SpanRow, ...]:
        """`spans` as the run had them."""
        return tuple(SpanRow(*row) for row in self._db.rows(queries.SPAN_ROWS))

    def span(self, number: int) -> SpanRow:
        """Return the span with an id. Raises UnreadableRun if the trace's table of spans lacks the id."""
        for row in self._db.rows(queries.SPAN_ROW, span=number):
            return SpanRow(*row)
        raise UnreadableRun(
            f"The trace of run {self.uid} names span {number}, which its table of spans lacks; restore the file from a "
            f"copy."
        )

    def head_spans(self, step: int, layer: int, q_head: int) -> pd.DataFrame:
        """What one query head attended at one step, by mass, with where each span lay while the step attended (state)
        and when the step was over (state_after); `.attrs['tail_mass']` is what the other spans got together."""
        frame = self._db.frame(queries.HEAD_SPANS, step=step, layer=layer, q_head=q_head)
        now, later = self._states(step, layer, q_head // (self.q_heads // self.kv_heads))
        frame["state"] = [now.get(int(span)) for span in frame["span"]]
        frame["state_after"] = [later.get(int(span)) for span in frame["span"]]
        tail = self._db.rows(queries.TAIL_MASS, step=step, layer=layer, q_head=q_head)
        frame.attrs["tail_mass"] = float(tail[0][0]) if tail and tail[0][0] is not None else float("nan")
        return frame

    def span_mass(self, layer: int, q_head: int) -> pd.DataFrame:
        """Mass per step and span of one query head's top spans."""
        return self._db.frame(queries.SPAN_MASS, layer=layer, q_head=q_head)

    def span_mass_of_layer(self, layer: int) -> pd.DataFrame:
        """Return `span_mass` of all query heads of a layer: q_head, step, span, mass."""
        return self._db.frame(queries.SPAN_MASS_OF_LAYER, layer=layer)

    def mean_span_mass(self, start: int = 0, stop: int | None = None) -> pd.DataFrame:
        """Mass per span, averaged over layers, heads and steps [start, stop); a lower bound, as only top spans are
        logged."""
        first, last = self._range(start, stop)
        rows = max(last - first, 1) * self.n_layers * self.q_heads
        return self._db.frame(queries.MEAN_SPAN_MASS, start=first, stop=last, rows=rows)

    def mean_span_mass_by_step(self) -> pd.DataFrame:
        """step, span, mass averaged over layers and heads, for all steps in one query."""
        return self._db.frame(queries.MEAN_SPAN_MASS_BY_STEP, rows=self.n_layers * self.q_heads)

    def state_changes(self, layer: int, kv_head: int) -> pd.DataFrame:
        """step, span, state: every change of a span's state for one KV head, its birth included; ordered. The state is
        the one in which the step attended: what changes after a step's attention counts from the next step on."""
        return _frame(self._changes(layer, kv_head, kv_head)[kv_head])

    def state_changes_of_layer(self, layer: int) -> list[pd.DataFrame]:
        """Return `state_changes` of every KV head of a layer, which is read once."""
        return [_frame(changed) for changed in self._changes(layer, 0, self.kv_heads - 1).values()]

    def attended_states(self, layer: int, steps: np.ndarray, kv_heads: np.ndarray, spans: np.ndarray) -> list[str]:
        """Return the state in which a step attended a span for a KV head, [rows]; '' before the span's birth. Reads the
        events of these spans only. steps, kv_heads, spans: int64 [rows]."""
        if not len(steps):
            return []
        lowest, highest = int(kv_heads.min()), int(kv_heads.max())
        clocks: dict[tuple[int, int], tuple[list[int], list[str]]] = {}
        for head, changed in self._changes(layer, lowest, highest, np.unique(spans).tolist()).items():
            for step, span, state in changed:  # in the order of steps
                since, states = clocks.setdefault((head, span), ([], [""]))
                since.append(step)
                states.append(state)
        never: tuple[list[int], list[str]] = ([], [""])
        places = zip(steps.tolist(), kv_heads.tolist(), spans.tolist(), strict=True)
        histories = ((step, *clocks.get((head, span), never)) for step, head, span in places)
        return [states[bisect_right(since, step)] for step, since, states in histories]

    def _changes(
        self, layer: int, first_head: int, last_head: int, only: list[int] | None = None
    ) -> dict[int, list[tuple[int, int, str]]]:
        """Return the rows of `state_changes` by KV head. only: ids of the spans to read; None: all spans."""
        where: dict[str, Any] = {"layer": layer, "first": first_head, "last": last_head}
        ever = event_spans = ""
        if only is not None:
            ever, event_spans, where["spans"] = queries.ONE_OF_EVER, queries.ONE_OF_TOLD, only
        group = self.q_heads // self.kv_heads
        heads = range(first_head, last_head + 1)
        spans: dict[int, list[tuple[int, str, str | None, int]]] = {head: [] for head in heads}
        events: dict[int, list[tuple[int, int, str, int | None]]] = {head: [] for head in heads}
        for head, *span in self._db.rows(queries.SPANS_EVER.format(which=ever), **where):
            spans[head].append(tuple(span))
        state_events = queries.ALL_STATE_EVENTS.format(which=event_spans)
        for owner, *event in self._db.rows(state_events, group=group, steps=self.n_steps, **where):
            for head in events if owner is None else (owner,):
                events[head].append(tuple(event))
        return {head: changes(spans[head], events[head]) for head in heads}

    def tells_moments(self) -> bool:
        """Events say whether the step had attended when they happened: not before schema 6."""
        return bool(self._db.rows(queries.TELLS_MOMENTS)[0][0])

    def span_states(self, step: int, layer: int, kv_head: int) -> pd.DataFrame:
        """Where each span alive at `step` lay for one KV head: state while the step attended, state_after when it was
        over. Traces of schema 5 and before do not tell them apart: both are the latter."""
        now, later = self._states(step, layer, kv_head)
        return pd.DataFrame(
            {
                "span": np.array(list(now), np.int64),
                "state": pd.Series(list(now.values()), dtype="str"),
                "state_after": pd.Series([later[span] for span in now], dtype="str"),
            }
        )

    def _states(self, step: int, layer: int, kv_head: int) -> tuple[dict[int, str], dict[int, str]]:
        where = {"step": step, "layer": layer, "kv_head": kv_head}
        spans = self._db.rows(queries.SPANS_ALIVE, **where)
        group, heads = self.q_heads // self.kv_heads, {"first": kv_head, "last": kv_head}
        told = self._db.rows(queries.STATE_EVENTS, group=group, step=step, layer=layer, **heads)
        before = ((span, kind, q_head) for span, kind, q_head, after in told if not after)
        return replay(spans, before), replay(spans, (row[:3] for row in told))


def _frame(changed: list[tuple[int, int, str]]) -> pd.DataFrame:
    return pd.DataFrame(changed, columns=["step", "span", "state"])
