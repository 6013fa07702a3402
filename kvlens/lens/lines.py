"""What was missed at a step, as one ranking: spans, and, each as a line of its own, tokens lost inside a span that the
span's regret hides. By effect on the choice where it was recorded, behind that by regret.

A span of which only a part is attended may get more mass than full attention gives it, while what full attention wanted
of it is gone. Its unread mass tells, and the tokens that hold most of it are recorded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from kvlens.holds import joined
from kvlens.store.reader import TraceReader

LEAST = 0.01
"""share of a KV head's full attention below which tokens lost inside a span are not named"""
MASSES = (
    "Full KV's mass is what full KV gives the span when it is fed this run's tokens. Own-query mass is full attention "
    "by this run's own query, which has drifted, over the exact keys. Regret is full KV's mass minus this run's, of "
    "what this run did not read; where full KV's was not recorded, own-query mass minus this run's."
)
"""what the masses of a span are, for captions"""


@dataclass(frozen=True)
class Line:
    """What a KV head missed. Shares are means over its query heads."""

    layer: int
    kv_head: int
    span: int
    share: float
    """regret of the span; of a line inside it: unread mass beyond what the regret shows"""
    tokens: tuple[tuple[int, int], ...] = ()
    """ranges [start, end) lost inside the span, in the order of positions; empty: the line is the span's regret"""
    named: float = 0.0
    """full KV's own mass on those tokens (own-query mass where that was not recorded), mean over the query heads"""
    place: float = math.inf
    """in the ranking of effects, from 1 on; of a line added over steps the first; inf: no effect was recorded"""
    effect: float = 0.0
    """logits, of all that was unread of the span (kvlens.engine.effect), on that one of the span's two lines whose
    share is larger; 0: none was recorded"""

    def words(self) -> str:
        """'span 17', or 'lost inside span 17: tokens 396-401'."""
        if not self.tokens:
            return f"span {self.span}"
        return f"lost inside span {self.span}: {ranges_in_words(self.tokens)}"


def mass_name(reference: bool) -> str:
    """Return the name of the mass that regret and holes are of. reference: full KV's own mass was recorded."""
    return "full KV's mass" if reference else "own-query mass"


def ranges_in_words(ranges: Iterable[tuple[int, int]]) -> str:
    """'tokens 396-401, 407', 'token 396'."""
    parts = [str(start) if end - start == 1 else f"{start}-{end - 1}" for start, end in ranges]
    return f"{'token' if len(parts) == 1 and parts[0].isdigit() else 'tokens'} {', '.join(parts)}"


def ranked(reader: TraceReader, steps: Iterable[int]) -> list[Line]:
    """Return all that was missed at some steps, by the place in the ranking of effects, then most regret; regret and
    effect are added over the steps. Empty where full attention was not recorded."""
    lines_by_key: dict[tuple[int, int, int, bool], Line] = {}
    for step in steps:
        triples = reader.triples(step)
        regrets = [
            Line(int(layer), int(head), int(span), float(regret), place=float(place), effect=float(effect))
            for layer, head, span, regret, effect, place in _numbers(triples, "regret")
            if regret > 0 or effect > 0
        ]
        for line in (*regrets, *inside(reader, step)):
            key = line.layer, line.kv_head, line.span, bool(line.tokens)
            lines_by_key[key] = line if key not in lines_by_key else _added(lines_by_key[key], line)
    return sorted(lines_by_key.values(), key=_order)


def _order(line: Line) -> tuple[Any, ...]:
    return line.place, -line.share, line.layer, line.kv_head, line.span, line.tokens


def _numbers(triples: pd.DataFrame, share: str) -> Iterable[tuple[Any, ...]]:
    """layer, kv_head, span, share ('regret' or 'hidden'), effect and place (0, inf: none, or the other share is
    larger)."""
    inside = triples["hidden"] > triples["regret"]
    larger = inside if share == "hidden" else ~inside
    effect, place = triples["effect"].where(larger).fillna(0.0), triples["place"].where(larger).fillna(math.inf)
    columns = ["layer", "kv_head", "span", share, "effect", "place"]
    return triples.assign(effect=effect, place=place)[columns].itertuples(index=False)


def inside(reader: TraceReader, step: int) -> list[Line]:
    """The tokens lost inside spans at a step beyond what regret shows, in the order of `ranked`."""
    triples = reader.triples(step)
    triples = triples[triples["hidden"] >= LEAST]
    if triples.empty:
        return []
    lost = _with_spans(reader, step)
    group = reader.q_heads // reader.kv_heads
    rows = []
    for layer, head, span, hidden, effect, place in _numbers(triples, "hidden"):
        head_tokens = lost[(lost["layer"] == layer) & (lost["kv_head"] == head) & (lost["span"] == span)]
        if len(head_tokens):
            where = joined((int(pos), int(pos) + 1) for pos in head_tokens["pos"])
            named = float(head_tokens["mass"].sum()) / group
            rows.append(
                Line(int(layer), int(head), int(span), float(hidden), where, named, float(place), float(effect))
            )
    return sorted(rows, key=_order)


def lost_of(reader: TraceReader, step: int, layer: int, kv_head: int, span: int) -> tuple[tuple[int, int], ...]:
    """Ranges [start, end) of the span's tokens that full attention wanted and some query head of the KV head did not
    attend, as far as they were named."""
    lost = _with_spans(reader, step)
    head_tokens = lost[(lost["layer"] == layer) & (lost["kv_head"] == kv_head) & (lost["span"] == span)]
    return joined((int(pos), int(pos) + 1) for pos in head_tokens["pos"])


def _with_spans(reader: TraceReader, step: int) -> pd.DataFrame:
    """The step's lost tokens with the span that each belonged to; the window has those of no other span."""
    lost, spans = reader.lost_tokens(step), reader.spans()
    window = spans.loc[spans["kind"] == "window", "span"]
    owner = pd.Series(int(window.iloc[0]) if len(window) else -1, index=lost.index)
    alive = spans[(spans["kind"] != "window") & (spans["born_step"] <= step) & ~(spans["died_step"] <= step)]
    for span, start, end in alive[["span", "tok_start", "tok_end"]].itertuples(index=False):
        owner = owner.mask((lost["pos"] >= start) & (lost["pos"] < end), int(span))
    return lost.assign(span=owner)


def _added(line: Line, counterpart: Line) -> Line:
    tokens = joined((*line.tokens, *counterpart.tokens))
    share, named, effect = (
        line.share + counterpart.share,
        line.named + counterpart.named,
        line.effect + counterpart.effect,
    )
    place = min(line.place, counterpart.place)
    return replace(line, share=share, tokens=tokens, named=named, place=place, effect=effect)
