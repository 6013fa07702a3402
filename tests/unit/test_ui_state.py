"""The selection: what a URL or the player may say, and how it is brought inside the run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlens.app.ui.common.state import Selection, clamp, from_player, parse
from kvlens.app.ui.common.widgets import label, plain


@dataclass(frozen=True)
class Shape:
    n_steps: int = 10
    n_layers: int = 4
    q_heads: int = 8


def fitted(selection: Selection) -> tuple[Selection, list[str]]:
    return clamp(selection, Shape(), ["entropy", "coverage"], {0, 3}, Selection(None, 6, 2, 5, 3, "coverage"))


def test_a_selection_survives_its_own_url() -> None:
    chosen = Selection("20260101-000000-abc", 3, 2, 1, 0, "entropy")
    assert parse(chosen.query()) == (chosen, [])


def test_unset_fields_are_filled_without_a_word() -> None:
    assert fitted(Selection("u")) == (Selection("u", 6, 2, 5, 3, "coverage"), [])


@pytest.mark.parametrize("chosen", [Selection("u", step=1), Selection("u", layer=1), Selection("u", head=1)])
def test_a_span_is_selected_only_where_nothing_else_was_chosen(chosen: Selection) -> None:
    assert fitted(chosen)[0].span is None
    assert fitted(Selection("u", metric="entropy"))[0].span == 3


@given(
    st.dictionaries(st.sampled_from(["run", "step", "layer", "head", "span", "metric", "other"]), st.text(max_size=60))
)
def test_no_url_breaks_the_page(params: dict[str, str]) -> None:
    chosen, problems = fitted(parse(params)[0])
    assert (chosen.step or 0) < 10
    assert (chosen.layer or 0) < 4
    assert (chosen.head or 0) < 8
    assert chosen.span in (None, 0, 3)
    assert chosen.metric in ("entropy", "coverage")
    assert all("\n" not in plain(problem) for problem in problems)


@pytest.mark.parametrize("raw", ["-1", "1.5", "²", "１", "9" * 40, "nan", "0x10", " 3"])
def test_what_is_not_a_plain_whole_number_is_named(raw: str) -> None:
    values, problems = parse({"step": raw})
    assert len(problems) == 1
    assert values == parse({})[0]


@pytest.mark.parametrize(
    "value", [None, 3, "x", [], {"step": "3"}, {"step": -1}, {"layer": 1.5}, {"head": True}, {"metric": 4}]
)
def test_malformed_commits_change_nothing(value: object) -> None:
    assert from_player(value) == {}


def test_a_commit_may_clear_the_span() -> None:
    commit = {"step": 3.0, "layer": 1, "head": 2, "span": None, "metric": "entropy", "run": "other"}
    assert from_player(commit) == {"step": 3, "layer": 1, "head": 2, "span": None, "metric": "entropy"}


@pytest.mark.parametrize(
    "text", ["<b>x</b>", "[a](http://x)", "![i](http://x)", "# h", "`c`", "$x$", ":material/x:", "a_b_c*d*"]
)
def test_data_in_messages_is_kept_from_markdown(text: str) -> None:
    escaped = plain(text)
    # a word joiner keeps an icon's name from becoming the icon
    assert escaped.replace("\\", "").replace("\u2060", "") == text
    assert all(escaped[i - 1] == "\\" for i, letter in enumerate(escaped) if letter in "<>[]()!#`$:*_")


@pytest.mark.parametrize("text", ["max_rank", "max_rank (r) †", "top1_k (2.5) = 3"])
def test_a_label_of_plain_words_has_no_backslash(text: str) -> None:
    assert label(text) == text


@pytest.mark.parametrize("text", ["1. first", "- first", "_all_", "*x*", "[a](b)", "`x`", "<b>", ":red[x]"])
def test_what_is_markup_in_a_label_stays_escaped(text: str) -> None:
    assert "\\" in label(text)
    assert label(text)[:2] == plain(text)[:2]
