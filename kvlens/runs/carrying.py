"""One run from request to trace: foreseen, prepared, compared with its reference where that was asked for, stored; or
several, of questions about one context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvlens import methods
from kvlens.budget import BudgetInfeasible
from kvlens.models.device import give_back_heap, settle
from kvlens.runs.memory import (
    attended_share,
    attending,
    attending_sentence,
    room_made,
    weights_sentence,
    wider,
    with_room,
)
from kvlens.runs.preflight import refuse
from kvlens.runs.preparing import Pairing, Prepared, advice, check, plan, prepare, reference_key, sizes_of
from kvlens.runs.readings import keeping, shared
from kvlens.runs.request import BY_NAME, ModelSource, Report, RunRequest
from kvlens.text.prompts import PromptText, tokenize

if TYPE_CHECKING:
    from kvlens.runs.storing import Stored
    from kvlens.runs.watching import Audience


def _nobody(line: str) -> None:
    """Nobody asked what is worth knowing."""


def carry_out(
    request: RunRequest,
    source: PromptText,
    runs_dir: Path,
    report: Report,
    cancelled: Callable[[], bool],
    say: Callable[[str], None] = _nobody,
    models: ModelSource = BY_NAME,
    audience: Audience | None = None,
) -> tuple[str, str, str]:
    """Run and store; returns (uid, status, output text). report(phase, done, total): load, prefill, place, decode,
    store; before the run itself, where a full-KV run has to be made to compare with, `reference`, and `check` where
    only placing the prompt shows whether the method can keep to its budget. say(line): which parameters are run, where
    they are not the ones that the model usually gets, and which budget, where none was given and the usual one is too
    small. audience: sees the run step by step, as a race of one; its `report` is not called.

    Raises ValueError (with one sentence) for whatever is wrong with the request, the prompt, the model or the budget;
    nothing is stored then, and what arithmetic can tell is told before the model is loaded. Raises the store's
    TraceError when the trace cannot be written.
    """
    check(request)
    if models.named:
        need = refuse(request, source)
        for line in (weights_sentence(request.model, request.dtype), "" if need is None else need.sentence):
            if line:
                say(line)
    request = request.model_copy(update={"device": settle(request.device)})
    return carry_out_prepared(
        request, prepare(request, source, report, models=models), runs_dir, report, cancelled, say, audience
    )


def carry_out_prepared(
    request: RunRequest,
    prepared: Prepared,
    runs_dir: Path,
    report: Report,
    cancelled: Callable[[], bool],
    say: Callable[[str], None] = _nobody,
    audience: Audience | None = None,
) -> tuple[str, str, str]:
    """As `carry_out`, with a model and a prompt at hand, for example those of a stored run that is repeated."""
    _, stored = _stored_with_room(request, prepared, runs_dir, report, cancelled, say, audience)
    return stored.uid, stored.status, stored.text


def carry_out_each(
    request: RunRequest,
    sources: Sequence[PromptText],
    runs_dir: Path,
    report: Report,
    cancelled: Callable[[], bool],
    say: Callable[[str], None] = _nobody,
) -> Iterator[tuple[str, str, str]]:
    """Like `carry_out`, a run for each of several questions about one context, which is read once and placed alike for
    all: the device is divided for as many steps whatever the question, so that a shorter one leaves a few tokens more
    for its answer. What is wrong with any of them is told before the first is run; a cancelled one is the last.

    Raises ValueError as well where the questions are not fed after the context, or the context's tokens depend on
    them."""
    if request.question != "after":
        raise ValueError("several questions share a placement only when they are fed after it: add --question after.")
    check(request)
    for source in sources:
        refuse(request, source)
    request = request.model_copy(update={"device": settle(request.device)})
    first = prepare(request, sources[0], report)
    prepared = [replace(first, kept=keeping([methods.get(request.method)]))]
    for source in sources[1:]:
        prompt = tokenize(
            source,
            prepared[0].engine.loaded.tokenizer,
            None,
            request.max_new,
            request.chat,
            request.system,
            "after",
            turns=request.turns,
            arguments=request.chat_args,
            carried=request.carried,
        )
        if prompt.ids != prepared[0].prompt.ids:
            raise ValueError("the context has other tokens before another question: run the questions one by one.")
        prepared.append(replace(prepared[0], prompt=prompt))
    steps = request.max_new + max(len(one.prompt.asked) for one in prepared)
    requests = [request.model_copy(update={"max_new": steps - len(one.prompt.asked)}) for one in prepared]
    lines: set[str] = set()

    def say_once(line: str) -> None:
        if line not in lines:
            lines.add(line)
            say(line)

    budget = request.budget
    for one, of in zip(requests, prepared, strict=True):
        run = one.model_copy(update={"budget": budget})
        held, stored = _stored_with_room(run, of, runs_dir, report, cancelled, say_once)
        budget = held.budget
        yield stored.uid, stored.status, stored.text
        if stored.status != "completed":
            return


def _stored_with_room(
    request: RunRequest,
    prepared: Prepared,
    runs_dir: Path,
    report: Report,
    cancelled: Callable[[], bool],
    say: Callable[[str], None],
    audience: Audience | None = None,
) -> tuple[RunRequest, Stored]:
    """Store the run; return it with the request as it was run. A request that names no budget gets the least that the
    method can hold, also where only reading the prompt shows how much that is. Raises BudgetInfeasible for a budget
    that is named."""
    if (share := attended_share(request.method, request.budget, request.overrides)) is not None:
        say(attending_sentence(request.method, share))
        request = attending(request)
    run = with_room(request, sizes_of(request, prepared))
    while True:
        planned = plan(run, prepared)
        if run.budget != request.budget:
            say(room_made(run))
        if planned.chosen.said:
            say(planned.chosen.said)
        if run.against or run.forced_reference:
            prepared = shared(prepared, planned)
        try:
            return run, _advised(run, prepared, runs_dir, report, cancelled, audience)
        except BudgetInfeasible as refused:
            if request.budget is not None:
                raise
            run = wider(run, refused)


def _advised(
    request: RunRequest,
    prepared: Prepared,
    runs_dir: Path,
    report: Report,
    cancelled: Callable[[], bool],
    audience: Audience | None,
) -> Stored:
    """The stored run; where its budget cannot be kept, the refusal says what would do."""
    try:
        return _store_run(request, prepared, runs_dir, report, cancelled, audience)
    except BudgetInfeasible as error:
        raise advice(request, sizes_of(request, prepared), error.smallest) from None
    finally:
        give_back_heap()


def _store_run(
    request: RunRequest,
    prepared: Prepared,
    runs_dir: Path,
    report: Report,
    cancelled: Callable[[], bool],
    audience: Audience | None,
) -> Stored:
    from kvlens.runs.lanes import SingleRun  # not above: a refusal need not wait for torch
    from kvlens.runs.storing import store

    pairing = Pairing(reference_key=reference_key(request, prepared), holds=request.hold, drops=request.drop)
    forced = None
    watched = None if audience is None else SingleRun(audience, prepared, request, plan(request, prepared))
    if request.against or request.forced_reference:
        from kvlens.runs.reference import obtain

        watcher = None if watched is None else watched.full_kv
        reference = obtain(prepared, request, runs_dir, report, cancelled, watcher)
        if watched is not None:
            watched.show_reference(runs_dir, reference)
        forced = reference.ids if request.forced_reference else None
        pairing = replace(pairing, reference=reference, reference_uid=reference.uid)
    planned, watcher = plan(request, prepared, forced), None if watched is None else watched.run
    early = None if watched is None else watched.show_stored
    stored = store(prepared, request, planned, pairing, runs_dir, report, cancelled, watcher=watcher, early=early)
    if watched is not None:
        watched.end(stored)
    return stored
