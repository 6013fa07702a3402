"""A race on a terminal: a table that changes while the lanes decode, and how they came out."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvlens.methods.naming import titled
from kvlens.runs.frames import Frame, Maps
from kvlens.runs.races import REFUSED, Lane, RaceInfo
from kvlens.text.plaintext import terminal
from kvlens.text.units import si_bytes

PER_SECOND = 4
"""how often the table is drawn"""
OUTPUT = 60
"""characters of an output that are shown, the newest"""


class RaceTable:
    """The audience of a race on a terminal; the table is drawn where `live`."""

    def __init__(self, console: Console, live: bool) -> None:
        self._race: RaceInfo | None = None
        self._frames: dict[int, list[Frame]] = {}
        self._phase = ""
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=PER_SECOND, transient=True)
        if live:
            self._live.start()

    def report(self, phase: str, count: int, total: int) -> None:
        self._phase = f"{phase} {count:,} / {total:,}"

    def begun(self, race: RaceInfo) -> None:
        self._race = race

    def lane(self, number: int, lane: Lane) -> None:
        """What it is now is read when the table is drawn."""

    def frame(self, frame: Frame) -> None:
        self._frames.setdefault(frame["lane"], []).append(frame)

    def maps(self, maps: Maps) -> None:
        """Maps are for the dashboard."""

    def stop(self) -> None:
        """The terminal is as it was before."""
        self._live.stop()

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold", title=self._phase, title_justify="left")
        for column in ("lane", "step", "output so far", "KL", "left full KV at", "on device", "moved"):
            table.add_column(column, no_wrap=True, justify="left" if column in ("lane", "output so far") else "right")
        if self._race is not None:
            for number, lane in enumerate(self._race.lanes):
                table.add_row(*self._row(number, lane, self._race.sizes))
        return table

    def _row(self, number: int, lane: Lane, sizes: dict[str, int]) -> list[Text]:
        frames = self._frames.get(number, [])
        asked_bytes, full = sizes["asked"], sizes["full_kv_bytes"]
        text = "".join(frame["text"] for frame in frames[asked_bytes:]) if frames else lane.message or lane.state
        kl = next((frame["kl"] for frame in reversed(frames) if frame["kl"] is not None), None)
        cells = [
            Text(named(lane), "red" if lane.lost is not None else ""),
            Text(f"{frames[-1]['step'] + 1} / {sizes['steps']}" if frames else ""),
            Text(terminal(" ".join(text.split()))[-OUTPUT:] if frames else terminal(text)[:OUTPUT]),
            Text("" if kl is None else f"{kl:.3g}"),
            Text("" if lane.lost is None else str(lane.lost), "bold red"),
            Text(f"{frames[-1]['resident'] / full:.0%}" if frames else ""),
            Text(si_bytes(sum(frame["moved"] for frame in frames)) if frames else ""),
        ]
        return cells


def named(lane: Lane) -> str:
    """A lane in words: its method with its untrained parts, its preset where one was asked for, and the parameters that
    tell it from another lane of its method."""
    preset = "" if lane.preset is None else f"({lane.preset})"
    return " ".join(part for part in (titled(lane.method, lane.stand_in), preset, lane.differs) if part)


def line(lane: Lane) -> str:
    """How a lane came out, on one line: method, run, right or wrong, output or why there is none."""
    if lane.state in (REFUSED, "failed"):
        return f"{named(lane)}: {lane.state}: {lane.message}"
    whole = lane.state == "completed"
    lost = ("as full KV" if whole else "") if lane.lost is None else f"left full KV at step {lane.lost}"
    judged = {True: "right", False: "wrong", None: ""}[lane.right]
    sentence = ", ".join(part for part in ("" if whole else lane.state, lost, judged) if part)
    return f"{named(lane)} {lane.uid}: {sentence}: {' '.join(lane.text.split())}"
