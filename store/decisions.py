"""Decisions on their way to disk: one row each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pyarrow as pa

from kvlens.decisions import DECISION_KINDS, DECISION_UNITS, Decisions
from kvlens.store.errors import TraceError
from kvlens.store.rowtables import check_shape
from kvlens.store.schema import MAX_SPAN

_IDS = ("layer", "kv_head", "q_head")
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
    ids = {name: _optional(getattr(joined, name)[order], pa.uint8()) for name in _IDS}
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
    if flat.size and (flat.min() < 0 or flat.max() > MAX_SPAN):
        raise TraceError(f"Span ids above {MAX_SPAN} cannot be stored; make longer spans or log fewer.")
    starts = np.cumsum(counts) - counts
    lengths = counts[order]
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    places = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths) + np.repeat(starts[order], lengths)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat[places].astype(np.uint16)))
