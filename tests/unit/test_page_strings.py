"""The catalogue of what pages say: whole, current, and in the language of kvlens."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlens.lab.studies import page_strings
from kvlens.lab.studies.pagetext import PageText
from kvlens.lab.studies.pythontexts import texts_of_python
from kvlens.lab.studies.webtexts import texts_of_html, texts_of_script

SOURCE = '''
"""Documentation."""
import streamlit as st
LABELS = {"first": "The first one."}
def draw(n, late):
    """More documentation."""
    st.caption(f"Of {n.count:,} runs {'few are' if late else 'none is'} late." + note(n) + " That is all.")
    st.selectbox("Colour", ["red or blue"], key="not a text at all", help="What is *coloured*.")
    st.html(f'<span title="x">Two words</span>')
    if late == "never is this read":
        raise ValueError(f"no such run: {n}.")
'''


def test_texts_of_python_have_kinds_and_placeholders() -> None:
    texts = {(item.kind, item.text) for item in texts_of_python(SOURCE, "a.py")}
    assert texts == {
        ("sentence", "The first one."),
        ("caption", "Of «count» runs «few are|none is» late.«n» That is all."),
        ("label", "Colour"),
        ("label", "red or blue"),
        ("tooltip", "What is *coloured*."),
        ("sentence", "Two words"),
        ("error", "no such run: «n»."),
    }


def test_texts_of_scripts_and_html() -> None:
    script = 'const a = "lost here", b = `of ${total.toFixed(2)} in all`, c = "data-step"; // "not this one"'
    assert [item.text for item in texts_of_script(script, "a.js")] == ["lost here", "of «toFixed» in all"]
    assert [(item.kind, item.text) for item in texts_of_html('<b title="Play or pause">Play</b>', "a.html")] == [
        ("tooltip", "Play or pause"),
        ("label", "Play"),
    ]


@pytest.mark.parametrize(
    ("text", "broken"),
    [("word " * 25 + "end.", 1), ("word " * 24 + "end. " + "Word " * 20 + "end.", 0), ("Run with --budget 3.", 1)],
)
def test_a_long_sentence_and_an_option_break_the_rules(text: str, broken: int) -> None:
    assert len(list(page_strings.faults([PageText("a.py", 1, "caption", text)]))) == broken


def test_no_text_of_the_app_breaks_a_rule() -> None:
    broken = [(item, rule) for texts in page_strings.catalogue().values() for item, rule in page_strings.faults(texts)]
    assert broken == []


def test_the_catalogue_is_that_of_the_sources() -> None:
    page = Path(page_strings.ROOT / "docs" / "page-strings.md").read_text(encoding="utf-8")
    made = page_strings.page(page_strings.catalogue())
    assert page_strings.without_lines(page) == page_strings.without_lines(made), "make the catalogue again"
    assert made.count("\n| ") > 600
