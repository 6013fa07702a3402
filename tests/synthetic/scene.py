"""The prompt of a made-up run: its words, spans and cold tier. See ``synthetic.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from kvlens.records import PrefillRecord
from kvlens.rows import EventRow, JournalRow, PromptToken, SpanHeadRow, SpanRow, TransferRow

WORDS = """
the harbour master wrote every evening in a long green book what ships had come and what they carried; salt, rope, lamps
and letters for people who no longer lived there. On the last page he kept the number of a key that opened nothing in
town. Children asked about it when rain kept them inside, and he told another story each time, so that nobody could say
which was true. The river moved slowly past the mill while clerks counted barrels by lantern light and argued over the
price of wool with merchants from the north.
""".split()  # noqa: SIM905
ANSWER = """
The key in the green book carries the number 4172 and it opens nothing in town ; the harbour master kept it anyway .
""".split()  # noqa: SIM905
SINK, WINDOW, LEAVE, ANCHORS = 4, 48, 16, 3


@dataclass
class Scene:
    """What the made-up steps share."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rng: np.random.Generator
    spans: list[SpanRow] = field(default_factory=list)
    cold: dict[int, SpanHeadRow] = field(default_factory=dict)
    """per span: how it lies in the cold tier (made equal for all heads, but for the rank)"""

    def token_bytes(self) -> int:
        return 2 * self.head_dim * 2  # keys and values, two bytes each


def make_prefill(scene: Scene, n_prompt: int, n_spans: int) -> tuple[PrefillRecord, str]:
    rng = scene.rng
    surprisal = rng.gamma(1.6, 1.3, n_prompt)
    body_end = max(SINK + n_spans + ANCHORS, n_prompt - WINDOW)
    cuts = np.sort(rng.choice(np.arange(SINK + 1, body_end), min(n_spans, body_end - SINK - 1) - 1, replace=False))
    edges = [SINK, *(int(cut) for cut in cuts), body_end]
    surprisal[[edge for edge in edges if edge < n_prompt]] += 4.0
    anchors = (
        {int(i) for i in rng.choice(np.arange(1, len(edges) - 2), ANCHORS, replace=False)} if len(edges) > 5 else set()
    )
    scene.spans = [
        SpanRow(0, "sink", 0, SINK, -1, f"The first {SINK} tokens, kept because heads park attention on them.", None)
    ]
    for index, (start, end) in enumerate(pairwise(edges)):
        mean = float(surprisal[start:end].mean())
        if index in anchors:
            row = SpanRow(
                index + 1, "anchor", start, end, -1, "Kept exact: its mean surprisal is among the highest.", mean
            )
        else:
            why = f"Begins where surprisal jumps to {surprisal[start]:.1f} nats and ends before the next jump."
            row = SpanRow(index + 1, "entropy", start, end, -1, why, mean, "coarse")
        scene.spans.append(row)
    scene.spans.append(
        SpanRow(len(edges), "window", body_end, n_prompt, -1, f"The last {WINDOW} tokens before decoding.", None)
    )
    heads = [row for span in scene.spans if span.kind == "entropy" for row in span_heads(scene, span)]
    tokens, chars = [], 0
    for pos in range(n_prompt):
        piece = ("" if pos == 0 else " ") + WORDS[pos % len(WORDS)]
        tokens.append(
            PromptToken(
                pos, 100 + pos % len(WORDS), piece, chars, chars + len(piece), float(surprisal[pos]) if pos else None
            )
        )
        chars += len(piece)
    clock, transfers = 900_000, []
    for layer in range(scene.layers):
        size = sum(row.cold_bytes for row in heads if row.layer == layer)
        took = 20 + size // 8000
        transfers.append(TransferRow(-1, layer, None, None, "d2h", "offload", size, clock, clock + took, took, True))
        clock += took
    events = [EventRow(-1, None, None, None, "span_open", span.span) for span in scene.spans]
    events += [EventRow(-1, None, None, None, "offload", span.span) for span in scene.spans if span.kind == "entropy"]
    cold = sum(row.cold_bytes for row in heads)
    hot = resident_bytes(scene, n_prompt, 0).sum()
    full = n_prompt * scene.layers * scene.kv_heads * scene.token_bytes()
    shares = rng.dirichlet(np.full(scene.kv_heads, 4.0), scene.layers)
    record = PrefillRecord(
        tokens=tokens,
        spans=list(scene.spans),
        span_heads=heads,
        transfers=transfers,
        events=events,
        prefill_us=clock,
        prefill_peak_bytes=int(full),
        cold_bytes=cold,
        resident_bytes=int(hot),
        journal=[JournalRow(-1, layer, None, "head_share", shares[layer]) for layer in range(scene.layers)],
    )
    return record, "".join(token.text for token in tokens)


def span_heads(scene: Scene, span: SpanRow) -> list[SpanHeadRow]:
    length, rows = span.tok_end - span.tok_start, []
    for layer in range(scene.layers):
        for head in range(scene.kv_heads):
            if length < 12:
                row = SpanHeadRow(span.span, layer, head, "raw", None, None, length * scene.token_bytes(), None, None)
            else:
                rank = max(2, length // 4 + (layer + head) % 3)
                size = (length + scene.head_dim) * rank * 4
                error = float(scene.rng.uniform(0.02, 0.15))
                row = SpanHeadRow(span.span, layer, head, "factors", rank, rank, size, error, error * 1.2)
            rows.append(row)
    scene.cold[span.span] = rows[0]
    return rows


def resident_bytes(scene: Scene, position: int, zoomed_tokens: int | np.ndarray) -> np.ndarray:
    """Hot bytes per (layer, KV head): sink, anchors, window, zoomed tokens and one summary per entropy span."""
    exact = sum(s.tok_end - s.tok_start for s in scene.spans if s.kind in ("sink", "anchor"))
    coarse_spans = [s for s in scene.spans if s.kind == "entropy"]
    covered = max((s.tok_end for s in coarse_spans), default=SINK)
    tokens = exact + max(position - covered, 0) + len(coarse_spans) + np.asarray(zoomed_tokens)
    return np.broadcast_to(tokens * scene.token_bytes(), (scene.layers, scene.kv_heads)).astype(float)
