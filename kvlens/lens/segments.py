"""What became of the named parts of a prompt: tokens kept and evicted, attention and effect of each.

A span that crosses a border counts for each segment by its tokens there. Layers that keep a sliding window are left
out: no method acts on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvlens.lens.attribution import attribute
from kvlens.methods import REFERENCE
from kvlens.store.errors import NotRecorded
from kvlens.store.reader import TraceReader
from kvlens.text.segments import BadSegment, Segment, find_segments, joined, refuse_empty, token_segments

COLUMNS = (
    *("segment", "tokens", "kept_share", "evicted_share", "heads", "evicted_heads", "full_mass", "mass"),
    "largest_effect",
)
ON_DEVICE = ("resident", "quantised", "reconstructed")
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Fate:
    """What of a segment each KV head kept and lost by a step, shares 0..1 [acting layers, KV heads]."""

    on_device: np.ndarray
    """tokens that are on the device, exact, rebuilt or in few bits"""
    evicted: np.ndarray
    """tokens that are gone for good"""

    @property
    def heads(self) -> int:
        """KV heads, of all layers on which the method acts."""
        return int(self.on_device.size)

    @property
    def evicted_heads(self) -> int:
        """KV heads that have no token of the segment left anywhere."""
        return int((self.evicted > 1 - 1e-9).sum())


def segments_of(reader: TraceReader, named: Mapping[str, str | tuple[int, int]] | None = None) -> dict[str, Ranges]:
    """Return the token ranges of each segment: those that the run recorded, or, where given, those that markers or
    character ranges of the prompt name; a token belongs to one segment, as in a run. Raises BadSegment for a marker
    that is not in the prompt and for a segment without a token."""
    if named:
        parts = find_segments(list(named.items()), reader.prompt_text())
        numbered = [Segment(str(number), part.start, part.end) for number, part in enumerate(parts)]
        tokens = reader.tokens()[["char_start", "char_end"]].fillna(0).astype(int)
        offsets = list(tokens.itertuples(index=False, name=None))
        question, characters = reader.meta.question_start, (0, len(reader.prompt_text()))
        owned = token_segments(offsets, "", characters, numbered, question, None, (), False)
        inner = [Segment(parts[int(part.name)].name, part.start, part.end) for part in owned if part.name.isdigit()]
        refuse_empty(parts, inner)
        return dict(joined(inner))
    return dict(joined(Segment(*part) for part in reader.meta.segments))


def segment_ranges(reader: TraceReader, name: str) -> Ranges:
    """Return the token ranges of a recorded segment. Raises BadSegment, `unknown_segment`."""
    ranges = segments_of(reader)
    if name not in ranges:
        listed = ", ".join(ranges) or "none"
        raise BadSegment("unknown_segment", f"the run has no segment '{name}'; it has: {listed}.", name=name)
    return ranges[name]


def segment_table(
    reader: TraceReader, named: Mapping[str, str | tuple[int, int]] | None = None, step: int | None = None
) -> pd.DataFrame:
    """Return one row per segment, in the order of the prompt: segment, tokens, kept_share, evicted_share, heads,
    evicted_heads (by `step`, None: the last), full_mass, mass (means over sampled steps), largest_effect
    (logits, of one KV head and span). Empty where the run names no segment; NaN: not recorded."""
    parts = segments_of(reader, named)
    rows = reader.spans()
    spans = rows[rows["kind"] != "window"]
    effects, sampled = attribute(reader), bool(reader.meta.sampled)
    states = _states(reader, reader.n_steps - 1 if step is None else step) if len(spans) else {}
    dropped = _dropped(reader, step)
    table = []
    for name, ranges in parts.items():
        shares = _shares(spans, ranges)
        size = sum(end - start for start, end in ranges)
        fate = _fate(reader, spans, shares, size, states, dropped)
        full, mass = _masses(reader, shares) if sampled else (np.nan, np.nan)
        table.append(
            {
                "segment": name,
                "tokens": size,
                "kept_share": float(fate.on_device.mean()),
                "evicted_share": float(fate.evicted.mean()),
                "heads": fate.heads,
                "evicted_heads": fate.evicted_heads,
                "full_mass": full,
                "mass": mass,
                "largest_effect": _largest_effect(effects, shares),
            }
        )
    return pd.DataFrame(table, columns=list(COLUMNS))


def eviction_sentences(table: pd.DataFrame, method: str) -> list[str]:
    """Return one sentence for each segment that some KV head lost whole, most heads first; none for full KV, which
    lacks only what its windows hide."""
    if method == REFERENCE:
        return []
    lost = table[table["evicted_heads"] > 0].sort_values("evicted_heads", ascending=False, kind="stable")
    return [
        f"The segment '{row.segment}' was evicted from {row.evicted_heads} of {row.heads} KV heads."
        for row in lost.itertuples()
    ]


def acting_layers(reader: TraceReader) -> list[int]:
    """Return the layers on which the method acts: those without a sliding window, or all where every layer has one."""
    windows = reader.meta.windows
    layers = [layer for layer in range(reader.n_layers) if not windows or not windows[layer]]
    return layers or list(range(reader.n_layers))


def _shares(spans: pd.DataFrame, ranges: Ranges) -> dict[int, tuple[int, float]]:
    """Span id -> its tokens in the ranges, and their share of the span's tokens; spans with some only."""
    shares = {}
    rows = spans[["span", "tok_start", "tok_end"]].itertuples(index=False, name=None)
    for span, begin, behind in rows:
        inside = sum(max(0, min(behind, end) - max(begin, start)) for start, end in ranges)
        if inside:
            shares[int(span)] = (int(inside), inside / (behind - begin))
    return shares


def _states(reader: TraceReader, step: int) -> dict[tuple[int, int], dict[int, str]]:
    """(layer, KV head) -> span -> state after the step."""
    states = {}
    for layer in acting_layers(reader):
        for head in range(reader.kv_heads):
            frame = reader.span_states(step, layer, head)
            states[layer, head] = dict(zip(frame["span"].tolist(), frame["state_after"].tolist(), strict=True))
    return states


def _dropped(reader: TraceReader, step: int | None) -> dict[int, np.ndarray]:
    """Span -> tokens that rankings dropped for good by a step [layers, KV heads]."""
    counts: dict[int, np.ndarray] = {}
    cuts = reader.all_cuts()
    if step is not None:
        cuts = cuts[cuts["step"] <= step]
    for row in cuts[["layer", "kv_head", "span", "dropped"]].itertuples(index=False, name=None):
        layer, head = (slice(None) if np.isnan(place) else int(place) for place in map(float, row[:2]))
        table = counts.setdefault(int(row[2]), np.zeros((reader.n_layers, reader.kv_heads)))
        table[layer, head] += row[3]
    return counts


def _fate(
    reader: TraceReader,
    spans: pd.DataFrame,
    shares: Mapping[int, tuple[int, float]],
    size: int,
    states: Mapping[tuple[int, int], Mapping[int, str]],
    dropped: Mapping[int, np.ndarray],
) -> Fate:
    layers, lengths = (
        acting_layers(reader),
        dict(zip(spans["span"], spans["tok_end"] - spans["tok_start"], strict=True)),
    )
    present = np.zeros((len(layers), reader.kv_heads))
    evicted = np.zeros_like(present)
    covered = 0
    for span, (inside, _) in shares.items():
        covered += inside
        lost = dropped.get(span, np.zeros((reader.n_layers, reader.kv_heads))) / int(lengths[span])
        for row, layer in enumerate(layers):
            for head in range(reader.kv_heads):
                state = states[layer, head].get(span, "resident")
                if state == "evicted":
                    evicted[row, head] += inside
                elif state == "partial":
                    lost_share = min(1.0, float(lost[layer, head]))
                    evicted[row, head] += inside * lost_share
                    present[row, head] += inside * (1 - lost_share)
                elif state in ON_DEVICE:
                    present[row, head] += inside
    present += size - covered  # tokens that no span has are the window's
    return Fate(present / max(size, 1), evicted / max(size, 1))


def _masses(reader: TraceReader, shares: Mapping[int, tuple[int, float]]) -> tuple[float, float]:
    """Full attention's mass on a segment and the run's own, means over sampled steps, acting layers and query heads.
    Tokens of the window, which no span holds, do not count; NaN where the segment has no other."""
    if not shares:
        return float("nan"), float("nan")
    by_share: dict[float, list[int]] = {}
    for span, (_, share) in shares.items():
        by_share.setdefault(round(share, 3), []).append(span)
    total = np.zeros(2)
    for share, group in by_share.items():
        try:
            masses = reader.mass_on_spans(group)
        except NotRecorded:
            return float("nan"), float("nan")
        layers = acting_layers(reader)
        samples = [mass[:, layers][np.isfinite(mass[:, layers])] for mass in masses]
        total += share * np.array([float(values.mean()) if len(values) else np.nan for values in samples])
    return float(total[0]), float(total[1])


def _largest_effect(effects: pd.DataFrame, shares: Mapping[int, tuple[int, float]]) -> float:
    """Return the largest effect of one KV head and span of the segment, in logits; NaN: no effects were recorded.

    Effects are not added: each is of the round that placed it, and later rounds hold what earlier rounds placed."""
    recorded = effects[effects["effect"].notna()]
    if recorded.empty:
        return float("nan")
    portion = recorded["span"].map(lambda span: shares.get(int(span), (0, 0.0))[1])
    return float((recorded["effect"] * portion).max())
