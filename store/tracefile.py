"""The DuckDB file of a run while it is being written: one connection, one transaction per flushed block."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import duckdb
import numpy as np
import pyarrow as pa

from kvlens.files import close_file
from kvlens.instruments import Effects
from kvlens.records import PrefillRecord, SelfCheck
from kvlens.store import rollup
from kvlens.store.blocks import Block, block_tables, prefill_tables
from kvlens.store.effects import effect_table
from kvlens.store.errors import TraceError
from kvlens.store.guarded import guarded
from kvlens.store.outcomefacts import OutcomeFacts, facts_at_end
from kvlens.store.rollup import stored_checks
from kvlens.store.rowtables import moved_bytes, rows_table
from kvlens.store.schema import ORACLE_CODEC, SCHEMA_VERSION, statements
from kvlens.store.versions import upgrades
from kvlens.text.plaintext import clean_text, plain


def put_surprisals(con: duckdb.DuckDBPyConnection, nats: np.ndarray, prompt_tokens: int) -> None:
    """Into the prompt's rows of `token`, inside the caller's transaction. nats: float32 [prompt_tokens]; NaN is stored
    as NULL. Raises TraceError for another number of them."""
    if nats.shape != (prompt_tokens,):
        raise TraceError(
            f"{nats.size} surprisals are logged of a prompt of {prompt_tokens} tokens; this is a fault of kvlens.",
            code="wrong_count",
            surprisals=nats.size,
            tokens=prompt_tokens,
        )
    recorded = pa.array(nats.astype(np.float32), mask=np.isnan(nats))
    con.register("incoming", pa.table({"pos": np.arange(nats.size), "surprisal": recorded}))
    try:
        con.execute(
            "UPDATE token SET surprisal = incoming.surprisal FROM incoming "
            "WHERE token.pos = incoming.pos AND token.step IS NULL"
        )
    finally:
        con.unregister("incoming")


_CONFIG = {"threads": "1", "wal_autocheckpoint": "16MB", "default_block_size": "65536"}
#: Not written at trace level 'summary'.
_OF_HEADS = ("head_step", "kv_step", "decision")
#: What is written in one transaction: a block of steps, what prefill found, surprisals that it did not know, or effects
#: at lost steps.
Job: TypeAlias = Block | PrefillRecord | np.ndarray | Sequence[Effects]


class TraceFile:
    """An open trace. Used by one thread at a time."""

    def __init__(self, con: duckdb.DuckDBPyConnection, version: int | None = SCHEMA_VERSION) -> None:
        """version: the schema in which the file was made; None: unknown."""
        self._con, self._version = con, version
        self._heads = 0, 0
        self._prompt_tokens = 0
        self._text: list[str] = []
        self._asked = 0
        """steps that feed a question: their tokens are no output"""
        self._peak = 0
        self._moved: list[int | None] = [0, 0]
        """bytes to the device and to host memory; None: a step did not record them"""

    @classmethod
    def create(cls, path: Path, meta: dict[str, Any]) -> TraceFile:
        """A new file with the schema, the run's meta and state 'running'."""
        con = duckdb.connect(str(path), config=dict(_CONFIG))
        close_file(path)
        try:
            con.begin()
            for statement in statements():
                con.execute(statement)
            con.execute("INSERT INTO run_state VALUES ('running', -1, NULL)")
            file = cls(con)
            file._heads = meta["layers"], meta["kv_heads"]
            file._asked = meta.get("question_tokens") or 0
            file._put_meta(meta | {"oracle_codec": ORACLE_CODEC})
            con.commit()
            con.execute("CHECKPOINT")  # what every reader needs is in the file itself, whatever befalls its log
        except BaseException:
            con.close()
            raise
        return file

    @classmethod
    def reopen(cls, path: Path, version: int | None) -> TraceFile:
        """An existing file of a schema, to finish what a dead process began, inside the walls that stand around a
        foreign file; opening it replays what was committed."""
        file = cls(guarded(path, read_only=False, **_CONFIG), version)
        con = file._con
        con.execute("USE run")
        con.begin()
        for statement in upgrades(version):
            con.execute(statement)
        con.commit()
        peak = con.execute("SELECT coalesce(max(peak_bytes), 0) FROM step").fetchone()
        moved = dict(con.execute("SELECT direction, sum(bytes)::BIGINT FROM transfer GROUP BY direction").fetchall())
        file._peak = peak[0] if peak else 0
        file._moved = [moved.get("h2d", 0), moved.get("d2h", 0)]
        request = con.execute("SELECT value FROM meta WHERE key = 'question_tokens'").fetchone()
        file._asked = (json.loads(request[0]) if request else None) or 0
        text = "SELECT text FROM token WHERE step >= ? ORDER BY step"
        file._text = [row[0] for row in con.execute(text, [file._asked]).fetchall()]
        return file

    def last_step(self) -> int:
        """The last flushed step, -1 for none."""
        row = self._con.execute("SELECT last_step FROM run_state").fetchone()
        return int(row[0]) if row else -1

    def ended(self) -> tuple[str, str | None] | None:
        """(status, error) when the file says that the run ended, else None."""
        row = self._con.execute("SELECT status, error FROM run_state WHERE status <> 'running'").fetchone()
        return None if row is None else (row[0], row[1])

    def totals(self) -> dict[str, Any]:
        """Summary fields known so far."""
        return {
            "peak_bytes": self._peak,
            "h2d_bytes": self._moved[0],
            "d2h_bytes": self._moved[1],
            "output_text": "".join(self._text),
        }

    def flush(self, job: Job, trace_level: str) -> None:
        """Writes one job in one transaction."""
        if isinstance(job, Block):
            tables = block_tables(job, self._prompt_tokens, trace_level)
        elif isinstance(job, PrefillRecord):
            tables = prefill_tables(job, self._heads, trace_level)
        elif isinstance(job, np.ndarray):
            tables = []
        else:
            kept_tokens = job if trace_level == "spans" else ()
            tables = [("effect", effect_table(kept_tokens, self._heads, self.last_step() + 1))]
        con = self._con
        con.begin()
        try:
            for name, table in tables:
                if table.num_rows and (trace_level != "summary" or name not in _OF_HEADS):
                    self._insert(name, table)
            if isinstance(job, Block):
                if trace_level == "summary":
                    self._merge(dict(tables))
                con.execute("UPDATE run_state SET last_step = ?", [job.records[-1].step])
            elif isinstance(job, PrefillRecord):
                figures = {"us": job.prefill_us, "peak_bytes": job.prefill_peak_bytes}
                figures |= {"cold_bytes": job.cold_bytes, "resident_bytes": job.resident_bytes}
                self._put_meta({f"prefill_{name}": value for name, value in figures.items()})
            elif isinstance(job, np.ndarray):
                put_surprisals(con, job, self._prompt_tokens)
            con.commit()
        except BaseException:
            with contextlib.suppress(duckdb.Error):
                con.rollback()
            raise
        if isinstance(job, PrefillRecord):
            self._give_back()
        self._account(job)

    def finish(
        self, status: str, error: str | None, checks: Iterable[SelfCheck], extra: dict[str, Any], trace_level: str
    ) -> None:
        """Rollups, self-checks, final state, checkpoint."""
        rollup.rebuild(self._con)
        own_value = stored_checks(self._con) if trace_level != "summary" else []
        con = self._con
        con.begin()
        self._insert("self_check", rows_table("self_check", [*checks, *own_value]))
        self._put_meta(extra)
        con.execute("UPDATE run_state SET status = ?, error = ?", [status, clean_text(error) if error else None])
        con.commit()
        con.execute("CHECKPOINT")

    def amend(self, effects: Sequence[Effects], heads: tuple[int, int], extra: dict[str, Any]) -> None:
        """Add effects, and values of the meta, to a trace that has ended. heads: layers, KV heads."""
        table = effect_table(effects, heads, self.last_step() + 1)
        self._con.begin()
        self._insert("effect", table)
        self._put_meta(extra)
        self._con.commit()
        self._con.execute("CHECKPOINT")

    def outcome_facts(self, folder: Path) -> OutcomeFacts:
        """Read what a list of runs tells of this run, which has ended. `folder`: the run's."""
        return facts_at_end(lambda sql: self._con.execute(sql).fetchall(), folder, self._version)

    def close(self) -> None:
        """Closes the connection."""
        self._con.close()

    def _give_back(self) -> None:
        """Give back the memory of rows that are in the file: a run's keys by span are not read while it is written."""
        with contextlib.suppress(duckdb.Error):  # rows that are in the log alone stay in memory
            self._con.execute("SET memory_limit = '1MB'")
        self._con.execute("RESET memory_limit")

    def _insert(self, name: str, table: pa.Table) -> None:
        self._con.register("incoming", table)
        try:
            self._con.execute(f"INSERT INTO {name} BY NAME SELECT * FROM incoming")
        finally:
            self._con.unregister("incoming")

    def _put_meta(self, values: dict[str, Any]) -> None:
        if values:
            self._con.execute("DELETE FROM meta WHERE list_contains(?, key)", [list(values)])
            sentences = [json.dumps(plain(value), ensure_ascii=False) for value in values.values()]
            self._con.execute("INSERT INTO meta SELECT unnest(?), unnest(?)", [list(values), sentences])

    def _merge(self, tables: dict[str, pa.Table]) -> None:
        self._con.register("block_heads", tables["head_step"])
        self._con.register("block_kvs", tables["kv_step"])
        try:
            rollup.merge_block(self._con, "block_heads", "block_kvs")
        finally:
            self._con.unregister("block_heads")
            self._con.unregister("block_kvs")

    def _account(self, job: Job) -> None:
        """Keeps the totals of run.json, in the flush thread so that the engine's pays nothing."""
        if isinstance(job, PrefillRecord):
            self._prompt_tokens = len(job.tokens)
            for row in job.transfers:
                to_host = row.direction == "d2h"
                self._moved[to_host] = _added(self._moved[to_host], row.bytes)
        for record in job.records if isinstance(job, Block) else ():
            up, down = moved_bytes(record)
            self._moved = [_added(self._moved[0], up), _added(self._moved[1], down)]
            self._peak = max(self._peak, record.peak_bytes)
            if record.step >= self._asked:
                self._text.append(record.text)


def _added(total: int | None, count: int | None) -> int | None:
    """Return the sum; None if a part of it was not recorded."""
    return None if total is None or count is None else total + count
