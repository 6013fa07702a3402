"""Reading a finished run. No torch, no Streamlit; see ``attach.py`` for what keeps a foreign file from doing harm.

'Not recorded' is NaN (None in text columns), never 0. Every method returns a fresh frame or array.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa

from kvlens.rows import HEAD_COLUMNS, KV_COLUMNS
from kvlens.store import headqueries, queries
from kvlens.store.about import About, read_about
from kvlens.store.attach import attach, check_trace, read_meta, stored_steps
from kvlens.store.catalog import derived_status, list_runs
from kvlens.store.errors import RunBusy, RunNotFound, SchemaTooNew, TraceError, UnreadableRun
from kvlens.store.lensrecords import LensRecords
from kvlens.store.memoryrecords import MemoryRecords
from kvlens.store.methodrecords import MethodRecords
from kvlens.store.outcomefacts import OutcomeFacts, read_facts, read_prompt
from kvlens.store.rollup import head_run_sql, kv_run_sql
from kvlens.store.runinfo import read_info, run_dir
from kvlens.store.session import Session
from kvlens.store.sizerecords import SizeRecords
from kvlens.store.spanrecords import SpanRecords
from kvlens.store.versions import source

__all__ = ["RunBusy", "RunNotFound", "SchemaTooNew", "TraceError", "TraceReader", "UnreadableRun", "list_runs", "stamp"]


def stamp(runs_dir: Path, uid: str) -> int:
    """Return when a run's trace was last changed, ns; 0 when there is none, in which case opening it says what is
    wrong."""
    try:
        return (runs_dir / uid / "trace.duckdb").stat().st_mtime_ns
    except (OSError, ValueError):
        return 0


class TraceReader(SizeRecords, SpanRecords, MethodRecords, MemoryRecords, LensRecords):
    """A run that is not being written any more. Safe to use from several threads."""

    session: type[Session] = Session
    """through which results come"""
    stamp = 0
    """`stamp` of the run's folder before the trace was opened: what is kept of this reader is of that trace, also where
    another has taken its place since"""

    def __init__(self, con: duckdb.DuckDBPyConnection, folder: Path) -> None:
        self._db, self._folder, self.uid = self.session(con, folder.name), folder, folder.name
        self.meta = read_meta(con, self.uid)
        self.n_layers: int = self.meta.layers
        self.q_heads: int = self.meta.q_heads
        self.kv_heads: int = self.meta.kv_heads
        self.status, self.n_steps, self.error = stored_steps(con, self.uid)
        check_trace(con, folder / "trace.duckdb", self.meta, self.n_steps)
        self._summary_only = self.meta.trace_level == "summary"
        self._read_status()

    @classmethod
    def open(cls, runs_dir: Path, uid: str) -> Self:
        """Opens run `uid`, or raises a TraceError that says in one sentence why not."""
        changed = stamp(Path(runs_dir), uid)
        con = attach(Path(runs_dir), uid)
        try:
            reader = cls(con, run_dir(runs_dir, uid))
        except BaseException:
            con.close()
            raise
        reader.stamp = changed
        return reader

    def _read_status(self) -> None:
        """run.json knows of an end that the file could not be told of (a full disk)."""
        try:
            info = read_info(self._folder)
        except UnreadableRun:
            self.status = derived_status(self._folder, self.status)
            return
        self.status = derived_status(self._folder, info["status"])
        self.error = info.get("error") or self.error

    @property
    def runs_dir(self) -> Path:
        """The folder of runs that it lies in."""
        return self._folder.parent

    @property
    def trace_bytes(self) -> int:
        """Bytes of the trace's file."""
        return (self._folder / "trace.duckdb").stat().st_size

    def close(self) -> None:
        """Lets go of the file; the reader is of no use afterwards."""
        self._db.close()

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def about(self) -> About:
        """What somebody calls the run and says of it."""
        return read_about(self._folder)

    def batches(self, sql: str) -> pa.RecordBatchReader:
        """The stream of Arrow batches that an export writes; `sql` comes from ``queries``."""
        return self._db.batches(sql)

    def _has_rollup(self) -> bool:
        """False for a run that failed before its end; then the rows themselves are asked."""
        return bool(self._db.rows(queries.HAS_ROLLUP)[0][0])

    # ---- small tables ------------------------------------------------------------------------------------------------

    def tokens(self) -> pd.DataFrame:
        """Prompt and generated tokens by position; `step` is NaN for the prompt."""
        return self._db.frame(queries.TOKENS)

    def steps(self) -> pd.DataFrame:
        """One row per decode step."""
        return self._db.frame(queries.STEPS)

    def self_checks(self) -> pd.DataFrame:
        """What the run checked about itself."""
        return self._db.frame(queries.SELF_CHECKS)

    def span_heads(self, layer: int | None = None, kv_head: int | None = None) -> pd.DataFrame:
        """How spans lie in the cold tier."""
        return self._db.frame(queries.SPAN_HEADS, layer=layer, kv_head=kv_head)

    def prompt_text(self) -> str:
        """The prompt as text; empty when it was not kept."""
        return read_prompt(self._folder)

    def outcome_facts(self) -> OutcomeFacts:
        """What a list of runs tells of this run."""
        return read_facts(self._db.rows, source, self.meta, self.prompt_text())

    def transfers(self, step: int | None = None, layer: int | None = None, kv_head: int | None = None) -> pd.DataFrame:
        """Copies between tiers; a copy for all KV heads of a layer belongs to each of them."""
        return self._db.frame(queries.TRANSFERS, step=step, layer=layer, kv_head=kv_head)

    def events(self, step: int | None = None, layer: int | None = None, kv_head: int | None = None) -> pd.DataFrame:
        """Events; one without a layer or KV head belongs to each of them."""
        return self._db.frame(
            queries.EVENTS, step=step, layer=layer, kv_head=kv_head, group=self.q_heads // self.kv_heads
        )

    def transfer_times(self) -> pd.DataFrame:
        """Per step, direction and cause: bytes, of these blocking_bytes, number n of copies, moving_us (durations of
        the copies added up; they may overlap, and one that several lines share counts once), wait_us (how long the
        engine stood still for them). Step -1 is the end of prefill."""
        return self._db.frame(queries.TRANSFER_TIMES)

    # ---- heads -------------------------------------------------------------------------------------------------------

    def metrics(self) -> list[str]:
        """Head metrics with any value."""
        return self._recorded("head_run" if self._summary_only else "head_step", HEAD_COLUMNS)

    def kv_metrics(self) -> list[str]:
        """KV-head metrics with any value."""
        return self._recorded("kv_run" if self._summary_only else "kv_step", KV_COLUMNS)

    def _recorded(self, table: str, columns: tuple[str, ...]) -> list[str]:
        make = headqueries.recorded_rollup if table.endswith("_run") else headqueries.recorded
        counts = self._db.rows(make(table, columns))[0]
        return [name for name, count in zip(columns, counts, strict=True) if count]

    def head_cube(self, metric: str) -> np.ndarray:
        """float32 [steps, layers, query heads]; all NaN at trace level 'summary'."""
        headqueries.column(metric, HEAD_COLUMNS)
        return self._cube("head_step", "q_head", metric, self.q_heads)

    def kv_cube(self, metric: str) -> np.ndarray:
        """float32 [steps, layers, KV heads]."""
        headqueries.column(metric, KV_COLUMNS)
        return self._cube("kv_step", "kv_head", metric, self.kv_heads)

    def _cube(self, table: str, head: str, metric: str, heads: int) -> np.ndarray:
        shape = (self.n_steps, self.n_layers, heads)
        sql = headqueries.cube(table, head, metric)
        return self._db.fill(self.n_steps * self.n_layers * heads, sql, layers=self.n_layers, heads=heads).reshape(
            shape
        )

    def head_summary(self, metric: str, start: int = 0, stop: int | None = None, agg: str = "mean") -> np.ndarray:
        """float32 [layers, query heads]: a metric over steps [start, stop)."""
        headqueries.column(metric, HEAD_COLUMNS)
        if agg not in headqueries.AGGREGATES:
            raise ValueError(f"{agg!r} is not an aggregate; there are {', '.join(headqueries.AGGREGATES)}.")
        first_item, last = self._range(start, stop)
        size = self.n_layers * self.q_heads
        if (first_item, last) == (0, self.n_steps) and self._has_rollup():
            flat = self._db.fill(size, headqueries.head_summary_rollup(metric, agg), heads=self.q_heads)
        else:
            flat = self._db.fill(
                size, headqueries.head_summary(metric, agg), heads=self.q_heads, start=first_item, stop=last
            )
        return flat.reshape(self.n_layers, self.q_heads)

    def head_table(self, start: int = 0, stop: int | None = None) -> pd.DataFrame:
        """Statistics per query head over steps [start, stop), the table that is exported. At trace level 'summary' only
        the whole run is known: any other range raises TraceError."""
        first_item, last = self._range(start, stop)
        values: dict[str, Any] = {"uid": self.uid, "method": str(self.meta.method), "model": str(self.meta.model)}
        whole = (first_item, last) == (0, self.n_steps)
        if self._summary_only and not whole:
            raise TraceError(
                f"Run {self.uid} was recorded at trace level 'summary', which keeps whole-run statistics only."
            )
        if whole and self._has_rollup():
            return self._db.frame(headqueries.head_table(source("head_run"), source("kv_run")), **values)
        part = "(SELECT * FROM {} WHERE step >= $start AND step < $stop)"
        sql = headqueries.head_table(
            head_run_sql(part.format(source("head_step"))), kv_run_sql(part.format(source("kv_step")))
        )
        return self._db.frame(sql, start=first_item, stop=last, **values)

    def head_timeline(self, layer: int, q_head: int) -> pd.DataFrame:
        """All that is known of one query head and of its KV head, by step."""
        kv_head = q_head // (self.q_heads // self.kv_heads)
        return self._db.frame(queries.HEAD_TIMELINE, layer=layer, q_head=q_head, kv_head=kv_head)
