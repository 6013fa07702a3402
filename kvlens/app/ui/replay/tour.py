"""Marks that lead through a loss: lost here, wanted this, why, the map, the head map, play, hold, back. They come by
themselves in a run of the gallery, until they are left once, and where they are asked for in any run that lost."""

from __future__ import annotations

from importlib.resources import files

import streamlit as st

from kvlens.app import gallery
from kvlens.app.ui.common.player import KEY as PLAYER
from kvlens.lens.severity import Severity, severity
from kvlens.lens.verdict import Missed, Verdict
from kvlens.metaparts import Counterfactual
from kvlens.player.lens import LEAST_HOLE
from kvlens.store.reader import TraceReader

_FOLDER = files(__package__)


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


_tour = st.components.v2.component("kvlens_tour", html=_read("tour.html"), css=_read("tour.css"), js=_read("tour.js"))

VERDICT, HOLD, RESULT, TRIED = "verdict", "hold_resident", "hold_result", "tried"
"""keys of what the marks point at"""


def tour(reader: TraceReader, loss: Verdict, tried: Counterfactual | None) -> None:
    """The button that asks for the marks. `tried`: what holding came to, where it stands on the page."""
    how = severity(reader, loss)
    data = {"run": reader.uid, "marks": marks(loss, how, tried), "unasked": gallery.loss_of(reader.uid) is not None}
    _tour(key="tour", data=data, width="content")


def marks(loss: Verdict, how: Severity, tried: Counterfactual | None) -> list[dict[str, str]]:
    """What each mark points at and says: title, text (shown as they are, never as markup), within (a selector), begins
    (the first words of a line there; '': all of it) and inside (a selector in the player; '': none)."""

    def line(begins: str, title: str, text: str) -> dict[str, str]:
        return {"within": f".st-key-{VERDICT}", "begins": begins, "inside": "", "title": title, "text": text}

    def part(inside: str, title: str, text: str) -> dict[str, str]:
        return {"within": f".st-key-{PLAYER}", "begins": "", "inside": inside, "title": title, "text": text}

    severity_sentence = f": {how.sentence()}" if how.sentence() else ""
    missed = loss.missed
    missed_sentence = "This line names the missed span, if it was recorded."
    why = "This line names the reason: where the span was, and why the step could not read it."
    if missed is not None:
        who = "By this run's own query full attention puts" if missed.reference is None else "Full KV puts"
        missed_sentence = (
            f"{who} {missed.full:.0%} of this head's attention on one passage. Here it got {missed.mass:.0%}."
        )
        if missed.later_steps:
            missed_sentence = f"At the step of loss: {missed.mass_words()}."
        elif red(missed):
            missed_sentence += " The cache map shows it red."
        elif hatched(missed):
            missed_sentence += " The cache map shows it hatched red: only its summary was read."
        why = f"The record says so: {missed.reason.says}."
    back = "The outcome appears here: the answer before and after, and the bytes of the hold."
    if tried is not None:
        back = (
            f"A repeat has tried it: without the hold the run said {_line(tried.answer_before)}, with the hold it says "
            f"{_line(tried.answer_after)}. {'Expected' if tried.answer_known else 'Full KV'}: {_line(tried.expected)}."
        )
    return [
        line(
            how.headline(loss.step),
            f"{how.word} here",
            f"Before step {loss.step} both say the same. Here full KV says {loss.expected!r} and this run "
            f"{loss.got!r}{severity_sentence}.",
        ),
        line("Missed most", "The missed span", missed_sentence),
        line("Why it was", "Why it was missed", why),
        part(
            "#map",
            "See it on the map",
            "Tokens go across, decode steps go down. Red is what full KV attended and this run did not; hatched red "
            "was lost to a summary. The frame is the passage, here at this step.",
        ),
        part(
            "#heads",
            "Find the head",
            "A cell is a query head of a layer, coloured by the metric above. The framed one is shown in the map; "
            "click another to see its own.",
        ),
        part(
            "#play",
            "Play it",
            "The run goes on token by token, a short one at one step a second. Space starts and stops it.",
        ),
        {
            "within": f".st-key-{HOLD}",
            "begins": "",
            "inside": "",
            "title": "Hold it",
            "text": "This repeats the run with that passage kept on the device, all else the same. It takes some "
            "seconds.",
        },
        {
            "within": f".st-key-{HOLD if tried is None else RESULT}",
            "begins": "",
            "inside": "",
            "title": "Is it back?",
            "text": back,
        },
    ]


def red(missed: Missed) -> bool:
    """Whether the cache map shows the whole of the span as a hole; of one that is there in part it shows tokens."""
    whole = missed.kind != "window" and missed.state not in ("partial", "partly_recalled")
    return whole and missed.unread is not None and missed.unread >= LEAST_HOLE


def hatched(missed: Missed) -> bool:
    """Whether the cache map hatches the span: attended as its summary alone, which got less than full KV gives it."""
    return missed.kind != "window" and missed.state == "coarse" and missed.regret >= LEAST_HOLE


def _line(text: str | None) -> str:
    return "nothing" if text is None else repr(text.strip().partition("\n")[0])
