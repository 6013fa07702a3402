"""A Run's replay: one file, and a frame of its own in a notebook."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

import kvlens


def test_the_replay_is_one_file_and_the_notebook_s_frame(lost: kvlens.Run, tmp_path: Path) -> None:
    written = lost.save_html(tmp_path / "replay.html")
    page = written.read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>")
    assert lost.uid in page
    frame = re.fullmatch(r'<iframe srcdoc="([^"]*)"([^>]*)></iframe>', lost._repr_html_(), re.S)
    assert frame is not None
    assert html.unescape(frame[1]) == page
    assert 'sandbox="allow-scripts"' in frame[2], "it runs apart from the notebook"


def test_a_file_that_cannot_be_written(lost: kvlens.Run, tmp_path: Path) -> None:
    with pytest.raises(kvlens.RequestError) as error:
        lost.save_html(tmp_path / "no such folder" / "replay.html")
    assert error.value.code == "file_unwritable"
    assert error.value.values["path"] == str(tmp_path / "no such folder" / "replay.html")
