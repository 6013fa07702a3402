"""An observed generation that becomes a stored run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvlens.engine.comparison import Reference
from kvlens.engine.objects import lent
from kvlens.meta import Outcome, RunMeta
from kvlens.metaparts import OBSERVED, Observed
from kvlens.observing.against import add_full_kv_masses, explain_no_full_attention, find_effects, find_reference
from kvlens.observing.checks import self_checks
from kvlens.observing.observer import Observer
from kvlens.observing.options import Options
from kvlens.observing.outcome import NextToken, conclude, next_tokens
from kvlens.observing.preparing import describe_caller, prepare_observed, prompt_of
from kvlens.observing.taken import Taken
from kvlens.records import PrefillRecord, StepRecord
from kvlens.rows import PromptToken
from kvlens.runs.preparing import Pairing, Prepared, plan, reference_key
from kvlens.runs.request import Report, RunRequest
from kvlens.runs.trace import describe
from kvlens.store.reader import TraceReader
from kvlens.store.writer import TraceWriter
from kvlens.text.plaintext import TokenStream
from kvlens.text.prompts import Prompt

DRAWN: dict[str, Any] = {"temperature": None, "top_p": None, "seed": None}
"""of a generation that drew its tokens: kvlens does not see with which values"""
COUNTED = ("exact", "rotated", "rewritten", "ambiguous")


@dataclass(frozen=True)
class Block:
    """What the caller's block was asked to record, and what was heard of it."""

    model: Any
    tokenizer: Any
    options: Options
    attention: str
    presses: list[str] = field(default_factory=list)
    sampled: bool | None = None


def store_observed(observer: Observer, block: Block, runs_dir: Path, error: str | None, report: Report) -> str:
    """Store what was observed -> the run's uid. error: why the block ended early; None: it came to its end.

    Raises CannotObserve where nothing was observed, BadPrompt for a needle that is not in the prompt, the store's
    TraceError.
    """
    options = block.options
    loaded, refusal = describe_caller(block.model, block.tokenizer, options.name)
    prompt = prompt_of(observer, block.tokenizer, options.answer, options.needle)
    prepared, request = prepare_observed(loaded, prompt, [step.token for step in observer.steps])
    with lent(loaded):
        reference, no_reference = None, refusal or (None if options.compare else "the comparison was switched off")
        if no_reference is None:
            reference, no_reference = find_reference(prepared, request, runs_dir, report)
        rows = next_tokens(loaded, prompt, observer.steps, reference)
        no_masses = no_reference if reference is None else add_full_kv_masses(prepared, observer)
        lost = None if reference is None else find_effects(prepared, observer, rows, reference)
    output = loaded.decode([step.token for step in observer.steps[len(prompt.asked) :]])
    whatif = None
    if options.parent is not None and reference is not None:
        losses, changed = [row.loss for row in rows], (options.holds, options.drops)
        whatif = conclude(options.parent, loaded, prompt, losses, output, reference, *changed)
    writer = TraceWriter(runs_dir)
    writer.begin(_meta(observer, block, prepared, request, reference, no_reference))
    writer.prefill(_prefill(observer, prompt, _surprisals(runs_dir, reference)))
    stream = TokenStream(block.tokenizer.decode)
    for number, (step, row) in enumerate(zip(observer.steps, rows, strict=True)):
        writer.step(_step(observer, number, step, row, stream.text(step.token)))
    made, no_effects = (None, None) if lost is None else lost
    if made is not None:
        writer.effects([made])
    ended = Outcome(
        output_text=output,
        stopped="eos" if observer.steps[-1].token in loaded.eos else None,
        no_effects=no_effects,
        effect_steps=() if made is None else made.steps,
        effect_order=() if made is None else made.order,
        no_reference_masses=no_masses,
        no_surprisal=None if reference is not None else "there is no full-KV run that computed them",
        kernels=block.attention,
        whatif=whatif,
    )
    writer.finish("failed" if error else "completed", error, self_checks(observer, rows, loaded), ended.to_row())
    return writer.uid


def _meta(
    observer: Observer,
    block: Block,
    prepared: Prepared,
    request: RunRequest,
    reference: Reference | None,
    no_reference: str | None,
) -> RunMeta:
    uid = None if reference is None else reference.uid
    parent = None if block.options.parent is None else block.options.parent.uid
    key = reference_key(request, prepared)
    pairing = Pairing(reference, uid, key, parent, block.options.holds, block.options.drops)
    meta = describe(request, plan(request, prepared), pairing, prepared)
    kinds = {name: int(sum(step.kinds[name] for step in observer.steps)) for name in COUNTED}
    missing = explain_no_full_attention(observer)
    observed = Observed(
        cache=observer.cache_name or None,
        presses=tuple(block.presses),
        attention=block.attention,
        shadow_bytes=0 if observer.copies is None else observer.copies.bytes,
        entries=kinds | {"unmatched": int(sum(step.kinds["nothing"] for step in observer.steps))},
        unmatched_mass=float(np.mean([step.kinds["unmatched"] for step in observer.steps])),
        largest_error=max(step.kinds["error"] for step in observer.steps),
        windowed_layers=tuple(sorted(observer.windowed)),
        row=observer.row,
        padding=observer.pads or 0,
        sampled=block.sampled,
        stopped=observer.stopped,
        no_reference=no_reference,
        no_full_attention=missing,
    )
    config = {"cache": observer.cache_name, "presses": list(block.presses), "attention": block.attention}
    return meta.model_copy(
        update={
            "method": OBSERVED,
            "preset": None,
            "fit": None,
            "config": config,
            "own_decisions": {},
            "stand_in": None,
            "budget": None,
            "budget_bytes": None,
            "link": None,
            "kernels": block.attention,
            "coverage": missing is None,
            "oracle": None if observer.oracle is None or missing is not None else observer.oracle.meta(),
            "max_new": None,
            **({} if block.sampled is False else DRAWN),
            **({"full_kv_bytes": None} if observer.written[0].unsized else {}),
            "observed": observed,
        }
    )


def _surprisals(runs_dir: Path, reference: Reference | None) -> list[float | None] | None:
    """Return the surprisals of the prompt's tokens as the full-KV run has them; None: not known."""
    if reference is None:
        return None
    with TraceReader.open(runs_dir, reference.uid) as reader:
        tokens = reader.tokens()
    column = tokens[tokens["step"].isna()].sort_values("pos")["surprisal"]
    return [None if value != value else float(value) for value in column]


def _prefill(observer: Observer, prompt: Prompt, surprisals: list[float | None] | None) -> PrefillRecord:
    assert observer.pages is not None
    nats = surprisals or [None] * len(prompt.ids)
    tokens = [
        PromptToken(pos, token, piece, offset[0] if offset else None, offset[1] if offset else None, nats[pos])
        for pos, (token, piece, offset) in enumerate(zip(prompt.ids, prompt.pieces, prompt.offsets, strict=True))
    ]
    first = observer.steps[0]
    return PrefillRecord(
        tokens=tokens,
        spans=observer.pages.rows(),
        span_heads=[],
        transfers=[],
        events=observer.pages.opened(),
        prefill_us=first.start_us + first.took_us,
        prefill_peak_bytes=first.peak,
        cold_bytes=first.elsewhere,
        resident_bytes=sum(first.held),
    )


def _step(observer: Observer, number: int, step: Taken, row: NextToken, text: str) -> StepRecord:
    shape, measured = observer.shape, step.measured
    resident = np.array(step.held, float)[:, None] / shape.kv_heads
    return StepRecord(
        step=number,
        t_us=step.start_us,
        dur_us=step.took_us,
        wait_us=None,
        record_us=step.record_us,
        token_id=step.token,
        text=text,
        logprob=row.logprob,
        next_entropy=row.entropy,
        resident_bytes=sum(step.held),
        peak_bytes=max(step.peak, sum(step.held)),
        cold_bytes=step.elsewhere,
        head=measured.head,
        kv=measured.kv | {"resident_bytes": np.floor(np.broadcast_to(resident, (shape.layers, shape.kv_heads)))},
        top_span=measured.top_span,
        top_mass=measured.top_mass,
        tail_mass=measured.tail_mass,
        tells_transfers=False,
        events=step.events,
        loss=row.loss,
        oracle=measured.oracle,
    )
