"""Progress of a run in a terminal or a notebook: a tqdm bar for the phase that is under way."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self

from kvlens.runs.frames import Frame, Maps
from kvlens.runs.races import Lane, RaceInfo


class Progress:
    """A bar that disappears when the run ends. Also the audience of a race (kvlens.runs.watching.Audience)."""

    def __init__(self, shown: bool) -> None:
        """shown: False reports nothing."""
        self._shown = shown
        self._bar: Any = None
        self._phase = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def report(self, phase: str, done: int, total: int) -> None:
        """Show that a phase has done `done` of `total` tokens, steps or trials."""
        if not self._shown:
            return
        if self._bar is None:
            from tqdm.auto import tqdm

            self._bar = tqdm(leave=False)
        if (phase, total) != (self._phase, self._bar.total):
            self._phase = phase
            self._bar.reset(total)
            self._bar.set_description(phase)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.refresh()

    def say(self, line: str) -> None:
        """Print a line above the bar, where the bar is: on stderr."""
        if self._shown:
            from tqdm.auto import tqdm

            tqdm.write(line, file=sys.stderr)

    # ---- of a race, the report alone is shown
    def begun(self, race: RaceInfo) -> None:
        """See Audience."""

    def lane(self, number: int, lane: Lane) -> None:
        """See Audience."""

    def frame(self, frame: Frame) -> None:
        """See Audience."""

    def maps(self, maps: Maps) -> None:
        """See Audience."""
