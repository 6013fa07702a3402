"""What is recorded of single spans, on its way to disk: full attention, mean keys, and how spans were ranked (per step
and KV head three lists of equal length, best first)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pyarrow as pa

from kvlens.instruments import Oracle, Scores, SpanKeys
from kvlens.store.errors import TraceError
from kvlens.store.rowtables import check_shape
from kvlens.store.schema import MAX_SPAN, ORACLE_CODES

_IDS = ("span", "lost_pos", "reference_lost_pos")
_LISTS = {
    "span": ("span", "span"),
    "full_mass": ("full", "span"),
    "mass": ("mass", "span"),
    "unread": ("unread", "span"),
    "lost_pos": ("lost_pos", "lost_pos"),
    "lost_mass": ("lost_mass", "lost_pos"),
    "reference_mass": ("reference", "span"),
    "reference_unread": ("reference_unread", "span"),
    "reference_lost_pos": ("reference_lost_pos", "reference_lost_pos"),
    "reference_lost_mass": ("reference_lost_mass", "reference_lost_pos"),
}
"""list column -> (field of Oracle, which field says what is listed)"""
_TAILS = ("tail_full", "tail_reference")


def copied_oracle(step: int, oracle: Oracle, heads: tuple[int, int]) -> Oracle:
    """A copy, since what logs it may reuse its arrays. `heads`: (layers, query heads). TraceError for other
    shapes, and for masses that are not recorded where a span is listed."""
    source = {field.name: values for field in fields(Oracle) if (values := getattr(oracle, field.name)) is not None}
    widths = {name: ids.shape[-1] if ids.ndim else 0 for name in _IDS if (ids := source.get(name)) is not None}
    for name, values in source.items():
        ids_name = next((ids for field, ids in _LISTS.values() if field == name), None)
        check_shape(step, f"oracle.{name}", values, heads if ids_name is None else (*heads, widths.get(ids_name, 0)))
    copies = {name: values.astype(np.int32 if name in _IDS else np.float32) for name, values in source.items()}
    present = copies["span"] >= 0
    masses = [copies[field][present] for field, ids in _LISTS.values() if ids == "span" and field in copies]
    tails = [copies[name] for name in _TAILS if name in copies]
    if not all(np.isfinite(mass).all() for mass in masses) or any(
        (present & np.isnan(tail)[..., None]).any() for tail in tails
    ):
        raise TraceError(
            f"Step {step} logs full attention on a span without its mass or tail; this is a bug in what logs it."
        )
    return Oracle(**copies)


def oracle_table(pairs: Sequence[tuple[int, Oracle]]) -> pa.Table:
    """Rows of oracle, ordered (step, layer, query head): one for each query head of each layer that was sampled at a
    step.

    `pairs`: (step, oracle); how many spans are listed may differ from step to step.
    """
    keys: dict[str, list[np.ndarray]] = {"step": [], "layer": [], "q_head": [], "tail_full": [], "tail_reference": []}
    lists: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in _LISTS}
    for step, oracle in pairs:
        layer, q_head = np.nonzero(np.isfinite(oracle.tail_full))
        for name, (field, ids) in _LISTS.items():
            values, listed = getattr(oracle, field), getattr(oracle, ids)
            if values is None:
                lists[name].append((np.empty(0, np.int32), np.full(len(layer), -1)))
            else:
                present = listed[layer, q_head] >= 0
                lists[name].append((values[layer, q_head][present], present.sum(-1)))
        columns = {"step": np.full(len(layer), step), "layer": layer, "q_head": q_head}
        unknown = np.full(oracle.tail_full.shape, np.nan, np.float32)
        tail = unknown if oracle.tail_reference is None else oracle.tail_reference
        tails = {"tail_full": oracle.tail_full[layer, q_head], "tail_reference": tail[layer, q_head]}
        for name, column in (columns | tails).items():
            keys[name].append(column)
    whole = {name: np.concatenate([np.empty(0), *parts]) for name, parts in keys.items()}
    return pa.table(
        {
            "step": whole["step"].astype(np.uint32),
            "layer": whole["layer"].astype(np.uint8),
            "q_head": whole["q_head"].astype(np.uint8),
            **{name: _list_column(name, parts) for name, parts in lists.items()},
            "tail_full": np.round(whole["tail_full"], 6).astype(np.float32),
            "tail_reference": pa.array(np.round(whole["tail_reference"], 6).astype(np.float32), from_pandas=True),
        }
    )


def _list_column(name: str, parts: list[tuple[np.ndarray, np.ndarray]]) -> pa.Array:
    """(values, how many of them each row has, -1 for NULL), step by step, as a list column; masses as codes."""
    flat = np.concatenate([np.empty(0, np.int32), *(values for values, _ in parts)])
    counts = np.concatenate([np.empty(0, np.int64), *(lengths for _, lengths in parts)])
    if name == "span":
        _check_ids(flat)
    values = flat.astype(np.uint16 if name == "span" else np.uint32) if name in _IDS else _codes(flat)
    offsets = np.concatenate(([0], np.cumsum(counts.clip(min=0)))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), mask=pa.array(counts < 0))


def span_key_table(span_keys: SpanKeys, heads: tuple[int, int]) -> pa.Table:
    """Rows of span_key, ordered (layer, KV head, span). `heads`: (layers, KV heads)."""
    count, size = len(span_keys.span), span_keys.keys.shape[-1]
    check_shape(-1, "span_keys.keys", span_keys.keys, (*heads, count, size))
    _check_ids(span_keys.span)
    layers, kv_heads = heads
    rows = layers * kv_heads * count
    offsets = pa.array(size * np.arange(rows + 1, dtype=np.int64), pa.int32())
    return pa.table(
        {
            "layer": np.repeat(np.arange(layers, dtype=np.uint8), kv_heads * count),
            "kv_head": np.tile(np.repeat(np.arange(kv_heads, dtype=np.uint8), count), layers),
            "span": np.tile(span_keys.span.astype(np.uint16), layers * kv_heads),
            "form": pa.array([span_keys.form] * rows, pa.string()),
            "key": pa.ListArray.from_arrays(offsets, pa.array(span_keys.keys.astype(np.float32).reshape(-1))),
        }
    )


def _check_ids(spans: np.ndarray) -> None:
    if spans.size and (spans.max() > MAX_SPAN or spans.min() < 0):
        raise TraceError(f"Span ids above {MAX_SPAN} cannot be stored; make longer spans or log fewer.")


def _codes(mass: np.ndarray) -> np.ndarray:
    return np.rint(ORACLE_CODES * np.sqrt(np.clip(mass, 0, 1))).astype(np.uint16)


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
