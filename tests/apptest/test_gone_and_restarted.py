"""Runs that are gone, prompts that are none, servers that were killed: what the pages say and what they leave."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest
from uiruns import ROOT, Runs, Visit

from kvlens.app.ui.common.scratch import Scratch
from kvlens.app.ui.common.widgets import FAILED
from kvlens.store.reader import list_runs


@pytest.mark.parametrize("page", ["replay", "heads", "spans", "memory", "method"])
@pytest.mark.parametrize("others", [True, False])
def test_the_page_of_a_deleted_run_says_so(visit: Visit, runs: Runs, tmp_path: Path, page: str, others: bool) -> None:
    folder = tmp_path / "runs"
    for uid in (runs.whole, runs.cancelled) if others else (runs.whole,):
        shutil.copytree(runs.folder / uid, folder / uid)
    app = visit(folder, page, run=runs.whole)
    shutil.rmtree(folder / runs.whole)
    app.run()
    said = [box.value.replace("\\", "") for box in app.error]
    assert any(f" run {runs.whole}" in text for text in said), said
    assert not app.exception
    assert not [text for text in said if text.startswith(FAILED)]


def test_a_fragment_whose_run_went_meanwhile_says_so() -> None:
    def script() -> None:
        from kvlens.app.ui.common.widgets import guarded
        from kvlens.store.errors import RunNotFound

        def gone() -> None:
            raise RunNotFound("There is no run x in runs; list the runs with `kvlens runs`.")

        guarded(gone)()

    app = AppTest.from_function(script).run()
    said = [box.value.replace("\\", "") for box in app.error]
    assert " run x" in said[0]


@pytest.mark.parametrize(
    "content",
    [
        b'{"text": "abc", "needle": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"text": "abc", "needle": [[0, Infinity]]}',
        rb'{"text": "The code \ud800"}',
    ],
)
def test_a_prompt_that_is_none_is_one_sentence_on_the_page(visit: Visit, runs: Runs, content: bytes) -> None:
    app = visit(runs.folder, "run")
    app.segmented_control(key="form_source").set_value("Upload").run()
    app.file_uploader(key="form_file").set_value(("prompt.json", content, "application/json")).run()
    assert not app.exception
    said = [box.value.replace("\\", "") for box in app.error]
    assert len(said) == 1
    assert said[0].startswith("prompt.json")


def test_a_run_goes_on_when_nobody_reads_its_progress(tmp_path: Path) -> None:
    prompt, runs = tmp_path / "p.txt", tmp_path / "runs"
    prompt.write_text("The river was wide and the bridge was old. " * 20)
    command = [sys.executable, "-m", "kvlens", "run", str(prompt), "--method", "streaming_llm", "--max-new", "40"]
    command += ["--ignore-eos", "--runs", str(runs), "--progress-json"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["phase"] == "load"
        process.stdout.close()  # the server was restarted
        assert process.wait(240) == 0
    row = list_runs(runs).iloc[0]
    assert (row["status"], row["error"]) == ("completed", None)
    assert row["steps"] == 40


HOLD = """
import sys, time
from kvlens.app.ui.common.scratch import Scratch
held = Scratch()
print(held.file("prompt.json", "a secret prompt"), flush=True)
time.sleep(600)
"""


def test_prompts_of_a_killed_server_are_gone_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with subprocess.Popen([sys.executable, "-c", HOLD], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        prompt = Path(process.stdout.readline().strip())
        first = Scratch()
        assert prompt.is_file(), "its server lives"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert prompt.is_file()
    second = Scratch()
    assert not prompt.parent.exists()
    kept = first.file("prompt.json", "x")
    assert kept.is_file(), "the folder of a server that lives is left alone"
    assert (kept.stat().st_mode & 0o077, kept.parent.stat().st_mode & 0o077) == (kept.stat().st_mode & 0o077, 0)
    first.forget(["run", str(kept), "--method", "full", str(ROOT / "app.py")])
    assert not kept.exists()
    assert (ROOT / "app.py").is_file()
    assert second is not None
