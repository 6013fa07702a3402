"""The counterfactual: a stored run is repeated with spans held exactly, or not attended, for some heads, or asked for
with another budget or other parameters, everything else as it was.

It says what became of the step of loss and of the answer, and can look for the fewest heads, or the fewest bytes, that
bring the answer back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvlens.finer import parse_finer
from kvlens.holds import Drop, Hold, apart, less
from kvlens.lens.cheapest import fewest_bytes
from kvlens.lens.fewest import Fewest
from kvlens.lens.fewest_bits import fewest_bits, with_room
from kvlens.lens.hold_changes import check_steps
from kvlens.lens.knob import attending_change
from kvlens.lens.question import Question
from kvlens.lens.search import Head, SearchResult
from kvlens.lens.span_parts import recut
from kvlens.lens.trial_request import TrialRequest, drops_for, holds_for, numbers
from kvlens.lens.trials import Trials
from kvlens.metaparts import Counterfactual, Tested
from kvlens.metaparts import Search as SearchMeta
from kvlens.refusal import Refusal
from kvlens.runs.preflight import refuse
from kvlens.runs.readings import reading, shared
from kvlens.runs.repeat import Past, read_run, reload
from kvlens.runs.request import BY_NAME, ModelSource, Report

if TYPE_CHECKING:
    from kvlens.engine.comparison import Reference
    from kvlens.engine.engine import Result
    from kvlens.runs.preparing import Plan, Prepared
    from kvlens.runs.storing import Stored
    from kvlens.runs.watching import Audience


def _nobody(line: str) -> None:
    """Nobody asked what is being tried."""


def whatif(
    runs_dir: Path,
    uid: str,
    change: TrialRequest,
    report: Report,
    cancelled: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = _nobody,
    models: ModelSource = BY_NAME,
    audience: Audience | None = None,
) -> tuple[Stored, Counterfactual | None]:
    """Carry it out and store the repeat -> (the run, what it changed, which is also its meta's `whatif`; None where it
    was cancelled). say(line): what a search is trying, and which parameters a changed run has. audience: sees the
    repeat, as a race of one, once it is known what is held.

    The run is free or forced as the run it repeats, and has its holds and drops, but for what is now asked to be the
    other. Raises ValueError or TraceError, one sentence, when it cannot be
    repeated, or not so.
    """
    from kvlens.runs.lanes import SingleRun
    from kvlens.runs.preparing import Pairing, plan, reference_key
    from kvlens.runs.reference import obtain
    from kvlens.runs.storing import store

    changed = dict(change.changed)
    for name in (name for name, value in changed.items() if not value.strip()):
        option = "--budget" if name == "budget" else f"--set {name}="
        raise ValueError(f"{option} has no value: say what it is to be, or leave it out to keep the run's own.")
    past = read_run(runs_dir, uid)
    changed = attending_change(past.request.method, changed)
    heads, holds = _holds(past, change, bool(changed))
    drops = drops_for(past, change)
    apart(holds, drops)
    check_steps(holds, past.request.drop)
    check_steps(drops, past.request.hold)
    grows = "finer" in changed and "budget" not in changed
    request = past.request if grows else past.otherwise(changed)
    if changed and models.named and not grows:
        refuse(request.model_copy(update={"against": True}), past.source)
    if grows:
        parse_finer(changed["finer"])
    prepared = reload(past, report, models)
    prepared = shared(prepared, plan(request, prepared))
    reference = obtain(prepared, past.request, runs_dir, report, cancelled)
    base_trials = changed_trials = trials_of(prepared, plan(past.request, prepared), reference, past, report)
    if grows:
        changed |= with_room(base_trials, changed["finer"])
        request = past.with_finer(changed)
    if changed or drops:
        planned = plan(request, prepared)
        if changed and planned.chosen.said:
            say(planned.chosen.said)
        changed_trials = trials_of(prepared, planned, reference, past, report, drops)
    question = Question.about(past, base_trials, changed_trials, report)
    search: SearchMeta | None = None
    if change.bits is not None:
        search, changed = fewest_bits(question, past, change.bits, report, say, cancelled)
        request = past.with_finer(changed)
        changed_trials = trials_of(prepared, plan(request, prepared), reference, past, report)
        question = replace(question, trials=changed_trials, _losses={})
    elif changed and (change.search or change.fewest is not None) and question.needless(past, cancelled):
        search, holds = SearchMeta(tried=1, most=change.fewest, needless=True), ()
    elif change.fewest is not None:
        fewest, holds = fewest_bytes(question, past, change.from_step, change.fewest, report, say, cancelled)
        search = _bytes_found(fewest, change.fewest)
    elif change.search:
        search_result = question.fewest_heads(
            past, lambda triples: holds_for(past, change, triples, frozenset(triples)), heads, report, cancelled
        )
        search = _heads_found(search_result)
        if search_result.heads:
            holds = holds_for(past, change, search_result.heads, frozenset(search_result.heads))
    request_holds, left_out = less(request.hold, drops), (*less(request.drop, holds), *drops)
    if changed and (request_holds or holds or left_out):
        rows = changed_trials.spans(holds, past.forced)
        request_holds, holds = recut(Hold, request_holds, rows), recut(Hold, holds, rows)
        left_out = recut(Drop, left_out, rows)
    updates = {"against": True, "forced_reference": past.forced, "hold": (*request_holds, *holds), "drop": left_out}
    request = request.model_copy(update=updates)
    key = reference_key(request, prepared)
    pairing = Pairing(reference, reference.uid, key, uid, request.hold, request.drop, changed)
    answers: list[Counterfactual] = []

    def conclude(result: Result) -> Counterfactual:
        answers.append(question.answered(result, holds, drops, past.forced, search))
        return answers[0]

    planned = plan(request, prepared, reference.ids if past.forced else None)
    watched = None if audience is None else SingleRun(audience, prepared, request, planned)
    if watched is not None:
        watched.show_reference(runs_dir, reference)
    watcher = None if watched is None else watched.run
    stored = store(prepared, request, planned, pairing, runs_dir, report, cancelled, conclude, watcher=watcher)
    if watched is not None:
        watched.end(stored)
    return stored, answers[0] if answers else None


def _holds(past: Past, change: TrialRequest, changed: bool) -> tuple[tuple[Head, ...], tuple[Hold, ...]]:
    """(the KV heads that anything is to be held for, what is to be held). Raises ValueError with one sentence."""
    if change.from_step >= past.steps:
        raise ValueError(f"--from-step {change.from_step}: run {past.uid} has {past.steps} steps, counted from 0.")
    if change.drops and (change.search or change.fewest is not None):
        raise ValueError("a search looks for what to hold: leave out --drop, or the search.")
    if change.bits is not None:
        if change.holds or change.search or change.drops or changed or change.fewest is not None:
            raise Refusal(
                "a search for the fewest bits chooses what changes: leave out --hold, --drop, --set, --budget and "
                "other searches.",
                code="bits_search_alone",
            )
        if change.bits < 1:
            raise Refusal(f"--most {change.bits}: a search tries at least one set.", code="most_below_one")
        return (), ()
    if change.fewest is not None:
        if change.holds or change.search:
            raise ValueError(
                "a search for the fewest bytes chooses what to hold: leave out --hold, --span and --search."
            )
        if change.fewest < 1:
            raise ValueError(f"--most {change.fewest}: a search tries at least one set.")
        return (), ()
    if (changed or change.drops) and not change.holds and not change.search:
        return (), ()
    layers = numbers(change.layers, past.layers, "layers")
    kv_heads = numbers(change.kv_heads, past.kv_heads, "heads")
    holds = holds_for(past, change, tuple((layer, head) for layer in layers for head in kv_heads))
    return tuple(sorted({head for hold in holds for head in hold.heads})), holds


def trials_of(
    prepared: Prepared, planned: Plan, reference: Reference, past: Past, report: Report, drops: tuple[Drop, ...] = ()
) -> Trials:
    """drops: beside those that the run had, of which it then holds nothing."""
    return Trials(
        prepared.engine,
        prepared.prompt,
        planned.method,
        planned.params,
        planned.budget,
        planned.options,
        reference,
        less(past.request.hold, drops),
        report,
        reading(prepared, planned, report),
        (*past.request.drop, *drops),
    )


def _heads_found(result: SearchResult) -> SearchMeta:
    return SearchMeta(
        heads=result.heads,
        tried=result.tried,
        kl=result.kl,
        everywhere=result.everywhere,
        alone=tuple((layer, head, kl) for (layer, head), kl in result.alone),
    )


def _bytes_found(result: Fewest, most: int) -> SearchMeta:
    best = result.best
    return SearchMeta(
        triples=() if best is None else best.triples,
        tried=len(result.tests),
        most=most,
        ended=result.ended,
        kl=None if best is None else best.kl,
        tests=tuple(
            Tested(size=len(test.triples), held_bytes=test.held_bytes, kl=test.kl, restored=test.restored)
            for test in result.tests
        ),
    )
