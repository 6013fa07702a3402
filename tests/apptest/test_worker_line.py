"""What the New run page says of the process that is kept for runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from uiruns import Visit

from kvlens.app.ui.common import readahead
from kvlens.app.ui.common.jobs import JobManager
from kvlens.app.ui.common.likely import Likely
from kvlens.app.ui.common.warm import WarmStatus, warm
from kvlens.app.ui.run import preflight, worker
from kvlens.runs.request import READ_AHEAD


def captions(visit: Visit, folder: Path) -> tuple[list[str], list[str]]:
    app = visit(folder, "run")
    assert not app.exception
    return (
        [text.value for text in app.caption if "kept for runs" in text.value],
        [button.label for button in app.button if button.key == "worker_release"],
    )


def test_state_memory_and_idle_time_are_shown(visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "able", lambda: True)
    monkeypatch.setenv("KVLENS_WARM_IDLE", "90")
    (none,), buttons = captions(visit, tmp_path)
    assert "1.5 minutes" in none
    assert buttons == []
    released: list[bool] = []
    monkeypatch.setattr(warm, "release", lambda: released.append(True))
    monkeypatch.setattr(warm, "status", lambda: WarmStatus(False, 1_400_000_000))
    (idle,), buttons = captions(visit, tmp_path)
    assert "1.4 GB" in idle
    assert len(buttons) == 1
    app = visit(tmp_path, "run")
    app.button(key="worker_release").click().run()
    assert released == [True]
    monkeypatch.setattr(warm, "status", lambda: WarmStatus(True, None))
    assert captions(visit, tmp_path)[1] == [], "a run is not cut off"


def test_no_page_starts_the_process(visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(warm, "prepare", lambda: begun.append(True))
    for page in ("home", "run", "replay"):
        visit(tmp_path, page)
    assert begun == []


def test_a_change_of_the_form_begins_the_process_once(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(worker, "able", lambda: True)
    monkeypatch.setattr(warm, "prepare", lambda: begun.append(True))
    monkeypatch.setattr(warm, "status", lambda: WarmStatus(False, 1) if begun else None)
    app = visit(tmp_path, "run")
    for page in ("home", "run"):
        app.switch_page(f"pages/{page}.py").run()
    assert begun == [], "the form is what it was"
    app.number_input(key="form_max_new").set_value(8).run()
    app.number_input(key="form_max_new").set_value(9).run()
    assert begun == [True]
    monkeypatch.setattr(warm, "release", begun.clear)
    app.button(key="worker_release").click().run()
    app.number_input(key="form_max_new").set_value(8).run()
    assert begun == [], "a released process stays away"
    begun.append(False)  # a run began one
    app.run()
    begun.clear()  # it ended by itself
    app.number_input(key="form_max_new").set_value(9).run()
    assert begun == [True], "the run has undone the release"


def test_nothing_is_said_where_jobs_start_from_nothing(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "able", lambda: False)
    assert captions(visit, tmp_path) == ([], [])


def test_the_estimate_counts_what_was_read_ahead_no_more(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the reading ends, the page is drawn again with what is left."""
    monkeypatch.setattr(worker, "able", lambda: True)
    monkeypatch.setattr(warm, "status", lambda: WarmStatus(False, 1))
    phases = {"load": 5.0, "prefill": 8.0, "reference": 4.0, "place": 2.0, "decode": 1.0}
    monkeypatch.setattr(preflight, "likely_of", lambda *figures: Likely(phases, 1000, 1, True))

    def seconds() -> list[str]:
        app = visit(tmp_path, "run")
        assert not app.exception
        sentences = [text.value.replace("\\", "") for text in app.caption]
        return [match[1] for text in sentences if (match := re.match(r"Time: about ([\d.]+)", text))]

    (before,) = seconds()
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(JobManager, "has_read", lambda manager, reads: asked.append(reads) or True)
    (after,) = seconds()
    assert (float(before), float(after)) == (20.0, 3.0)
    assert asked
    monkeypatch.setattr(warm, "status", lambda: None)
    assert [float(text) for text in seconds()] == [8.0], "the model has to be loaded again"
    monkeypatch.setattr(warm, "status", lambda: WarmStatus(False, 1))
    looks: list[bool] = []  # the reading goes on when the page is drawn first, and has ended at the line's first look

    def reads_ahead(manager: JobManager) -> bool:
        looks.append(not looks)
        return looks[-1]

    monkeypatch.setattr(JobManager, "reads_ahead", reads_ahead)
    monkeypatch.setattr(JobManager, "has_read", lambda manager, reads: bool(looks))
    assert seconds() == [after], "the page was drawn again"


def test_a_changed_form_has_its_prompt_read(visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for what decides the reading, and no prompt that takes long."""
    asked: list[tuple[object, ...]] = []

    def submit(manager: JobManager, argv: list[str], title: str, **more: Any) -> str:
        assert (argv[-1], more["ahead"]) == (READ_AHEAD, True)
        asked.append(more["reads"])
        return "0"

    monkeypatch.setattr(readahead, "able", lambda: True)
    monkeypatch.setattr(warm, "status", lambda: WarmStatus(False, 1))
    monkeypatch.setattr(JobManager, "submit", submit)
    monkeypatch.setattr(JobManager, "would_read", lambda manager, reads: reads not in asked)
    app = visit(tmp_path, "run")
    app.run()
    assert asked == [], "nothing is read because the page is open"
    app.number_input(key="form_max_new").set_value(8).run()
    assert len(asked) == 1
    app.checkbox(key="form_against").set_value(False).run()
    assert len(asked) == 2, "nobody compares: full KV need not answer"
    app.number_input(key="form_max_new").set_value(9).run()
    assert len(asked) == 2
    app.number_input(key="form_length").set_value(300).run()
    assert len(asked) == 3
    with monkeypatch.context() as patch:
        patch.setattr(readahead, "MOST_TOKENS", 200)
        app.number_input(key="form_length").set_value(400).run()
        assert len(asked) == 3
    with monkeypatch.context() as patch:
        patch.setattr(readahead, "MOST_BYTES", 1000)
        app.number_input(key="form_length").set_value(500).run()
        assert len(asked) == 3
    app.number_input(key="form_length").set_value(600).run()
    assert len(asked) == 4
    assert not app.exception
