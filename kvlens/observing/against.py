"""What an observed generation is laid beside when its block has ended: full KV's run, its attention, its choice."""

from __future__ import annotations

from pathlib import Path

from kvlens.engine.comparison import Reference
from kvlens.engine.effect import effects
from kvlens.instruments import Effects
from kvlens.observing.observer import Observer
from kvlens.observing.outcome import NextToken
from kvlens.runs.answerend import answer_end, gives_answer
from kvlens.runs.effects import UNRECORDED
from kvlens.runs.preparing import Prepared
from kvlens.runs.reference import obtain
from kvlens.runs.request import Report, RunRequest
from kvlens.shortage import shortage


def find_reference(
    prepared: Prepared, request: RunRequest, runs_dir: Path, report: Report
) -> tuple[Reference | None, str | None]:
    """Return (kvlens's own run of full KV, why there is none)."""
    try:
        return obtain(prepared, request, runs_dir, report), None
    except ValueError as refusal:
        return None, str(refusal)
    except Exception as failure:
        short = shortage(failure)
        return None, str(short) if short is not None else f"it failed ({type(failure).__name__}: {failure})"


def explain_no_full_attention(observer: Observer) -> str | None:
    """Return why no layer's full attention was recorded; None: it was."""
    if observer.copies is None:
        return "keys and values were not copied: shadow=False"
    if observer.copies.bytes:
        return None
    if observer.written[0].latent:
        return "the cache holds one compressed vector per token in place of each KV head's keys and values (MLA)"
    return "the keys of a KV head have another size than its values"


def add_full_kv_masses(prepared: Prepared, observer: Observer) -> str | None:
    """Record full KV's own attention at the sampled steps. Returns why it is missing; None: it is not."""
    if observer.copies is None or observer.oracle is None or explain_no_full_attention(observer) is not None:
        return "full attention was not recorded"
    first_step = observer.steps[0]
    exact = not first_step.kinds["rewritten"] and not first_step.kinds["nothing"] and bool(first_step.present.all())
    whole = observer.prompt_passes == 1 and exact
    try:
        return observer.waiting_steps.measure_again(prepared, observer.steps, observer.copies, whole)
    except Exception as failure:
        short = shortage(failure)
        return str(short) if short is not None else f"it failed ({type(failure).__name__}: {failure})"
    finally:
        observer.waiting_steps.discard()


def find_effects(
    prepared: Prepared, observer: Observer, rows: list[NextToken], reference: Reference
) -> tuple[Effects | None, str | None] | None:
    """Return (effects on the choice at the step of loss, why there are none); None: nothing was lost."""
    lost = next((n for n, row in enumerate(rows) if row.loss is not None and not row.loss.agrees), None)
    if lost is None or observer.pages is None:
        return None
    steps = [(row.loss, step.measured.oracle) for row, step in zip(rows[: lost + 1], observer.steps, strict=False)]
    if steps[lost][1] is None:
        return None, UNRECORDED
    loaded, prompt = prepared.engine.loaded, prepared.prompt
    try:
        read = prepared.engine.read(prompt)
        end = answer_end(loaded, prompt, reference, lost, gives_answer(loaded, prompt, reference))
        result = effects(loaded, read, reference, steps, observer.pages.rows(), end)
    except Exception as failure:
        short = shortage(failure)
        return None, str(short) if short is not None else f"it failed ({type(failure).__name__}: {failure})"
    if result is None or not len(result.effect):
        return None, "no unread span raises full KV's token"
    return result, None
