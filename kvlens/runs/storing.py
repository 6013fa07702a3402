"""Runs that become stored traces."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlens.meta import Outcome
from kvlens.metaparts import Counterfactual
from kvlens.models.device import give_back_heap
from kvlens.records import SelfCheck
from kvlens.refusal import Refusal
from kvlens.runs.effects import Lost
from kvlens.runs.modelcheck import EQUAL, MODEL_CHECK, UNCHECKED, ModelCheck
from kvlens.runs.preparing import Pairing, Plan, Prepared
from kvlens.runs.readings import full_reading, reading
from kvlens.runs.request import Report, RunRequest
from kvlens.runs.trace import LateSink, Watcher, add_surprisals, describe
from kvlens.shortage import shortage
from kvlens.store.amend import PENDING, amend, outstanding

if TYPE_CHECKING:
    from kvlens.engine.engine import Result
    from kvlens.engine.prefill import ReadPrompt


@dataclass(frozen=True)
class Stored:
    """A run that has been stored."""

    uid: str
    status: str
    text: str
    result: Result | None
    """None: cancelled"""


def store(
    prepared: Prepared,
    request: RunRequest,
    planned: Plan,
    pairing: Pairing,
    runs_dir: Path,
    report: Report,
    cancelled: Callable[[], bool],
    conclude: Callable[[Result], Counterfactual | None] = lambda result: None,
    keep_logits: bool = False,
    watcher: Watcher | None = None,
    raced: int | None = None,
    early: Callable[[Stored], None] | None = None,
) -> Stored:
    """Run and store. `conclude`: what a counterfactual changed, from what came out, before the trace is closed. While
    `cancelled` is asked between steps the run stands still, and the time is not its own. early: called when the run is
    stored and its effects are not yet; they are added then. None: the run is stored with its effects.

    Raises ValueError when nothing could be decoded; nothing is stored then. Raises Shortage when the machine has too
    little memory or lacks a feature: the run is stored as failed then. Raises the store's TraceError when the trace
    cannot be written.
    """
    from kvlens.engine.engine import Cancelled
    from kvlens.store.writer import TraceWriter

    engine, prompt = prepared.engine, prepared.prompt
    in_company = bool(raced) or engine.seat is not None
    writer = TraceWriter(runs_dir, trace_level=request.trace_level)
    lost = None if pairing.reference is None or request.trace_level != "spans" else Lost(pairing.reference)
    sink = LateSink(writer, describe(request, planned, pairing, prepared), watcher, lost)
    status, error, checks = "completed", None, []
    outcome: Outcome | None = None
    result: Result | None = None
    phases = ["prefill"]  # the one that was reported last
    later, waiting = False, contextlib.ExitStack()

    def tell(phase: str, finished: int, total: int) -> None:
        phases[0] = phase
        report(phase, finished, total)

    def requested() -> bool:
        start_time = time.monotonic()
        stop = cancelled()
        writer.stood_s += time.monotonic() - start_time
        return stop

    def check() -> None:
        if requested():
            raise Cancelled

    def follow(phase: str, finished: int, total: int) -> None:
        check()
        tell(phase, finished, total)

    try:
        read = reading(prepared, planned, follow) if prepared.keeps_reading else None
        full, no_full = _full_kv(prepared, planned, pairing, follow)
        give_back_heap()
        result = engine.run(
            prompt,
            planned.method,
            planned.params,
            planned.budget,
            planned.options,
            sink,
            tell,
            requested,
            keep_logits,
            read=read or full,
            against=pairing.reference,
            holds=pairing.holds,
            follow=watcher,
            drops=pairing.drops,
        )
        writer.hand_over_steps()  # who kills the run during what follows loses none of them
        if watcher is not None:
            requested()  # lanes of a race that still decode go on before this one explains
        checks, kept_tokens = result.checks, read is not None and read.kept
        no_surprisal, start_time = None, time.monotonic()
        if sink.surprisals_wait:
            no_surprisal = add_surprisals(result.surprisal, writer, follow, tell)
        surprisal_s = time.monotonic() - start_time
        peak = None if in_company else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if read is not None:
            read.learned(result.surprisal)
        no_effects, effects, effect_s = None, None, None
        reader = read if full is None else lambda: full
        later = early is not None and lost is not None and lost.any
        if later:
            no_effects = PENDING
            waiting.enter_context(outstanding(writer.folder))
        elif lost is not None and lost.any:
            start_time, stood = time.monotonic(), writer.stood_s
            report("effect", 0, 1)
            effects, no_effects = lost.effects(prepared, planned, pairing, reader, follow, check)
            if effects is not None:
                writer.effects([effects])
            effect_s = time.monotonic() - start_time
            writer.stood_s = stood + effect_s
        outcome = Outcome(
            output_text=result.text,
            stopped=result.stopped,
            load_s=None if prepared.load_s is None else round(prepared.load_s, 4),
            prefill_s=None if kept_tokens else round(result.prefill_s, 4),
            second_tokens=result.second_reading[0] or None,
            second_s=round(result.second_reading[1], 4) if result.second_reading[0] else None,
            prompt_kept=kept_tokens,
            decode_s=round(result.decode_s, 4),
            surprisal_s=round(surprisal_s, 4) if sink.surprisals_wait and not in_company else None,
            no_surprisal=no_surprisal,
            process_peak_bytes=peak,
            unannounced_bytes=result.unannounced_bytes,
            kernels=result.kernels,
            link_host_wait_s=None if in_company else round(result.link_host_wait_s, 6),
            whatif=conclude(result),
            raced=raced,
            batched=result.most_rows if result.most_rows > 1 else None,
            no_effects=no_effects,
            full_kv_s=None if result.full_kv_s is None else round(result.full_kv_s, 4),
            no_reference_masses=no_full or result.no_full_kv,
            effect_steps=() if effects is None else effects.steps,
            effect_order=() if effects is None else effects.order,
            effect_s=None if effect_s is None or in_company else round(effect_s, 4),
        )
    except Cancelled as stopped:
        status, error, checks = "cancelled", "Cancelled by the user.", stopped.checks
    except Exception as failure:
        waiting.close()
        short = shortage(failure, "decode" if sink.begun else phases[0])
        if short is not None:
            sink.begin_anyhow()  # the prompt was right and the machine too small: that is a run that failed
        if sink.begun:
            sentence = f"{type(failure).__name__}: {failure}" if short is None else str(short)
            writer.finish("failed", sentence, [], {"output_text": sink.text()})
        if short is not None:
            raise short from failure
        raise
    except BaseException:
        waiting.close()
        raise
    if not sink.begun:
        raise Refusal("cancelled before anything was decoded.", code="cancelled")
    with waiting:
        report("store", 0, 1)
        checks = [*checks, *_model_checks(prepared.model_check)]
        ended = outcome or Outcome(output_text=sink.text())
        writer.finish(status, error, checks, ended.to_row())
        report("store", 1, 1)
        stored = Stored(writer.uid, status, ended.output_text or "", result)
        if later and early is not None and lost is not None and status == "completed":
            early(stored)
            report("effect", 0, 1)
            start_time = time.monotonic()
            effects, no_effects = lost.effects(prepared, planned, pairing, reader, follow, check)
            shape = engine.loaded.shape
            heads = shape.layers, shape.kv_heads
            amend(writer.folder, effects, heads, no_effects, time.monotonic() - start_time)
    return stored


def _full_kv(
    prepared: Prepared, planned: Plan, pairing: Pairing, follow: Callable[[str, int, int], None]
) -> tuple[ReadPrompt | None, str | None]:
    """(full KV's reading of the prompt, for a run that leaves it none and records full KV's own masses; why there is
    none where it could not be read). Raises what `follow` raises to stop."""
    from kvlens.engine.engine import Cancelled

    if pairing.reference is None or not planned.method.needs_with(planned.params).reading:
        return None, None
    if prepared.engine.sampling(prepared.prompt, planned.options) is None:
        return None, None
    try:
        return full_reading(prepared, planned, lambda phase, count, total: follow("reference", count, total)), None
    except Cancelled:
        raise
    except Exception as failure:
        short = shortage(failure)
        return None, str(short) if short is not None else f"it failed ({type(failure).__name__}: {failure})"


def _model_checks(model_check: ModelCheck | None) -> list[SelfCheck]:
    """The self-check of the model, where it was compared with its own generate."""
    if model_check is None or model_check.verdict == UNCHECKED:
        return []
    passed = model_check.verdict == EQUAL
    return [SelfCheck(MODEL_CHECK, passed, float(model_check.compared), model_check.sentence)]
