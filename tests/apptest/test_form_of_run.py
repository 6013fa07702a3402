"""The form keeps what it was given: an upload that survives leaving the page, and the prompt of a stored run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from uiruns import Visit

from kvlens.app.ui.common import submit
from kvlens.app.ui.common.request import MethodChoice
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest
from kvlens.text.prompts import PromptText

TEXT = "The farmer carried the copper kettle to the old harbor. " * 8


def test_an_upload_survives_leaving_the_page(visit: Visit, tmp_path: Path) -> None:
    app = visit(tmp_path, "run")
    app.segmented_control(key="form_source").set_value("Upload").run()
    content = json.dumps({"text": TEXT, "answer": "harbor"}).encode()
    app.file_uploader(key="form_file").set_value(("own.json", content, "application/json")).run()
    assert any(text.value == "Expected answer: harbor" for text in app.text)
    app.switch_page("pages/study.py").run()
    app.switch_page("pages/run.py").run()
    assert any(text.value.startswith("In use: own.json") for text in app.text)
    assert any(text.value == "Expected answer: harbor" for text in app.text)
    app.button(key="form_upload_remove").click().run()
    assert not [text for text in app.text if text.value.startswith(("In use", "Expected"))]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run with parameters of its own."""
    runs = tmp_path_factory.mktemp("runs")
    request = RunRequest(model="demo", method="snapkv", budget="30%", max_new=3, seed=7, overrides={"kernel": "3"})
    prompt = PromptText(TEXT, answer="harbor")
    return runs, carry_out(request, prompt, runs, lambda *told: None, lambda: False)[0]


def test_the_form_takes_prompt_and_settings_of_a_stored_run(
    visit: Visit, made: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, uid = made
    begun: list[MethodChoice] = []

    def note(file: Path, choice: MethodChoice, folder: Path) -> list[str]:
        begun.append(choice)
        assert json.loads(file.read_text(encoding="utf-8"))["answer"] == "harbor"
        return [sys.executable, "-c", "pass"]

    monkeypatch.setattr(submit, "command", note)
    app = visit(runs, "run", like=uid)
    assert not app.error
    assert not app.warning
    assert "like" not in app.query_params
    assert (app.selectbox(key="form_method").value, app.number_input(key="form_seed").value) == ("snapkv", 7)
    assert app.text_input(key="form_budget").value == "30%"
    kernel = next(box for box in app.number_input if box.label.startswith("kernel"))
    assert kernel.value == 3
    kernel.set_value(5).run()
    next(button for button in app.button if button.label == "Run").click().run()
    (choice,) = begun
    assert choice.changed == {"kernel": 5}


def test_replay_and_runs_lead_to_the_form(visit: Visit, made: tuple[Path, str]) -> None:
    runs, uid = made
    app = visit(runs, "replay", run=uid)
    links = [link.proto for link in app.get("page_link") if link.proto.label.startswith("Same prompt")]
    assert [(link.page, link.query_string) for link in links] == [("run", f"like={uid}")]
