"""How a run tells how far it is: a bar for people, JSON lines for programs."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext, redirect_stdout

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvlens.runs.frames import Frame, Maps
from kvlens.runs.races import Lane, RaceInfo, begun_line, frame_line, lane_line, maps_line
from kvlens.text.plaintext import json_text, terminal

EVERY_S = 0.1
"""a phase reports at most this often, and when it ends"""


class _Rate:
    """Tokens per second of the running phase."""

    def __init__(self) -> None:
        self.phase, self.began, self._last = "", 0.0, 0.0

    def due(self, phase: str, done: int, total: int) -> bool:
        now = time.monotonic()
        if phase != self.phase:
            self.phase, self.began, self._last = phase, now, 0.0
        if done < total and now - self._last < EVERY_S:
            return False
        self._last = now
        return True

    def per_second(self, done: int) -> float | None:
        elapsed = time.monotonic() - self.began
        return round(done / elapsed, 1) if done and elapsed > 0.05 else None


class JsonLines:
    """One object per line: {"phase", "done", "total", "tokens_per_s"}; what is worth knowing {"phase": "note",
    "message"}; at the end {"phase": "done"|"error", ...}, an error with the options that would do
    (`would_do`: option -> value) where they are known. Of a race, and of a single run as a race of one, also what
    kvlens.runs.races says of lanes and steps."""

    def __init__(self) -> None:
        self._rate = _Rate()
        self._stream = sys.stdout
        self._lock = threading.Lock()
        """the recorder of a single run writes maps from a thread of its own"""

    def report(self, phase: str, done: int, total: int) -> None:
        if self._rate.due(phase, done, total):
            speed = self._rate.per_second(done) if phase in ("prefill", "decode") else None
            self._object({"phase": phase, "done": done, "total": total, "tokens_per_s": speed})

    def say(self, line: str) -> None:
        self._object({"phase": "note", "message": line})

    def begun(self, race: RaceInfo) -> None:
        self._line(begun_line(race))

    def lane(self, number: int, lane: Lane) -> None:
        self._line(lane_line(number, lane))

    def frame(self, frame: Frame) -> None:
        self._line(frame_line(frame))

    def maps(self, maps: Maps) -> None:
        self._line(maps_line(maps))

    def end_run(self, uid: str, status: str, race: str | None = None) -> None:
        self._object({"phase": "done", "uid": uid, "status": status, **({} if race is None else {"race": race})})

    def failed(self, error: BaseException) -> None:
        would_do = getattr(error, "would_do", None)
        record = {"phase": "error", "message": str(error) or type(error).__name__}
        self._object(record | ({"would_do": would_do} if would_do else {}))

    def _object(self, fields: dict[str, object]) -> None:
        self._line(json_text(fields))

    def _line(self, line: str) -> None:
        """Write one line to the stdout of the time at which the report began. If its reader has gone (the dashboard was
        restarted), the run goes on and its lines are discarded."""
        with self._lock:
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except BrokenPipeError:
                with open(os.devnull, "w", encoding="utf-8") as discarded:
                    os.dup2(discarded.fileno(), self._stream.fileno())


class Bar:
    """A rich progress bar on stderr."""

    def __init__(self, console: Console) -> None:
        self._rate = _Rate()
        columns = (
            TextColumn("{task.description:8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
        )
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._progress.start()

    def report(self, phase: str, done: int, total: int) -> None:
        if not self._rate.due(phase, done, total):
            return
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(phase, total=total, speed="")
        speed = self._rate.per_second(done) if phase in ("prefill", "decode") else None
        self._progress.update(
            self._tasks[phase], completed=done, total=total, speed="" if speed is None else f"{speed} tokens/s"
        )

    def say(self, line: str) -> None:
        self._progress.console.print(terminal(line), markup=False, highlight=False)

    def end_run(self, uid: str, status: str) -> None:
        self._progress.stop()

    def failed(self, error: BaseException) -> None:
        self._progress.stop()


def reserve_stdout(reserved: bool) -> AbstractContextManager[object]:
    """Return a context for a run. If stdout is `reserved` for JSON, text that methods print meanwhile is written to
    stderr. A `JsonLines` made before still writes to stdout."""
    return redirect_stdout(sys.stderr) if reserved else nullcontext()
