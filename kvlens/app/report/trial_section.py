"""The section on what was tried on a run: what proved the loss, and every other try."""

from __future__ import annotations

from kvlens.app.report.markup import paragraph, table
from kvlens.lens.tries import STANDS, Try
from kvlens.lens.trylist import tries_in
from kvlens.metaparts import Counterfactual
from kvlens.store.reader import TraceReader
from kvlens.text.units import counted, si_bytes

MOST = 40
"""tries in the table, the newest"""


def describe_trials(reader: TraceReader) -> str:
    """A sentence on the cheapest try that brought the answer back, and the table of all; '' where nothing was tried."""
    trials = tries_in(reader.runs_dir, reader.uid)
    if not trials:
        return ""
    rows = [_row(trial, reader.meta.budget_bytes) for trial in trials[:MOST]]
    head = ("tried", "answer", "restored, or stands", "KL before → after (nats)", "bytes more", "run")
    omitted_note = (
        f" The {counted(len(trials) - MOST, 'oldest is', 'oldest are')} left out." if len(trials) > MOST else ""
    )
    note = (
        "Each is a stored repeat of this run with that alone changed. Bytes more: keys and values that were held, and "
        "what the budget was raised by." + omitted_note
    )
    return _proof(trials, reader.meta.budget_bytes) + table(head, rows) + paragraph(note, "note")


def _proof(trials: list[Try], budget: int | None) -> str:
    back = [trial for trial in trials if trial.summary is not None and trial.summary.restored]
    hangs = [trial for trial in trials if trial.summary is not None and trial.summary.stands is False]
    if not back and hangs:
        trial, came = hangs[0], hangs[0].summary
        says = None if came is None else _line(came.answer_after)
        hangs_so = "the answer hangs on it" if trial.outcome() == STANDS[False] else trial.outcome()
        return paragraph(f"Proved by trying: with {trial.words()}, the run says {says}: {hangs_so}.", "calm")
    is_known = not any(trial.summary is not None and not trial.summary.answer_known for trial in trials)
    if not back and any(trial.summary is not None and trial.summary.stands for trial in trials):
        loss_words = "lost the answer" if is_known else "left full KV"
        return paragraph(f"{counted(len(trials), 'try', 'tries')}, none of which {loss_words}.", "calm")
    if not back:
        won = "brought the answer back" if is_known else "had full KV's token at the step of loss"
        return paragraph(f"{counted(len(trials), 'try', 'tries')}, none of which {won}.", "verdict")
    best = min(back, key=lambda trial: _cost(trial, budget))
    assert best.summary is not None
    more = _cost(best, budget)
    cost = f"{si_bytes(abs(more))} {'less' if more < 0 else 'more'} on the device"
    if best.summary.lifted_tokens and not best.summary.held_tokens and not best.changed:
        cost = f"drop lifted, {si_bytes(0)}"
    return paragraph(
        f"Proved by trying: with {best.words()}, all else the same, the run says {_line(best.summary.answer_after)} "
        f"({cost}).",
        "calm",
    )


def _cost(trial: Try, budget: int | None) -> float:
    """Bytes more on the device; more than any where they were not recorded."""
    more = trial.more_bytes(budget)
    return float("inf") if more is None else more


def _row(trial: Try, budget: int | None) -> tuple[object, ...]:
    summary = trial.summary or Counterfactual()
    words = trial.brief() + (" (found by a search)" if summary.search is not None else "")
    kl = (
        None
        if summary.kl_before is None or summary.kl_after is None
        else f"{summary.kl_before:.3g} → {summary.kl_after:.3g}"
    )
    return words, _line(summary.answer_after), trial.outcome(), kl, si_bytes(trial.more_bytes(budget)), trial.uid


def _line(text: str | None) -> str | None:
    return None if text is None else repr(" ".join(text.split()))
