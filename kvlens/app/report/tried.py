"""The section on what was tried on a run: what proved the loss, and every other try."""

from __future__ import annotations

from kvlens.app.report.markup import paragraph, table
from kvlens.lens.tries import STANDS, Try, tries_in
from kvlens.meta import Counterfactual
from kvlens.store.reader import TraceReader
from kvlens.text.units import counted, si_bytes

MOST = 40
"""tries in the table, the newest"""


def tried(reader: TraceReader) -> str:
    """A sentence on the cheapest try that brought the answer back, and the table of all; '' where nothing was tried."""
    found = tries_in(reader.runs_dir, reader.uid)
    if not found:
        return ""
    rows = [_row(one, reader.meta.budget_bytes) for one in found[:MOST]]
    head = ("tried", "answer", "restored, or stands", "KL before → after (nats)", "bytes more", "run")
    left = f" The {counted(len(found) - MOST, 'oldest is', 'oldest are')} left out." if len(found) > MOST else ""
    note = (
        "Each is a stored repeat of this run with that alone changed. Bytes more: keys and values that were held, and "
        "what the budget was raised by." + left
    )
    return _proof(found, reader.meta.budget_bytes) + table(head, rows) + paragraph(note, "note")


def _proof(found: list[Try], budget: int | None) -> str:
    back = [one for one in found if one.summary is not None and one.summary.restored]
    hangs = [one for one in found if one.summary is not None and one.summary.stands is False]
    if not back and hangs:
        one, came = hangs[0], hangs[0].summary
        says = None if came is None else _line(came.answer_after)
        hangs_so = "the answer hangs on it" if one.outcome() == STANDS[False] else one.outcome()
        return paragraph(f"Proved by trying: with {one.words()}, the run says {says}: {hangs_so}.", "calm")
    known = not any(one.summary is not None and not one.summary.answer_known for one in found)
    if not back and any(one.summary is not None and one.summary.stands for one in found):
        left = "lost the answer" if known else "left full KV"
        return paragraph(f"{counted(len(found), 'try', 'tries')}, none of which {left}.", "calm")
    if not back:
        won = "brought the answer back" if known else "had full KV's token at the step of loss"
        return paragraph(f"{counted(len(found), 'try', 'tries')}, none of which {won}.", "verdict")
    best = min(back, key=lambda one: _cost(one, budget))
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


def _cost(one: Try, budget: int | None) -> float:
    """Bytes more on the device; more than any where they were not recorded."""
    more = one.more_bytes(budget)
    return float("inf") if more is None else more


def _row(one: Try, budget: int | None) -> tuple[object, ...]:
    said = one.summary or Counterfactual()
    words = one.brief() + (" (found by a search)" if said.search is not None else "")
    kl = None if said.kl_before is None or said.kl_after is None else f"{said.kl_before:.3g} → {said.kl_after:.3g}"
    return words, _line(said.answer_after), one.outcome(), kl, si_bytes(one.more_bytes(budget)), one.uid


def _line(text: str | None) -> str | None:
    return None if text is None else repr(" ".join(text.split()))
