"""A gate: its file, what its thresholds judge, its exit status and its JUnit XML."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

import kvlens
from kvlens.cli.gate import MISSED
from kvlens.cli.main import main
from kvlens.runs.races import Entrant
from kvlens.runs.request import RunRequest
from kvlens.studies import storage
from kvlens.studies.checks import Check, check_possible, checks, least, prompts_for
from kvlens.studies.errors import BadStudy
from kvlens.studies.gate import gate_study
from kvlens.studies.junit import junit
from kvlens.studies.limits import Thresholds
from kvlens.studies.plan import Arm, ListedArm, StudyPlan
from kvlens.studies.planfile import read_plan
from kvlens.studies.promptrow import StudyPrompt
from kvlens.studies.storage import StudyInfo, Trial
from kvlens.studies.table import Results
from kvlens.text.prompts import PromptText

DOCS = Path(__file__).resolve().parents[2] / "docs" / "studies.md"


ARMS = (("streaming_llm", "60%"), ("full", ""))


def kvlens_status(*arguments: str) -> int:
    """Run a command in this process and return its exit status."""
    before, sys.argv = sys.argv, ["kvlens", *arguments]
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv = before
    return 0


def made(full: Sequence[bool], arm: Sequence[bool | None], groups: str = "", kl: float = 0.01) -> Results:
    """A study whose prompts full KV and SnapKV answered right or wrong as said; None: the trial was refused."""
    plan = StudyPlan(shared=RunRequest(model="demo"), entrants=(Entrant(method="snapkv"),), budgets=("20%",))
    prompts = [
        StudyPrompt(str(number), PromptText("x", answer="y"), groups[number : number + 1])
        for number in range(len(full))
    ]
    trials = []
    rows: tuple[Sequence[bool | None], ...] = (full, arm)
    for key, rights in zip((each.key() for each in plan.arms()), rows, strict=True):
        for number, right in enumerate(rights):
            figures = {"right": right, "same_output": right, "kl_mean_nats": kl + 0.001 * (number % 2)}
            state = "refused" if right is None else "completed"
            trials.append(Trial(str(number), key, state, figures=None if right is None else figures))
    return Results(StudyInfo(id="20260101-000000-aaaaaa", created="", plan=plan), prompts, trials)


def outcomes(results: Results, **limits: float) -> dict[str, Check]:
    return {check.threshold: check for check in checks(results, Thresholds(**limits))}


def test_a_loss_is_judged_by_the_paired_interval() -> None:
    rows = outcomes(made([True] * 40, [True] * 40), lost=0.1)
    assert [rows["ran"].state, rows["lost"].state] == ["passed", "passed"]
    assert rows["lost"].high == pytest.approx(0.0876, abs=1e-4)  # Tango: z² / (n + z²)
    assert outcomes(made([True] * 40, [True] * 30 + [False] * 10), lost=0.1)["lost"].state == "missed"
    unsure = outcomes(made([True] * 40, [True] * 39 + [False]), lost=0.1)["lost"]
    assert (unsure.state, unsure.value) == ("undecided", pytest.approx(1 / 40))
    assert unsure.needed is not None
    assert unsure.needed > 40
    both_wrong = outcomes(made([False] * 40, [False] * 40), lost=0.1)["lost"]
    assert both_wrong.state == "passed"  # full KV has no answer to lose


def test_outputs_and_divergence_are_judged_by_their_intervals() -> None:
    rows = outcomes(made([True] * 40, [True] * 38 + [False] * 2), changed=0.2, kl_mean_nats=0.02)
    assert (rows["changed"].state, rows["changed"].value) == ("passed", pytest.approx(0.05))
    assert rows["kl_mean_nats"].state == "passed"
    assert rows["kl_mean_nats"].high == pytest.approx(0.01066, abs=1e-5)
    assert outcomes(made([True] * 40, [True] * 40, kl=0.03), kl_mean_nats=0.02)["kl_mean_nats"].state == "missed"
    few = outcomes(made([True] * 3, [True] * 3), kl_mean_nats=0.02)["kl_mean_nats"]
    assert (few.state, few.needed) == ("undecided", 6)
    assert math.isnan(few.high)


def test_earlier_names_are_read(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('model = "demo"\nprompts = ["needle@prompts=2"]\n[methods.snapkv]\n[gate]\nkl_nats = 0.1\n')
    asked = read_plan(path)
    assert asked.thresholds.limits == {"kl_mean_nats": 0.1}
    info = storage.create(tmp_path, asked.plan, [StudyPrompt("0", PromptText("x"))])
    for figures in ({"kl_nats": 0.5, "kl_there": 2.0}, {"kl_mean_nats": 0.5, "kl_at_loss_nats": 2.0}):
        storage.append(tmp_path, info.id, Trial("0", asked.plan.arms()[1].key(), "completed", figures=figures))
        row = Results.read(tmp_path, info.id).frame().iloc[0]
        assert (row["kl_mean_nats"], row["kl_at_loss_nats"]) == (0.5, 2.0)


def test_a_mean_of_no_negative_figure_has_no_negative_bound() -> None:
    results = made([True] * 8, [True] * 8, kl=0.0)
    for place, trial in enumerate(results.trials):
        assert trial.figures is not None
        trial.figures["kl_mean_nats"] = 1e-6 if place % 8 else 2e-5
    check = outcomes(results, kl_mean_nats=0.1)["kl_mean_nats"]
    assert (check.state, check.low) == ("passed", 0.0)
    assert check.high > check.value


def test_the_worst_group_of_prompts_is_judged_apart() -> None:
    results = made([True] * 8, [True] * 6 + [False] * 2, groups="aaaabbbb")
    check = outcomes(results, group_lost=0.25)["group_lost"]
    assert (check.state, check.group, check.n, check.value) == ("missed", "b", 4, 0.5)
    assert math.isnan(check.low)
    assert math.isnan(check.high)
    (case,) = ElementTree.fromstring(junit("n", [check], {})).findall("testcase")
    measured = {item.get("name"): item.get("value") for item in case.iter("property")}
    assert measured == {"value": "0.5", "limit": "0.25", "group": "b"}
    assert outcomes(made([True] * 8, [True] * 8, groups="aaaaaaaa"), group_lost=0.25)["group_lost"].group == "a"
    assert outcomes(results, group_lost=0.5)["group_lost"].state == "passed"


def test_a_prompt_that_did_not_run_is_no_pass() -> None:
    rows = outcomes(made([True] * 40, [True] * 39 + [None]), lost=0.1)
    assert (rows["ran"].state, rows["ran"].n, rows["lost"].n) == ("not_run", 39, 39)


def test_too_few_prompts_are_refused_before_anything_runs() -> None:
    assert prompts_for(Thresholds(lost=0.1, changed=0.1, kl_mean_nats=1.0)) == {
        "lost": 35,
        "changed": 35,
        "kl_mean_nats": 6,
    }
    check_possible(Thresholds(lost=0.1), 35, 35)
    for thresholds, prompts, answered, code in (
        (Thresholds(lost=0.1), 35, 34, "too_few_prompts"),
        (Thresholds(changed=0.1), 34, 0, "too_few_prompts"),
        (Thresholds(group_lost=0.1), 34, 0, "too_few_prompts"),
        (Thresholds(), 34, 34, "no_threshold"),
    ):
        with pytest.raises(BadStudy) as problem:
            check_possible(thresholds, prompts, answered)
        assert problem.value.code == code
    assert least(lambda count: count >= 7) == 7
    assert least(lambda count: False) is None


def test_full_kv_alone_is_no_gate(tmp_path: Path) -> None:
    plan = StudyPlan(shared=RunRequest(model="demo"), entrants=(Entrant(method="full"),))
    prompts = [StudyPrompt(str(number), PromptText("x", answer="y")) for number in range(50)]
    with pytest.raises(BadStudy) as problem:
        gate_study(tmp_path, plan, prompts, Thresholds(lost=0.2))
    assert problem.value.code == "no_method"
    assert list(storage.ids(tmp_path)) == []


def test_listed_arms_without_full_kv_are_no_gate(tmp_path: Path) -> None:
    prompts = [StudyPrompt(str(number), PromptText("x", answer="y")) for number in range(50)]
    every = tuple(prompt.id for prompt in prompts)
    method, full = (ListedArm(arm=Arm(method=name, budget=at), prompts=every) for name, at in ARMS)
    plan = StudyPlan(shared=RunRequest(model="demo"), entrants=(), listed=(method,))
    with pytest.raises(BadStudy) as problem:
        gate_study(tmp_path, plan, prompts, Thresholds(lost=0.2))
    assert problem.value.code == "no_reference"
    assert list(storage.ids(tmp_path)) == []
    whole = plan.model_copy(update={"listed": (method, full)})
    assert gate_study(tmp_path, whole, prompts, Thresholds(lost=0.2)).plan == whole


def test_a_limit_that_no_study_can_meet_is_refused() -> None:
    with pytest.raises(BadStudy) as problem:
        check_possible(Thresholds(lost=1e-7), 10, 10)
    assert problem.value.code == "too_few_prompts"


def test_a_prompt_with_a_task_and_no_group_finds_its_study(tmp_path: Path) -> None:
    plan = StudyPlan(shared=RunRequest(model="demo"), entrants=(Entrant(method="snapkv"),), budgets=("20%",))
    prompts = [StudyPrompt(str(number), PromptText("x", answer="y", task="needle")) for number in range(50)]
    first = gate_study(tmp_path, plan, prompts, Thresholds(lost=0.2))
    assert gate_study(tmp_path, plan, prompts, Thresholds(lost=0.3)).id == first.id
    other = plan.model_copy(update={"budgets": ("40%",)})
    assert gate_study(tmp_path, other, prompts, Thresholds(lost=0.2)).id != first.id
    assert storage.read(tmp_path, first.id).thresholds == Thresholds(lost=0.3)


def test_the_xml_holds_any_text_and_counts_failures() -> None:
    check = Check("a\x00 <b>", "lost", "missed", 0.1, 0.5, 0.4, 0.6, 10)
    suite = ElementTree.fromstring(
        junit('n "&"', [check, Check("b", "ran", "passed", 1, 1, math.nan, math.nan, 1)], {})
    )
    assert (suite.get("tests"), suite.get("failures"), suite.get("name")) == ("2", "1", 'n "&"')
    first = suite.findall("testcase")[0]
    assert first.get("classname") == "a? <b>"
    failure = first.find("failure")
    assert failure is not None
    assert failure.get("type") == "missed"


@pytest.mark.parametrize(
    "text",
    [
        "prompts = [",
        'prompts = ["needle"]\nmethod = "x"',
        "[methods.snapkv]",
        'prompts = "needle"\nmethods = 3',
        'prompts = "needle"\nmax_new = 0\n[methods.snapkv]',
        'prompts = "needle"\n[methods.snapkv]\n[gate]\nlost = 2',
    ],
)
def test_a_file_that_is_no_study_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(BadStudy) as problem:
        read_plan(path)
    assert problem.value.code == "bad_plan_file"


def test_all_faults_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(
        'prompt = "needle"\nmax_new = 0\nseeds = ["x"]\n[methods.snapkv]\n[gate]\nlost = 2\nkl_nats = -1\nlosts = 0.1\n'
    )
    with pytest.raises(BadStudy) as problem:
        read_plan(path)
    assert problem.value.code == "bad_plan_file"
    names = ("prompt", "prompts", "max_new", "gate.lost", "gate.kl_mean_nats", "gate.losts", "seeds.0")
    assert problem.value.faults == names
    assert "must lie between" in str(problem.value)


def test_a_file_spans_the_arms_and_finds_prompts_beside_it(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"question": "q"}\n')
    path = tmp_path / "s.toml"
    path.write_text(
        'prompts = ["p.jsonl", "needle@prompts=2"]\nmodel = "demo"\nbudgets = ["20%", "40%"]\nseeds = 3\n'
        "chat_args = {enable_thinking = false}\n[segments]\nrules = 'Rules:'\nask = [3, 9]\nnoon = '12:30'\n"
        "'a=b' = 'x'\n"
        '[methods.snapkv]\nwindow = [4, 8]\nkernel = 5\n[methods.quest]\npreset = "demo"\n[gate]\nlost = 0.1\n'
    )
    asked = read_plan(path)
    assert asked.prompts == (str(tmp_path / "p.jsonl"), "needle@prompts=2")
    assert asked.thresholds.limits == {"lost": 0.1}
    assert asked.segments == (("rules", "Rules:"), ("ask", [3, 9]), ("noon", "12:30"), ("a=b", "x"))
    assert asked.plan.shared.chat_args == {"enable_thinking": False}
    arms = asked.plan.arms()
    assert [arm.method for arm in arms] == ["full", *4 * ["snapkv"], *2 * ["quest"]]
    assert arms[1].overrides == {"window": 4, "kernel": 5}
    assert (arms[-1].preset, arms[-1].seed) == ("demo", 3)


def test_the_file_of_the_docs_is_a_gate_that_passes_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = re.search(r"```toml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    (tmp_path / "study.toml").write_text(block[1])
    monkeypatch.setenv("KVLENS_RUNS", str(tmp_path / "runs"))
    assert kvlens_status("gate", str(tmp_path / "study.toml")) == 0
    suite = ElementTree.parse(tmp_path / "study.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("5", "0")
    (study,) = storage.ids(tmp_path / "runs")
    before = storage.read_trials(tmp_path / "runs", study)
    (tmp_path / "study.toml").write_text(block[1].replace("lost = 0.2", "lost = 0.3"))
    assert kvlens_status("gate", str(tmp_path / "study.toml")) == 0
    assert storage.read_trials(tmp_path / "runs", study) == before  # a threshold changes no trial
    stored = kvlens.Study(tmp_path / "runs", study, kvlens.api.models.Named())
    assert stored.gate()["limit"].tolist()[1] == 0.3
    assert not stored.gate(kl_mean_nats=1e-12)["passed"].all()


def test_a_missed_threshold_is_status_3_with_what_was_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLENS_RUNS", str(tmp_path / "runs"))
    (tmp_path / "study.toml").write_text(
        'model = "demo"\nprompts = ["needle@length=200@prompts=2"]\nbudgets = ["20%"]\nmax_new = 8\n'
        'trace_level = "summary"\n[methods.streaming_llm]\n[gate]\ngroup_lost = 0.5\n'
    )
    assert kvlens_status("gate", str(tmp_path / "study.toml"), "--json", "--junit", str(tmp_path / "j.xml")) == MISSED
    answer = json.loads(capsys.readouterr().out)
    assert not answer["passed"]
    assert {check["threshold"]: check["state"] for check in answer["checks"]}["group_lost"] == "missed"
    assert ElementTree.parse(tmp_path / "j.xml").getroot().get("failures") == "1"
