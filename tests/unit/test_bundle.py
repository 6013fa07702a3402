"""Runs handed on in one file, and taken in from one that trusts nothing."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import duckdb
import pytest
from support import raises_code

from kvlens.app.gallery import bundle
from kvlens.app.gallery.bundle import hand_on, take_in
from kvlens.ledger.account import LossLedger
from kvlens.ledger.storage import FILE as LEDGER
from kvlens.ledger.storage import store_ledger, stored_ledger
from kvlens.store.errors import TraceError, UnreadableRun
from kvlens.store.reader import TraceReader
from kvlens.store.schema import TABLES
from tests.synthetic import write_synthetic

UID = "20260101-000000-handed"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_synthetic(folder, 2, 4, 2, 6, 10, seed=1, uid=UID, prompt_tokens=120)
    return folder


@pytest.fixture
def handed(runs: Path, tmp_path: Path) -> Path:
    file = tmp_path / "run.tar.xz"
    hand_on(runs, {UID: ()}, file)
    return file


def rows(folder: Path, uid: str, table: str) -> list[tuple[object, ...]]:
    with duckdb.connect(str(folder / uid / "trace.duckdb"), read_only=True) as con:
        return con.execute(f"SELECT * FROM {table}").fetchall()


def test_every_row_arrives_in_its_order(runs: Path, handed: Path, tmp_path: Path) -> None:
    take_in(handed, tmp_path / "in", (UID,))
    assert [path.name for path in (tmp_path / "in").iterdir()] == [UID]
    for table in TABLES:
        assert rows(tmp_path / "in", UID, table) == rows(runs, UID, table), table
    assert not (tmp_path / "in" / UID / "trace.duckdb").stat().st_mode & 0o222
    assert "pid" not in json.loads((tmp_path / "in" / UID / "run.json").read_text())


def test_the_same_runs_make_the_same_text_files(runs: Path, handed: Path, tmp_path: Path) -> None:
    """The trace's own bytes are DuckDB's affair."""
    again = tmp_path / "again.tar.xz"
    hand_on(runs, {UID: ()}, again)
    with tarfile.open(handed) as one, tarfile.open(again) as other:
        assert [member.name for member in one] == [f"{UID}/{name}" for name in bundle.FILES]
        for name in (f"{UID}/run.json", f"{UID}/prompt.txt"):
            first, second = one.extractfile(name), other.extractfile(name)
            assert first is not None
            assert second is not None
            assert first.read() == second.read()


def test_what_is_left_out_is_said_and_reads_as_not_recorded(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.tar.xz"
    hand_on(runs, {UID: ("oracle", "span_key")}, file)
    take_in(file, tmp_path, (UID,))
    assert rows(tmp_path, UID, "oracle") == []
    with TraceReader.open(tmp_path, UID) as reader:
        assert reader.meta.left_out == ("oracle", "span_key")
        assert reader.oracle_step(0).empty
        assert reader.n_steps == 6


def test_a_run_that_is_there_stays(handed: Path, tmp_path: Path) -> None:
    take_in(handed, tmp_path, (UID,))
    (tmp_path / UID / "note").write_text("mine")
    take_in(handed, tmp_path, (UID,))
    assert (tmp_path / UID / "note").read_text() == "mine"


def test_a_stored_ledger_travels_and_a_damaged_one_is_refused(runs: Path, tmp_path: Path) -> None:
    file, ledger = tmp_path / "run.tar.xz", LossLedger((2,), 1.5, -0.5, (), 2.0, 3, 0.1)
    store_ledger(runs, UID, ledger, None)
    try:
        hand_on(runs, {UID: ()}, file)
    finally:
        (runs / UID / LEDGER).unlink()
    take_in(file, tmp_path / "in", (UID,))
    assert stored_ledger(tmp_path / "in", UID) == (ledger, None)
    bad = made(tmp_path / "bad.tar.xz", members(file) | {f"{UID}/{LEDGER}": b"{}"})
    with pytest.raises(UnreadableRun):
        take_in(bad, tmp_path / "other", (UID,))
    assert list((tmp_path / "other").iterdir()) == []


def made(path: Path, members: dict[str, bytes | None]) -> Path:
    """An archive; None: a link to a file outside."""
    with tarfile.open(path, "w:xz") as archive:
        for name, data in members.items():
            about = tarfile.TarInfo(name)
            if data is None:
                about.type, about.linkname = tarfile.SYMTYPE, "/etc/passwd"
            else:
                about.size = len(data)
            archive.addfile(about, io.BytesIO(data or b""))
    return path


def members(handed: Path) -> dict[str, bytes | None]:
    with tarfile.open(handed) as archive:
        return {member.name: file.read() for member in archive if (file := archive.extractfile(member)) is not None}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"../outside": b"x"}, "no part of its runs"),
        ({f"{UID}/../../outside": b"x"}, "no part of its runs"),
        ({f"{UID}/logits.safetensors": b"x"}, "no part of its runs"),
        ({f"{UID}/prompt.txt": None}, "no part of its runs"),
        ({f"{UID}/trace.duckdb": b"not a database" * 999}, "damaged or not a trace"),
        ({f"{UID}/run.json": b'{"status": "running"}'}, "not the whole run"),
    ],
)
def test_a_file_of_another_kind_leaves_nothing(
    handed: Path, tmp_path: Path, changed: dict[str, bytes | None], says: str
) -> None:
    file = made(tmp_path / "bad.tar.xz", members(handed) | changed)
    with pytest.raises(TraceError, match=says):
        take_in(file, tmp_path / "in", (UID,))
    assert list((tmp_path / "in").iterdir()) == []
    assert not (tmp_path / "outside").exists()


def test_a_damaged_or_half_file_leaves_nothing(handed: Path, tmp_path: Path) -> None:
    data = handed.read_bytes()
    for bad in (data[: len(data) // 2], b"no archive"):
        handed.write_bytes(bad)
        with raises_code("bundle_unreadable", TraceError):
            take_in(handed, tmp_path / "in", (UID,))
        assert list((tmp_path / "in").iterdir()) == []


def test_more_than_a_run_can_be_is_refused(handed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MOST_BYTES", 1000)
    with raises_code("bundle_foreign_file", TraceError):
        take_in(handed, tmp_path / "in", (UID,))


def test_a_run_under_another_name_or_with_a_failed_check_is_refused(handed: Path, tmp_path: Path) -> None:
    other = "20260101-000000-other"
    file = made(tmp_path / "renamed.tar.xz", {name.replace(UID, other): data for name, data in members(handed).items()})
    with raises_code("bundle_other_run", TraceError, uid=other):
        take_in(file, tmp_path / "in", (other,))
    take_in(handed, tmp_path / "good", (UID,))
    trace = tmp_path / "good" / UID / "trace.duckdb"
    trace.chmod(0o644)
    with duckdb.connect(str(trace)) as con:
        con.execute("UPDATE self_check SET passed = FALSE WHERE rowid = 0")
    file = made(tmp_path / "failed.tar.xz", members(handed) | {f"{UID}/trace.duckdb": trace.read_bytes()})
    with raises_code("bundle_check_failed", TraceError, uid=UID):
        take_in(file, tmp_path / "in", (UID,))
    with pytest.raises(TraceError, match="lacks"):
        take_in(file, tmp_path / "in", (UID, other))


def test_a_folder_that_cannot_be_written_is_one_sentence(handed: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with raises_code("bundle_unreadable", TraceError):
        take_in(handed, tmp_path / "file" / "runs", (UID,))


def test_where_one_run_cannot_be_put_down_none_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, plain = f"{UID[:-1]}x", os.rename
    for seed, uid in enumerate((UID, other)):
        write_synthetic(tmp_path / "runs", 2, 4, 2, 2, 6, seed=seed, uid=uid, prompt_tokens=60)
    hand_on(tmp_path / "runs", {UID: (), other: ()}, tmp_path / "two.tar.xz")

    def rename(source: Path, target: Path) -> None:
        if target == tmp_path / "in" / other:
            raise OSError(28, "No space left on device")
        plain(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with raises_code("bundle_unreadable", TraceError):
        take_in(tmp_path / "two.tar.xz", tmp_path / "in", (UID, other))
    assert list((tmp_path / "in").iterdir()) == []
