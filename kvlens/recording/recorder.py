"""The only way telemetry leaves the engine. The engine's thread freezes a step (a few copies); a second thread measures
it and hands the row to the sink. Nothing here changes what the run computes."""

from __future__ import annotations

import queue
import threading
import time

import torch

from kvlens.decisions import decisions_between
from kvlens.instruments import SpanKeys
from kvlens.memory.memory import Memory
from kvlens.memory.windowed import WindowedLayers
from kvlens.methods.base import Method, own_method
from kvlens.methods.run_inputs import RunContext
from kvlens.models.device import give_back_heap
from kvlens.recording.facts import (
    Follower,
    FullKVAttention,
    Seen,
    Settled,
    StepFacts,
    journal_rows,
    kv_columns,
    span_keys,
)
from kvlens.recording.freezing import Freezer
from kvlens.recording.layerparts import split_alike
from kvlens.recording.measure import measure, sketch
from kvlens.recording.oracle import Owners
from kvlens.recording.sampling import TOGETHER_NUMBERS, OracleSampling, steps_together
from kvlens.recording.selfcheck import Tally, check_figures
from kvlens.recording.snapshot import Snapshot
from kvlens.records import PrefillRecord, TraceSink
from kvlens.rows import EventRow, PromptToken

RANKED_SPANS = 32
"""spans whose scores are logged, per (step, layer, KV head)"""
SKETCHED_S = 0.5
"""a run that is followed shows a sketch of a step at most so often, where the second thread has time for it"""
IN_FLIGHT = 3
"""most batches that wait to be measured; then the engine waits. Where steps are large, none waits"""


class Recorder:
    """Observes one session's layers and turns each step into one StepRecord.

    top_k: spans logged one by one per query head, the rest of the mass goes to the tail. coverage: also keep all keys
    (outside the budget) and log how much of full attention's mass lies on entries attended exactly. oracle: steps and
    layers at which full attention's mass on each span is logged too; needs coverage. full_kv: and that of full KV.
    """

    def __init__(
        self,
        memory: Memory,
        windowed: WindowedLayers,
        method: Method,
        sink: TraceSink,
        tally: Tally,
        keys: torch.Tensor,
        max_new: int,
        top_k: int = 16,
        coverage: bool = False,
        oracle: OracleSampling | None = None,
        follow: Follower | None = None,
        full_kv: FullKVAttention | None = None,
        context: RunContext | None = None,
    ) -> None:
        """tally: of self-checks; keys: the prompt's [L, H_kv, n, D]; max_new: steps at most; context: of a model."""
        assert coverage or oracle is None, "full attention by span needs coverage"
        self.memory, self.method, self.sink, self.top_k, self.coverage = memory, method, sink, top_k, coverage
        self.windowed, self._rotate = windowed, (context or method.context).rotate
        self.oracle, self._follow, self._full_kv = oracle, follow, full_kv
        self.full_kv_ns = 0
        """spent by full KV so far"""
        forms = () if context is None else context.forms
        self.freezer, self._tally = Freezer(memory, windowed, not method.selects_between_steps, forms), tally
        if coverage:  # a method of others may still write in its prompt
            self.freezer.watch_keys(keys if own_method(type(method)) else keys.clone(), max_new)
        self._lost_between = 0
        """lost steps so far that `oracle` does not choose"""
        self._owners = None if oracle is None else Owners(keys.shape[2] + max_new, keys.device)
        self._prompt_keys: torch.Tensor | None = keys
        """of which means over spans are logged with the prompt"""
        self._error: BaseException | None = None
        self._newest: Seen | None = None
        """held back for one step, so that what the last step moved in the background still finds its record"""
        self._batch: list[Settled] = []
        self._sketched = -SKETCHED_S
        """when the last sketch was asked for"""
        self._positions = keys.shape[2] + max_new
        self._is_large = windowed.shape.layers * windowed.shape.q_heads * self._positions > TOGETHER_NUMBERS
        self._queue: queue.Queue[list[Settled] | Seen | None] = queue.Queue(IN_FLIGHT)
        self._thread = threading.Thread(target=self._work, name="kvlens-recorder", daemon=True)
        self._thread.start()

    # ---- the engine's thread -----------------------------------------------------------------------------------------
    def prefill(self, tokens: list[PromptToken], prefill_us: int, peak_bytes: int) -> None:
        """Prefill has ended and the prompt is placed."""
        memory = self.memory
        cuts = self.windowed.model_rows(memory.log.take_cuts())
        record = PrefillRecord(
            tokens=tokens,
            spans=memory.spans.take_new(),
            span_heads=self.windowed.model_rows(memory.log.take_stored()),
            transfers=self.windowed.model_rows(memory.take_transfers()),
            events=self._events(),
            prefill_us=prefill_us,
            prefill_peak_bytes=peak_bytes,
            cold_bytes=memory.cold_bytes,
            resident_bytes=memory.account.resident,
            journal=journal_rows(self.memory.log.step, self.windowed, self.method),
            cuts=cuts,
            span_keys=self._span_keys(),
            decisions=decisions_between(cuts, self.method.drain_decided()),
        )
        self._tally.count_entries(memory.transfers.opened)
        self._tally.rows(record.transfers)
        self.sink.prefill(record)

    def step(self, facts: StepFacts, position: int) -> None:
        """All layers of a step have been seen; nothing has been rearranged since. Raises what the sink raised for an
        earlier step."""
        began, full_kv_ns = time.perf_counter_ns(), self.full_kv_ns
        if self._error is not None:
            raise self._error
        shot, memory = self.freezer.snapshot(position), self.memory
        if self._owners is not None and (sampled := self._sampled(facts)):
            shot.owner, shot.sampled = self._owners.follow(memory.spans.rows), sampled
        self._complete_newest()  # its copies in the background have landed before this step's attention
        account = memory.account
        loss = () if facts.loss is None else (facts.loss.kl, facts.loss.logit_diff)
        self._tally.step(account.limit, account.peak, facts.logprob, facts.next_entropy, *loss)
        self._newest = Seen(
            facts=facts,
            shot=shot,
            resident_bytes=account.resident,
            peak_bytes=account.peak,
            cold_bytes=memory.cold_bytes,
            kv=kv_columns(memory, self.windowed, self._tally),
            events=self._events(),
            spans=memory.spans.take_new(),
            span_heads=self.windowed.model_rows(memory.log.take_stored()),
            journal=journal_rows(self.memory.log.step, self.windowed, self.method),
            cuts=self.windowed.model_rows(memory.log.take_cuts()),
            decided=self.method.drain_decided(),
            record_us=(time.perf_counter_ns() - began - (self.full_kv_ns - full_kv_ns)) // 1000,
        )
        if self._follow is not None:
            self._follow.note_step(self._newest)
            if self._queue.empty() and time.monotonic() - self._sketched >= SKETCHED_S:
                self._queue.put(self._newest)
                self._sketched = time.monotonic()

    def _events(self) -> list[EventRow]:
        """Return the events since the last call, those of windowed layers last."""
        return self.windowed.model_rows(self.memory.log.take_events()) + self.windowed.take_events()

    def _sampled(self, facts: StepFacts) -> tuple[int, ...]:
        """Return the layers of which a step's full attention by span is logged."""
        if self.oracle is None:
            return ()
        lost = facts.loss is not None and not facts.loss.agrees and not self.oracle.choose_layers(facts.step)
        self._lost_between += lost
        return self.oracle.choose_layers(facts.step, self._lost_between if lost else 0)

    def _span_keys(self) -> SpanKeys | None:
        keys, self._prompt_keys = self._prompt_keys, None
        return None if keys is None else span_keys(keys, self.memory.spans.rows, self._rotate)

    def _complete_newest(self) -> None:
        """Give the step before its transfers, and hand its batch over when the batch is whole."""
        if self._newest is None:
            return
        seen, self._newest = self._newest, None
        step = seen.facts.step
        moved, waited_us = self.memory.take_transfers(step), self.memory.transfers.waited_ns(step) // 1000
        settled = Settled(seen, self.windowed.model_rows(moved), waited_us)
        self._tally.rows(settled.transfers)
        self._batch.append(settled)
        if len(self._batch) >= self._together(seen.shot):
            self._hand_over()

    def _hand_over(self) -> None:
        """Let the batch be measured, with full KV's own attention where it is asked for."""
        if self._full_kv is not None:
            start_ns = time.perf_counter_ns()
            tokens = [settled.seen.facts.token_id for settled in self._batch]
            shots = [settled.seen.shot for settled in self._batch]
            for shot, rows in zip(shots, self._full_kv.attention(tokens, [s.sampled for s in shots]), strict=True):
                shot.reference = rows
            self.full_kv_ns += time.perf_counter_ns() - start_ns
        if self._is_large:
            self._queue.join()
        self._queue.put(self._batch)
        self._batch = []

    def _together(self, shot: Snapshot) -> int:
        """Return how many steps are measured at a time, by the sizes of the run alone."""
        slots = 0 if shot.keys is not None else max((p.zones.slots for p in self.memory.hot.pools), default=0)
        every = None if self._full_kv is None or self.oracle is None else self.oracle.every
        return steps_together(self.windowed.shape, self._positions, slots, shot.spans, every)

    def finish(self) -> None:
        """Wait for copies under way, measure what is in flight and end the thread. Raises what the sink raised."""
        if self._newest is not None:
            self.memory.settle()
        self._complete_newest()
        if self._batch:
            self._hand_over()
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        if self._error is not None:
            raise self._error

    # ---- the second thread -------------------------------------------------------------------------------------------
    def _work(self) -> None:
        torch.set_num_threads(1)  # of this thread: it must not compete with the engine's
        with torch.inference_mode():
            while (job := self._queue.get()) is not None:
                try:
                    if self._error is None:
                        self._take(job)
                except BaseException as error:
                    self._error = error
                finally:
                    del job  # or it lasts until the next comes
                    if self._is_large:
                        give_back_heap()
                    self._queue.task_done()

    def _take(self, job: list[Settled] | Seen) -> None:
        if isinstance(job, list):
            self._measure(job)
        elif self._follow is not None:
            self._follow.sketched(job.facts.step, *sketch(job.shot))

    def _measure(self, batch: list[Settled]) -> None:
        shots = [settled.seen.shot for settled in batch]
        for run in split_alike(shots):
            for number, measured in zip(
                run, measure(shots[run.start : run.stop], self.top_k, RANKED_SPANS), strict=True
            ):
                self._tally.count_step(measured, len(shots[number].sampled))
                record = batch[number].record(measured)
                check_figures(self.method.name, record)
                self.sink.step(record)
