"""The page Study: what the form would run, and a stored study with its tables, curve and links."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest
from typer.testing import CliRunner
from uiruns import Runs, Visit

from kvlens.app.ui.common import chart
from kvlens.app.ui.common.exportruns import table_file
from kvlens.app.ui.common.job import Job
from kvlens.app.ui.common.jobs import JobManager
from kvlens.app.ui.study import form
from kvlens.app.ui.study.request import StudyChoice, extend_command, resume_command, study_command
from kvlens.cli import main
from kvlens.ledger.foresight import foresight
from kvlens.ledger.signals import SIGNALS
from kvlens.ledger.tracks import tracks_of_runs
from kvlens.runs.races import Entrant
from kvlens.runs.request import RunRequest, parse_chat_args
from kvlens.store.reader import TraceReader, list_runs
from kvlens.studies import storage
from kvlens.studies.limits import Thresholds
from kvlens.studies.plan import StudyPlan
from kvlens.studies.promptfile import read_prompts
from kvlens.studies.promptrow import StudyPrompt
from kvlens.studies.running import carry_out
from kvlens.studies.storage import Trial
from kvlens.tasks.encoding import encoding
from kvlens.text.prompts import PromptText
from kvlens.workers.lanes import Crew

RIGHT = {"10%": (False, False, True), "40%": (True, True, True)}


def make_study(folder: Path, uid: str, trials: int = 9) -> str:
    """A study of three prompts, of which so many trials have ended -> its id."""
    plan = StudyPlan(
        name="needles <b>", shared=RunRequest(model="demo"), entrants=(Entrant(method="snapkv"),), budgets=tuple(RIGHT)
    )
    prompts = [StudyPrompt(f"p{number}", PromptText(f"text {number}", answer="x")) for number in range(3)]
    info = storage.create(folder, plan, prompts)
    ended = [(number, arm) for number in range(3) for arm in plan.arms()][:trials]
    for number, arm in ended:
        right = RIGHT.get(arm.budget, (True, True, True))[number]
        figures = {"right": right, "kl_mean_nats": 0.5, "outcome": "right answer", "kinds": ["right"], "output": "x"}
        storage.append(folder, info.id, Trial(f"p{number}", arm.key(), "completed", uid, figures=figures))
    return info.id


class Silent:
    """Hears of a study (kvlens.studies.running.Audience)."""

    def report(self, phase: str, number: int, total: int) -> None:
        """Nothing of it is needed."""

    def trial(self, finished: int, total: int, *rest: Any) -> None:
        """Nothing of it is needed."""


def table(app: AppTest, column: str) -> Any:
    """The table of the page that has this column."""
    return next(frame.value for frame in app.dataframe if column in frame.value.columns)


def test_a_stored_study_is_shown_with_intervals_and_a_curve(runs: Runs, visit: Visit) -> None:
    study = make_study(runs.folder, runs.whole)
    app = visit(runs.folder, "study", study=study)
    frame = table(app, "interval").set_index("label")
    assert frame.loc["SnapKV 10%", ["n", "right"]].tolist() == [3, pytest.approx(1 / 3)]
    assert frame.loc["SnapKV 40%", "interval"] == "44% to 100%"
    assert app.selectbox(key="study_axis").options == ["budget"]
    app.selectbox(key=f"study_a_{study}").set_value("SnapKV 40%")
    app.selectbox(key=f"study_b_{study}").set_value("SnapKV 10%").run()
    assert len(table(app, "right under")) == 2
    assert not app.exception


def test_the_curve_hands_out_its_numbers(runs: Runs, visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    tables: dict[str, pd.DataFrame] = {}
    monkeypatch.setattr(chart, "menu", lambda data, name, key: tables.setdefault(key, data))
    app = visit(runs.folder, "study", study=make_study(runs.folder, runs.whole))
    assert not app.exception
    columns = list(pd.read_csv(io.BytesIO(chart.table_file(tables["study_curve"], "csv"))))
    assert {"budget", "value_share", "low_share", "high_share", "n", "uids"} <= set(columns), columns


def test_a_study_that_stopped_can_go_on(runs: Runs, visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[list[str]] = []
    monkeypatch.setattr(JobManager, "submit", lambda self, argv, title, *more: submitted.append(argv) or "job")
    study = make_study(runs.folder, runs.whole, trials=4)
    app = visit(runs.folder, "study", study=study)
    app.button(key="study_resume").click().run()
    assert submitted == [resume_command(study, runs.folder.resolve())]


def _place_of(block: Any, part: Any) -> list[int]:
    """The way from a block of the page to an element in it; [] where it has none."""
    for place, child in getattr(block, "children", {}).items():
        if child is part:
            return [place]
        if way := _place_of(child, part):
            return [place, *way]
    return []


@pytest.mark.parametrize("trials", [0, 9])
def test_nothing_moves_when_a_study_is_paused(
    runs: Runs, visit: Visit, monkeypatch: pytest.MonkeyPatch, trials: int
) -> None:
    """A part that moved would be seen at its old and its new place until the page's run ends."""
    study, subject = make_study(runs.folder, runs.whole, trials), {"study": ""}

    def places(**link: str) -> tuple[list[list[int]], list[str]]:
        app = visit(runs.folder, "study", study=study, **link)
        parts = [*app.subheader, *(text for text in app.markdown if text.value.startswith("##### Every"))]
        return [_place_of(app.main, part) for part in parts], [button.label for button in app.button]

    job = Job("one", ["nothing"], "A study", 0.0, study=study)
    monkeypatch.setattr(JobManager, "get", lambda manager, job_id: job)
    monkeypatch.setattr(JobManager, "jobs", lambda manager: [job])
    monkeypatch.setattr(storage, "is_running", lambda folder, study_id: not subject["study"])
    running, buttons = places(job=job.id)
    assert "Pause" in buttons
    job.state, job.ended, subject["study"] = "cancelled", 1.0, study
    paused, buttons = places(job=job.id)
    assert "Pause" not in buttons
    assert running == paused != []


def test_go_on_has_the_batch_that_the_study_was_begun_with(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[list[str]] = []
    monkeypatch.setattr(JobManager, "submit", lambda self, argv, title, *more: submitted.append(argv) or "job")
    plan = StudyPlan(shared=RunRequest(model="demo", max_new=4), entrants=(Entrant(method="full"),))
    read = read_prompts(["needle@length=120@prompts=2"], lambda: encoding("demo"))
    study = storage.create(tmp_path, plan, read.prompts).id
    carry_out(tmp_path, study, Silent(), lambda: True, crew=Crew(batch=2))
    assert not storage.read_trials(tmp_path, study), "it was stopped before its first trial"
    app = visit(tmp_path, "study", study=study)
    assert "2 prompts at once" in " ".join(caption.value for caption in app.caption)
    app.button(key="study_resume").click().run()
    (argv,) = submitted
    result = CliRunner().invoke(main.app, argv[argv.index("kvlens") + 1 :])
    assert result.exit_code == 0, result.output
    uids = [trial.uid for trial in storage.read_trials(tmp_path, study)]
    sizes = list_runs(tmp_path).set_index("uid")["batched"]
    assert [sizes[str(uid)] for uid in uids] == [2, 2]


def test_the_form_says_what_would_be_run_and_begins_it(
    runs: Runs, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[list[str]] = []
    monkeypatch.setattr(JobManager, "submit", lambda self, argv, title, *more: submitted.append(argv) or "job")
    app = visit(runs.folder, "study")
    app.selectbox(key="study_model").set_value("demo").run()
    app.segmented_control(key="study_prompts_from").set_value(form._GENERATED).run()
    app.number_input(key="study_length").set_value(128)
    app.number_input(key="study_count").set_value(2)
    app.multiselect(key="study_methods").set_value(["freekv"]).run()
    app.selectbox(key="study_parameter").set_value("freekv.tau").run()
    app.text_input(key="study_values_freekv.tau").set_value("0.5,0.9").run()
    assert any("2 prompts x 7 arms \\= 14 trials" in caption.value for caption in app.caption)
    next(button for button in app.button if button.label == "Run the study").click().run()
    (argv,) = submitted
    assert argv[3:5] == ["study", "needle@length=128@prompts=2"]
    assert argv[argv.index("--set") + 1] == "freekv.tau=0.5,0.9"


def test_a_parameter_brings_its_method_in_place_of_the_usual_one(
    runs: Runs, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[list[str]] = []
    monkeypatch.setattr(JobManager, "submit", lambda self, argv, title, *more: submitted.append(argv) or "job")
    app = visit(runs.folder, "study")
    app.segmented_control(key="study_prompts_from").set_value(form._GENERATED).run()
    app.selectbox(key="study_parameter").set_value("freekv.tau").run()
    next(button for button in app.button if button.label == "Run the study").click().run()
    (argv,) = submitted
    assert argv[argv.index("--methods") + 1] == "freekv"


def test_a_gates_study_shows_its_checks_and_can_be_extended(
    runs: Runs, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[list[str]] = []
    monkeypatch.setattr(JobManager, "submit", lambda self, argv, title, *more: submitted.append(argv) or "job")
    study = make_study(runs.folder, runs.whole)
    info = storage.read(runs.folder, study)
    storage.save(runs.folder, info.model_copy(update={"thresholds": Thresholds(lost=0.5)}))
    app = visit(runs.folder, "study", study=study)
    outcomes = table(app, "outcome").set_index(["arm", "threshold"])["outcome"]
    assert outcomes["SnapKV 10%", "lost"] == "missed"
    assert outcomes["SnapKV 40%", "ran"] == "passed"
    settings = table(app, "this study").set_index("setting")
    assert settings.loc["model", "state"] in ("differs", "check")
    assert settings.loc["budget", "state"] in ("differs", "check")
    app.text_input(key="study_more_budgets").set_value("80%").run()
    app.button(key="study_run_more").click().run()
    assert submitted == [extend_command(study, "80%", {}, runs.folder.resolve())]


def test_bad_budgets_are_one_sentence(runs: Runs, visit: Visit) -> None:
    app = visit(runs.folder, "study")
    app.segmented_control(key="study_prompts_from").set_value(form._GENERATED).run()
    app.text_input(key="study_budgets").set_value("much").run()
    assert len(app.error) == 1
    assert not [button for button in app.button if button.label == "Run the study"]


def test_segments_and_template_arguments_of_a_study(runs: Runs, visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[list[str]] = []
    monkeypatch.setattr(JobManager, "submit", lambda self, argv, title, *more: submitted.append(argv) or "job")
    app = visit(runs.folder, "study")
    app.selectbox(key="study_model").set_value("demo").run()
    app.segmented_control(key="study_prompts_from").set_value(form._GENERATED).run()
    for key, lines in (("study_segments", "rules=Nowhere"), ("study_segments", "x"), ("study_chat_args", "a=1")):
        app.text_area(key=key).set_value(lines).run()
        assert len(app.error) == 1
        assert "--" not in app.error[0].value.replace("\\", "")
        app.text_area(key=key).set_value("").run()
        assert not app.error
    app.text_area(key="study_segments").set_value("rules=0:20").run()
    next(button for button in app.button if button.label == "Run the study").click().run()
    (argv,) = submitted
    assert argv[argv.index("--segment") + 1] == "rules=0:20"
    choice = StudyChoice("demo", ("snapkv",), chat_args={"enable_thinking": False, "effort": "low"})
    argv = study_command(["p.jsonl"], choice, Path("r"))
    typed = [argv[place + 1] for place, word in enumerate(argv) if word == "--chat-arg"]
    assert parse_chat_args(typed) == choice.chat_args


def test_the_command_is_what_the_form_says() -> None:
    choice = StudyChoice(
        "demo", ("snapkv", "quest"), ("10%", "20%"), {"snapkv.window": "8,16"}, ("in", "after"), 8, "n"
    )
    argv = study_command(["p.jsonl"], choice, Path("r"))
    assert argv[argv.index("--methods") + 1] == "snapkv,quest"
    assert argv[argv.index("--questions") + 1] == "in,after"
    assert len(choice.plan().arms()) == 2 + 2 * 2 * 2 + 2 * 2


def test_any_table_of_all_runs_of_a_study_is_exported(runs: Runs, visit: Visit) -> None:
    app = visit(runs.folder, "study", study=make_study(runs.folder, runs.whole))
    stem = next(box.key for box in app.selectbox if box.key.startswith("export_table_")).removeprefix("export_table_")
    app.selectbox(key=f"export_table_{stem}").set_value("decisions").run()
    app.button(key=f"export_make_{stem}").click().run()
    assert not app.exception
    assert not app.error
    (saved,) = [item for item in app.get("download_button") if item.proto.label == "Save decisions.csv"]
    assert saved.proto.url.endswith(".csv")
    content = table_file([runs.whole, runs.whole], runs.folder, "steps", "csv")
    header, *lines = content.decode().splitlines()
    assert {"uid", "method", "outcome", "step"} <= {name.strip('"') for name in header.split(",")}
    with TraceReader.open(runs.folder, runs.whole) as reader:
        assert len(lines) == 2 * reader.n_steps


def test_the_signals_of_a_study_are_drawn_when_they_are_asked_for(runs: Runs, visit: Visit) -> None:
    study = make_study(runs.folder, runs.whole)
    app = visit(runs.folder, "study", study=study)
    switch = app.toggle(key=f"foresight_kvlens-study-{study}")
    assert not switch.value
    switch.set_value(True).run()
    assert not app.exception
    rows = table(app, "auc").set_index("signal")
    expected = pd.DataFrame(foresight(tracks_of_runs(runs.folder, [runs.whole]))).set_index("signal")
    assert rows.index.tolist() == [name for name in SIGNALS if name != "varentropy"], "no row of a signal without steps"
    assert expected.loc["varentropy", "n"] == 0
    pd.testing.assert_frame_equal(rows.drop(columns="meaning"), expected.loc[rows.index], check_dtype=False)
    assert rows["lost"].gt(0).all()
    assert rows["auc"].between(0, 1).all()
