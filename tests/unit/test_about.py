"""Names, notes and tags of runs: beside the record, bounded, handed on with it, and gone with it."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import pytest
from support import raises_code

from kvlens.app.gallery import bundle
from kvlens.app.report import report_bytes
from kvlens.cli.main import main
from kvlens.store import about
from kvlens.store.about import About, change_about, read_about, write_about
from kvlens.store.errors import TraceError, UnreadableRun
from kvlens.store.reader import TraceReader, list_runs
from kvlens.store.recover import delete_run, recover
from tests.synthetic import write_synthetic

UID, OTHER = "20260101-000000-named", "20260101-000001-other"
GIVEN = About(name="the lost port", note="two\nlines, <b>bold</b>", tags=("needle", "to show"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for uid in (UID, OTHER):
        write_synthetic(folder, 2, 4, 2, 4, 8, uid=uid, prompt_tokens=80)
    return folder


@pytest.fixture
def runs(made: Path) -> Path:
    """The folder as it was made, whatever a test before wrote into it."""
    write_about(made, UID, GIVEN)
    write_about(made, OTHER, About())
    return made


def kvlens(runs: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvlens", *arguments, "--runs", str(runs)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_what_was_said_is_read_and_leaves_the_record_alone(runs: Path) -> None:
    before = {path.name: path.read_bytes() for path in (runs / UID).iterdir() if path.name != about.FILE}
    assert read_about(runs / UID) == GIVEN
    assert read_about(runs / OTHER) == About()
    rows = list_runs(runs).set_index("uid")
    assert (rows.loc[UID, "name"], rows.loc[UID, "note"], rows.loc[UID, "tags"]) == (
        *list(GIVEN.model_dump().values()),
    )
    assert rows.loc[OTHER, "tags"] == ()
    assert {path.name: path.read_bytes() for path in (runs / UID).iterdir() if path.name != about.FILE} == before
    write_about(runs, UID, About())
    assert not (runs / UID / about.FILE).exists(), "nothing said is no file"


def test_changes_are_of_one_line_and_bounded() -> None:
    changed = change_about(GIVEN, name="  a \n name ", tags=["to show", " new  one "], untags=["needle"])
    assert changed == About(name="a name", note=GIVEN.note, tags=("to show", "new one"))
    assert change_about(changed, name="", note="") == About(tags=("to show", "new one"))
    assert change_about(About(), name="\ud800").name == "?"
    for wrong, sentence in (
        ({"name": "x" * 81}, "a name has at most 80 characters, this one 81."),
        ({"note": "x" * 2001}, "a note has at most 2,000 characters, this one 2,001."),
        ({"tags": ["x" * 33]}, "a tag has at most 32 characters, this one 33."),
        ({"tags": [str(number) for number in range(15)]}, "a run has at most 16 tags, these are 17."),
        ({"tags": [" "]}, "a tag needs at least one character."),
        ({"untags": ["gone"]}, "the run has no tag 'gone' to take away; it has needle, to show."),
    ):
        with pytest.raises(ValueError) as problem:  # noqa: PT011
            change_about(GIVEN, **wrong)  # type: ignore[arg-type]
        assert str(problem.value) == sentence


@pytest.mark.parametrize(
    "bad",
    [
        b"not json",
        b"[]",
        b'{"name": 3}',
        b'{"name": "x", "more": 1}',
        json.dumps({"name": "x" * 81}).encode(),
        json.dumps({"tags": ["x"] * 17}).encode(),
        json.dumps({"tags": ["turned \u202e round"]}).encode(),
        b'{"note": "' + b"x" * (65 << 10) + b'"}',
        None,
    ],
)
def test_a_damaged_file_is_one_sentence_and_hides_no_run(
    runs: Path, bad: bytes | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = runs / UID / about.FILE
    path.unlink(missing_ok=True)
    if bad is None:
        path.symlink_to("/etc/passwd")
    else:
        path.write_bytes(bad)
    with raises_code("about_unreadable", UnreadableRun) as problem:
        read_about(runs / UID)
    assert "\n" not in str(problem.value)
    row = list_runs(runs).set_index("uid").loc[UID]
    assert (row["status"], row["name"], row["tags"], row["about_error"]) == ("completed", "", (), str(problem.value))
    assert kvlens(runs, monkeypatch, "runs", "show", UID) == 0
    assert kvlens(runs, monkeypatch, "runs") == 0
    told = capsys.readouterr()
    assert UID in told.out
    assert str(problem.value)[:80] in told.err
    assert kvlens(runs, monkeypatch, "runs", "note", UID, "--name", "x") == 1
    assert str(problem.value)[:80] in capsys.readouterr().err
    path.unlink()


def test_a_report_says_that_the_file_is_damaged(runs: Path) -> None:
    (runs / UID / about.FILE).write_bytes(b"not json")
    with TraceReader.open(runs, UID) as reader:
        assert b"its name, note and tags, cannot be read" in report_bytes(reader)


def test_it_goes_where_the_run_goes(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "runs.tar.xz"
    bundle.hand_on(runs, {UID: (), OTHER: ()}, file)
    bundle.take_in(file, tmp_path / "in", (UID, OTHER))
    assert read_about(tmp_path / "in" / UID) == GIVEN
    assert not (tmp_path / "in" / OTHER / about.FILE).exists()
    with TraceReader.open(tmp_path / "in", UID) as reader:
        text = report_bytes(reader).decode()
    assert "the lost port" in text
    assert "&lt;b&gt;bold&lt;/b&gt;" in text
    delete_run(tmp_path / "in", UID)
    assert not (tmp_path / "in" / UID).exists()


def test_recovery_leaves_it(tmp_path: Path) -> None:
    """Of a run whose process died between the trace's end and run.json's."""
    write_synthetic(tmp_path, 2, 4, 2, 4, 8, uid=UID, prompt_tokens=80)
    path = tmp_path / UID / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "running"}))
    write_about(tmp_path, UID, GIVEN)
    recover(tmp_path, UID)
    assert list_runs(tmp_path)["status"].tolist() == ["completed"]
    assert read_about(tmp_path / UID) == GIVEN


def test_a_place_that_cannot_be_written_is_one_sentence(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(TraceError, match=r"cannot be stored \(.*No space left.*\); check the disk"):
        write_about(runs, UID, About(name="x"))
    assert read_about(runs / UID) == GIVEN
    assert sorted(path.name for path in (runs / UID).iterdir() if path.name.startswith(".about")) == []


def test_a_read_only_file_system_is_one_sentence(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a file system refuses to create a file, and to delete a file that does not exist."""

    def refuse(path: object, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(about, "replace_plain", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert kvlens(runs, monkeypatch, "runs", "note", UID, "--name", "x") == 1
    refused = capsys.readouterr().err
    monkeypatch.undo()
    assert refused.startswith("kvlens: ")
    assert f"run {UID} cannot be stored ({os.strerror(errno.EROFS)});" in refused
    assert "Errno" not in refused
    assert read_about(runs / UID) == GIVEN


def test_the_command_names_and_finds(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvlens(runs, monkeypatch, "runs", "note", OTHER, "--name", "second", "--tag", "show", "--tag", "x") == 0
    assert capsys.readouterr().out.splitlines() == ["name  second", "tags  show, x", "note  "]
    assert kvlens(runs, monkeypatch, "runs", "note", OTHER, "--untag", "x", "--note", "a\nb", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"name": "second", "note": "a\nb", "tags": ["show"]}

    def found(*asked: str) -> list[str]:
        assert kvlens(runs, monkeypatch, "runs", *asked, "--json") == 0
        return [row["uid"] for row in json.loads(capsys.readouterr().out)]

    assert found() == [OTHER, UID]
    assert found("--tag", "show") == [OTHER]
    assert found("--text", "PORT lost") == [UID]
    assert found("--text", "lost second") == []
    assert found("--outcome", "lost") == [OTHER, UID]
    assert found("--outcome", "kept", "--method", "sekv", "--model", "synthetic") == []
    assert kvlens(runs, monkeypatch, "runs", "--tag", "show") == 0
    assert "other token" in capsys.readouterr().out
    assert kvlens(runs, monkeypatch, "runs", "--text", "nowhere") == 0
    assert "none of the 2 runs" in capsys.readouterr().out
    assert kvlens(runs / "absent", monkeypatch, "runs") == 1
    assert str(runs / "absent") in " ".join(capsys.readouterr().err.split())
    assert kvlens(runs, monkeypatch, "runs", "--outcome", "good") == 1
    assert "'good' is no" in capsys.readouterr().err
    assert kvlens(runs, monkeypatch, "runs", "--outcome", "lost", "list") == 1
    assert "`kvlens runs list`" in capsys.readouterr().err
    assert kvlens(runs, monkeypatch, "runs", "note", "20990101-000000-absent", "--name", "x") == 1
    assert "20990101-000000-absent" in capsys.readouterr().err


def test_what_cannot_be_seen_is_named(runs: Path) -> None:
    assert change_about(About(), name="a\u202eb", tags=["c\x1b"]) == About(name="a⟨U+202E⟩b", tags=("c⟨U+001B⟩",))
