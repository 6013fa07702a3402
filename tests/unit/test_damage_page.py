"""The page of damaged traces: made of committed results, with the tables that they do not cover."""

from __future__ import annotations

from pathlib import Path

from kvlens.lab.studies.damage import PAGE, page, read, unmeasured

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_page_is_made_of_the_committed_figures() -> None:
    assert (ROOT / PAGE).read_text(encoding="utf-8") == page()


def test_tables_newer_than_the_result_are_named() -> None:
    rows = read("damage")["rows"]
    assert unmeasured(rows) == []
    without = [row for row in rows if row["kind"] != "phase: missing table"]
    assert unmeasured(without) == ["`phase`"]
