"""How spans were ranked, on its way to disk: per step and KV head three lists of equal length, best first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from kvlens.instruments import Scores
from kvlens.store.errors import TraceError
from kvlens.store.rowtables import check_shape
from kvlens.store.schema import MAX_SPAN


def copied_scores(step: int, scores: Scores, heads: tuple[int, int]) -> Scores:
    """A copy, because methods reuse their arrays. `heads`: (layers, KV heads). TraceError for other shapes or a
    negative count."""
    listed = (*heads, scores.span.shape[-1] if scores.span.ndim else 0)
    for name, want in (("span", listed), ("score", listed), ("chosen", listed), ("candidates", heads)):
        check_shape(step, f"scores.{name}", getattr(scores, name), want)
    if scores.candidates.size and scores.candidates.min() < 0:
        raise TraceError(f"Step {step} logs a negative number of candidates; this is a bug in what logs it.")
    return Scores(
        scores.span.astype(np.int32),
        scores.score.astype(np.float32),
        scores.chosen.astype(bool),
        scores.candidates.astype(np.uint32),
    )


def score_table(ranked: Sequence[tuple[int, Scores]], layers: int, kv_heads: int) -> pa.Table:
    """Rows of kv_span, ordered (layer, KV head, step). `ranked`: (step, scores); how many are listed may differ from
    step to step."""
    steps, width = len(ranked), max((scores.span.shape[-1] for _, scores in ranked), default=0)
    spans = np.full((steps, layers, kv_heads, width), -1, np.int32)
    values, chosen_mask = np.empty(spans.shape, np.float32), np.zeros(spans.shape, bool)
    candidates = np.zeros((steps, layers, kv_heads), np.uint32)
    for index, (_, scores) in enumerate(ranked):
        n = scores.span.shape[-1]
        spans[index, ..., :n], values[index, ..., :n], chosen_mask[index, ..., :n] = (
            scores.span,
            scores.score,
            scores.chosen,
        )
        candidates[index] = scores.candidates
    spans, values, chosen_mask = (array.transpose(1, 2, 0, 3) for array in (spans, values, chosen_mask))
    valid = spans >= 0
    kept_tokens, scored = spans[valid], values[valid]
    if kept_tokens.size and kept_tokens.max() > MAX_SPAN:
        raise TraceError(f"Span ids above {MAX_SPAN} cannot be stored; make longer spans or log fewer.")
    offsets = pa.array(np.concatenate(([0], np.cumsum(valid.sum(-1).reshape(-1)))).astype(np.int32))
    lists = {
        "span": pa.array(kept_tokens.astype(np.uint16)),
        "score": pa.array(scored, mask=np.isnan(scored)),
        "chosen": pa.array(chosen_mask[valid]),
    }
    return pa.table(
        {
            "step": np.tile(np.array([step for step, _ in ranked], np.uint32), layers * kv_heads),
            "layer": np.repeat(np.arange(layers, dtype=np.uint8), kv_heads * steps),
            "kv_head": np.tile(np.repeat(np.arange(kv_heads, dtype=np.uint8), steps), layers),
            **{name: pa.ListArray.from_arrays(offsets, values) for name, values in lists.items()},
            "n_candidates": candidates.transpose(1, 2, 0).reshape(-1),
        }
    )
