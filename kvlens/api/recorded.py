"""What a stored run is and what it recorded: its verdict and its tables."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvlens.api.errors import translated
from kvlens.api.places import check_kind, take_places, take_span, take_steps
from kvlens.api.verdict import Verdict, read_verdict

if TYPE_CHECKING:
    import pandas as pd

    from kvlens.meta import RunMeta
    from kvlens.store.reader import TraceReader


class RecordedRun:
    """The trace of a stored run, read when it is asked for."""

    def __init__(self, folder: Path, uid: str) -> None:
        self.folder = folder
        """folder of runs that the run is stored in"""
        self.uid = uid
        """names the run: `kvlens.open(uid)` returns it again"""

    # ---- what it is
    @cached_property
    def reader(self) -> TraceReader:
        """The run's trace, open for reading (kvlens.store.reader)."""
        from kvlens.store.reader import TraceReader

        with translated():
            return TraceReader.open(self.folder, self.uid)

    def check(self) -> None:
        """Raise RunError where the run cannot be read."""
        _ = self.reader

    @property
    def meta(self) -> RunMeta:
        """What the run records of itself: model, method, parameters, budget, versions (kvlens.meta)."""
        return self.reader.meta

    @property
    def status(self) -> str:
        """completed, cancelled, failed or interrupted."""
        return str(self.reader.status)

    @cached_property
    def output(self) -> str:
        """The generated text."""
        from kvlens.lens.output import output_text

        return output_text(self.reader)

    @cached_property
    def verdict(self) -> Verdict:
        """Where the run lost against full KV, which head missed which span, and why."""
        return read_verdict(self.reader)

    # ---- what it recorded
    def heads(self, start: int = 0, stop: int | None = None) -> pd.DataFrame:
        """Return one row per layer and query head, over steps [start, stop). Columns: docs/api.md, or
        `frame.attrs["columns"]` and `frame.attrs["units"]`. Raises RequestError `bad_value` for steps that the run
        lacks."""
        from kvlens.tables import frames

        with translated():
            return frames.heads(self.reader, *take_steps(self.reader, start, stop))

    def steps(self) -> pd.DataFrame:
        """Return one row per decode step: its token, its loss against full KV, times and bytes."""
        from kvlens.tables import frames

        with translated():
            return frames.steps(self.reader)

    def spans(self) -> pd.DataFrame:
        """Return one row per span of the context: its tokens, its text and what it is."""
        from kvlens.tables import frames

        with translated():
            return frames.spans(self.reader)

    def missed(self) -> pd.DataFrame:
        """Return one row per (layer, KV head, span) that was missed where the run lost, most important first; the first
        rows are what to pass to `hold(triples=...)`. Empty if nothing was lost."""
        from kvlens.tables import frames

        with translated():
            return frames.missed(self.reader)

    def decisions(
        self, step: int | None = None, layer: int | None = None, kv_head: int | None = None, kind: str | None = None
    ) -> pd.DataFrame:
        """Return one row per decision of the method: how many spans or tokens it asked for, and of these how many were
        granted, refused or missed; None takes all steps, layers, KV heads or kinds. Empty in traces that recorded none
        (`run.reader.records_decisions()`). Raises RequestError `bad_value` or `unknown_kind` for a step, layer, KV head
        or kind that the run lacks."""
        from kvlens.tables import frames

        with translated():
            check_kind(kind)
            return frames.decisions(self.reader, kind, *take_places(self.reader, step, layer, kv_head))

    def events(self, step: int | None = None, layer: int | None = None, kv_head: int | None = None) -> pd.DataFrame:
        """Return what happened to spans: opened, recalled, evicted, refused and so on; None takes all steps, layers or
        KV heads. Raises RequestError `bad_value` for one that the run lacks."""
        from kvlens.tables import frames

        with translated():
            return frames.events(self.reader, *take_places(self.reader, step, layer, kv_head))

    def readers(self, span: int | None = None) -> pd.DataFrame:
        """Return one row per layer and query head: full KV's mass and this run's on a span, mean over the sampled
        steps; None: on the spans that hold the needle. Raises RequestError `bad_value` for a span that the run
        lacks."""
        from kvlens.tables import frames

        with translated():
            number = take_span(self.reader, span)
            return frames.readers(self.reader, None if number is None else (number,))

    def segments(self, **named: str | tuple[int, int]) -> pd.DataFrame:
        """Return one row per named part of the prompt: tokens kept and evicted, attention and effect.

        Args:
            named: name=marker or name=(start, end) in characters of the prompt, in place of the recorded parts; a
                marked part ends where the next one begins.

        Raises:
            RequestError: `segment_not_found`, `segment_outside`, `bad_segment`.
        """
        from kvlens.tables import frames

        with translated():
            return frames.segments(self.reader, named)

    def head_steps(self) -> pd.DataFrame:
        """Return one row per step, layer and query head."""
        return self._rows("head-steps")

    def kv_steps(self) -> pd.DataFrame:
        """Return one row per step, layer and KV head: bytes and tokens moved, read and held."""
        return self._rows("kv-steps")

    def phases(self) -> pd.DataFrame:
        """Return one row per timed step: how long each of its phases took. Empty if phases were not timed."""
        return self._rows("phases")

    def _rows(self, table: str) -> pd.DataFrame:
        from kvlens.tables import frames

        with translated():
            return frames.rows(self.reader, table)

    def transfers(self, step: int | None = None, layer: int | None = None, kv_head: int | None = None) -> pd.DataFrame:
        """Return the copies between device and host; None takes all steps, layers or KV heads. Raises RequestError
        `bad_value` for one that the run lacks."""
        from kvlens.tables import frames

        with translated():
            return frames.transfers(self.reader, *take_places(self.reader, step, layer, kv_head))
