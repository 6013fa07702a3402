"""One name for one thing: what pages, reports and the command line call what a trace has codes for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlens.app.figures.columns import column_words
from kvlens.recording.metrics import METRICS
from kvlens.rows import EVENT_KINDS, HEAD_COLUMNS, KV_COLUMNS, SPAN_STATES
from kvlens.store.headqueries import head_table_columns
from kvlens.text import words

ROOT = Path(__file__).parents[2]
SHOWN = (
    "kvlens/app/ui",
    "kvlens/app/figures",
    "kvlens/app/report",
    "kvlens/app/compare",
    "kvlens/app/methods",
    "kvlens/lens",
    "kvlens/cli",
    "pages",
)
OTHER = {
    r"(?<!-)\bfetch(es|ed|ing)?\b": "recall",
    r"\b(cold|hot) (tier|memory)\b": "host memory, device",
    r"\bto (the )?host\b(?! memory)": "to host memory",
    r"\bexpand(s|ed) (spans?|form)\b": "zoom",
    r"\bcoarse (entr|span)": "summary",
    r"\bgone for good\b|\bdropped for good\b": "evicted",
    r"\battended mass\b": "coverage",
    r"\bSentKVCompress \(sentkv\)": "the title alone",
    r"\bwithout (a )?limit\b|\bno budget limit\b|\bunlimited\b": "no limit",
}
"""what is said otherwise on pages -> the one word"""


def said(path: Path) -> Iterator[tuple[int, str]]:
    """The texts of a source that are no documentation, with their lines."""
    text = path.read_text(encoding="utf-8")
    if not any(re.search(pattern, text) for pattern in OTHER):
        return
    if path.suffix == ".js":
        for line, row in enumerate(text.splitlines(), 1):
            yield from ((line, found) for found in re.findall(r'"[^"]*"|`[^`]*`', row.partition("//")[0]))
        return
    tree = ast.parse(text)
    loose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in loose:
            yield node.lineno, node.value


def test_no_page_calls_a_thing_by_another_name() -> None:
    sources = [path for folder in SHOWN for ending in ("py", "js") for path in (ROOT / folder).rglob(f"*.{ending}")]
    assert len(sources) > 150
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text[:60]!r}: say {word}"
        for path in sources
        for line, text in said(path)
        for pattern, word in OTHER.items()
        if re.search(pattern, text)
    ]
    assert found == []


def test_every_code_of_a_trace_has_words() -> None:
    assert tuple(words.STATES) == tuple(words.STATE_MEANINGS) == SPAN_STATES
    assert words.state("cold") == "in host memory"
    assert [words.state(code) for code in (None, float("nan"), "other")] == ["not recorded", "not recorded", "other"]
    assert not any("_" in words.event(kind) for kind in EVENT_KINDS)
    assert set(METRICS) == {*HEAD_COLUMNS, *KV_COLUMNS}


def test_the_table_of_words_gives_each_event_its_own_code() -> None:
    page = (ROOT / "docs/trace-schema.md").read_text(encoding="utf-8").split("\n## Words\n")[1].split("\n## ")[0]
    rows = [[cell.split(", ") for cell in line.strip("| ").split(" | ")[:2]] for line in page.splitlines()]
    named = [(word, codes) for said, *rest in rows for codes in rest for word in said if word in EVENT_KINDS]
    assert {"hold", "drop", "recall"} <= {word for word, _ in named}
    assert [word for word, codes in named if word not in codes] == []


@pytest.mark.parametrize("name", ["layer", "q_head", "kv_head", "n_steps", *head_table_columns()])
def test_a_column_of_the_table_of_heads_is_in_words_and_explained(name: str) -> None:
    title, explained = column_words(name)
    assert "_" not in title
    assert explained or name in ("layer", "q_head")


def test_statistics_say_over_what_and_whose_they_are() -> None:
    assert column_words("coverage_min")[0] == "coverage, min (share)"
    title, explained = column_words("kv_head_recalled_tokens_total")
    assert title == "recalled tokens, total"
    assert explained.endswith("over all steps; of the KV head")
    assert column_words("of_a_plugin") == ("of a plugin", "")
