"""The loss ledger of a stored run, measured by repeats of the run in memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

from kvlens.ledger.account import LossLedger
from kvlens.ledger.frontier import Frontier, find_frontier
from kvlens.ledger.measure import Measure
from kvlens.ledger.storage import store_ledger, stored_ledger
from kvlens.lens.question import Question
from kvlens.lens.trials import Trials
from kvlens.lens.whatif import trials_of
from kvlens.refusal import Refusal
from kvlens.runs.repeat import read_run, reload
from kvlens.runs.request import BY_NAME, ModelSource, Report
from kvlens.store.errors import TraceError

PHASE = "ledger"
"""of progress"""


def measure_ledger(
    runs_dir: Path,
    uid: str,
    report: Report,
    cancelled: Callable[[], bool] = lambda: False,
    models: ModelSource = BY_NAME,
    frontier: bool | Frontier = False,
    say: Callable[[str], None] = warnings.warn,
) -> tuple[LossLedger, Frontier | None]:
    """Measure the ledger of a stored run, store it beside the trace, and return it with the oracle frontier.

    frontier: find the frontier too, or the frontier that another run of the prompt has, which serves if both answers
    end at the same step. A frontier that is stored is kept where none is asked for. say(sentence): why the ledger could
    not be stored; it is returned all the same. Raises ValueError or TraceError
    with one sentence for a run that lost nothing or cannot be repeated."""
    from kvlens.runs.preparing import plan
    from kvlens.runs.reference import obtain

    past = read_run(runs_dir, uid)
    prepared = reload(past, report, models)
    reference = obtain(prepared, past.request, runs_dir, report, cancelled)
    trials = trials_of(prepared, plan(past.request, prepared), reference, past, report)
    question = Question.about(past, trials, trials, report)
    question.lost_step(past)
    trials.ready()

    def report_runs(count: int, total: int) -> None:
        if cancelled():
            raise Refusal("cancelled while measuring the ledger; nothing was stored.", code="cancelled")
        report(PHASE, count, total)

    report_runs(0, 1)
    ledger = Measure(trials, question.answer_end).account(question.restored, report_runs)
    stored = stored_ledger(runs_dir, uid)
    fewest = frontier or (None if stored is None else stored[1])
    if fewest is True or (isinstance(fewest, Frontier) and fewest.end != question.answer_end):
        fewest = _frontier(trials, question.answer_end, report_runs)
    try:
        store_ledger(runs_dir, uid, ledger, fewest)
    except TraceError as error:
        say(str(error))
    return ledger, fewest


def _frontier(trials: Trials, end: int, report: Callable[[int, int], None]) -> Frontier:
    """Find the frontier with full KV in the place of the run's method, over the same reading of the prompt."""
    from kvlens import methods

    full = methods.get(methods.REFERENCE)
    params = methods.make_parameters(full, None, {})
    engine, prompt, reference = trials.engine, trials.prompt, trials.reference
    read = engine.read(prompt, trials.options.prefill_chunk)
    report(0, 1)
    return find_frontier(
        lambda drops: Trials(
            engine, prompt, full, params, None, trials.options, reference, reader=lambda: read, drops=drops
        ),
        end,
        first_token=len(prompt.asked),
        report=report,
    )
