"""The only way telemetry leaves the engine. The engine's thread freezes a step (a few copies); a second thread measures it and
hands the row to the sink. Nothing here changes what the run computes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from kvlens.kernels.attend import attention_weights
from kvlens.measure import Attended, Ranked, Snapshot, Zooms, alike, measure
from kvlens.memory import Memory, Selection
from kvlens.memory.ledger import Entry
from kvlens.methods.base import Method
from kvlens.rows import JournalRow, PrefillRecord, PromptToken, SelfCheck, StepRecord, TraceSink, TransferRow

MASS_TOLERANCE = 1e-3
RANKED_SPANS = 32
"""spans whose scores are logged, per (step, layer, KV head)"""
TOGETHER = 8
"""steps measured at a time, so that the second thread takes the interpreter from the engine's less often"""
TOGETHER_NUMBERS = 4_000_000
"""weights of one kind that may be in work at a time: long contexts are measured fewer steps at a time"""
IN_FLIGHT = 3
"""batches that may wait to be measured before the engine's thread has to wait"""


@dataclass
class _Seen:
    """One layer's decision, as the session showed it."""

    q: torch.Tensor
    bias: torch.Tensor | None
    scaling: float
    selection: Selection | None
    frozen: tuple[Attended, torch.Tensor] | None = None
    """taken at once where the slots are about to be overwritten in the background: the attention, and which spans were hot"""


@dataclass(frozen=True)
class StepFacts:
    """What the engine knows of a step besides the attention. Times in us since the run began."""

    step: int
    t_us: int
    dur_us: int
    token_id: int
    text: str
    logprob: float
    next_entropy: float


class Recorder:
    """Observes one session's layers and turns each step into one StepRecord.

    top_k: spans logged one by one per query head, the rest of the mass goes to the tail. coverage: also keep a copy of all keys
    (outside the budget, an instrument of its own) and log how much of full attention's mass lies on entries attended exactly.
    """

    def __init__(self, memory: Memory, method: Method, sink: TraceSink, top_k: int = 16, coverage: bool = False) -> None:
        self.memory, self.method, self.sink, self.top_k, self.coverage = memory, method, sink, top_k, coverage
        self._seen: list[_Seen] = []
        self._previous: torch.Tensor | None = None
        self._shadow: torch.Tensor | None = None
        self._tally = _Tally(memory)
        self._error: BaseException | None = None
        self._newest: tuple[Snapshot, StepRecord] | None = None
        """held back for one step, so that what the last step moved in the background still finds its record"""
        self._batch: list[tuple[Snapshot, StepRecord]] = []
        self._queue: queue.Queue[list[tuple[Snapshot, StepRecord]] | None] = queue.Queue(IN_FLIGHT)
        self._thread = threading.Thread(target=self._work, name="kvlens-recorder", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------------------------------- the engine's thread
    def layer(self, layer: int, q: torch.Tensor, bias: torch.Tensor | None, scaling: float, selection: Selection | None) -> None:
        seen = _Seen(q, bias, scaling, selection)
        if selection is not None and selection.now is not None:
            seen.frozen = self._freeze(range(layer, layer + 1), [seen]), self.memory.is_hot[layer].clone()
        self._seen.append(seen)

    def prompt_keys(self, keys: torch.Tensor, max_new: int) -> None:
        """Copy of the prompt's keys [L, H_kv, n, D] for coverage, with room for the decoded tokens."""
        if self.coverage:
            self._shadow = torch.zeros(*keys.shape[:2], keys.shape[2] + max_new, keys.shape[3], dtype=keys.dtype, device=keys.device)
            self._shadow[:, :, : keys.shape[2]] = keys

    def prefill(self, tokens: list[PromptToken], prefill_us: int, peak_bytes: int) -> None:
        """Prefill has ended and the prompt is placed."""
        memory = self.memory
        record = PrefillRecord(
            tokens, memory.spans.drain_born(), memory.drain_span_heads(), memory.ledger.drain(), memory.drain_events(), prefill_us,
            peak_bytes, memory.cold.bytes, memory.account.resident, self._journal(),
        )  # fmt: skip
        self._tally.opened(memory.ledger.opened)
        self._tally.rows(record.transfers)
        self.sink.prefill(record)

    def step(self, facts: StepFacts, position: int) -> None:
        """All layers of a step have been seen; nothing has been rearranged since. Raises what the sink raised for an earlier step."""
        began = time.perf_counter_ns()
        if self._error is not None:
            raise self._error
        shot, memory = self._snapshot(position), self.memory
        self._complete_newest()  # its copies in the background have landed before this step's attention
        account = memory.account
        self._tally.step(account.limit, account.peak)
        none = np.empty(0)
        record = StepRecord(
            facts.step, facts.t_us, facts.dur_us, memory.waited_ns // 1000, 0, facts.token_id, facts.text, facts.logprob,
            facts.next_entropy, account.resident, account.peak, memory.cold.bytes, {}, self._kv_columns(memory.ledger.opened), none,
            none, none, [], memory.drain_events(), memory.spans.drain_born(), [], memory.drain_span_heads(),
            self._journal(),
        )  # fmt: skip
        self._seen = []
        self._newest = shot, record
        record.record_us = (time.perf_counter_ns() - began) // 1000

    def _complete_newest(self) -> None:
        """Give the step before its transfers and let it be measured, in batches of a size that depends on the run's sizes alone."""
        if self._newest is None:
            return
        shot, record = self._newest
        record.transfers = self.memory.ledger.drain(record.step)
        self._tally.rows(record.transfers)
        self._batch.append((shot, record))
        self._newest = None
        if len(self._batch) >= self._together(shot):
            self._queue.put(self._batch)
            self._batch = []

    def _together(self, shot: Snapshot) -> int:
        shape = self.memory.shape
        widest = max(shot.spans, *(pool.zones.slots for pool in self.memory.hot.pools))
        if self._shadow is not None:
            widest = max(widest, self._shadow.shape[2])
        return max(1, min(TOGETHER, TOGETHER_NUMBERS // (shape.layers * shape.q_heads * widest)))

    def finish(self) -> None:
        """Wait for copies under way, measure what is in flight and end the thread. Raises what the sink raised."""
        if self._newest is not None:
            self.memory.settle()
        self._complete_newest()
        if self._batch:
            self._queue.put(self._batch)
            self._batch = []
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        if self._error is not None:
            raise self._error

    def checks(self) -> list[SelfCheck]:
        """The truths this run can check on itself, to be stored with it. Call after `finish`."""
        return self._tally.checks()

    # --------------------------------------------------------------------------------------------------------------------- freezing
    def _snapshot(self, position: int) -> Snapshot:
        seen, memory = self._seen, self.memory
        groups: list[Attended] = []
        for pool in memory.hot.pools:
            for layers, members in self._alike(pool.layers):
                groups.append(members[0].frozen[0] if members[0].frozen is not None else self._freeze(layers, members))
        q = torch.stack([s.q for s in seen]).float()
        shadow = None
        if self._shadow is not None:
            self._shadow[:, :, position] = memory.read_window(position, position + 1)[0][:, :, 0]
            shadow = self._shadow[:, :, : position + 1]
        chosen = [s.selection for s in seen]
        ranked = [None if c is None or c.score is None else Ranked(c.score, c.want) for c in chosen]
        shot = Snapshot(
            groups, q, self._previous, self._zooms(), ranked, self._columns("head_columns", memory.shape.q_heads),
            self._columns("kv_columns", memory.shape.kv_heads), shadow, seen[0].scaling, memory.spans.capacity,
        )  # fmt: skip
        self._previous = q
        return shot

    def _alike(self, layers: range) -> Iterator[tuple[range, list[_Seen]]]:
        """Runs of a pool's layers that can be frozen in one go: none frozen before, and with or without a bias alike."""
        for _, run in groupby(layers, key=lambda i: (self._seen[i].bias is None, i if self._seen[i].frozen else -1)):
            members = list(run)
            yield range(members[0], members[-1] + 1), [self._seen[i] for i in members]

    def _zooms(self) -> Zooms | None:
        """What each layer could and did read token by token; None for methods that do not zoom."""
        memory, shape = self.memory, self.memory.shape
        if all(s.selection is None or s.selection.zoomable is None for s in self._seen):
            return None
        fine = torch.zeros(shape.layers, shape.kv_heads, shape.group, memory.spans.capacity, dtype=torch.bool, device=memory.device)
        zoomable = torch.zeros(shape.layers, memory.spans.capacity, dtype=torch.bool, device=memory.device)
        hot = memory.is_hot.clone()
        for layer, s in enumerate(self._seen):
            if s.selection is not None and s.selection.zoomable is not None:
                fine[layer], zoomable[layer] = s.selection.fine, s.selection.zoomable
            if s.frozen is not None:
                hot[layer] = s.frozen[1]
        return Zooms(fine, hot[:, :, None], zoomable)

    def _columns(self, kind: str, heads: int) -> dict[str, torch.Tensor]:
        """Columns that the method itself logged, [L, heads], NaN for layers in which it did not."""
        columns: dict[str, torch.Tensor] = {}
        for layer, s in enumerate(self._seen):
            logged: dict[str, torch.Tensor] = {} if s.selection is None else getattr(s.selection, kind)
            for name, values in logged.items():
                if name not in columns:
                    columns[name] = torch.full((len(self._seen), heads), torch.nan, device=values.device)
                columns[name][layer] = values
        return columns

    def _journal(self) -> list[JournalRow]:
        step = self.memory.step
        return [
            JournalRow(step, note.layer, note.kv_head, note.name, note.values.detach().float().numpy(force=True).astype(np.float32).ravel())
            for note in self.method.drain_journal()
        ]

    def _freeze(self, layers: range, seen: list[_Seen]) -> Attended:
        pool = self.memory.hot.pool(layers.start)
        at = slice(layers.start - pool.layers.start, layers.stop - pool.layers.start)
        plain = seen[0].bias is None
        live = self.memory.live_prefix(layers.start) if plain else None
        bias = None if plain else torch.stack([s.bias for s in seen if s.bias is not None])
        weights = attention_weights(torch.stack([s.q for s in seen]), pool.keys[at, :, :live], bias, seen[0].scaling)
        tables = (table[at, :, :live].clone() for table in (pool.role, pool.span, pool.position))
        return Attended(weights, bias, *tables)

    def _kv_columns(self, opened: list[Entry]) -> dict[str, np.ndarray]:
        memory, shape = self.memory, self.memory.shape
        size = (shape.layers, shape.kv_heads)
        moved = {name: np.zeros(size) for name in ("h2d", "d2h", "blocking")}
        for entry in opened:
            at = (entry.layer,) if entry.kv_head is None else (entry.layer, entry.kv_head)
            share = entry.bytes if entry.kv_head is not None else entry.bytes // shape.kv_heads
            moved[entry.direction][at] += share
            if entry.direction == "h2d" and entry.blocking:
                moved["blocking"][at] += share
        self._tally.opened(opened)
        return {
            "h2d_bytes": moved["h2d"], "d2h_bytes": moved["d2h"], "blocking_bytes": moved["blocking"],
            "resident_bytes": self._resident(), **memory.recaller.counts,
        }  # fmt: skip

    def _resident(self) -> np.ndarray:
        """Bytes per (layer, KV head): its slots with their tables; what all share (span tables, a method's index tensors) in equal
        parts, rounded down."""
        shape, slots = self.memory.shape, np.zeros((self.memory.shape.layers, self.memory.shape.kv_heads))
        for layer in range(shape.layers):
            slots[layer] = self.memory.layout.of(layer).layer_bytes(shape) // shape.kv_heads
        shared = self.memory.account.resident - int(slots.sum())
        return slots + max(0, shared) // slots.size

    # ----------------------------------------------------------------------------------------------------------- the second thread
    def _work(self) -> None:
        torch.set_num_threads(1)  # of this thread: it must not compete with the engine's
        with torch.inference_mode():
            while (job := self._queue.get()) is not None:
                if self._error is not None:
                    continue
                try:
                    self._measure(job)
                except BaseException as error:
                    self._error = error

    def _measure(self, batch: list[tuple[Snapshot, StepRecord]]) -> None:
        for _, run in groupby(batch, key=lambda pair: alike(pair[0])):
            pairs = list(run)
            for (_, record), measured in zip(pairs, measure([shot for shot, _ in pairs], self.top_k, RANKED_SPANS), strict=True):
                record.head, record.kv = measured.head, record.kv | measured.kv
                record.top_span, record.top_mass, record.tail_mass = measured.top_span, measured.top_mass, measured.tail_mass
                record.scores = measured.scores
                self._tally.measured(measured.worst, measured.head["entropy"].size)
                self.sink.step(record)


class _Tally:
    """Counts what the self-checks compare."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.worst_mass = 0.0
        self.head_rows = self.steps = self.over_budget = 0
        self.kv_bytes, self.row_bytes = {"h2d": 0, "d2h": 0}, {"h2d": 0, "d2h": 0}

    def step(self, limit: int | None, peak: int) -> None:
        self.steps += 1
        self.over_budget += limit is not None and peak > limit

    def measured(self, worst: float, rows: int) -> None:
        self.worst_mass = max(self.worst_mass, worst)
        self.head_rows += rows

    def opened(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.kv_bytes[entry.direction] += entry.bytes

    def rows(self, rows: list[TransferRow]) -> None:
        for row in rows:
            self.row_bytes[row.direction] += row.bytes

    def checks(self) -> list[SelfCheck]:
        shape, total, limit = self.memory.shape, self.memory.ledger.total, self.memory.account.limit
        expected = self.steps * shape.layers * shape.q_heads
        moved, rows = (", ".join(f"{d} {table[d]} B" for d in ("h2d", "d2h")) for table in (total, self.row_bytes))
        checks: list[tuple[str, bool, float, Any]] = [
            ("masses add up to 1", self.worst_mass <= MASS_TOLERANCE, self.worst_mass,
             "largest |sum of masses over roles - 1| over all (step, layer, query head)"),
            ("no row is missing", self.head_rows == expected, self.head_rows, f"{expected} rows of (step, layer, query head) expected"),
            ("ledger rows equal bytes moved", self.row_bytes == total, sum(total.values()), f"moved: {moved}; rows: {rows}"),
            ("bytes per KV head equal ledger", self.kv_bytes == total, sum(self.kv_bytes.values()),
             "sums over (step, layer, KV head) and prefill against the ledger"),
            ("peak within budget", self.over_budget == 0, self.over_budget,
             "no limit was set" if limit is None else f"steps whose peak passed {limit} B"),
        ]  # fmt: skip
        return [SelfCheck(name, bool(passed), float(value), detail) for name, passed, value, detail in checks]
