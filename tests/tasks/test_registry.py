"""The registry of tasks: built in, plugins, what is told of each."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvlens import plugins, tasks
from kvlens.demo.encode import demo_encode
from kvlens.demo.tasks import TASKS, make_prompt


@pytest.fixture
def fresh() -> Iterator[None]:
    tasks.forget()
    yield
    tasks.forget()


def test_the_demo_tasks_are_the_demo_language_and_stay_what_they_were() -> None:
    assert [entry["name"] for entry in tasks.catalogue() if entry["demo_language"]] == list(TASKS)
    for name in TASKS:
        old, new = make_prompt(name, 512, 0.3, 5, demo_encode()), tasks.get(name).make(512, 0.3, 5, demo_encode())
        assert (new.text, new.answer, new.needle) == (old.text, old.answer, old.needle)
        assert tasks.score(name, new.answer, new.answer) == 1.0


def test_every_task_says_what_it_is() -> None:
    for name, task in tasks.registry().items():
        assert task.name == name
        assert task.summary
        assert task.metric
        assert task.new_tokens > 0


def test_a_plugin_joins_by_its_entry_point(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = copy(tasks.get("needle"))
    plugin.name = "mine"
    tasks.forget()
    point = SimpleNamespace(name="mine", value="mine:TASK", load=lambda: plugin)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == "kvlens.tasks" else [])
    assert tasks.get("mine") is plugin
    product = tasks.get("list")
    point.name = "list"
    tasks.forget()
    assert tasks.get("list") is product
    assert "plugin task 'list' (mine:TASK) has the name" in tasks.refused()["list"]
    with pytest.raises(tasks.UnknownTask, match="unknown task 'mine'"):
        tasks.get("mine")


@pytest.mark.parametrize(
    ("found", "said"), [(object(), "is no kvlens.tasks.base.Task"), ("needle", "calls itself 'needle': both names")]
)
def test_what_is_no_task_is_refused_with_a_sentence(
    fresh: None, monkeypatch: pytest.MonkeyPatch, found: object, said: str
) -> None:
    found = tasks.get(found) if isinstance(found, str) else found
    tasks.forget()
    point = SimpleNamespace(name="mine", value="mine:TASK", load=lambda: found)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == "kvlens.tasks" else [])
    assert "mine" not in {entry["name"] for entry in tasks.catalogue()}
    with pytest.raises(tasks.UnknownTask, match=said):
        tasks.get("mine")


def test_a_stored_runs_answer_is_judged_whatever_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "How many?", "answer": "All. #### 40"}\n' * 12)
    assert tasks.is_right(f"gsm8k:{file}", "40", "So #### 40")
    assert not tasks.is_right(f"gsm8k:{file}", "about 40", "So #### 40"), "no number"
    assert tasks.judged(f"gsm8k:{file}", "about 40", "So #### 40") is None, "and that is no wrong answer"
    assert tasks.judged(f"gsm8k:{file}", "40", "So #### 41") is False
    assert tasks.is_right("gsm8k:/dev/zero", "40", "40"), "no file: as without a task"
    monkeypatch.setattr(tasks, "LOOKED_AT", 10)
    monkeypatch.setattr(tasks, "_open", lambda *given: pytest.fail("it is not opened"))
    assert tasks.is_right(f"gsm8k:{file}", "40", "40")


@pytest.mark.parametrize(
    ("output", "right"),
    [
        (" 4821.", True),
        ("The code is 4821, I think.\nOr 17.", True),
        ("14821", False),
        ("48211", False),
        ("I think:\n4821", True),
        ("", False),
    ],
)
def test_without_a_task_the_output_contains_the_answer(output: str, right: bool) -> None:
    assert tasks.is_right(None, "4821", output) is right
    assert tasks.is_right("ruler:gone.jsonl", "4821", output) is right, "the file is not here any more"


def test_a_task_decides_by_its_own_metric_and_letters_by_either_case() -> None:
    assert tasks.is_right("needle", "4821.", " 4821.")
    assert not tasks.is_right("needle", "4821.", "It is 4821.")
    assert tasks.is_right("", "New York (USA)", "in new york (usa), of course")


def test_an_unknown_task_names_those_there_are() -> None:
    with pytest.raises(tasks.UnknownTask, match=r"unknown task 'x'; known: needle, .* files as longbench:PATH"):
        tasks.get("x")
