"""The part of the reader that hands out what a method said of its own decisions: its journal and its rankings."""

from __future__ import annotations

import pandas as pd

from kvlens.meta import RunMeta
from kvlens.store import queries
from kvlens.store.session import Session

DECISIONS_SINCE = 11
"""the schema from which on decisions are recorded"""


class MethodRecords:
    """Base of TraceReader. Empty frames where the method keeps no journal, ranks nothing, or the trace is of schema
    1."""

    _db: Session
    meta: RunMeta

    def journal(self, name: str | None = None) -> pd.DataFrame:
        """step (-1: end of prefill), layer and kv_head (NaN: for all), name, values (float32 array each, NaN = none).
        All names, or one."""
        return self._db.frame(queries.JOURNAL, name=name)

    def journal_names(self) -> list[str]:
        """Names in the journal, in alphabetical order."""
        return [str(row[0]) for row in self._db.rows(queries.JOURNAL_NAMES)]

    def scores(self, step: int, layer: int, kv_head: int) -> pd.DataFrame:
        """The spans a KV head ranked best at a step: span, score (the method's own scale), chosen, rank (1 = best).

        `.attrs['candidates']`: how many spans were ranked, None when not recorded."""
        where = {"step": step, "layer": layer, "kv_head": kv_head}
        frame = self._db.frame(queries.SCORES, **where)
        ranked = self._db.rows(queries.CANDIDATES, **where)
        frame.attrs["candidates"] = int(ranked[0][0]) if ranked else None
        return frame

    def records_decisions(self) -> bool:
        """The run recorded what was decided: since schema 11, and not at trace level 'summary'."""
        version = self.meta.schema_version
        return (version is None or version >= DECISIONS_SINCE) and self.meta.trace_level != "summary"

    def decisions(
        self, kind: str | None = None, step: int | None = None, layer: int | None = None, kv_head: int | None = None
    ) -> pd.DataFrame:
        """One row per decision, of one kind, step, layer and KV head or of all: step (-1: end of prefill), layer and
        kv_head (NaN: for all), q_head (NaN: of the KV head), kind, unit, candidates, asked, granted, refused, missed,
        score, cut, refused_span and missed_span (arrays of span ids); see kvlens.decisions.Decisions. asked = granted +
        refused + missed. Empty if none was made, or `records_decisions` is False."""
        return self._db.frame(queries.DECISIONS, kind=kind, step=step, layer=layer, kv_head=kv_head)

    def decision_counts(self) -> pd.DataFrame:
        """Sums over all decisions of each kind and unit: kind, unit, decisions, asked, granted, refused, missed."""
        return self._db.frame(queries.DECISION_COUNTS)

    def cuts(self, step: int, layer: int, kv_head: int, span: int) -> pd.DataFrame:
        """Tokens of a span that a KV head had dropped for good by a step, a row per ranking that dropped some: step
        (-1: end of prefill), candidates and kept (tokens), cut (lowest score that stayed), dropped (tokens), and pos,
        rank (1 = best) and score of the best of them. Empty: nothing was dropped, or it was not recorded."""
        return self._db.frame(queries.CUTS_OF_HEAD, step=step, layer=layer, kv_head=kv_head, span=span)

    def cuts_of_span(self, step: int, span: int) -> pd.DataFrame:
        """Tokens of a span that each KV head had dropped for good by a step: layer, kv_head (NaN: alike for all),
        dropped. KV heads without a row dropped none."""
        return self._db.frame(queries.CUTS_OF_SPAN, step=step, span=span)

    def all_cuts(self) -> pd.DataFrame:
        """`cuts` of every layer, KV head and span, in order: step, layer and kv_head (NaN: alike for all), candidates,
        kept, cut, span, dropped, pos, rank, score."""
        return self._db.frame(queries.ALL_CUTS)

    def ranks_what_it_drops(self) -> bool:
        """The run recorded what its rankings dropped: a span without a row in `cuts` lost nothing by them."""
        return bool(self._db.rows(queries.ANY_CUT))

    def ranks_spans(self) -> bool:
        """The run recorded scores of spans at some step."""
        return bool(self._db.rows(queries.ANY_SCORE))
