"""Studies on the toy model: what is run, how often prompts are read, what a stop leaves, and what the tables say."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlens import methods
from kvlens.api.models import Named
from kvlens.api.studyprompts import study_prompts
from kvlens.app.figures.curves import curves
from kvlens.app.figures.methodmarks import mark
from kvlens.engine.engine import Engine
from kvlens.lens.segments import segments_of
from kvlens.methods.parts import part
from kvlens.methods.run_inputs import Prefilled
from kvlens.methods.snapkv import SnapKV
from kvlens.runs.races import Entrant
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader, list_runs
from kvlens.studies import storage
from kvlens.studies.catalogue import studies_in
from kvlens.studies.errors import BadStudy
from kvlens.studies.extension import extend, extended
from kvlens.studies.paired import compare
from kvlens.studies.papers import beside_paper
from kvlens.studies.plan import Arm, ListedArm, StudyPlan, labels, parse_values
from kvlens.studies.promptfile import read_prompts
from kvlens.studies.promptrow import StudyPrompt, prompt_of
from kvlens.studies.protocols import NOT_STATED, SETTINGS
from kvlens.studies.running import carry_out
from kvlens.studies.storage import StudyInfo, Trial
from kvlens.studies.table import Results
from kvlens.tasks.encoding import encoding
from kvlens.text.prompts import BadPrompt, PromptText
from kvlens.text.segments import Segment

PLAN = StudyPlan(
    shared=RunRequest(model="demo", max_new=8, trace_level="heads"),
    entrants=(Entrant(method="snapkv"), Entrant(method="freekv")),
    values={"freekv": {"tau": ("0.5", "0.9")}},
    budgets=("20%", "40%"),
)


class Heard:
    """Hears of a study; stops it after so many trials."""

    def __init__(self, most: int = 1000) -> None:
        self.trials: list[tuple[int, int, str, Arm, Trial]] = []
        self._most = most

    def report(self, phase: str, number: int, total: int) -> None:
        """Nothing of it is needed."""

    def trial(self, finished: int, total: int, prompt: StudyPrompt, arm: Arm, trial: Trial) -> None:
        self.trials.append((finished, total, prompt.id, arm, trial))

    def stop(self) -> bool:
        return len(self.trials) >= self._most


@pytest.fixture(scope="module")
def prompts() -> tuple[StudyPrompt, ...]:
    return read_prompts(["needle@length=200@prompts=2"], lambda: encoding("demo")).prompts


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every prompt that is read."""
    counts: list[int] = []
    read: Callable[..., object] = Engine.read

    def counted(engine: Engine, prompt: object, *more: object, **named: object) -> object:
        counts.append(len(prompt.ids))  # type: ignore[attr-defined]
        return read(engine, prompt, *more, **named)

    monkeypatch.setattr(Engine, "read", counted)
    return counts


def test_every_arm_is_run_on_every_prompt_which_is_read_once(
    tmp_path: Path, prompts: tuple[StudyPrompt, ...], readings: list[int]
) -> None:
    info, heard = storage.create(tmp_path, PLAN, prompts), Heard()
    assert carry_out(tmp_path, info.id, heard, lambda: False)
    arms = PLAN.arms()
    assert [arm.method for arm in arms] == ["full", "snapkv", "snapkv", *4 * ["freekv"]]
    assert len(heard.trials) == 2 * len(arms)
    assert heard.trials[-1][:2] == (14, 14)
    assert len(readings) == len(prompts)
    assert "unreadable" not in list_runs(tmp_path)["status"].tolist()  # the study's folder is no run
    results = Results.read(tmp_path, info.id)
    assert results.ended == results.planned == 14
    for trial in results.trials:
        arm = next(arm for arm in arms if arm.key() == trial.arm)
        if trial.uid is None:
            assert trial.state == "refused"
            assert str(trial.message).startswith("budget_infeasible")
            continue
        with TraceReader.open(tmp_path, trial.uid) as reader:
            assert reader.meta.method == arm.method
            if arm.overrides:
                assert str(reader.meta.config["tau"]) == arm.overrides["tau"]
            assert reader.meta.output_text is not None
            figures = trial.figures or {}
            assert figures.get("compared_steps", 0) == reader.loss()["kl"].notna().sum()
            assert ("kl_mean_nats" in figures) is ("compared_steps" in figures)


def test_questions_after_one_context_share_its_reading(tmp_path: Path, readings: list[int]) -> None:
    """The context is read once for all questions, methods and budgets; another context is read for itself."""
    context, other = ("the red key opens the old door . " * 20, "the green lamp lights the new hall . " * 20)
    rows = [
        {"context": context, "question": "the red key opens", "answer": "door"},
        {"context": context, "question": "the old door", "answer": "key"},
        {"context": other, "question": "the green lamp", "answer": "hall"},
    ]
    read = study_prompts(rows, RunRequest(model="demo"), Named())
    plan = PLAN.model_copy(update={"values": {}, "questions": ("after",)})
    info = storage.create(tmp_path, plan, read.prompts)
    assert carry_out(tmp_path, info.id, Heard(), lambda: False)
    assert len(readings) == 2
    trials = storage.read_trials(tmp_path, info.id)
    assert sum(trial.state == "completed" for trial in trials) >= 6


def test_a_prompt_that_cannot_be_fed_leaves_the_others_unharmed(tmp_path: Path) -> None:
    """The first prompt has a segment without a token: half of a word. The second one runs under every arm."""
    text = "the red key opens the old door . " * 12
    half = PromptText(text, answer="door", segments=(Segment("half", 0, 1),))
    whole = PromptText(text + "the", answer="door", segments=(Segment("rest", 40, len(text)),))
    plan = PLAN.model_copy(update={"values": {}, "budgets": ("40%",), "entrants": (Entrant(method="snapkv"),)})
    info = storage.create(tmp_path, plan, (StudyPrompt("half", half), StudyPrompt("whole", whole)))
    assert carry_out(tmp_path, info.id, Heard(), lambda: False)
    trials = storage.read_trials(tmp_path, info.id)
    assert {trial.state for trial in trials if trial.prompt == "half"} == {"refused"}
    ended = [trial for trial in trials if trial.prompt == "whole"]
    assert [trial.state for trial in ended] == ["completed"] * 2
    for trial in ended:
        with TraceReader.open(tmp_path, str(trial.uid)) as reader:
            assert "rest" in segments_of(reader)


def test_a_trial_is_the_run_that_it_would_be_alone(tmp_path: Path, prompts: tuple[StudyPrompt, ...]) -> None:
    from kvlens.runs.carrying import carry_out as run_alone

    plan = PLAN.model_copy(update={"values": {}, "entrants": (Entrant(method="snapkv"),), "budgets": ("40%",)})
    info = storage.create(tmp_path, plan, prompts[:1])
    carry_out(tmp_path, info.id, Heard(), lambda: False)
    request = plan.request(plan.arms()[1])
    uid, _, text = run_alone(request, prompts[0].source, tmp_path, lambda *told: None, lambda: False)
    stored = [trial.uid for trial in storage.read_trials(tmp_path, info.id)][1]
    assert stored is not None
    with TraceReader.open(tmp_path, uid) as alone, TraceReader.open(tmp_path, stored) as reader:
        assert reader.meta.output_text == text
        assert reader.meta.config == alone.meta.config
        assert (reader.head_table() == alone.head_table())["coverage_mean"].all()


def test_a_study_that_was_stopped_goes_on_where_it_stopped(
    tmp_path: Path, prompts: tuple[StudyPrompt, ...], readings: list[int]
) -> None:
    info, heard = storage.create(tmp_path, PLAN, prompts), Heard(3)
    assert not carry_out(tmp_path, info.id, heard, heard.stop)
    assert len(storage.read_trials(tmp_path, info.id)) == 3
    path = storage.folder_of(tmp_path, info.id) / storage.TRIALS
    path.write_bytes(path.read_bytes() + b'{"prompt": "needle-0", "ar')  # a line that was being written
    again = Heard()
    assert carry_out(tmp_path, info.id, again, lambda: False)
    assert len(again.trials) == 11
    assert len(storage.read_trials(tmp_path, info.id)) == 14
    assert all(json.loads(line) for line in path.read_text().splitlines())
    assert len(readings) == len(prompts)  # the first prompt's reading was kept
    assert carry_out(tmp_path, info.id, Heard(), lambda: False)


def test_two_processes_do_not_carry_out_one_study(tmp_path: Path, prompts: tuple[StudyPrompt, ...]) -> None:
    info = storage.create(tmp_path, PLAN, prompts)
    with storage.carried_out_alone(tmp_path, info.id):
        assert storage.is_running(tmp_path, info.id)
        with pytest.raises(storage.StudyBusy):
            carry_out(tmp_path, info.id, Heard(), lambda: False)
    assert not storage.is_running(tmp_path, info.id)


class Broken(SnapKV):
    """Ends the process from a hook."""

    name = "broken_for_studies"

    def score(self, prompt: Prefilled, layer: int, before: int) -> torch.Tensor:
        raise SystemExit(3)


def test_a_method_that_fails_leaves_the_other_arms_unharmed(
    tmp_path: Path, prompts: tuple[StudyPrompt, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    methods.register(Broken)
    try:
        plan = PLAN.model_copy(
            update={
                "entrants": (Entrant(method=Broken.name), Entrant(method="snapkv")),
                "values": {},
                "budgets": ("40%",),
            }
        )
        info = storage.create(tmp_path, plan, prompts[:1])
        assert not carry_out(tmp_path, info.id, Heard(), lambda: False)
        states = {trial.arm: trial.state for trial in storage.read_trials(tmp_path, info.id)}
        assert [states[arm.key()] for arm in plan.arms()] == ["completed", "failed", "completed"]
    finally:
        methods.registry().pop(Broken.name, None)


def test_arms_are_named_by_what_tells_them_apart() -> None:
    names = list(labels(PLAN.arms(), "demo").values())
    assert names[:3] == ["FullKV", "SnapKV 20%", "SnapKV 40%"]
    assert names[3:] == ["FreeKV tau 0.5 20%", "FreeKV tau 0.5 40%", "FreeKV tau 0.9 20%", "FreeKV tau 0.9 40%"]
    assert len(set(names)) == len(names)


def test_an_arm_names_what_is_a_stand_in_on_the_model() -> None:
    plan = PLAN.model_copy(update={"entrants": (Entrant(method="sekv"),), "values": {}, "budgets": ("40%",)})
    assert list(labels(plan.arms(), "another").values())[1] == "SeKV (untrained router)"
    assert list(labels(plan.arms(), "smollm2").values())[1] == "SeKV"


def test_values_of_parameters() -> None:
    assert parse_values(["a.x=1,2", "a.y=3"], ["a", "b"]) == {"a": {"x": ("1", "2"), "y": ("3",)}}
    assert parse_values(["x=1"], ["a"]) == {"a": {"x": ("1",)}}
    for texts in (["x=1"], ["a.x"], ["c.x=1"], ["a.x="], ["a.x=1", "a.x=2"]):
        with pytest.raises(BadStudy) as problem:
            parse_values(texts, ["a", "b"])
        assert problem.value.code == "bad_values"


@pytest.mark.parametrize(
    ("changes", "code"), [({"entrants": ()}, "no_method"), ({"values": {"quest": {"page": (1,)}}}, "foreign_parameter")]
)
def test_a_plan_that_cannot_be_run_is_refused(changes: dict[str, object], code: str) -> None:
    with pytest.raises(BadStudy) as problem:
        PLAN.model_copy(update={"values": {}} | changes).check()
    assert problem.value.code == code


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"budgets": ("much",)}, "much"),
        ({"values": {"freekv": {"no_such": (1,)}}}, "no_such"),
        ({"entrants": (Entrant(method="no_such"),)}, "no_such"),
    ],
)
def test_a_plan_names_what_does_not_exist(changes: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        PLAN.model_copy(update={"values": {}} | changes).check()


PROMPT = PromptText("a text")


# ---------------------------------------------------------------------------------------- tables, from made trials
def made(rights: dict[str, list[bool | None]]) -> Results:
    """A study of one method at several budgets whose trials came out as said, budget -> right of each prompt."""
    plan = StudyPlan(shared=RunRequest(model="demo"), entrants=(Entrant(method="snapkv"),), budgets=tuple(rights))
    count = len(next(iter(rights.values())))
    prompts = [StudyPrompt(str(number), PROMPT) for number in range(count)]
    trials = [
        Trial(
            str(number), arm.key(), "completed", f"u{number}", figures={"right": right, "kl_mean_nats": float(number)}
        )
        for arm in plan.arms()[1:]
        for number, right in enumerate(rights[arm.budget])
    ]
    return Results(StudyInfo(id="20260101-000000-aaaaaa", created="", plan=plan), prompts, trials)


def test_the_matrix_counts_what_was_judged() -> None:
    matrix = made({"10%": [True, False, None, True], "20%": [True] * 4}).matrix().set_index("label")
    assert matrix.loc["SnapKV 10%", ["n", "right"]].tolist() == [3, pytest.approx(2 / 3)]
    assert matrix.loc["SnapKV 20%", "right_low"] == pytest.approx(0.5101, abs=1e-4)  # Wilson, 4 of 4
    assert matrix.loc["FullKV", "n"] == 0
    assert matrix.loc["SnapKV 10%", "kl_mean_nats"] == pytest.approx(1.5)


def test_a_curve_has_a_point_for_every_value() -> None:
    curve = made({"10%": [False, False], "20%": [True, False], "512tok": [True, True]}).curve("budget")
    assert curve["x"].tolist() == [0.1, 0.2, 512.0]
    assert curve["value"].tolist() == [0.0, 0.5, 1.0]
    assert curve["line"].unique().tolist() == ["SnapKV"]
    for results, figure, code in (
        (made({"10%": [True]}), "right", "unknown_axis"),
        (made({"10%": [True], "20%": [True]}), "no_such", "unknown_figure"),
    ):
        with pytest.raises(BadStudy) as problem:
            results.curve("budget", figure)
        assert problem.value.code == code


def test_the_presets_that_ran_are_named(tmp_path: Path) -> None:
    """At a budget that a preset chooses its values by, one line may hold several presets."""
    results = made({"10%": [True, True], "20%": [True, True], "40%": [True, True]})
    ran = {"10%": ("fit", "fit"), "20%": ("fit", "paper"), "40%": ("paper", "paper")}
    budgets = {arm.key(): arm.budget for arm in results.arms}
    trials = [
        replace(trial, figures={**(trial.figures or {}), "ran_preset": ran[budgets[trial.arm]][int(trial.prompt)]})
        for trial in results.trials
    ]
    results = replace(results, trials=trials)
    assert results.matrix()["ran_preset"].tolist() == ["", "fit", "fit and paper", "paper"]
    points = results.curve("budget")
    assert points["ran_preset"].tolist() == ["fit", "fit and paper", "paper"]
    (line,) = curves(points, "budget", "right", "share").data
    assert line.marker.symbol == (look := mark("snapkv").symbol, f"{look}-open", f"{look}-open")


def test_two_arms_are_compared_on_the_prompts_of_both() -> None:
    results = made({"10%": [True, False, True, None, False, False], "20%": [True, True, False, True, True, True]})
    paired = compare(results, "SnapKV 20%", "SnapKV 10%")
    assert (paired.n, paired.both, paired.only_a, paired.only_b, paired.neither) == (5, 1, 3, 1, 0)
    assert paired.difference == pytest.approx(0.4)
    assert paired.p == pytest.approx(0.625)  # two-sided binomial, 1 of 4
    assert not paired.decided
    assert [(split.prompt, split.right) for split in paired.splits] == [("1", "a"), ("2", "b"), ("4", "a"), ("5", "a")]
    with pytest.raises(BadStudy) as problem:
        compare(results, "SnapKV 20%", "no arm")
    assert problem.value.code == "unknown_arm"


def test_an_arm_beside_its_paper_marks_what_differs() -> None:
    plan = PLAN.model_copy(update={"questions": ("in", "after"), "values": {"snapkv": {"kernel": (1, 7)}}})
    results = Results(StudyInfo(id="20260101-000000-aaaaaa", created="", plan=plan), [StudyPrompt("0", PROMPT)], [])
    states = {}
    for arm in plan.arms()[2:]:
        rows = {row.setting: row for row in beside_paper(results, arm.key())}
        if arm.method == "snapkv":
            states[arm.overrides["kernel"], arm.question] = rows["kernel"].state, rows["question"].state
        stated = {"snapkv": "check", "freekv": "silent"}  # no source was read; the paper is silent
        assert rows["number format of KV"].state == stated[arm.method]
    assert states == {
        (1, "in"): ("differs", "same"),
        (1, "after"): ("differs", "differs"),
        (7, "in"): ("same", "same"),
        (7, "after"): ("same", "differs"),
    }
    snapkv = next(arm for arm in plan.arms() if arm.method == "snapkv")
    by_name = {row.setting: row for row in beside_paper(results, snapkv.key())}
    assert (by_name["window"].study, by_name["window"].paper) == ("8", "32")  # the preset of the demo model
    assert by_name["group"].state == "ours"
    assert by_name["scoring"].state == "differs"
    with pytest.raises(BadStudy) as problem:
        beside_paper(results, "FullKV question in")
    assert problem.value.code == "no_paper"


def protocols() -> dict[str, Mapping[str, str]]:
    """Return what the papers of methods with a part `protocol` state, by method."""
    modules = {name: part(kind, "protocol", "kvlens.studies.methods") for name, kind in methods.registry().items()}
    return {name: module.PROTOCOL for name, module in modules.items() if module is not None}


def test_what_a_paper_states_is_beside_the_study_and_its_silence_is_said() -> None:
    papers = protocols()
    assert set(papers) == {"sekv", "chess", "freekv", "sentkv", "compresskv"}
    plan = PLAN.model_copy(update={"entrants": tuple(Entrant(method=name) for name in papers), "values": {}})
    results = Results(StudyInfo(id="20260101-000000-aaaaaa", created="", plan=plan), [StudyPrompt("0", PROMPT)], [])
    for arm in plan.arms():
        if arm.method not in papers:
            continue
        rows = {row.setting: row for row in beside_paper(results, arm.key())}
        assert set(papers[arm.method]) <= set(SETTINGS) <= set(rows)
        for setting, text in papers[arm.method].items():
            assert rows[setting].paper == text
            assert (rows[setting].state == "silent") is (text == NOT_STATED)
            stated = text != NOT_STATED and not text.startswith(NOT_STATED)
            assert not stated or "(" in text, f"{arm.method}, {setting}: names its section"
    assert rows["scoring"].state == "differs", "compresskv's is its benchmark's, which the study does not run"


def test_a_paper_is_compared_with_values_and_never_with_guesses() -> None:
    def states(entrant: Entrant, **changes: object) -> dict[str, str]:
        plan = PLAN.model_copy(update={"entrants": (entrant,), "values": {}, **changes})
        results = Results(StudyInfo(id="20260101-000000-aaaaaa", created="", plan=plan), [StudyPrompt("0", PROMPT)], [])
        return {row.setting: row.state for row in beside_paper(results, plan.arms()[-1].key())}

    assert states(Entrant(method="snapkv", preset="fit"))["window"] == "check", "what fit chooses shows in a run alone"
    assert states(Entrant(method="snapkv"), values={"snapkv": {"window": ("32",)}})["window"] == "same"


def test_a_value_is_the_same_however_it_is_written() -> None:
    plan = PLAN.model_copy(update={"values": {"snapkv": {"window": (4, 8)}}})
    more = PLAN.model_copy(update={"values": {"snapkv": {"window": ("8", "16")}}})
    grown = extended(plan, more)
    assert grown.values["snapkv"]["window"] == (4, 8, "16")
    assert len({arm.key() for arm in grown.arms()}) == len(grown.arms())


def test_an_extended_plan_has_the_number_formats_of_both() -> None:
    more = PLAN.model_copy(update={"reference_dtypes": ("bfloat16",)})
    arms = [(arm.method, arm.dtype) for arm in extended(PLAN, more).arms()]
    assert ("full", "bfloat16") in arms


def test_studies_of_the_same_prompts_read_each_once(
    tmp_path: Path, prompts: tuple[StudyPrompt, ...], readings: list[int]
) -> None:
    for number, budget in enumerate(("40%", "60%")):
        plan = PLAN.model_copy(update={"budgets": (budget,), "values": {}})
        info = storage.create(tmp_path, plan, prompts)
        assert carry_out(tmp_path, info.id, Heard(), lambda: False)
        assert len(readings) == len(prompts), number
    files = list(storage.readings_folder(tmp_path).glob("*.safetensors"))
    assert len([file for file in files if ".surprisal" not in file.name]) == len(prompts)
    assert len(storage.ids(tmp_path)) == 2


def test_trials_come_in_the_order_in_which_they_ended(tmp_path: Path, prompts: tuple[StudyPrompt, ...]) -> None:
    info = storage.create(tmp_path, PLAN, prompts)
    for prompt, origin in (("needle-0", "old"), ("needle-1", "old"), ("needle-0", "new")):
        storage.append(tmp_path, info.id, Trial(prompt, "arm", "completed", figures={}, origin=origin))
    trials = storage.read_trials(tmp_path, info.id)
    assert [(trial.prompt, trial.origin) for trial in trials] == [("needle-1", "old"), ("needle-0", "new")]


def test_an_extended_study_runs_what_is_new_alone(tmp_path: Path, prompts: tuple[StudyPrompt, ...]) -> None:
    plan = PLAN.model_copy(update={"budgets": ("40%",)})
    info = storage.create(tmp_path, plan, prompts[:1])
    carry_out(tmp_path, info.id, Heard(), lambda: False)
    before = storage.read_trials(tmp_path, info.id)
    assert len(before) == 4
    changes: dict[str, object] = {"entrants": (), "budgets": ("60%",), "values": {"freekv": {"tau": ("0.7",)}}}
    more = plan.model_copy(update=changes)
    grown = extend(tmp_path, info.id, more, prompts)  # the first prompt is there already
    assert len(grown.plan.arms()) == 1 + 2 + 2 * 3
    assert [prompt.id for prompt in storage.read_prompts(tmp_path, info.id)] == ["needle-0", "needle-1"]
    heard = Heard()
    assert carry_out(tmp_path, info.id, heard, lambda: False)
    assert len(heard.trials) == 2 * 9 - 4
    assert storage.read_trials(tmp_path, info.id)[:4] == before
    other = plan.model_copy(update={"entrants": (Entrant(method="snapkv", preset="paper"),), "values": {}})
    unvaried = plan.model_copy(update={"entrants": (), "values": {"snapkv": {"window": ("4",)}}})
    for foreign in (other, unvaried):
        with pytest.raises(BadStudy) as problem:
            extend(tmp_path, info.id, foreign, ())
        assert problem.value.code == "other_methods"


def test_the_same_prompt_twice_is_one_prompt_in_the_api(tmp_path: Path) -> None:
    rows = [{"question": "who?", "answer": "a", "id": name} for name in ("x", "y")]
    read = study_prompts([*rows, {"question": "what?"}], RunRequest(model="demo"), Named())
    assert [prompt.id for prompt in read.prompts] == ["x", "prompt-2"]
    assert len(read.faults) == 1


def test_listed_arms_run_on_their_own_prompts_alone(tmp_path: Path, prompts: tuple[StudyPrompt, ...]) -> None:
    """A study may be a list of trials; beside axes they are added, and an extension joins the prompts of an arm."""
    first, second = (prompt.id for prompt in prompts)
    arms = [Arm(method="streaming_llm", budget="60%"), Arm(method="full")]
    listed = [ListedArm(arm=arms[0], prompts=(first,)), ListedArm(arm=arms[1], prompts=(first, second))]
    shared = RunRequest(model="demo", max_new=4)
    plan = StudyPlan(shared=shared, entrants=(), listed=tuple(listed), traces=False)
    plan.check()
    trials = [(first, arms[0].key()), (first, arms[1].key()), (second, arms[1].key())]
    assert plan.trials([first, second]) == trials
    info, heard = storage.create(tmp_path, plan, prompts), Heard()
    assert carry_out(tmp_path, info.id, heard, lambda: False)
    assert sorted((prompt, arm.key()) for _, _, prompt, arm, _ in heard.trials) == sorted(trials)
    results = Results.read(tmp_path, info.id)
    assert (results.planned, results.ended) == (3, 3)
    (row,) = studies_in(tmp_path)
    assert (row.methods, row.planned) == ("streaming_llm, full", 3)
    more = plan.model_copy(update={"listed": (ListedArm(arm=arms[0], prompts=(second,)),)})
    assert extended(plan, more).trials([first, second]) == [*trials[:2], (second, arms[0].key()), trials[2]]
    assert len(PLAN.model_copy(update={"listed": tuple(listed)}).trials([first])) == len(PLAN.arms()) + 1
    with pytest.raises(BadStudy) as refused:
        plan.model_copy(update={"traces": True, "generation": "cut"}).check()
    assert refused.value.code == "cut_is_stored"


def test_a_listed_arm_is_checked_before_anything_runs(tmp_path: Path, prompts: tuple[StudyPrompt, ...]) -> None:
    """Its budget by the plan, its prompts where the study is stored."""
    plan = StudyPlan(shared=RunRequest(model="demo", max_new=4), entrants=())

    def listing(budget: str, *ids: str) -> StudyPlan:
        arm = Arm(method="streaming_llm", budget=budget)
        return plan.model_copy(update={"listed": (ListedArm(arm=arm, prompts=ids),)})

    with pytest.raises(ValueError, match="abc"):
        listing("abc", prompts[0].id).check()
    listing("60%", prompts[0].id).check()
    with pytest.raises(BadStudy) as refused:
        storage.create(tmp_path, listing("60%", prompts[0].id, "typo"), prompts)
    assert refused.value.code == "unknown_prompt"
    assert storage.ids(tmp_path) == []


def test_changes_are_set_after_the_preset_was_chosen() -> None:
    """They are part of an arm's key and name; an arm without them keeps the key that stored studies have."""
    plain = Arm(method="snapkv", budget="20%")
    changed = Arm(method="snapkv", budget="20%", changes={"window": 16})
    assert plain.key() == "40bc355a29d2"
    assert changed.key() != plain.key()
    assert labels([plain, changed], "demo")[changed.key()].endswith("window 16")


def test_forced_text_is_fed_to_every_arm_and_compared_with_full_kv_on_it(tmp_path: Path) -> None:
    """No run is stored, also where other trials of the study are; full KV differs from itself by nothing."""
    text = "The harbour was quiet that morning. " * 8
    row = {"id": "a", "text": text, "forced": "Nobody had seen the boat since."}
    prompt = prompt_of(row, "0", "row")
    assert prompt_of(prompt.row(), "0", "row") == prompt
    plan = StudyPlan(
        shared=RunRequest(model="demo", max_new=4), entrants=(Entrant(method="streaming_llm"),), budgets=("50%",)
    )
    info, heard = storage.create(tmp_path, plan, [prompt]), Heard()
    assert carry_out(tmp_path, info.id, heard, lambda: False)
    kl = {arm.method: trial.figures["kl_mean_nats"] for _, _, _, arm, trial in heard.trials if trial.figures}
    assert kl["full"] == pytest.approx(0, abs=1e-9)
    assert kl["streaming_llm"] > 1e-4
    steps = {trial.figures["steps"] for *_, trial in heard.trials if trial.figures}
    assert len(steps) == 1
    assert steps != {4}
    assert {trial.figures["compared_steps"] for *_, trial in heard.trials if trial.figures} == steps
    assert list_runs(tmp_path).empty
    assert replace(prompt, forced="").content != prompt.content


@pytest.mark.parametrize("missing", [float("nan"), None, ""])
def test_a_missing_answer_of_a_frame_is_none(missing: Any) -> None:
    row = {"text": "The code is 5.", "answer": missing, "answers": missing or None, "needle": missing, "id": missing}
    prompt = prompt_of(row, "line 1", "line 1")
    assert (prompt.source.answer, prompt.source.answers, prompt.source.needle) == (None, (), ())
    assert prompt.id == "line 1"


@pytest.mark.parametrize(
    "row",
    [
        {"text": "The code is 5.", "question": "What is the code?"},
        {"text": "The code is 5.", "context": "A context."},
        {"text": 123},
        {"context": "The code is 5.", "question": 7.5},
    ],
)
def test_a_row_whose_question_would_be_lost_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(BadPrompt):
        prompt_of(row, "0", "line 1")
