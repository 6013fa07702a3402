"""Runs, races, caches and prompts are their owner's alone, whatever the umask and wherever they are."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlens import files
from kvlens.app import gallery
from kvlens.app.ui.common.scratch import Scratch
from kvlens.models.cache import make_once, models_dir, write_json
from kvlens.runs import races
from kvlens.runs.races import Lane, RaceInfo
from kvlens.store.about import About, write_about


@pytest.fixture(autouse=True)
def everything_allowed() -> Iterator[None]:
    """The umask that takes nothing away."""
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(top: Path) -> list[tuple[str, str]]:
    """Return what below `top`, and `top` itself, others have any right on: path and mode."""
    places = [top, *top.rglob("*")]
    modes = [(place, stat.S_IMODE(place.lstat().st_mode)) for place in places]
    return [(str(place.relative_to(top)), oct(mode)) for place, mode in modes if mode & 0o077]


def test_folders_are_made_private_and_those_that_are_there_stay(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    files.make_folder(tmp_path / "a" / "b")
    assert open_to_others(tmp_path / "a") == []
    (tmp_path / "a").chmod(0o750)
    files.make_folder(tmp_path / "a" / "c")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o750
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError):
            files.make_folder(place)


def test_a_file_that_was_open_to_others_is_closed_when_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("long before")
    path.chmod(0o666)
    files.write_file(path, b"new")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", 0o600)


def test_runs_are_private(tmp_path: Path) -> None:
    import kvlens

    run = kvlens.run(
        "The river was wide. " * 12, "snapkv", "40%", model="demo", max_new=2, runs=tmp_path / "r", progress=False
    )
    write_about(tmp_path / "r", run.uid, About(name="n"))
    list(kvlens.runs(runs=tmp_path / "r").index)
    assert open_to_others(tmp_path / "r") == []
    assert (tmp_path / "r" / run.uid / "trace.duckdb").is_file()


def test_recorded_losses_are_private_where_they_are_copied(tmp_path: Path) -> None:
    uid = gallery.bring(gallery.losses()[0], tmp_path / "r")
    assert (tmp_path / "r" / uid / "trace.duckdb").is_file()
    assert open_to_others(tmp_path / "r") == []


def test_races_prompts_and_converted_models_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    race = RaceInfo(
        id="20260101-000000-abcdef", created="", model="demo", budget="20%", max_new=1, lanes=[Lane(method="full")]
    )
    races.write(tmp_path / "r", race)
    assert open_to_others(tmp_path / "r") == []
    scratch = Scratch()
    prompt = scratch.file("prompt.json", "text")
    assert open_to_others(prompt.parent) == []
    monkeypatch.setenv("KVLENS_CACHE", str(tmp_path / "cache"))
    make_once("model", lambda folder: (folder / "config.json").write_text("{}") and None)
    write_json(tmp_path / "cache" / "models.json", {})
    assert (models_dir() / "model" / "config.json").is_file()
    shut = [path for path, _ in open_to_others(tmp_path / "cache")]
    assert shut == ["models/model/config.json"], "inside a folder that is shut"
