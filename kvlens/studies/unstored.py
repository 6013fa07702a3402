"""Figures of a run that is not stored: what a study without traces keeps of a trial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kvlens.runs.preparing import Plan, Prepared
from kvlens.runs.readings import full_reading, reading
from kvlens.studies.means import Means, output_figures
from kvlens.studies.promptrow import StudyPrompt
from kvlens.tasks import judged
from kvlens.text.answerwords import answer_words

if TYPE_CHECKING:
    from kvlens.engine.comparison import Reference


def tell(phase: str, number: int, total: int) -> None:
    """Nobody follows the phases of a trial."""


def forced_reference(prepared: Prepared, planned: Plan, cancelled: Callable[[], bool]) -> Reference:
    """Return full KV's logits on the text that a plan is fed. Raises what the engine raises."""
    import torch

    from kvlens.engine.comparison import Reference
    from kvlens.methods.full import FullKV

    assert planned.options.forced is not None, "only forced text has such a reference"
    options, read = replace(planned.options, coverage=False), full_reading(prepared, planned, tell)
    run, parameters = prepared.engine.run, FullKV.Parameters()
    full = run(prepared.prompt, FullKV, parameters, None, options, None, tell, cancelled, keep_logits=True, read=read)
    return Reference("", planned.options.forced, torch.stack(full.logits).cpu())


def measure(
    prepared: Prepared,
    planned: Plan,
    prompt: StudyPrompt,
    cancelled: Callable[[], bool],
    reference: Reference | None = None,
) -> dict[str, Any]:
    """Run a plan and return its figures by the names of kvlens.studies.figures; without a reference there is none that
    compares with full KV. Raises what the engine raises."""
    sink, tokens, source = Means(), prepared.prompt, prompt.source
    read = reading(prepared, planned, tell) or full_reading(prepared, planned, tell)
    run = prepared.engine.run
    asked_run = (tokens, planned.method, planned.params, planned.budget, planned.options)
    result = run(*asked_run, sink, tell, cancelled, read=read, against=reference)
    means, question_tokens = sink.figures(), len(tokens.asked)
    prompt_tokens = len(tokens.ids) + question_tokens
    full = prepared.engine.loaded.shape.full_kv_bytes(len(tokens.ids) + planned.options.divided(question_tokens))
    right = None if source.answer is None else judged(source.task, source.answer, result.text, source.answers)
    cut_off = right is False and result.stopped == "length"
    figures: dict[str, Any] = {
        "outcome": answer_words(right, cut_off),
        "kinds": ["unknown" if right is None else "right" if right else "wrong", *(["cut_off"] if cut_off else [])],
        "right": right,
        "cut_off": None if right is None else cut_off,
        **output_figures(result.text),
        "prompt_tokens": prompt_tokens,
        "steps": len(result.ids) - question_tokens,
        "coverage": means["coverage"],
        "selection_recall": means["selection_recall"],
        "attended_tokens": means["attended_tokens"],
        "resident_bytes": float(result.peak_bytes),
        "resident_share": result.peak_bytes / full,
        "read_bytes_per_step": means["read_bytes_per_step"],
        "read_share": means["read_bytes_per_step"] / full,
        "moved_bytes_per_step": means["h2d_bytes_per_step"],
        "moved_share": means["h2d_bytes_per_step"] / full,
        "cold_share": means["cold_bytes"] / full,
        "offloaded_bytes_per_step": means["d2h_bytes_per_step"],
        "corrected_share": means.get("corrected_share"),
        "reused_share": means.get("reused_share"),
        "batched": result.most_rows if result.most_rows > 1 else None,
        "checks_passed": all(check.passed for check in result.checks),
    }
    losses = [loss.kl for loss in result.losses if loss is not None]
    if reference is not None:
        assert len(losses) == len(reference.ids), "every forced token is compared"
        figures |= {"kl_mean_nats": fmean(losses), "compared_steps": len(losses)}
    return {name: value for name, value in figures.items() if value is not None}
