"""What is written of a block of steps and of prefill, as tables of the trace."""

from __future__ import annotations

import pyarrow as pa

from kvlens.records import PrefillRecord
from kvlens.store.blocks import Block
from kvlens.store.decisions import copied_decisions, decision_table
from kvlens.store.oracles import span_key_table
from kvlens.store.rowtables import copied, loss_rows, phase_rows, rows_table, step_tables


def block_tables(block: Block, prompt_tokens: int, trace_level: str) -> list[tuple[str, pa.Table]]:
    """Return the tables of a block of steps by name: rows of a table of the trace, without those that a level below
    `spans` leaves out."""
    records = block.records
    tables = list(step_tables(records, prompt_tokens).items())
    for name, rows in (
        ("span", [row for record in records for row in record.spans]),
        ("span_head", [row for record in records for row in record.span_heads]),
        ("transfer", [row for record in records for row in record.transfers]),
        ("event", [row for record in records for row in record.events]),
        ("journal", block.journal),
        ("cut", [row for record in records for row in record.cuts]),
        ("loss", loss_rows(records)),
        ("phase", phase_rows(records)),
    ):
        tables.append((name, rows_table(name, rows)))
    tables += [("head_step", block.head_table()), ("kv_step", block.kv_table()), ("decision", block.decision_table())]
    if trace_level == "spans":
        tables += [
            ("head_span", block.span_table()),
            ("kv_span", block.score_table()),
            ("oracle", block.oracle_table()),
        ]
    return tables


def prefill_tables(record: PrefillRecord, heads: tuple[int, int], trace_level: str) -> list[tuple[str, pa.Table]]:
    """Return the tables of what prefill found, in the same way. heads: layers, KV heads."""
    tables = [
        ("token", rows_table("prompt", record.tokens)),
        ("span", rows_table("span", record.spans)),
        ("span_head", rows_table("span_head", record.span_heads)),
        ("transfer", rows_table("transfer", record.transfers)),
        ("event", rows_table("event", record.events)),
        ("journal", rows_table("journal", copied(record.journal))),
        ("cut", rows_table("cut", record.cuts)),
    ]
    if record.decisions is not None:
        tables.append(("decision", decision_table([(-1, copied_decisions(-1, record.decisions))])))
    if trace_level == "spans" and record.span_keys is not None:
        tables.append(("span_key", span_key_table(record.span_keys, heads)))
    return tables
