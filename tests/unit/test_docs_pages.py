"""The docs: no link is broken, generated heads are those of the registry, and prose is easy to read."""

from __future__ import annotations

import re
from pathlib import Path

import doclinks
import prose
import pytest
import ratchet
import readability

from kvlens import methods
from kvlens.lab.studies import generated_pages, method_pages

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "methods"


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    assert doclinks.broken() == []


def test_a_broken_link_and_a_missing_heading_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "a.md"
    page.write_text("# A part\n[x](a.md#a-part) [y](gone.md) [z](#no-part) `[code](none.md)` [web](https://x.org)\n")
    monkeypatch.setattr(doclinks, "pages", lambda root: [page])
    assert doclinks.broken(tmp_path) == ["a.md: gone.md", "a.md: #no-part"]


def test_every_method_has_a_page_whose_head_is_the_registrys() -> None:
    texts = method_pages.pages(FOLDER)
    assert {path.stem for path in texts} == {entry["name"] for entry in methods.catalogue()} | {"index"}
    assert {path.stem for path in FOLDER.glob("*.md")} == {path.stem for path in texts}


@pytest.mark.parametrize("heading", ["## Idea", "## Where tokens are", "## Departures from the paper", "## Parameters"])
def test_every_method_page_has_its_parts(heading: str) -> None:
    pages = [path for path in FOLDER.glob("*.md") if path.stem != "index"]
    assert [path.stem for path in pages if f"\n{heading}\n" not in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("path", readability.pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_is_easy_to_read(path: Path) -> None:
    row = readability.measure(path.read_text(encoding="utf-8"))
    assert row.mean <= readability.MEAN_WORDS
    assert row.longest <= readability.MOST_WORDS
    assert row.grade <= readability.GRADE


def test_the_measure_counts_words_syllables_and_sentences() -> None:
    text = "# Title\n\nA cat sat here. It ran `away` home!\n\n| a | table |\n\n- One item, e.g. it.\n\n```\ncode\n```\n"
    row = readability.measure(text)
    assert (row.sentences, row.words, row.longest) == (3, 12, 4)
    assert [readability.count_syllables(word) for word in ("cat", "table", "readable", "moved", "spans", "7")] == [
        1, 2, 3, 1, 1, 1,
    ]  # fmt: skip


def test_a_test_that_quotes_four_words_of_prose_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text(
        'def test_a():\n    assert "the run was lost here" in text\n\n'
        'def test_b():\n    assert code == "budget_infeasible", "a message of a failure here"\n\n'
        'def test_c():\n    with raises(match="one two three four"):\n        pass\n\n'
        'def test_d():\n    assert score("the cat sat down", ["a dog sat down"]) == 1\n\n'
        'def test_e():\n    assert any("the cat sat down" in line for line in lines)\n'
    )
    assert [name for name, _, _ in prose.quoting_functions(file)] == ["test_a", "test_c", "test_e"]
    assert ratchet.rises(prose.counts(tmp_path), {"test_x.py": 3}) == []
    assert ratchet.rises(prose.counts(tmp_path), {"test_x.py": 2}) == ["test_x.py"]


def test_no_test_file_quotes_more_prose_than_before() -> None:
    assert ratchet.rises(prose.counts(), ratchet.read_baseline(prose.BASELINE)) == []


def test_generated_pages_are_those_of_the_code() -> None:
    stale = [path.name for path, text in generated_pages.pages().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run: python -m kvlens.lab.studies.generated_pages"


def test_evidence_has_a_date_and_a_command_and_its_index_lists_every_file() -> None:
    folder = ROOT / "docs" / "evidence"
    index = (folder / "index.md").read_text(encoding="utf-8")
    files = [path for path in folder.glob("*.md") if path.stem != "index"]
    assert [path.name for path in files if f"]({path.name})" not in index] == []
    texts = {path.name: path.read_text(encoding="utf-8") for path in files}
    assert [name for name, text in texts.items() if not re.search(r"\b20\d\d-\d\d-\d\d\b", text)] == []
    command = re.compile(r"`(?:kvlens|python -m|pytest|make|python tests/)[^`]*`|^(?:kvlens|python) ", re.MULTILINE)
    assert [name for name, text in texts.items() if not command.search(text)] == []
