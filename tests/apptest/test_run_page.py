"""The New run page: the form, its refusals, the job it starts."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest
from support import raises_code
from uiruns import ROOT, Visit

from kvlens import methods
from kvlens.app.ui.common import sentences, submit
from kvlens.app.ui.common.jobs import Job, JobManager
from kvlens.app.ui.common.jobview import manager, progress_text
from kvlens.app.ui.common.request import MethodChoice, PromptChoice, changed_parameters, command
from kvlens.app.ui.common.widgets import plain
from kvlens.app.ui.run import preflight
from kvlens.demo import tasks as demo_tasks
from kvlens.demo.encode import demo_encode
from kvlens.lens.condition import AFTER
from kvlens.models.catalogue import label
from kvlens.runs.request import AUTO
from kvlens.store.reader import TraceReader
from kvlens.text.promptfiles import decode

QUESTION = "What is the code of the gate?"
BEGUN = "library card number"
"""of the beginning of an answer, which the task gives"""


def wait(jobs: JobManager, uid: str, seconds: int = 240) -> Job:
    """The job when it has ended."""
    for _ in range(20 * seconds):
        job = jobs.get(uid)
        assert job is not None
        if not job.active:
            return job
        time.sleep(0.05)
    raise AssertionError("the job did not end")


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.fixture
def jobs() -> JobManager:
    return JobManager()


def test_the_form_comes_from_the_catalogue(visit: Visit, tmp_path: Path) -> None:
    app = visit(tmp_path, "run")
    assert {"SeKV · span retrieval", "StreamingLLM · decode eviction"} <= set(app.selectbox(key="form_method").options)
    labels = [widget.label.replace("\\", "") for widget in app.number_input]
    assert any(label.startswith("window") for label in labels)


def test_a_preset_that_does_not_fit_is_refused_with_a_button_that_works(visit: Visit, tmp_path: Path) -> None:
    app = visit(tmp_path, "run")
    app.selectbox(key="form_method").set_value("freekv").run()
    app.text_input(key="form_budget").set_value("20%").run()
    preset = app.selectbox(key="form_preset_freekv_demo")
    assert preset.options[-1].startswith("fit: ")
    preset.set_value("paper").run()
    assert any("Preset fit" in warning.value.replace("\\", "") for warning in app.warning)
    assert next(button for button in app.button if button.label == "Run").disabled
    next(button for button in app.button if button.label == "Use preset fit").click().run()
    assert app.selectbox(key="form_preset_freekv_demo").value == "fit"
    assert not app.warning
    assert any("unning preset fit: " in info.value.replace("\\", "") for info in app.info)
    assert not next(button for button in app.button if button.label == "Run").disabled


def test_warnings_and_notes_of_the_estimate_name_fields(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"warnings": ["lower --max-new."], "room": "raise --budget.", "fit": "pick --preset.", "feasible": False}
    made = preflight.estimated
    figures: list[dict[str, Any]] = []

    def changed(*told: Any) -> dict[str, Any]:
        figures.append(made(*told) | said)
        return figures[-1]

    monkeypatch.setattr(preflight, "estimated", changed)
    app = visit(tmp_path, "run")
    assert figures
    assert [box.value for box in app.warning] == [plain("lower Max new tokens.")]
    assert {plain("raise Budget."), plain("pick Preset.")} <= {box.value for box in app.info}


def test_the_real_model_is_what_the_form_opens_with(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVLENS_MODEL")
    app = visit(tmp_path, "run")
    model = app.selectbox(key="form_model")
    assert (model.value, model.options[-1]) == ("smollm2", label("demo"))
    assert any("run on: cpu" in caption.value.replace("\\", "") for caption in app.caption)
    assert app.selectbox(key="form_task_real").value == "niah_single"
    begun = [text.value for text in app.text if BEGUN in text.value]
    assert {metric.label: metric.value for metric in app.metric}["Prompt"] in (
        f"{tokens:,} tokens" for tokens in range(1004, 1025)
    )
    app.selectbox(key="form_chat").set_value("off").run()
    assert len([text for text in app.text if BEGUN in text.value]) == len(begun) - 1, "the answer is not begun"
    app.text_input(key="form_system").set_value("Be brief.").run()
    assert "System message" in app.error[0].value.replace("\\", "")
    prompt, choice = submit.sample_choice()
    assert (choice.model, choice.preset, prompt.prompt.answer) == ("smollm2", "no-coarse", " 48213")
    home = visit(tmp_path)
    first, second = [button.label for button in home.button][:2]
    assert first == sentences.WATCH_LOSS
    assert "SeKV (no-coarse)" in second


def test_an_impossible_length_is_refused_with_its_sentence(visit: Visit, tmp_path: Path) -> None:
    app = visit(tmp_path, "run")
    app.selectbox(key="form_task").set_value("list")
    app.number_input(key="form_length").set_value(32).run()
    assert "needs at least" in app.error[0].value.replace("\\", "")
    assert not [button for button in app.button if button.label == "Run"]


def test_a_bad_budget_is_refused_before_the_run(visit: Visit, tmp_path: Path) -> None:
    app = visit(tmp_path, "run")
    for budget, said in {
        "a lot": "is not understood",
        "20": "is 20 times full KV: write 20% for a share of it",
        "200%": "is more than full KV: 100% is no limit",
        "0%": "gives no room: it must be above 0.",
    }.items():
        app.text_input(key="form_budget").set_value(budget).run()
        (error,) = app.error
        assert said in error.value.replace("\\", "")
        assert next(button for button in app.button if button.label == "Run").disabled


def test_every_method_can_be_run_as_the_form_comes_up(visit: Visit, tmp_path: Path) -> None:
    """No default of the form is refused; methods that keep all KV on the device are held by their parameters."""
    app = visit(tmp_path, "run")
    for name in methods.BUILT_IN:
        app.selectbox(key="form_method").set_value(name).run()
        assert not app.error, (name, app.error)
        assert not app.warning, (name, app.warning)
        assert not next(button for button in app.button if button.label == "Run").disabled
        budget = next(box for box in app.text_input if box.label == "Budget").value
        assert budget == AUTO


def test_the_form_as_it_comes_up_takes_a_prompt_of_any_length(visit: Visit, tmp_path: Path) -> None:
    app = visit(tmp_path, "run")
    app.segmented_control(key="form_source").set_value("Paste").run()
    raised = []
    for words in (1, 5, 20, 51, 200, 1000):
        app.text_area(key="form_text").set_value(" the" * words).run()
        assert not app.error, (words, app.error)
        assert not app.warning, (words, app.warning)
        assert not next(button for button in app.button if button.label == "Run").disabled
        assert app.text_input(key="form_budget").value == AUTO
        raised.append(any("the usual 20%" in info.value.replace("\\", "") for info in app.info))
    assert (raised[0], raised[-1]) == (True, False)


def test_a_budget_that_is_put_aside_is_named(visit: Visit, tmp_path: Path) -> None:
    app = visit(tmp_path, "run")
    keeps_all = next(name for name in methods.BUILT_IN if methods.get(name).keeps_all)
    said = "a budget of its own"
    app.selectbox(key="form_method").set_value(keeps_all).run()
    assert not [caption for caption in app.caption if said in caption.value]
    app.selectbox(key="form_method").set_value(methods.DEFAULT).run()
    app.text_input(key="form_budget").set_value("35%").run()
    app.selectbox(key="form_method").set_value(keeps_all).run()
    (caption,) = [caption.value for caption in app.caption if said in caption.value]
    assert "35%" in caption
    app.selectbox(key="form_method").set_value(methods.DEFAULT).run()
    assert app.text_input(key="form_budget").value == "35%"


def test_an_answer_that_is_not_in_the_text_is_remarked_on(visit: Visit, tmp_path: Path) -> None:
    app = visit(tmp_path, "run")
    app.segmented_control(key="form_source").set_value("Paste").run()
    app.text_area(key="form_text").set_value("Bread is 3 euro, milk is 2. " * 20 + "Together they are").run()
    for answer, remarks in (("3 EURO", 0), ("5 euro", 1)):
        app.text_input(key="form_answer").set_value(answer).run()
        assert len([caption for caption in app.caption if sentences.ANSWER_NOT_IN_TEXT in caption.value]) == remarks
        assert not app.error


def test_an_empty_paste_says_what_to_do(visit: Visit, tmp_path: Path) -> None:
    app: AppTest = visit(tmp_path, "run")
    app.segmented_control(key="form_source").set_value("Paste").run()
    app.text_area(key="form_text").set_value("   ").run()
    assert "is empty" in app.error[0].value


def test_segments_and_template_arguments_go_with_the_run(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[dict[str, Any]] = []

    def note(file: Path, *rest: object) -> list[str]:
        prompts.append(json.loads(Path(file).read_text(encoding="utf-8")))
        return script("pass")

    monkeypatch.setattr(submit, "command", note)
    app = visit(tmp_path, "run")
    app.segmented_control(key="form_source").set_value("Paste").run()
    app.text_area(key="form_text").set_value("Rules: be brief. " + "Bread is 3 euro. " * 20).run()
    for lines, code in (("ask=Nowhere", "segment_not_found"), ("rules", "bad_segment"), ("a=9:9", "segment_outside")):
        app.text_area(key="form_segments").set_value(lines).run()
        (box,) = app.error
        assert box.value.replace("\\", "").startswith(code)
        assert "--" not in box.value.replace("\\", "")
    app.text_area(key="form_segments").set_value("rules=Rules:\nbread=17:34\n").run()
    for lines in ("enable_thinking", "enable_thinking=false"):  # no argument; and the toy has no chat template
        app.text_area(key="form_chat_args").set_value(lines).run()
        (box,) = app.error
        assert "--" not in box.value.replace("\\", "")
        assert not [button for button in app.button if button.label == "Run"]
    app.text_area(key="form_chat_args").set_value("").run()
    assert not app.error
    next(button for button in app.button if button.label == "Run").click().run()
    (prompt,) = prompts
    assert prompt["segments"] == {"rules": [0, 357], "bread": [17, 34]}


def test_what_is_expected_of_a_pasted_text_goes_with_it(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def note(file: Path, *rest: object) -> list[str]:
        asked.append(json.loads(Path(file).read_text(encoding="utf-8")))
        return script("pass")

    monkeypatch.setattr(submit, "command", note)
    app = visit(tmp_path, "run")
    app.segmented_control(key="form_source").set_value("Paste").run()
    text = "Bread is 3 euro. The code of Ann is 4821. " * 20 + "The code of Ann is"
    app.text_area(key="form_text").set_value(text).run()
    app.text_input(key="form_passage").set_value("code of Bob").run()
    assert "'code of Bob'" in app.error[0].value.replace("\\", "")
    app.text_input(key="form_passage").set_value(" Ann is 4821").run()
    app.text_input(key="form_answer").set_value(" 4821 ").run()
    assert not app.error
    next(button for button in app.button if button.label == "Run").click().run()
    (sent,) = asked
    assert sent["answer"] == "4821"
    assert len(sent["needle"]) == 20
    assert {text[start:end] for start, end in sent["needle"]} == {"Ann is 4821"}


def test_an_uploaded_answer_without_a_task_is_kept() -> None:
    source = decode(json.dumps({"text": "Ann is 4821.", "answer": "4821", "needle": [[0, 3]]}).encode(), "p.json")
    assert decode(PromptChoice(source, "p.json").file_text().encode(), "prompt.json") == source


def test_an_unknown_job_is_one_sentence(visit: Visit, tmp_path: Path) -> None:
    app = visit(tmp_path, "run", job="nonsense")
    assert "nonsense" in app.error[0].value


def test_a_finished_job_of_the_url_links_to_its_run(visit: Visit, tmp_path: Path) -> None:
    visit(tmp_path)
    job = manager().submit(script('print(\'{"phase": "done", "uid": "20260101-000000-abcdef"}\')'), "a run")
    wait(manager(), job)
    app = AppTest.from_file(str(ROOT / "app.py"), default_timeout=600).run()
    app.query_params["job"] = job
    app.switch_page("pages/run.py").run()
    assert app.success[0].value.startswith("Done")


def test_progress_lines_move_the_job_and_other_lines_go_to_the_log(jobs: JobManager) -> None:
    report = '{"phase": "decode", "done": 3, "total": 8, "tokens_per_s": 12.5}'
    job = wait(
        jobs,
        jobs.submit(script(f'print(\'hello\'); print(\'{report}\'); print(\'{{"phase": "done", "uid": "u"}}\')'), "t"),
    )
    assert (job.state, job.uid, job.done, job.total, job.tokens_per_s) == ("done", "u", 3, 8, 12.5)
    assert list(job.log) == ["hello"]


def test_a_crash_keeps_the_tail_of_the_log(jobs: JobManager) -> None:
    job = wait(jobs, jobs.submit(script("raise RuntimeError('the engine broke')"), "t"))
    assert job.state == "failed"
    assert "exit code 1" in str(job.message)
    assert any("the engine broke" in line for line in job.log)


def test_an_error_report_is_the_message(jobs: JobManager) -> None:
    code = 'import sys; print(\'{"phase": "error", "message": "one sentence"}\'); sys.exit(1)'
    assert wait(jobs, jobs.submit(script(code), "t")).message == "one sentence"


def test_a_command_that_cannot_start_fails_without_ending_the_worker(jobs: JobManager) -> None:
    failed = wait(jobs, jobs.submit(["/nonexistent/python"], "t"))
    assert (failed.state, failed.message is not None) == ("failed", True)
    assert wait(jobs, jobs.submit(script('print(\'{"phase": "done", "uid": "u"}\')'), "t")).state == "done"


def test_cancelling_ends_the_running_job_and_drops_the_queued_one(jobs: JobManager) -> None:
    first = jobs.submit(script("import time; print('up', flush=True); time.sleep(60)"), "first")
    second = jobs.submit(script("print(1)"), "second")
    while not (found := jobs.get(first)) or not found.log:
        time.sleep(0.02)
    assert jobs.position(second) == 1
    jobs.cancel(second)
    jobs.cancel(first)
    assert wait(jobs, first).state == wait(jobs, second).state == "cancelled"


def test_progress_in_words() -> None:
    job = Job(
        "i", [], "t", 0.0, state="running", phase="decode", done=5, total=10, tokens_per_s=3.25, started=time.time()
    )
    assert progress_text(job, 0).startswith("Decoding 5 / 10 steps · 3.2 tokens/s")


def test_only_changed_parameters_reach_the_command_line(tmp_path: Path) -> None:
    parameters = [{"name": "window", "default": 512}, {"name": "sinks", "default": 4}]
    assert changed_parameters(parameters, {"window": 32}, {"window": 32, "sinks": 8}) == {"sinks": 8}
    argv = command(tmp_path / "p.json", MethodChoice("sekv", "; rm -rf /", "demo", "10%", 8, 0, {"sinks": 8}), tmp_path)
    assert "; rm -rf /" in argv
    assert argv[argv.index("--set") + 1] == "sinks=8"


def test_arguments_of_the_chat_template_reach_the_command_line() -> None:
    choice = MethodChoice("sekv", "demo", None, "10%", 8, 0, chat_args={"enable_thinking": False})
    argv = command(Path("p"), choice, Path("r"))
    assert argv[argv.index("--chat-arg") + 1] == "enable_thinking=false"


def test_the_loss_is_recorded_unless_it_is_ticked_off(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[MethodChoice] = []
    monkeypatch.setattr(submit, "command", lambda file, choice, runs: asked.append(choice) or script("print(1)"))
    app = visit(tmp_path, "run")
    assert app.checkbox(key="form_against").value is True
    assert any("in all layers" in caption.value for caption in app.caption)
    next(button for button in app.button if button.label == "Run").click().run()
    app = visit(tmp_path, "run")
    app.checkbox(key="form_against").uncheck().run()
    next(button for button in app.button if button.label == "Run").click().run()
    app = visit(tmp_path, "run")
    app.selectbox(key="form_method").set_value("full").run()
    assert "form_against" not in [box.key for box in app.checkbox]
    next(button for button in app.button if button.label == "Run").click().run()
    assert [choice.against for choice in asked] == [True, False, False]
    for choice, flag in zip(asked, (True, False, False), strict=True):
        assert ("--against-full" in command(tmp_path / "p.json", choice, tmp_path)) is flag


TRIAL = {
    "task": "multikey",
    "length": 256,
    "depth": 0.5,
    "seed": 11,
    "index": 0,
    "method": "streaming_llm",
    "budget": "60%",
    "preset": None,
    "overrides": {},
}


@pytest.mark.slow
def test_a_trial_becomes_the_very_run_again_compared_with_full_kv(visit: Visit, tmp_path: Path) -> None:
    visit(tmp_path)
    job = wait(manager(), submit.submit_trial(TRIAL | {"max_new": 2}))
    assert job.then == "pages/replay.py"
    argv = job.argv
    assert argv[argv.index("--method") :][:6] == ["--method", "streaming_llm", "--budget", "60%", "--max-new", "2"]
    assert "--against-full" in argv
    assert (job.state, job.message) == ("done", None)
    made = demo_tasks.make_prompt("multikey", 256, 0.5, 11, demo_encode())
    with TraceReader.open(tmp_path, str(job.uid)) as reader:
        assert reader.prompt_text() == made.text
        assert reader.meta.answer == made.answer
        assert len(reader.loss())


def test_a_method_that_keeps_all_is_held_by_a_parameter(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    visit(tmp_path)
    asked: list[MethodChoice] = []
    monkeypatch.setattr(
        submit, "command", lambda file, choice, runs: asked.append(choice) or script(f"print({choice.method!r})")
    )
    submit.submit_trial(TRIAL | {"method": "chess", "budget": "20%", "overrides": {"keep": 0.2}})
    submit.submit_trial(TRIAL | {"method": "full", "budget": "", "preset": None, "overrides": None})
    assert [(c.budget, c.changed, c.against) for c in asked] == [(AUTO, {"keep": 0.2}, True), (AUTO, {}, False)]
    titles = [job.title.split(": ")[0].split() for job in manager().jobs()[:2]]
    assert [title[0] for title in titles] == ["FullKV", "CHESS"]
    assert [title[-2:] for title in titles] == [["no", "limit"], ["attended", "tokens"]]
    with raises_code("unknown_method", method="nonsense"):
        submit.submit_trial(TRIAL | {"method": "nonsense"})


def test_the_question_can_be_fed_after_the_context(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[dict[str, Any], list[str]]] = []

    def note(file: Path, choice: MethodChoice, runs: Path) -> list[str]:
        asked.append((json.loads(file.read_text(encoding="utf-8")), command(file, choice, runs)))
        return script("pass")

    monkeypatch.setattr(submit, "command", note)
    app = visit(tmp_path, "run")
    assert app.radio(key="form_question").value == "in"
    app.radio(key="form_question").set_value("after").run()
    assert not app.error, "a generated task says where its question begins"
    line = next(text.value for text in app.text if " · n = " in text.value)
    parts = line.split(" · ")
    assert (parts[0], parts[2], parts[4]) == ("demo", AFTER, "n = 1")
    assert re.fullmatch(r"budget \d+\.?\d*%", parts[3]), "the budget that auto stands for"
    app.segmented_control(key="form_source").set_value("Paste").run()
    app.text_area(key="form_text").set_value("The code of the gate is 4821. " * 120).run()
    assert sentences.NO_QUESTION_START in app.error[0].value.replace("\\", "")
    app.text_input(key="form_asked").set_value(QUESTION).run()
    assert not app.error
    next(button for button in app.button if button.label == "Run").click().run()
    ((prompt, argv),) = asked
    assert argv[argv.index("--question") + 1] == "after"
    assert prompt["text"][prompt["question"] :] == f"\n\n{QUESTION}"


def test_a_refused_run_can_be_run_again_with_what_would_do(visit: Visit, tmp_path: Path) -> None:
    message = "budget_infeasible: it needs more; raise --budget to 0.235."
    said = json.dumps({"phase": "error", "message": message, "would_do": {"budget": "0.235"}})
    argv = [*script(f"print({said!r}); raise SystemExit('--budget 10%' in ' '.join(__import__('sys').argv))")]
    argv += ["run", "p.json", "--budget", "10%"]
    app = visit(tmp_path, "run")
    job = wait(manager(), manager().submit(argv, "a run"))
    app.query_params["job"] = job.id
    app.run()
    assert "raise Budget to 0.235" in app.error[0].value.replace("\\", "")
    next(button for button in app.button if button.label == "Run again with the budget 23.5%").click().run()
    newest = manager().jobs()[0]
    assert newest.argv == [*argv[:-1], "23.5%"]
    assert newest.title.split(" ")[-1] == "23.5%"
    assert app.query_params["job"] in (newest.id, [newest.id])
    wait(manager(), newest.id)
