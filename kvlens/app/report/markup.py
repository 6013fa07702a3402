"""Pieces of HTML. Whatever comes from data passes through `safe`; figures travel as JSON that no tag can end early."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import plotly.graph_objects as go

from kvlens.app.figures.theme import GREY
from kvlens.text.plaintext import visible

#: What the page itself looks like on paper; figures are drawn for a white ground.
INK = "#1b1f24"
NOTHING = "not recorded"
MOST_SHOWN = 1 << 16
"""characters of one text; a report is to be mailed"""


def safe(value: object) -> str:
    """Text, shown literally up to MOST_SHOWN characters; None is 'not recorded'."""
    text = NOTHING if value is None else str(value)
    rest = len(text) - MOST_SHOWN
    return html.escape(visible(text[:MOST_SHOWN]), quote=True) + (f" … ({rest:,} characters more)" if rest > 0 else "")


def paragraph(text: object, kind: str = "") -> str:
    """One paragraph; `kind` is a class of the page's style: 'note', 'verdict', 'calm' (nothing lost), 'warning'."""
    return f'<p class="{kind}">{safe(text)}</p>' if kind else f"<p>{safe(text)}</p>"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of text; the first cell of each row names it."""
    top = "".join(f'<th scope="col">{safe(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{safe(row[0])}</th>' + "".join(f"<td>{safe(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def folded(title: str, inside: str) -> str:
    """A part that opens on a click."""
    return f"<details><summary>{safe(title)}</summary>{inside}</details>"


def verbatim(text: str) -> str:
    """Text with its line breaks."""
    return f"<pre>{safe(text)}</pre>"


@dataclass
class Figures:
    """The page's figures, in order; `place` gives the element that one is drawn into."""

    specs: list[str] = field(default_factory=list)

    def place(self, figure: go.Figure, alt: str, note: str = "") -> str:
        """`alt`: what the figure shows; `note`: a line below it."""
        figure.update_layout(
            template="plotly_white",
            font={"color": INK, "family": "system-ui, sans-serif", "size": 12},
            paper_bgcolor="#ffffff",
            plot_bgcolor="#ffffff",
            autosize=True,
            width=None,
        )
        self.specs.append(script_json(figure.to_json()))
        name = f"figure-{len(self.specs) - 1}"
        height = int(figure.layout.height or 400)
        caption = f"<figcaption>{safe(note)}</figcaption>" if note else ""
        return (
            f'<figure><div id="{name}" class="plot" role="img" aria-label="{safe(alt)}" '
            f'style="height:{height}px"></div>{caption}</figure>'
        )

    def scripts(self) -> str:
        """The data of all figures."""
        return "".join(
            f'<script type="application/json" id="figure-{number}-data">{spec}</script>'
            for number, spec in enumerate(self.specs)
        )


def script_json(text: str) -> str:
    """JSON that can stand inside a script element: nothing in it can look like a tag or a comment."""
    json.loads(text)
    for sign in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def missing(text: str) -> str:
    """The sentence in place of a figure that there are no data for."""
    return f'<p class="note" style="color:{GREY}">{safe(text)}</p>'
