"""A trace that is given effects after its run was stored, and what is said of a run that has none."""

from __future__ import annotations

import html
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvlens.app.report.run import verdict_text
from kvlens.lens.verdict import verdict
from kvlens.store import amend
from kvlens.store.amend import LEFT_OFF, PENDING, add_effects, outstanding, why_none
from kvlens.store.errors import RunBusy
from kvlens.store.reader import TraceReader
from kvlens.store.recover import delete_run
from kvlens.store.runinfo import Lease
from tests.synthetic import write_synthetic

TOO_LONG = "the context is too long"


def write(folder: Path, **meta: str) -> str:
    return write_synthetic(folder, 2, 4, 2, 4, 8, prompt_tokens=80, **meta)  # type: ignore[arg-type]


def test_effects_are_on_their_way_only_while_somebody_computes_them(tmp_path: Path) -> None:
    with outstanding(tmp_path):
        assert why_none(tmp_path, PENDING) == PENDING
    assert why_none(tmp_path, PENDING) == LEFT_OFF
    assert (why_none(tmp_path, TOO_LONG), why_none(tmp_path, None)) == (TOO_LONG, None)


def test_a_report_says_the_same(tmp_path: Path) -> None:
    uid = write(tmp_path, no_effects=PENDING)
    with TraceReader.open(tmp_path, uid) as reader:
        found = verdict(reader)
        assert found is not None
        assert found.missed is not None
        found = replace(found, missed=replace(found.missed, effect=None))
        with outstanding(tmp_path / uid):
            assert PENDING in html.unescape(verdict_text(reader, found))
        said = html.unescape(verdict_text(reader, found))
    assert LEFT_OFF in said
    assert PENDING not in said


def test_a_trace_is_replaced_under_the_lease_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = write(tmp_path)
    folder, copy, read = tmp_path / uid, shutil.copyfile, []

    def copying(source: Path, target: Path) -> None:
        copy(source, target)
        with pytest.raises(RunBusy):
            delete_run(tmp_path, uid)
        with TraceReader.open(tmp_path, uid) as reader:
            read.append(reader.meta.no_effects)

    monkeypatch.setattr(amend.shutil, "copyfile", copying)
    with outstanding(folder):
        add_effects(folder, None, (2, 2), {"no_effects": TOO_LONG})
    with TraceReader.open(tmp_path, uid) as reader:
        read.append(reader.meta.no_effects)
    assert read == [None, TOO_LONG]


def test_a_run_that_is_written_cannot_be_read_though_its_effects_are_outstanding(tmp_path: Path) -> None:
    uid = write(tmp_path, status="failed")
    with outstanding(tmp_path / uid), Lease(tmp_path / uid), pytest.raises(RunBusy):
        TraceReader.open(tmp_path, uid)


def test_copies_of_a_killed_process_are_discarded(tmp_path: Path) -> None:
    folder = tmp_path / write(tmp_path)
    for name in (".trace.1.duckdb", ".trace.1.duckdb.wal"):
        (folder / name).write_bytes(b"half a copy")
    add_effects(folder, None, (2, 2), {"no_effects": TOO_LONG})
    assert list(folder.glob(".trace.*")) == []
