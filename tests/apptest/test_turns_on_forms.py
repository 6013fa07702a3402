"""The choice of turns on the forms of New run, a race and Study: there for a conversation with several user messages,
with the default of the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest
from uiruns import Visit

from kvlens.app.ui.common import sentences
from kvlens.app.ui.common.jobs import JobManager
from kvlens.app.ui.common.request import MethodChoice, PromptChoice, Rivals, command, race_command
from kvlens.app.ui.common.widgets import plain
from kvlens.app.ui.run import racepreflight
from kvlens.app.ui.study.request import StudyChoice, study_command
from kvlens.lens.condition import ANEW, CARRIED
from kvlens.text.glossary import meaning
from kvlens.text.messages import decode_conversation
from kvlens.text.prompts import PromptText

TURNS = (("user", "The code of the gate is 4821. " * 8), ("assistant", "I see."))
LAST = "Which code does the gate have?"
MESSAGES = [{"role": role, "content": text} for role, text in (*TURNS, ("user", LAST))]
SYSTEM = {"role": "system", "content": "Be brief."}


def upload(app: AppTest, content: Any, name: str = "talk.json") -> AppTest:
    """Give the form a file."""
    data = json.dumps(content).encode() if name.endswith(".json") else str(content).encode()
    return app.file_uploader(key="form_file").set_value((name, data, "application/json")).run()


def form(visit: Visit, folder: Path) -> AppTest:
    """New run on the real model, whose chat form takes turns, before a file is chosen."""
    app = visit(folder, "run")
    app.selectbox(key="form_model").set_value("smollm2").run()
    return app.segmented_control(key="form_source").set_value("Upload").run()


def turns(app: AppTest, key: str) -> Any:
    """The control; None where the page has none."""
    return next((radio for radio in app.radio if radio.key == key), None)


def condition(app: AppTest) -> str:
    return next(text.value for text in app.text if "prompt tokens" in text.value)


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, Any]]]:
    """(command, its prompt file) of every job that a page begins."""
    begun: list[tuple[list[str], dict[str, Any]]] = []

    def note(self: JobManager, argv: list[str], title: str, **more: Any) -> str:
        begun.append((argv, json.loads(Path(argv[4]).read_text(encoding="utf-8"))))
        return "job"

    monkeypatch.setattr(JobManager, "submit", note)
    return begun


def press(app: AppTest, label: str) -> None:
    next(button for button in app.button if button.label == label).click().run()


def test_a_conversation_can_be_carried_from_new_run(
    visit: Visit, tmp_path: Path, submitted: list[tuple[list[str], dict[str, Any]]]
) -> None:
    app = upload(form(visit, tmp_path), {"messages": [SYSTEM, *MESSAGES], "answer": "4821"})
    assert not app.error
    control = turns(app, "form_turns")
    assert (control.value, list(control.options), control.help) == ("anew", ["anew", "carried"], meaning("turns"))
    assert ANEW in condition(app)
    press(app, "Run")
    argv, file = submitted.pop()
    assert "--turns" not in argv
    assert (file["messages"], file["answer"]) == (MESSAGES, "4821")
    assert argv[argv.index("--system") + 1] == "Be brief."
    app = upload(form(visit, tmp_path), {"messages": [SYSTEM, *MESSAGES]})
    turns(app, "form_turns").set_value("carried").run()
    assert CARRIED in condition(app)
    assert not app.error
    press(app, "Run")
    argv, _ = submitted.pop()
    assert argv[argv.index("--turns") + 1] == "carried"


@pytest.mark.parametrize(
    ("content", "name"),
    [("The code is 4821.", "talk.txt"), ({"text": LAST}, "one.json"), ({"messages": MESSAGES[-1:]}, "last.json")],
)
def test_a_prompt_without_earlier_user_messages_has_no_choice_of_turns(
    visit: Visit, tmp_path: Path, content: Any, name: str
) -> None:
    app = upload(form(visit, tmp_path), content, name)
    assert next(button for button in app.button if button.label == "Run")
    assert turns(app, "form_turns") is None


def test_two_system_messages_are_refused(visit: Visit, tmp_path: Path) -> None:
    app = upload(form(visit, tmp_path), {"messages": [SYSTEM, *MESSAGES]})
    app.text_input(key="form_system").set_value("Be long.").run()
    assert [box.value for box in app.error] == [plain(sentences.TWO_SYSTEM_MESSAGES)]
    assert not [button for button in app.button if button.label == "Run"]


def test_what_cannot_be_carried_is_told_before_the_run(visit: Visit, tmp_path: Path) -> None:
    app = upload(form(visit, tmp_path), {"messages": [MESSAGES[0], MESSAGES[2]]})
    turns(app, "form_turns").set_value("carried").run()
    assert len(app.error) == 1
    assert "--" not in app.error[0].value.replace("\\", "")


def test_a_race_carries_the_turns_of_the_form(
    visit: Visit, tmp_path: Path, submitted: list[tuple[list[str], dict[str, Any]]]
) -> None:
    app = upload(form(visit, tmp_path), {"messages": MESSAGES})
    app.selectbox(key="form_method").set_value("h2o").run()
    app.multiselect(key="form_rivals").set_value(["snapkv"]).run()
    turns(app, "form_turns").set_value("carried").run()
    assert CARRIED in condition(app)
    press(app, "Race 2 methods")
    argv, file = submitted.pop()
    assert argv[3] == "race"
    assert argv[argv.index("--turns") + 1] == "carried"
    assert file["messages"] == MESSAGES
    choice = MethodChoice("h2o", "smollm2", None, "20%", 8, 0, turns=TURNS, carried=True)
    shared = racepreflight.race_of(choice, Rivals(("snapkv",))).shared
    assert (shared.turns, shared.carried) == (TURNS, True)


def test_the_prompt_file_of_a_conversation_holds_its_turns() -> None:
    choice = PromptChoice(PromptText(LAST, answer="4821"), "run", TURNS)
    talk = decode_conversation(choice.file_text().encode(), "prompt.json")
    assert (talk.prompt.text, talk.prompt.answer, talk.turns) == (LAST, "4821", TURNS)


@pytest.mark.parametrize("carried", [True, False])
def test_the_commands_say_carried_and_leave_out_the_default(carried: bool) -> None:
    choice = MethodChoice("h2o", "smollm2", None, "20%", 8, 0, turns=TURNS, carried=carried)
    study = StudyChoice("smollm2", ("h2o",), carried=carried)
    for argv in (
        command(Path("p"), choice, Path("r")),
        race_command(Path("p"), choice, ("snapkv",), Path("r")),
        study_command(["p.jsonl"], study, Path("r")),
    ):
        assert ("--turns" in argv) is carried
    assert study.plan().shared.carried is carried


def test_a_study_carries_the_turns_of_its_conversations(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[list[str]] = []

    def note(self: JobManager, argv: list[str], title: str) -> str:
        begun.append(argv)
        return "job"

    monkeypatch.setattr(JobManager, "submit", note)
    app = visit(tmp_path, "study")
    app.selectbox(key="study_model").set_value("smollm2").run()
    rows = "".join(json.dumps(row) + "\n" for row in ({"messages": MESSAGES}, {"text": LAST}))
    app.file_uploader(key="study_files").set_value(("p.jsonl", rows.encode(), "application/json")).run()
    control = turns(app, "study_turns")
    assert (control.value, control.help) == ("anew", meaning("turns"))
    press(app, "Run the study")
    assert "--turns" not in begun.pop()
    control.set_value("carried").run()
    press(app, "Run the study")
    argv = begun.pop()
    assert argv[argv.index("--turns") + 1] == "carried"
    plain_rows = json.dumps({"text": LAST}).encode()
    app.file_uploader(key="study_files").set_value(("q.jsonl", plain_rows, "application/json")).run()
    assert turns(app, "study_turns") is None
