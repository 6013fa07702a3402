"""Rows of the table decision, as the decisions of a step."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from kvlens.decisions import DECISION_KINDS, DECISION_UNITS, NONE, Decisions
from kvlens.trace.cells import numbers


def decisions_of(rows: pa.Table) -> Decisions:
    """Return the decisions of checked rows of one step."""

    def optional(name: str) -> np.ndarray:
        return numbers(rows[name]) if name in rows.column_names else np.full(rows.num_rows, np.nan)

    columns: dict[str, np.ndarray] = {}
    for name in ("layer", "kv_head", "q_head", "candidates"):
        columns[name] = np.nan_to_num(optional(name), nan=NONE).astype(np.int32)
    for name, words in (("kind", DECISION_KINDS), ("unit", DECISION_UNITS)):
        columns[name] = np.array([words.index(word) for word in rows[name].to_pylist()], np.uint8)
    for name in ("asked", "granted", "refused", "missed"):
        columns["requested" if name == "asked" else name] = numbers(rows[name]).astype(np.int32)
    for name in ("score", "cut"):
        columns[name] = optional(name).astype(np.float32)
    for name in ("refused_span", "missed_span"):
        columns[name] = numbers(rows[name].combine_chunks().flatten()).astype(np.int32)
    return Decisions(**columns)
