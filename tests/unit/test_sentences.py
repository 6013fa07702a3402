"""Chunks that end at punctuation: the marks, algorithm 2 against its brute force, and closing chunks while decoding."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import raises_code

from kvlens.spans import check_partition
from kvlens.spans.marks import SETS, WEIGHTS, Mark, mark_of, set_for
from kvlens.spans.sentences import Splitter, cut_by

MARKS = st.one_of(st.none(), st.none(), st.sampled_from([Mark(text, weight) for text, weight in WEIGHTS.items()]))
TEXTS = st.lists(MARKS, max_size=90)

FIGURES = re.compile(r"\d+(?:\.\d+)?")


def brute(marks: list[Mark | None], length: int, deviation: int, literal: bool, start: int) -> list[int]:
    """Ends of the chunks: every split of every window is scored; nearest to the ideal end, then the smaller, among
    equals."""
    n, at, ends = len(marks), 0, []
    while at < n:
        ideal = min(at + length, n)
        found = []
        for split in range(at + 1, n + 1):
            mark = None
            if literal:
                mark = marks[split] if split < n else None
            else:
                mark = marks[split - 1]
            if mark is not None and ideal - deviation <= split <= ideal + deviation:
                found.append(
                    (-(0.7 * mark.weight + 0.3 * (1 - abs(ideal - split) / deviation)), abs(ideal - split), split)
                )
        at = min(found)[2] if found else ideal
        ends.append(start + at)
    return ends


@given(TEXTS, st.integers(1, 20), st.integers(1, 12), st.booleans(), st.integers(0, 5))
def test_chunks_are_the_best_splits(
    marks: list[Mark | None], length: int, deviation: int, literal: bool, start: int
) -> None:
    splitter = Splitter(length, deviation, literal)
    spans = splitter.cut(marks, start)
    check_partition(spans, start, start + len(marks))
    assert [span.tok_end for span in spans] == brute(marks, length, deviation, literal, start)
    assert all(1 <= len(span) <= splitter.most for span in spans)
    far = [span for span in spans if span.tok_start + length <= start + len(marks)]
    assert all(len(span) >= splitter.least for span in far), "only the end of the text makes shorter ones"
    assert all(span.reason.endswith(".") for span in spans)


@given(TEXTS, st.integers(1, 20), st.integers(1, 12), st.booleans())
def test_without_length_control_every_mark_splits(
    marks: list[Mark | None], length: int, deviation: int, literal: bool
) -> None:
    splitter = Splitter(length, deviation, literal, free=True)
    spans = splitter.cut(marks)
    check_partition(spans, 0, len(marks))
    ends = {span.tok_end for span in spans}
    splits = {i + (not literal) for i, mark in enumerate(marks) if mark is not None} - {0}
    assert splits <= ends
    assert all(len(span) == splitter.most for span in spans if span.tok_end not in splits and span.tok_end < len(marks))


@given(TEXTS, st.integers(1, 20), st.integers(1, 12), st.booleans(), st.booleans())
def test_chunks_closed_while_decoding_keep_to_the_lengths(
    marks: list[Mark | None], length: int, deviation: int, literal: bool, free: bool
) -> None:
    splitter = Splitter(length, deviation, literal, free)
    held = 0
    for mark in marks:
        held += 1
        closing = splitter.close(held, mark)
        if closing is None:
            assert held < splitter.most
            assert mark is None or held - literal < splitter.least
            continue
        assert splitter.least <= closing[0] <= splitter.most
        assert held - closing[0] <= (mark is not None and literal)
        held -= closing[0]


def test_a_full_open_chunk_closes_at_its_most_tokens_and_the_rest_stays_open() -> None:
    """The prompt may end with a chunk of L + Delta tokens; the first decoded token then makes one too many."""
    closed = Splitter(6, 2).close(9, Mark(".", 1.0))
    assert closed is not None
    assert (closed[0], cut_by(closed[1])) == (8, "no boundary")


def test_reasons_say_what_decided() -> None:
    marks = [None] * 40
    marks[11], marks[20] = Mark(".", 1.0), Mark("\n", 0.9)
    reasons = [(span.tok_end, span.reason) for span in Splitter(14, 8).cut(marks)]
    assert [(end, FIGURES.findall(reason)) for end, reason in reasons] == [
        (12, ["1", "2", "0.925"]),  # weight, tokens from the ideal end, score
        (21, ["0.9", "5", "0.7425"]),
        (35, ["8", "14"]),  # the most tokens from the ideal end, the cut
        (40, ["5"]),
    ]
    assert [cut_by(reason) for _, reason in reasons] == ["at .", "at \\n", "no boundary", "end of text"]
    assert cut_by(Splitter(14, 8).close(10, Mark("'", 1.0))[1]) == "at '"  # type: ignore[index]


@pytest.mark.parametrize(
    ("piece", "marks", "expected"),
    [
        (".", "one", Mark(".", 1.0)),
        (" end. ", "mid", Mark(".", 1.0)),
        ("?", "one", None),
        (" ?", "mid", Mark("?", 1.0)),
        ("\n", "mid", Mark("\n", 0.9)),
        ("\n\n", "mid", Mark("\n\n", 1.0)),
        (".\n", "full", Mark("\n", 0.9)),
        (",", "mid", None),
        (",", "full", Mark(",", 0.4)),
        ("。", "full", Mark("。", 1.0)),
        ("3.14", "full", None),
        ('."', "full", None),
        ("", "full", None),
        (" ", "any", None),
        ('."', "any", Mark('"', 1.0)),
        (",", "any", Mark(",", 1.0)),
        (".", "none", None),
    ],
)
def test_the_mark_of_a_token(piece: str, marks: str, expected: Mark | None) -> None:
    assert mark_of(piece, marks) == expected


def test_sets_grow_and_are_known_by_model() -> None:
    assert set(SETS["none"]) < set(SETS["one"]) < set(SETS["mid"]) < set(SETS["full"]) == set(WEIGHTS)
    assert set_for("Qwen2") == "mid"
    with raises_code("unknown_marks", marks="some"):
        mark_of(".", "some")


@pytest.mark.parametrize("bad", [(0, 1), (1, 0)])
def test_lengths_below_one_are_refused(bad: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        Splitter(*bad)


def test_of_two_equal_splits_the_earlier_one_counts() -> None:
    """Both one token from the ideal end, both full stops."""
    marks = [None, None, Mark(".", 1.0), None, Mark(".", 1.0), None, None, None]
    assert next(span.tok_end for span in Splitter(4, 2).cut(marks)) == 3
