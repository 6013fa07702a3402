"""What reaches a trace late. The trace begins with the first record, so that a run which is refused before leaves no
file. Surprisals that the method did not need are computed when the last step has ended, so that the first comes
sooner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvlens.meta import RunMeta
from kvlens.records import PrefillRecord, StepRecord
from kvlens.runs.effects import Lost
from kvlens.runs.request import Report
from kvlens.shortage import shortage

if TYPE_CHECKING:
    import numpy as np

    from kvlens.engine.surprisal import Surprisals
    from kvlens.recording.facts import Seen
    from kvlens.store.writer import TraceWriter


class Watcher(Protocol):
    """Sees what is stored of a run while it goes on; must change nothing."""

    def begun(self, uid: str) -> None:
        """The prompt is placed, and the run is there under this id."""

    def note_step(self, visited: Seen) -> None:
        """A step has ended: once each, in order, on the run's thread."""

    def decoded(self, text: str) -> None:
        """The last step was made and this is the output. The run's surprisals and effects are still to come."""

    def sketched(self, step: int, attended: np.ndarray, coverage: np.ndarray | None) -> None:
        """See kvlens.recording.recorder.Follower."""

    def step(self, record: StepRecord) -> None:
        """A step was measured too, some steps later: once each, in order, on the recorder's thread."""


class LateSink:
    """Begins the trace when prefill has succeeded, so that a refused run leaves nothing behind."""

    def __init__(self, writer: TraceWriter, meta: RunMeta, watcher: Watcher | None, lost: Lost | None) -> None:
        self._writer, self._meta, self._watcher, self._lost, self.begun = writer, meta, watcher, lost, False
        self._asked = meta.asked_steps
        self._pieces: list[str] = []
        self.surprisals_wait = False
        """the prompt was placed, and its tokens' surprisals were not known"""

    def begin_anyhow(self) -> None:
        """Begin the trace of a run that got no further."""
        if not self.begun:
            self._writer.begin(self._meta)
            self.begun = True
            if self._watcher is not None:
                self._watcher.begun(self._writer.uid)

    def prefill(self, record: PrefillRecord) -> None:
        self.begin_anyhow()
        self._writer.prefill(record)
        self.surprisals_wait = record.tokens[-1].surprisal is None
        if self._lost is not None:
            self._lost.prefill(record)

    def step(self, record: StepRecord) -> None:
        if record.step >= self._asked:
            self._pieces.append(record.text)
        self._writer.step(record)
        if self._lost is not None:
            self._lost.step(record)
        if self._watcher is not None:
            self._watcher.step(record)

    def text(self) -> str:
        """What was generated so far, token by token."""
        return "".join(self._pieces)


SURPRISAL_PHASE = "surprisal"
"""how far this is, as it is reported"""


def add_surprisals(surprisals: Surprisals, writer: TraceWriter, follow: Report, tell: Report) -> str | None:
    """Have the trace know them -> why it does not; None: it does. What `follow` raises to stop, and whatever goes
    wrong, costs them and nothing else: the run has ended. `tell`, which stops nothing, hears of the end."""
    from kvlens.engine.engine import Cancelled

    rows = 0

    def follow_rows(finished: int, total: int) -> None:
        nonlocal rows
        rows = total
        follow(SURPRISAL_PHASE, finished, total)

    try:
        results = surprisals.whole(follow_rows)
    except Cancelled:
        return "it was cancelled"
    except Exception as failure:
        short = shortage(failure)
        return str(short) if short is not None else f"it failed ({type(failure).__name__}: {failure})"
    writer.surprisals(results.numpy(force=True))
    if rows:
        tell(SURPRISAL_PHASE, rows, rows)
    return None
