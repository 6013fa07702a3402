"""The glossary: few words, plain sentences, and a page that equals the data."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from kvlens.app.ui.common.terms import TERMS, explained
from kvlens.rows import SPAN_STATES
from kvlens.text import glossary, words

PAGE = Path(__file__).resolve().parents[2] / "docs" / "glossary.md"


def sentences(text: str) -> list[str]:
    """Return the sentences of a meaning."""
    return [sentence for sentence in re.split(r"(?<=\.)\s+", text) if sentence]


def test_the_glossary_has_at_most_forty_words() -> None:
    assert 30 <= len(glossary.entries()) <= 40


def test_the_page_equals_the_data() -> None:
    assert PAGE.read_text(encoding="utf-8") == glossary.page()
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    listed = {term: text for term, text in rows if term not in ("word", "---")}
    assert listed == {term: entry.meaning for term, entry in glossary.entries().items()}


def test_every_section_has_a_title() -> None:
    assert {entry.section for entry in glossary.entries().values()} == set(glossary.TITLES)


@pytest.mark.parametrize("term", glossary.entries())
def test_a_meaning_is_one_or_two_short_sentences(term: str) -> None:
    parts = sentences(glossary.meaning(term))
    assert 1 <= len(parts) <= 2
    assert all(part.endswith(".") and len(part.split()) <= 25 for part in parts)


def test_the_states_are_the_words_that_pages_show() -> None:
    assert set(words.STATES) == set(SPAN_STATES)
    assert all(word in glossary.meaning("state") for word in words.STATES.values())


def test_an_unknown_word_is_an_error() -> None:
    with pytest.raises(KeyError):
        glossary.meaning("whatever")


def test_every_term_of_a_page_shows_the_glossarys_meaning_on_hover() -> None:
    for terms in TERMS.values():
        assert terms
        for term in terms:
            assert (
                html.unescape(explained(term)) == f'<abbr title="{glossary.meaning(term)}" tabindex="0">{term}</abbr>'
            )
