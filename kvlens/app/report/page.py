"""The page around the sections: one file, nothing fetched, no script that comes from data."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from importlib.resources import files
from string import Template

from plotly.offline import get_plotlyjs

from kvlens import __version__
from kvlens.app.compare.names import run_name
from kvlens.app.report.markup import Figures, safe
from kvlens.app.report.pair import two_runs
from kvlens.app.report.run import one_run
from kvlens.lens.condition import condition
from kvlens.store.errors import TraceError
from kvlens.store.reader import TraceReader

_FOLDER = files(__package__)


def report_bytes(reader: TraceReader, against: TraceReader | None = None) -> bytes:
    """The report on a run, UTF-8 HTML, some 5 MB of which are the drawing library. `against`: a second run to lay
    beside it.

    Raises TraceError with one sentence when a run holds no decode step, or when both are the same one."""
    for each in (reader, against):
        if each is not None and not each.n_steps:
            raise TraceError(f"Run {each.uid} holds no decode step, so there is nothing to report.")
    if against is not None and against.uid == reader.uid:
        raise TraceError("A run is not compared with itself: name another run to compare it with.")
    figures = Figures()
    sections = one_run(reader, figures)
    if against is not None:
        sections[3:3] = two_runs(reader, against, figures)
    title = run_name(reader) + (f" against {run_name(against)}" if against is not None else "")
    # Scripts run only with this number, which was drawn after all data had been written: text from a trace cannot know
    # it.
    nonce = secrets.token_hex(16)
    page = Template((_FOLDER / "report.html").read_text(encoding="utf-8")).substitute(
        title=safe(title),
        subtitle=safe(f"{condition([run for run in (reader, against) if run is not None])}, run {reader.uid}"),
        nonce=nonce,
        made=safe(f"kvlens {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
        style=(_FOLDER / "report.css").read_text(encoding="utf-8"),
        contents=_contents([name for name, _ in sections]),
        body="".join(_section(number, name, inside) for number, (name, inside) in enumerate(sections)),
        data=figures.scripts(),
        plotly=get_plotlyjs(),
        draw=(_FOLDER / "report.js").read_text(encoding="utf-8"),
    )
    return page.encode("utf-8")


def _contents(names: list[str]) -> str:
    return "".join(f'<li><a href="#section-{number}">{safe(name)}</a></li>' for number, name in enumerate(names))


def _section(number: int, name: str, inside: str) -> str:
    return f'<section id="section-{number}"><h2>{safe(name)}</h2>{inside}</section>'
