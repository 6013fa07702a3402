"""`kvlens study` and `kvlens studies`: what is refused before a study is stored, and the exit status of a study."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import raises_code
from test_bad_input import kvlens as end_status
from test_cli import kvlens as end_well
from test_studies import PLAN

from kvlens.app.ui.study.request import StudyChoice
from kvlens.models.errors import UnsupportedModel
from kvlens.refusal import Refusal
from kvlens.runs.races import Entrant
from kvlens.store.errors import RunNotFound
from kvlens.studies import storage
from kvlens.studies.extension import extended
from kvlens.studies.models import check_loading
from kvlens.studies.plan import Arm, ListedArm, StudyPlan
from kvlens.studies.planfile import read_plan
from kvlens.studies.table import Results
from kvlens.workers.lanes import BadCrew, Crew

PROMPT = "needle@length=120@prompts=1"
ARGUMENTS = ("--model", "demo", "--methods", "snapkv", "--max-new", "2")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVLENS_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.mark.parametrize(
    "options",
    [
        ("--preset", "snapkv:nope"),
        ("--set", "window=-3"),
        ("--trace-level", "all"),
        ("--dtype", "int8"),
        ("--device", "abacus"),
        ("--model", "/nowhere"),
        ("--workers", "2", "--batch", "2"),
        ("--max-new", "0"),
    ],
)
def test_what_no_trial_could_run_with_is_refused_before_a_study_is_stored(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    text = tmp_path / "prompt.txt"
    text.write_text("The river was wide and the bridge was old. " * 12)
    assert end_status(monkeypatch, "study", str(text), *ARGUMENTS, *options) == 1
    assert not runs.exists()


def test_a_plan_refuses_presets_and_values_that_its_methods_cannot_have() -> None:
    def changed(**changes: object) -> StudyPlan:
        return PLAN.model_copy(update={"values": {}, **changes})

    with raises_code("unknown_preset", Refusal, preset="nope"):
        changed(entrants=(Entrant(method="snapkv", preset="nope"),)).check()
    with pytest.raises(Refusal):
        changed(values={"snapkv": {"window": ("8", "-3")}}).check()
    listed = ListedArm(arm=Arm(method="snapkv", budget="20%", changes={"window": -3}), prompts=())
    with pytest.raises(ValueError, match="window"):
        changed(listed=(listed,)).check()
    with pytest.raises(ValueError, match="no_such"):
        changed(entrants=(Entrant(method="snapkv", preset="fit", overrides={"no_such": 1}),)).check()
    changed(budgets=("1tok",)).check()  # a budget below a method's floor is a row of the study


def test_equal_budgets_are_one_arm(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However they are written, in a command, a study file, the form of the page and an extension."""
    end_well("study", PROMPT, *ARGUMENTS, "--budgets", "60%,0.6,0.60", "--trace-level", "summary", "--json")
    study = json.loads(capsys.readouterr().out)["study"]
    assert storage.read(runs, study).plan.budgets == ("60%",)
    assert len(storage.read_trials(runs, study)) == 2
    file = tmp_path / "study.toml"
    file.write_text('prompts = ["needle"]\nbudgets = ["60%", "0.6", "64MB"]\n[methods.snapkv]\n')
    assert read_plan(file).plan.budgets == ("60%", "64MB")
    choice = StudyChoice("demo", ("snapkv",), ("0.2", "20%"))
    assert choice.plan().budgets == ("0.2",)
    more = PLAN.model_copy(update={"budgets": ("0.2", "0.6", "60%")})
    assert extended(PLAN, more).budgets == ("20%", "40%", "0.6")
    assert end_status(monkeypatch, "study", PROMPT, *ARGUMENTS, "--set", "window=8", "--set", "window=9") == 1
    assert storage.ids(runs) == [study]


def test_an_extension_names_each_prompt_that_it_leaves_out(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end_well("study", PROMPT, *ARGUMENTS, "--budgets", "60%", "--trace-level", "summary", "--json")
    study = json.loads(capsys.readouterr().out)["study"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "The river was wide and the bridge was old. One. Two."}\n{"answer": "5"}\n')
    end_well("studies", "extend", study, str(rows))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[4] for line in lines if line.startswith("kvlens: left out: line")] == ["2"]
    assert len(storage.read_prompts(runs, study)) == 2


@pytest.mark.parametrize("changes", [{"dtype": "int8"}, {"device": "abacus"}, {"model": "/nowhere"}])
def test_a_plan_whose_model_cannot_be_loaded_is_refused(changes: dict[str, str]) -> None:
    check_loading(PLAN)
    with pytest.raises(UnsupportedModel):
        check_loading(PLAN.model_copy(update={"shared": PLAN.shared.model_copy(update=changes)}))


def test_a_batch_of_several_workers_is_refused_where_it_is_asked_for() -> None:
    for workers, ray in ((2, None), (1, "auto")):
        with raises_code("batch_with_workers", BadCrew, workers=workers, batch=2):
            Crew(workers, ray, 2)


def test_a_line_of_a_trial_names_its_arm_as_the_tables_do(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("study", PROMPT, *ARGUMENTS, "--trace-level", "summary")
    end_well(*arguments, "--budgets", "0.6,80%", "--set", "window=8,16", "--json")
    printed = capsys.readouterr()
    study = json.loads(printed.out)["study"]
    names = [line.split(" ", 2)[2].partition(":")[0] for line in printed.err.splitlines() if "/5 " in line]
    assert names == list(Results.read(runs, study).labels.values())
    assert len(set(names)) == 5
    end_well("studies", "compare", study, names[1], names[2], "--json")
    assert json.loads(capsys.readouterr().out)["n"] == 1


def test_a_study_is_asked_for_by_a_study_id(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises_code("no_study_id", RunNotFound):
        storage.folder_of(runs, "nope")
    for command in (("show",), ("export",), ("resume",), ("extend",)):
        assert end_status(monkeypatch, "studies", *command, "nope") == 1


def test_a_study_whose_every_trial_was_refused_ends_with_status_1(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "long.txt"
    text.write_text("word " * 9000)  # the demo model takes 8,192 tokens
    assert end_status(monkeypatch, "study", str(text), *ARGUMENTS, "--json") == 1
    stored = json.loads(capsys.readouterr().out)
    assert {trial.state for trial in storage.read_trials(runs, stored["study"])} == {"refused"}
    assert end_status(monkeypatch, "studies", "resume", stored["study"], "--json") == 1
    capsys.readouterr()
    end_well("study", PROMPT, *ARGUMENTS, "--budgets", "0.1tok", "--json")
    stored = json.loads(capsys.readouterr().out)
    assert [trial.state for trial in storage.read_trials(runs, stored["study"])] == ["completed", "refused"]
