"""A loss of power between any two calls that change a file: readers find the old content or the new, whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvlens.files import discard, replace_plain


def operations(folder: Path, monkeypatch: pytest.MonkeyPatch, durable: bool) -> list[str]:
    """The calls of one replacement in their order: fsync of the file, rename, fsync of the folder."""
    calls: list[str] = []
    plain_sync, plain_replace = os.fsync, os.replace

    def sync(fd: int) -> None:
        calls.append("sync folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "sync file")
        plain_sync(fd)

    def replace(old: Path, new: Path) -> None:
        calls.append("rename")
        plain_replace(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    replace_plain(folder / "run.json", folder / ".run.json.1", b"new", durable)
    return calls


def after_power_loss(calls: list[str]) -> set[str]:
    """What a reader may find once the power is back: content that was not synced may be lost, a rename that was not
    synced may be undone, and nothing else."""
    if "rename" not in calls:
        return {"old"}
    content = "new" if "sync file" in calls[: calls.index("rename")] else "torn"
    return {content} if "sync folder" in calls[calls.index("rename") :] else {"old", content}


def test_every_prefix_leaves_old_or_new_and_the_whole_leaves_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = operations(tmp_path, monkeypatch, durable=True)
    assert calls == ["sync file", "rename", "sync folder"]
    found = [after_power_loss(calls[:length]) for length in range(len(calls) + 1)]
    assert found == [{"old"}, {"old"}, {"old", "new"}, {"new"}]


def test_a_progress_note_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert operations(tmp_path, monkeypatch, durable=False) == ["rename"]


def test_a_file_that_cannot_be_deleted_hides_no_error(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    discard(tmp_path / "folder")
    assert (tmp_path / "folder").is_dir()
