"""The writer of a run's trace. The engine's thread copies a step into a block; a second thread writes blocks to DuckDB.

What was flushed survives the process. An error of the flush thread (a full disk) is raised as one TraceError by the
next call, after the run has been marked failed; nothing waits for a thread that cannot go on.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from kvlens.files import make_folder, write_file
from kvlens.instruments import Effects
from kvlens.meta import RunMeta
from kvlens.records import PrefillRecord, SelfCheck, StepRecord
from kvlens.store.blocks import Block, Shape
from kvlens.store.errors import MemoryShort, RunBusy, TraceError, sentence
from kvlens.store.flusher import Flusher
from kvlens.store.outcomefacts import OutcomeFacts, facts_entry
from kvlens.store.runinfo import Lease, check_uid, first_info, freeze, new_uid, now, save_prompt, write_info
from kvlens.store.schema import MASS_CODEC, SCHEMA_VERSION, TRACE_LEVELS
from kvlens.store.tracefile import TraceFile

#: A block is flushed when it is full or this old, so that a slow run loses little when it dies.
_BLOCK_AGE_S = 5.0
_RESERVE_BYTES = 64 * 1024  # room kept on disk so that a run can still be marked failed when the disk is full


class TraceWriter:
    """A ``kvlens.records.TraceSink`` that writes ``runs_dir/<uid>/``.

    `trace_level`: 'summary' keeps steps, tokens, spans, transfers, events, journal and rollups; 'heads' adds a row per
    step and head; 'spans' adds each head's top spans and rankings per step, and effects. How many spans is up to the
    records (their K). The run's `duration_s` counts from here: made before prefill, its writer times prefill, decoding
    and storing.
    """

    def __init__(
        self, runs_dir: Path, uid: str | None = None, trace_level: str = "spans", block_steps: int = 32
    ) -> None:
        if trace_level not in TRACE_LEVELS:
            raise ValueError(f"Trace level {trace_level!r} is not one of {', '.join(TRACE_LEVELS)}.")
        self.uid = check_uid(uid or new_uid())
        self.folder = Path(runs_dir) / self.uid
        self.trace_level, self.block_steps = trace_level, block_steps
        self._started = time.monotonic()
        self.stood_s = 0.0
        """how long the run has stood still for others, which is no part of its duration"""
        self._shape: tuple[int, int, int] | None = None
        self._block: Block | None = None
        self._full_shape: Shape | None = None
        self._flusher = Flusher(trace_level)
        self._n_steps = 0
        self._error: TraceError | None = None
        self._closed = False
        self._facts: OutcomeFacts | None = None

    # ---- a run, from its meta to its end -----------------------------------------------------------------------------

    def begin(self, meta: RunMeta) -> None:
        """Creates the run: folder, lease, run.json, empty trace; starts the flush thread."""
        self._shape = meta.layers, meta.q_heads, meta.kv_heads
        try:
            make_folder(self.folder)
            self._lease = Lease(self.folder)
        except OSError as error:
            why = f"The run folder {self.folder} cannot be made ({sentence(error)}); check --runs."
            raise TraceError(why) from error
        try:
            self._create(meta.to_row())
        except BaseException as error:
            self._lease.release()
            self._closed = True
            if isinstance(error, TraceError) or not isinstance(error, Exception):
                raise
            why = f"Run {self.uid} cannot be created ({sentence(error)}); check the disk and --runs."
            raise TraceError(why) from error
        self._flusher.start(self._file, f"kvlens-trace-{self.uid}", self._describe, self._write_info)

    def prefill(self, record: PrefillRecord) -> None:
        """Hands over what prefill found."""
        self._check_open()
        self._flusher.put(record)

    def step(self, record: StepRecord) -> None:
        """Copies one decode step; blocks only while all blocks wait for the disk."""
        self._check_open()
        if record.step != self._n_steps:
            self._abort(
                TraceError(
                    f"Step {record.step} was logged where step {self._n_steps} was due; log every step once, in order."
                )
            )
        block = self._block or self._next_block(record)
        try:
            block.put(record)
        except TraceError as error:
            self._abort(error)
        self._n_steps += 1
        if block.n == block.capacity or time.monotonic() - self._block_since > _BLOCK_AGE_S:
            self._block = None
            self._flusher.put(block)

    def hand_over_steps(self) -> None:
        """Hands over the steps logged so far, so that they survive the process while something is computed that takes
        its time."""
        self._check_open()
        self._hand_over_block()

    def surprisals(self, nats: np.ndarray) -> None:
        """Hands over the surprisals of the prompt's tokens, float32 [tokens], NaN: not known, where `prefill` did not
        know them. The run fails, by a later call, where the prompt has another number of tokens."""
        self._check_open()
        self._flusher.put(nats)

    def effects(self, effects: Sequence[Effects]) -> None:
        """Hands over what was found of lost steps when all steps are logged; once, before the run ends."""
        self._check_open()
        self._hand_over_block()
        self._flusher.put(tuple(effects))

    def finish(self, status: str, error: str | None, checks: list[SelfCheck], extra: dict[str, Any]) -> None:
        """Ends the run: last block, self-checks, rollups, checkpoint; afterwards its files are immutable.

        After a failure of the trace itself this raises that failure again when asked to complete, and else returns."""
        if status not in ("completed", "failed", "cancelled"):
            raise ValueError(f"A run ends completed, failed or cancelled, not {status!r}.")
        if self._closed or self._shape is None:
            if self._error is not None and status == "completed":
                raise self._error
            return
        self._check_open()
        self._hand_over_block()
        self._flusher.stop()
        self._check_open()
        try:
            self._info["status"] = "finalizing"
            self._write_info()
            self._file.finish(status, error, checks, extra | {"trace_stalls": self._flusher.stalls}, self.trace_level)
            self._facts = self._file.outcome_facts(self.folder)
        except Exception as failure:
            self._abort(self._describe(failure))
        self._close(status, error, extra)
        freeze(self.folder)

    # ---- the run's folder --------------------------------------------------------------------------------------------

    def _create(self, meta: dict[str, Any]) -> None:
        if (self.folder / "run.json").exists() or (self.folder / "trace.duckdb").exists():
            raise RunBusy(f"Run {self.uid} exists already; choose another id or delete that run.")
        save_prompt(self.folder, meta)
        meta.setdefault("created", now())
        meta |= {
            "schema_version": SCHEMA_VERSION,
            "run_uid": self.uid,
            "mass_codec": MASS_CODEC,
            "trace_level": self.trace_level,
        }
        self._info = first_info(meta)
        write_info(self.folder, self._info)
        write_file(self.folder / ".reserve", os.urandom(_RESERVE_BYTES))
        self._file = TraceFile.create(self.folder / "trace.duckdb", meta)
        self._info["status"] = "running"
        self._write_info()

    def _write_info(self, override: dict[str, Any] | None = None) -> None:
        self._info |= {
            "heartbeat": now(),
            "steps": self._flusher.stored,
            "duration_s": round(time.monotonic() - self._started - self.stood_s, 3),
            "progress": {"step": self._n_steps, "max_new": self._info.get("max_new")},
            **self._file.totals(),
            **(override or {}),
        }
        write_info(self.folder, self._info, durable=self._info["status"] not in ("created", "running"))

    def _close(self, status: str, error: str | None, extra: dict[str, Any]) -> None:
        """Last act, whatever happened before: run.json says how the run ended, the lease is free."""
        self._closed = True
        with contextlib.suppress(Exception):
            self._file.close()
        (self.folder / ".reserve").unlink(missing_ok=True)
        try:
            size = sum(path.stat().st_size for path in self.folder.iterdir() if path.is_file())
            facts = facts_entry(self._facts, self.folder / "trace.duckdb")
            self._info |= {"status": status, "error": error, "disk_bytes": size, "extra": extra, "facts": facts}
            self._write_info({"output_text": extra["output_text"]} if "output_text" in extra else {})
        except OSError as failure:
            raise self._describe(failure) from failure
        finally:
            self._lease.release()

    # ---- what is handed to the flush thread --------------------------------------------------------------------------

    def _next_block(self, record: StepRecord) -> Block:
        assert self._shape is not None
        keep = self.trace_level == "spans"
        if self._full_shape is None:
            self._full_shape = Shape(*self._shape, record.top_span.shape[-1] if keep else 0)
        full = self._full_shape
        self._block = self._flusher.block(lambda: Block(full, self.block_steps, keep), self._check_open)
        self._block_since = time.monotonic()
        return self._block

    def _hand_over_block(self) -> None:
        """The steps logged since the last full block, if any."""
        if self._block is not None and self._block.n:
            self._flusher.put(self._block)
        self._block = None

    def _describe(self, error: BaseException) -> TraceError:
        if isinstance(error, MemoryError | duckdb.OutOfMemoryException | TraceError):
            return error if isinstance(error, TraceError) else MemoryShort(self.uid, sentence(error))
        return TraceError(
            f"The trace of run {self.uid} could not be written ({sentence(error)}); free disk space or choose another "
            "runs folder, what was flushed before stays readable."
        )

    def _check_open(self) -> None:
        if self._shape is None:
            raise TraceError("The trace has not been begun; call begin() first.")
        if self._closed:
            raise self._error or TraceError(f"Run {self.uid} has ended; nothing more can be logged to it.")
        if self._flusher.error is not None:
            self._abort(self._flusher.error)

    def _abort(self, error: TraceError) -> None:
        """Marks the run failed as far as the disk allows, then raises `error`.

        What was logged before a record that does not fit is still written, and the run rolled up; after an error of the
        flush thread nothing more is.
        """
        if self._flusher.error is None:
            self._hand_over_block()
        if self._flusher.stop() and self._flusher.error is None:
            with contextlib.suppress(Exception):
                self._file.finish("failed", str(error), [], {}, self.trace_level)
        self._error = error
        with contextlib.suppress(Exception):
            self._close("failed", str(error), {})
        raise error
