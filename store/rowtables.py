"""Small rows (tokens, spans, transfers, events, checks) as Arrow tables with the schema's types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from kvlens.records import StepRecord
from kvlens.rows import EVENT_KINDS, JournalRow
from kvlens.store.errors import TraceError
from kvlens.store.schema import PHASE_COLUMNS
from kvlens.text.plaintext import clean_text

_ARROW = {
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
    "BOOLEAN": pa.bool_(),
    "UTINYINT": pa.uint8(),
    "USMALLINT": pa.uint16(),
    "UINTEGER": pa.uint32(),
    "UBIGINT": pa.uint64(),
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "VARCHAR": pa.string(),
    "FLOAT[]": pa.list_(pa.float32()),
    "INTEGER[]": pa.list_(pa.int32()),
}

#: Columns that a dataclass row of kvlens.rows fills, per table.
COLUMNS: dict[str, dict[str, str]] = {
    "prompt": {
        "pos": "UINTEGER",
        "token_id": "INTEGER",
        "text": "VARCHAR",
        "char_start": "UINTEGER",
        "char_end": "UINTEGER",
        "surprisal": "FLOAT",
    },
    "span": {
        "span": "USMALLINT",
        "kind": "VARCHAR",
        "tok_start": "UINTEGER",
        "tok_end": "UINTEGER",
        "born_step": "INTEGER",
        "reason": "VARCHAR",
        "mean_surprisal": "FLOAT",
        "state": "VARCHAR",
    },
    "span_head": {
        "span": "USMALLINT",
        "layer": "UTINYINT",
        "kv_head": "UTINYINT",
        "form": "VARCHAR",
        "rank_k": "USMALLINT",
        "rank_v": "USMALLINT",
        "cold_bytes": "UBIGINT",
        "err_k": "FLOAT",
        "err_v": "FLOAT",
    },
    "transfer": {
        "step": "INTEGER",
        "layer": "UTINYINT",
        "kv_head": "UTINYINT",
        "span": "USMALLINT",
        "direction": "VARCHAR",
        "cause": "VARCHAR",
        "bytes": "UBIGINT",
        "start_us": "BIGINT",
        "end_us": "BIGINT",
        "wait_us": "BIGINT",
        "blocking": "BOOLEAN",
    },
    "event": {
        "step": "INTEGER",
        "layer": "UTINYINT",
        "kv_head": "UTINYINT",
        "q_head": "UTINYINT",
        "kind": "VARCHAR",
        "span": "USMALLINT",
        "value": "FLOAT",
        "after_attention": "BOOLEAN",
    },
    "cut": {
        "step": "INTEGER",
        "layer": "UTINYINT",
        "kv_head": "UTINYINT",
        "candidates": "UINTEGER",
        "kept": "UINTEGER",
        "cut": "FLOAT",
        "span": "INTEGER[]",
        "dropped": "INTEGER[]",
        "pos": "INTEGER[]",
        "rank": "INTEGER[]",
        "score": "FLOAT[]",
    },
    "journal": {"step": "INTEGER", "layer": "UTINYINT", "kv_head": "UTINYINT", "name": "VARCHAR", "values": "FLOAT[]"},
    "self_check": {"name": "VARCHAR", "passed": "BOOLEAN", "value": "DOUBLE", "detail": "VARCHAR"},
    "loss": {
        "step": "UINTEGER",
        "ref_token": "INTEGER",
        "ref_text": "VARCHAR",
        "top_token": "INTEGER",
        "top_text": "VARCHAR",
        "agrees": "BOOLEAN",
        "kl": "FLOAT",
        "ref_logprob": "FLOAT",
        "logprob": "FLOAT",
        "logit_diff": "FLOAT",
        "ref_rank": "UINTEGER",
    },
    "step": {
        "step": "UINTEGER",
        "t_us": "UBIGINT",
        "dur_us": "UBIGINT",
        "wait_us": "UBIGINT",
        "record_us": "UBIGINT",
        "resident_bytes": "UBIGINT",
        "peak_bytes": "UBIGINT",
        "cold_bytes": "UBIGINT",
    },
    "phase": {"step": "UINTEGER", **dict.fromkeys(PHASE_COLUMNS, "UBIGINT")},
    "output": {
        "step": "UINTEGER",
        "token_id": "INTEGER",
        "text": "VARCHAR",
        "logprob": "FLOAT",
        "next_entropy": "FLOAT",
        "t_us": "UBIGINT",
    },
}


def _arrow(values: Sequence[Any], kind: str) -> pa.Array:
    """A Python sequence as an Arrow array of the SQL type `kind`; None and NaN become NULL."""
    if kind == "VARCHAR":
        values = [None if value is None else clean_text(str(value)) for value in values]
    elif kind in ("FLOAT", "DOUBLE"):
        values = [None if value is None or value != value else float(value) for value in values]
    elif kind == "FLOAT[]":
        return floats(list(values))
    elif kind == "INTEGER[]":
        values = [vector.tolist() for vector in values]
    elif kind == "BOOLEAN":
        values = [None if value is None else bool(value) for value in values]
    else:
        values = [None if value is None else int(value) for value in values]
    return pa.array(values, type=_ARROW[kind])


def check_shape(step: int, name: str, value: np.ndarray, want: tuple[int, ...]) -> None:
    """TraceError unless an array of a step has the shape the run has."""
    if value.shape != want:
        raise TraceError(
            f"Step {step} logs {name} with shape {value.shape} where the run has {want}; log the same sizes at "
            f"every step."
        )


def floats(vectors: Sequence[np.ndarray]) -> pa.Array:
    """float32 vectors as a list column; NaN becomes NULL inside its list."""
    flat = np.concatenate([np.empty(0, np.float32), *vectors]).astype(np.float32)
    offsets = np.cumsum([0, *(len(vector) for vector in vectors)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, mask=np.isnan(flat)))


def copied(rows: Sequence[JournalRow]) -> list[JournalRow]:
    """Journal rows with vectors of their own, since a method may reuse its arrays; TraceError for what is no named
    vector."""
    journal_rows = []
    for row in rows:
        try:
            values = np.array(row.values, np.float32)
        except (TypeError, ValueError):
            values = np.empty((0, 0), np.float32)
        if not isinstance(row.name, str) or not row.name or values.ndim != 1:
            raise TraceError(
                f"Step {row.step} logs journal entry {row.name!r}, which is no named vector of numbers; log "
                f"one dimension."
            )
        journal_rows.append(replace(row, values=values))
    return journal_rows


def rows_table(name: str, rows: Sequence[Any]) -> pa.Table:
    """Dataclass rows as an Arrow table, or a TraceError naming the table when a value does not fit its column."""
    if name == "event":
        unknown = {row.kind for row in rows} - set(EVENT_KINDS)
        if unknown:
            raise TraceError(f"Event kind {min(unknown)!r} is not one of {', '.join(EVENT_KINDS)}; log one of those.")
    try:
        return pa.table(
            {column: _arrow([getattr(row, column) for row in rows], kind) for column, kind in COLUMNS[name].items()}
        )
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise TraceError(
            f"A row of table {name} does not fit the trace's schema ({error}); this is a bug in what logs it."
        ) from error


def loss_rows(records: Sequence[StepRecord]) -> list[SimpleNamespace]:
    """The steps that were compared with a reference, as rows of the table `loss`."""
    return [SimpleNamespace(step=record.step, **vars(record.loss)) for record in records if record.loss is not None]


def phase_rows(records: Sequence[StepRecord]) -> list[SimpleNamespace]:
    """The steps whose phases were timed, as rows of the table `phase`."""
    return [
        SimpleNamespace(step=record.step, **{f"{name}_us": took for name, took in record.phases.items()})
        for record in records
        if record.phases is not None
    ]


def moved_bytes(record: StepRecord) -> tuple[int | None, int | None]:
    """Bytes a step moved to the hot tier and to the cold one, by the ledger's rows. Of a step that records no single
    copies: by its KV heads, None where a KV head did not record them."""
    if not record.tells_transfers:
        sums = [float(record.kv[name].sum()) if name in record.kv else math.nan for name in ("h2d_bytes", "d2h_bytes")]
        up, down = (None if math.isnan(total) else int(total) for total in sums)
        return up, down
    to_device = sum(row.bytes for row in record.transfers if row.direction == "h2d")
    return to_device, sum(row.bytes for row in record.transfers if row.direction == "d2h")


def step_tables(records: Sequence[StepRecord], prompt_tokens: int) -> dict[str, pa.Table]:
    """The tables `token` and `step` of decode steps; a generated token's position follows the prompt."""
    tokens = rows_table("output", records)
    positions = pa.array([prompt_tokens + record.step for record in records], type=pa.uint32())
    moved = [moved_bytes(record) for record in records]
    steps = rows_table("step", records)
    for index, name in enumerate(("h2d_bytes", "d2h_bytes")):
        steps = steps.append_column(name, pa.array([pair[index] for pair in moved], type=pa.uint64()))
    return {"token": tokens.append_column("pos", positions), "step": steps}
