"""Rows with lists of spans on their way to disk: the oracle, the scores of a choice, decisions, and mean keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pyarrow as pa

from kvlens.decisions import DECISION_KINDS, DECISION_UNITS, Decisions
from kvlens.instruments import Oracle, Scores, SpanKeys
from kvlens.store.errors import TraceError
from kvlens.store.rowtables import check_shape
from kvlens.store.schema import MAX_SPAN, ORACLE_CODES

_HEADS = ("layer", "kv_head", "q_head")
_COUNTS = {"asked": "requested", "granted": "granted", "refused": "refused", "missed": "missed"}
"""column of the table -> field of Decisions"""


def copied_decisions(step: int, decisions: Decisions) -> Decisions:
    """Return a copy with arrays of its own. Raises TraceError for arrays of unequal lengths, an unknown kind or unit, a
    negative count, and counts that do not add up."""
    n = len(decisions)
    lists = {"refused_span": decisions.refused.sum(), "missed_span": decisions.missed.sum()}
    for field in fields(Decisions):
        check_shape(step, f"decisions.{field.name}", getattr(decisions, field.name), (int(lists.get(field.name, n)),))
    parts = np.stack([decisions.granted, decisions.refused, decisions.missed])
    words_exist = (decisions.kind < len(DECISION_KINDS)).all() and (decisions.unit < len(DECISION_UNITS)).all()
    if not words_exist or (parts < 0).any() or (parts.sum(0) != decisions.requested).any():
        raise TraceError(
            f"Step {step} logs decisions of an unknown kind or with counts that do not add up; this is a bug in what "
            "logs them."
        )
    return replace(decisions, **{field.name: getattr(decisions, field.name).copy() for field in fields(Decisions)})


def decision_table(decided: Sequence[tuple[int, Decisions]]) -> pa.Table:
    """Rows of decision, ordered (layer, KV head, query head, step). `decided`: (step, what was decided)."""
    joined = Decisions.joined([decisions for _, decisions in decided])
    if joined is None:
        joined = Decisions.filled(0, DECISION_KINDS[0], "spans", {})
    steps = np.repeat([step for step, _ in decided], [len(decisions) for _, decisions in decided]).astype(np.int32)
    order = np.lexsort((steps, joined.q_head, joined.kv_head, joined.layer))
    ids = {name: _optional(getattr(joined, name)[order], pa.uint8()) for name in _HEADS}
    counts = {column: getattr(joined, name)[order].astype(np.uint32) for column, name in _COUNTS.items()}
    figures = {name: getattr(joined, name)[order] for name in ("score", "cut")}
    return pa.table(
        {
            "step": steps[order],
            **ids,
            "kind": pa.array(np.array(DECISION_KINDS)[joined.kind[order]], pa.string()),
            "unit": pa.array(np.array(DECISION_UNITS)[joined.unit[order]], pa.string()),
            "candidates": _optional(joined.candidates[order], pa.uint32()),
            **counts,
            **{name: pa.array(values, mask=np.isnan(values)) for name, values in figures.items()},
            "refused_span": _lists(joined.refused_span, joined.refused, order),
            "missed_span": _lists(joined.missed_span, joined.missed, order),
        }
    )


def _optional(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Numbers from 0 on; those below are NULL."""
    return pa.array(np.maximum(values, 0), mask=values < 0).cast(kind)


def _lists(flat: np.ndarray, counts: np.ndarray, order: np.ndarray) -> pa.Array:
    """The lists whose lengths are `counts`, one behind the other in `flat`, in `order`."""
    _check_ids(flat)
    starts = np.cumsum(counts) - counts
    lengths = counts[order]
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    places = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths) + np.repeat(starts[order], lengths)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat[places].astype(np.uint16)))


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
    keys = pa.array(span_keys.keys.astype(np.float32, copy=False).reshape(-1))
    return pa.table(
        {
            "layer": np.repeat(np.arange(layers, dtype=np.uint8), kv_heads * count),
            "kv_head": np.tile(np.repeat(np.arange(kv_heads, dtype=np.uint8), count), layers),
            "span": np.tile(span_keys.span.astype(np.uint16), layers * kv_heads),
            "form": pa.array([span_keys.form] * rows, pa.string()),
            "key": pa.ListArray.from_arrays(offsets, keys),
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
    _check_ids(kept_tokens)
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
