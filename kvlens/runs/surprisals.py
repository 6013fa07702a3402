"""The surprisals of a run's prompt, where its method placed it without them: computed when the last step has ended, so
that the first comes sooner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlens.runs.request import Report
from kvlens.shortage import shortage

if TYPE_CHECKING:
    from kvlens.engine.surprisal import Surprisals
    from kvlens.store.writer import TraceWriter

PHASE = "surprisal"
"""how far this is, as it is reported"""


def add(surprisals: Surprisals, writer: TraceWriter, follow: Report, tell: Report) -> str | None:
    """Have the trace know them -> why it does not; None: it does. What `follow` raises to stop, and whatever goes
    wrong, costs them and nothing else: the run has ended. `tell`, which stops nothing, hears of the end."""
    from kvlens.engine.engine import Cancelled

    rows = 0

    def follow_rows(finished: int, total: int) -> None:
        nonlocal rows
        rows = total
        follow(PHASE, finished, total)

    try:
        results = surprisals.whole(follow_rows)
    except Cancelled:
        return "it was cancelled"
    except Exception as failure:
        short = shortage(failure)
        return str(short) if short is not None else f"it failed ({type(failure).__name__}: {failure})"
    writer.surprisals(results.numpy(force=True))
    if rows:
        tell(PHASE, rows, rows)
    return None
