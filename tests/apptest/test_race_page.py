"""Races on the New run page: the form that begins one, the job that goes on, the stored race of a link."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest
from uiruns import ROOT, Visit

from kvlens.app.ui.common import livelanes, sentences, submit
from kvlens.app.ui.common.joblog import read_line
from kvlens.app.ui.common.jobprocess import start_cold
from kvlens.app.ui.common.jobs import Job, JobManager
from kvlens.app.ui.common.request import MethodChoice, Rivals, race_command
from kvlens.app.ui.race import view
from kvlens.app.ui.race.race_lines import changed, lines_of
from kvlens.app.ui.run import racepreflight
from kvlens.runs import races
from kvlens.runs.entrants import entrants
from kvlens.runs.race import race
from kvlens.runs.races import RaceInfo, RaceRequest
from kvlens.runs.request import RunRequest
from kvlens.text.prompts import PromptText

SAID = (
    '{"phase": "race", "id": "r", "lanes": []}',
    '{"phase": "decode", "done": 1, "total": 8, "tokens_per_s": null}',
    '{"phase": "lane", "lane": 0}',
    '{"phase": "frame", "lane": 0, "step": 0}',
    '{"phase": "maps", "lane": 0, "step": 0}',
    '{"phase": "done", "uid": "u", "status": "completed", "race": "r"}',
)


class Nobody:
    """Watches and does nothing."""

    def report(self, phase: str, done: int, total: int) -> None: ...
    def begun(self, race: RaceInfo) -> None: ...
    def lane(self, number: int, lane: object) -> None: ...
    def frame(self, frame: object) -> None: ...
    def maps(self, maps: object) -> None: ...


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RaceInfo]:
    """A small race, one lane of which was refused."""
    runs = tmp_path_factory.mktemp("runs")
    shared = RunRequest(model="demo", budget="15%", max_new=4)
    asked = RaceRequest(shared=shared, entrants=entrants("streaming_llm,sekv", ["sekv:demo"], []))
    text = PromptText("The river was wide and the bridge was old. " * 16, answer="bridge")
    return runs, race(asked, text, runs, Nobody(), lambda: False)


def primary(app: AppTest, label: str) -> Any:
    return next(button for button in app.button if button.label == label)


def test_the_form_begins_a_race(visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[MethodChoice, tuple[str, ...]]] = []

    def note(file: Path, choice: MethodChoice, against: tuple[str, ...], runs: Path, *more: Any) -> list[str]:
        asked.append((choice, tuple(against)))
        assert json.loads(file.read_text(encoding="utf-8"))["answer"]
        race_command(file, choice, against, runs, *more)
        return [sys.executable, "-c", "pass", "--methods", "some"]

    monkeypatch.setattr(submit, "race_command", note)
    app = visit(tmp_path, "run")
    field = app.multiselect(key="form_rivals")
    assert "SeKV" not in field.options, "the chosen method is in the race already"
    assert "FullKV" not in field.options
    field.set_value(["snapkv", "quest"]).run()
    assert not [button for button in app.button if button.label == "Run"]
    app.text_input(key="form_budget").set_value("much").run()
    assert "is not understood" in app.error[0].value
    assert primary(app, "Race 3 methods").disabled
    app.text_input(key="form_budget").set_value("30%").run()
    lanes = app.dataframe[0].value.set_index("method")
    assert list(lanes.index) == ["FullKV", "SeKV", "SnapKV", "Quest"]
    assert (lanes.loc["FullKV", "held to"], lanes.loc["Quest", "held to"]) == ("no limit", "30% of attended tokens")
    assert lanes.loc["SnapKV", "will run"] == "yes"
    assert lanes.loc["SnapKV", "held to"].endswith(("kB", "MB"))
    app.selectbox(key="form_method").set_value("chess").run()
    assert next(box for box in app.text_input if box.label == sentences.RACE_BUDGET).value == "30%"
    primary(app, "Race 3 methods").click().run()
    ((choice, against),) = asked
    assert (choice.method, choice.budget, against) == ("chess", "30%", ("snapkv", "quest"))


def test_warnings_of_the_estimate_name_fields(visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = racepreflight.estimated
    monkeypatch.setattr(racepreflight, "estimated", lambda *told: made(*told) | {"warnings": ["lower --max-new."]})
    app = visit(tmp_path, "run")
    app.multiselect(key="form_rivals").set_value(["snapkv"]).run()
    said = [box.value.replace("\\", "") for box in app.warning]
    assert all("Max new tokens" in sentence.rpartition(": ")[2] for sentence in said)
    assert len(said) == 3


def test_the_form_races_a_method_against_itself(visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[str, str], ...]] = []

    def note(*told: Any) -> list[str]:
        asked.append(tuple(told[4]))
        return [sys.executable, "-c", "pass", "--methods", "some"]

    monkeypatch.setattr(submit, "race_command", note)
    app = visit(tmp_path, "run")
    app.selectbox(key="form_method").set_value("snapkv").run()
    app.selectbox(key="form_varied_snapkv").set_value("kernel").run()
    app.text_input(key="form_values_snapkv_kernel").set_value("wide").run()
    assert app.error
    app.text_input(key="form_values_snapkv_kernel").set_value("3, 5, 3").run()
    lanes = list(app.dataframe[0].value["method"])
    assert len(lanes) == 4
    assert lanes[2:] == ["SnapKV kernel 3", "SnapKV kernel 5"]
    app.text_input(key="form_values_snapkv_kernel").set_value("03, 3, 7").run()
    assert app.error, "7 is the value that the form has"
    assert primary(app, "Race 3 lanes").disabled
    app.text_input(key="form_values_snapkv_kernel").set_value("3, 5, 03").run()
    primary(app, "Race 3 lanes").click().run()
    assert asked == [(("kernel", "3"), ("kernel", "5"))]


def test_the_command_of_a_race(tmp_path: Path) -> None:
    choice = MethodChoice("snapkv", "demo", "paper", "20%", 8, 3, {"window": 8}, system="Be brief.", question="after")
    argv = race_command(tmp_path / "p.json", choice, ("quest", "snapkv", "full"), tmp_path)
    assert argv[3] == "race"
    assert argv[argv.index("--methods") + 1] == "snapkv,quest"
    assert argv[argv.index("--preset") + 1] == "snapkv:paper"
    assert argv[argv.index("--set") + 1] == "snapkv:window=8"
    assert argv[argv.index("--system") :][:4] == ["--system", "Be brief.", "--question", "after"]
    itself = race_command(tmp_path / "p.json", choice, ("quest",), tmp_path, (("window", "4"), ("window", "6")))
    assert itself[itself.index("--methods") + 1] == "snapkv,snapkv,snapkv,quest"
    sets = [itself[n + 1] for n, word in enumerate(itself) if word == "--set"]
    assert sets == ["snapkv:window=8", "snapkv:window=4", "snapkv:window=6"]
    assert itself.count("snapkv:paper") == 3
    full = MethodChoice("full", "demo", "paper", "20%", 8, 3, {})
    argv = race_command(tmp_path / "p.json", full, ("quest",), tmp_path)
    assert (argv[argv.index("--methods") + 1], "--preset" in argv) == ("quest", False)


def test_arguments_of_the_chat_template_reach_the_race() -> None:
    choice = MethodChoice("snapkv", "demo", None, "20%", 8, 3, chat_args={"enable_thinking": False})
    assert racepreflight.race_of(choice, Rivals(("quest",))).shared.chat_args == {"enable_thinking": False}
    argv = race_command(Path("p"), choice, ("quest",), Path("r"))
    assert argv[argv.index("--chat-arg") + 1] == "enable_thinking=false"


def test_lines_of_a_race_are_kept_unread() -> None:
    job = Job("i", [], "t", 0.0)
    for line in SAID:
        read_line(job, line)
    assert job.lines == [SAID[0], SAID[2], SAID[3], SAID[4]]
    assert (job.phase, job.done, job.uid, job.race) == ("decode", 1, "u", "r")
    assert not job.log


def test_only_what_is_new_is_sent_while_a_race_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now, session = [100.0], {}
    monkeypatch.setattr(livelanes.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(livelanes.st, "session_state", session)
    job = Job("i", [], "t", 0.0)
    sent = []
    for _ in range(12):
        job.lines.append("{}")
        sent.append(livelanes._first_line(job))
        now[0] += 0.5
    assert sent[:6] == [0] * 6, "every line is sent for some seconds"
    assert sent[-1] == 12 - 1 - livelanes.AGAIN_S / 0.5 - 1 + 1
    session["race_lacking"] = 2
    assert livelanes._first_line(job) == 2, "what the browser lacks is sent once more"
    assert livelanes._first_line(job) > 2


def test_a_race_that_goes_on_ends_with_its_finding(
    visit: Visit, made: tuple[Path, RaceInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, info = made
    done = json.dumps({"phase": "done", "uid": info.lanes[0].uid, "status": "completed", "race": info.id})
    code = f"[print(line) for line in {[*lines_of(str(runs), info.id, (0,)), done]!r}]"
    visit(runs)
    jobs = JobManager(lambda argv, environment, output: start_cold([sys.executable, "-c", code], environment, output))
    job = jobs.submit([sys.executable, "-m", "kvlens", "race"], "a race")
    monkeypatch.setattr(view.jobview, "manager", lambda: jobs)
    while jobs.jobs()[0].active:
        time.sleep(0.05)
    app = AppTest.from_file(str(ROOT / "app.py"), default_timeout=600).run()
    app.query_params["job"] = job
    app.switch_page("pages/run.py").run()
    assert not app.exception
    assert any("left full KV: StreamingLLM at step" in box.value.replace("\\", "") for box in app.markdown)
    assert len(jobs.jobs()[0].lines) == 1 + 2 * 8 + 3


def test_a_stored_race_is_opened_by_its_link(visit: Visit, made: tuple[Path, RaceInfo]) -> None:
    runs, info = made
    app = visit(runs, "run", race=info.id)
    assert any("left full KV" in box.value for box in app.markdown)
    assert any("demo, budget 15%" in text.value for text in app.text)
    lines = [json.loads(line) for line in lines_of(str(runs), info.id, (1,))]
    assert [line["phase"] for line in lines].count("frame") == [line["phase"] for line in lines].count("maps") == 8
    assert [line["state"] for line in lines if line["phase"] == "lane"] == ["completed", "completed", "refused"]
    assert [toggle.value for toggle in app.toggle] == [False], "the form is folded"
    (link,) = (link.proto for link in app.get("page_link") if link.proto.label == "Open as comparison")
    assert (link.page, link.query_string) == ("compare", f"race={info.id}")
    beside = visit(runs, "compare", race=info.id)
    assert len(beside.multiselect(key="compare_runs").value) == 2
    assert re.search(r"SeKV .*not", "".join(text.value for text in beside.text))


def test_a_run_that_was_deleted_is_a_lane_that_says_so(
    visit: Visit, made: tuple[Path, RaceInfo], tmp_path: Path
) -> None:
    _, info = made
    races.write(tmp_path, info)
    app = visit(tmp_path, "run", race=info.id)
    assert not app.error
    lanes = [json.loads(line) for line in lines_of(str(tmp_path), info.id, (2,))][1:]
    assert [lane["uid"] for lane in lanes] == [None, None, None]
    assert info.lanes[0].uid in lanes[0]["message"]


def test_a_lane_that_ended_after_the_race_was_drawn_is_drawn_as_it_ended(
    made: tuple[Path, RaceInfo], tmp_path: Path
) -> None:
    _, info = made

    def states() -> list[str]:
        race = races.read(tmp_path, info.id)
        lines = [json.loads(line) for line in lines_of(str(tmp_path), info.id, changed(tmp_path, race))]
        return [line["state"] for line in lines if line["phase"] == "lane"]

    lanes = [lane.model_copy(update={"uid": None}) for lane in info.lanes]
    races.write(
        tmp_path, info.model_copy(update={"lanes": [lanes[0].model_copy(update={"state": "running"}), *lanes[1:]]})
    )
    assert states()[0] == "failed"
    races.write(tmp_path, info.model_copy(update={"lanes": lanes}))
    assert states() == [lane.state for lane in lanes]


def test_an_unknown_race_is_one_sentence(visit: Visit, tmp_path: Path) -> None:
    for unknown in ("20200101-000000-abcdef", "../../etc"):
        (error,) = visit(tmp_path, "run", race=unknown).error
        assert unknown in error.value.replace("\\", "")


def test_stored_races_are_offered(visit: Visit, made: tuple[Path, RaceInfo], tmp_path: Path) -> None:
    runs, info = made
    folder = Path(tmp_path) / "with-a-run"
    shutil.copytree(runs, folder)
    for page in ("run", ""):
        (listed,) = (each for each in visit(folder, page).expander if each.label == "Stored races (1)")
        assert [link.proto.query_string for link in listed.get("page_link")] == [f"race={info.id}"]
        (said,) = listed.caption
        assert said.value.replace("\\", "").startswith("2 methods: StreamingLLM, SeKV. ")
    shown = visit(folder, "run", race=info.id)
    assert not [each for each in shown.expander if each.label.startswith("Stored races")], "the one that is shown"
    assert not [each for each in visit(tmp_path / "none", "run").expander if each.label.startswith("Stored races")]
