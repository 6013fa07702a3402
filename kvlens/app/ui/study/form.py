"""The form of a study: prompts, methods, budgets, a parameter to vary; what it would cost and could decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import streamlit as st

from kvlens import methods as registry
from kvlens import tasks
from kvlens.app.ui.common import data
from kvlens.app.ui.common.jobview import manager
from kvlens.app.ui.common.pagewords import page_words
from kvlens.app.ui.common.promptfields import segment_lines, template_arguments, turns_are_carried
from kvlens.app.ui.common.widgets import error, plain
from kvlens.app.ui.study.request import StudyChoice, study_command
from kvlens.models.catalogue import label
from kvlens.models.find import default_model
from kvlens.runs.request import DEFAULT_SHARE
from kvlens.studies.paired import plan_text
from kvlens.studies.promptfile import ReadPrompts, read_prompts
from kvlens.tasks.base import Encoding
from kvlens.tasks.encoding import encoding
from kvlens.text.carried import has_user_turns
from kvlens.text.plaintext import visible
from kvlens.text.segments import pairs_of
from kvlens.text.units import counted

KINDS = ["jsonl", "csv", "json", "txt", "md"]
_OWN, _GENERATED = "My prompts", "A generated task"


def study_form() -> str | None:
    """Draw the form. Return the id of the job that carries the study out when its button is pressed."""
    models = list(data.models())
    left_column, right_column = st.columns(2, gap="large")
    with right_column:
        st.subheader("Methods and values")
        usual = default_model()
        place = models.index(usual) if usual in models else 0
        model = st.selectbox("Model", models, index=place, key="study_model", format_func=label)
        choice = _choice(str(model))
        arguments, problem = template_arguments("study_chat_args")
    with left_column:
        st.subheader("Prompts")
        names = _prompt_names(str(model))
        choice = replace(choice, chat_args=arguments, segments=segment_lines("study_segments", several=True))
    if not names or not choice.methods:
        st.caption("Add prompts and at least one method. Full KV always runs too.")
        return None
    try:
        if problem:
            raise ValueError(problem)
        arms = choice.plan().arms()
        read = _read(tuple(names), str(model), choice.segments, dict(choice.chat_args))
    except ValueError as problem:
        error(str(problem))
        return None
    if any(has_user_turns(prompt.turns) for prompt in read.prompts):
        choice = replace(choice, carried=turns_are_carried("study_turns"))
    _foreseen(read, len(arms))
    if not st.button("Run the study", type="primary", icon=":material/play_arrow:"):
        return None
    argv = study_command([_for_job(name) for name in names], choice, data.runs_dir().resolve())
    return manager().submit(argv, f"Study of {', '.join(choice.methods)} on {model}, {len(read.prompts)} prompts")


def _prompt_names(model: str) -> list[str]:
    """What `kvlens study` takes for the prompts that were given."""
    kind = st.segmented_control("From", [_OWN, _GENERATED], default=_OWN, key="study_prompts_from", required=True)
    if kind == _OWN:
        files = st.file_uploader(
            "Files of prompts",
            type=KINDS,
            accept_multiple_files=True,
            key="study_files",
            help='One prompt a line: {"question": ..., "context": ..., "answer": ...}; also CSV with such columns, '
            "chat messages as JSON, or a text a file.",
        )
        return [_store_upload(file) for file in files]
    usual = list(tasks.usual(model))
    task = st.selectbox("Task", usual, key="study_task")
    length = st.number_input("Tokens of a prompt", 64, 131_072, 1024, 64, key="study_length")
    count = st.number_input("Prompts", 1, 1000, 20, key="study_count")
    return [f"{task}@length={length}@prompts={count}"]


def _store_upload(file: Any) -> str:
    """The path of an uploaded file, kept for the job once per session."""
    key = f"study_file_{file.file_id}"
    if key not in st.session_state:
        text = file.getvalue().decode("utf-8", "replace")
        st.session_state[key] = str(manager().scratch(Path(file.name).name[-80:], text))
    return str(st.session_state[key])


def _for_job(name: str) -> str:
    """A copy of an uploaded file that belongs to the job, which ends with it; a task's name as it is."""
    path = Path(name)
    return str(manager().scratch(path.name[-80:], path.read_text(encoding="utf-8"))) if path.is_file() else name


@st.cache_data(max_entries=8, show_spinner="Reading the prompts")
def _read(names: tuple[str, ...], model: str, segments: tuple[str, ...], arguments: dict[str, Any]) -> ReadPrompts:
    def counted() -> Encoding:
        return encoding(model, arguments=arguments)

    if arguments:
        counted()  # refuses an argument that the model's chat template lacks
    return read_prompts(names, counted, pairs_of(segments))


def _choice(model: str) -> StudyChoice:
    titles = data.titles_on(model)
    names = [entry["name"] for entry in data.catalogue() if entry["name"] != registry.REFERENCE]
    method_names = st.multiselect(
        "Methods",
        names,
        default=[registry.LOSING],
        key="study_methods",
        format_func=lambda name: titles.get(name, name),
    )
    budgets = st.text_input(
        "Budgets", "10%, 20%, 40%", key="study_budgets", help="Shares of full KV, separated by commas."
    )
    values, method_names = _values(names, method_names)
    left_column, right_column = st.columns(2)
    questions = left_column.multiselect("Question", ["in", "after"], default=["in"], key="study_questions")
    max_new = right_column.number_input("New tokens", 1, 4096, 64, key="study_max_new")
    batch = left_column.number_input(
        "Prompts at once",
        1,
        64,
        1,
        key="study_batch",
        help="Their decode steps are computed together. Numbers differ from a run alone in their last digits, and the "
        "memory grows with the number of prompts.",
    )
    name = right_column.text_input("Name (optional)", key="study_name")
    parts = tuple(part.strip() for part in budgets.split(",") if part.strip()) or (DEFAULT_SHARE,)
    form = tuple(questions) or ("in",)
    return StudyChoice(model, tuple(method_names), parts, values, form, int(max_new), name, batch=int(batch))


def _values(names: Sequence[str], method_names: list[str]) -> tuple[dict[str, str], list[str]]:
    """The parameter that is varied, with its values, {} where none is; and the methods with the one that has it. It
    takes the place of the method that the form begins with."""
    titles = data.titles()
    entries = {entry["name"]: entry for entry in data.catalogue()}
    usual = {
        f"{name}.{parameter['name']}": parameter["default"]
        for name in sorted(names, key=lambda name: name not in method_names)
        for parameter in entries[name]["parameters"]
    }
    target = st.selectbox(
        "Vary a parameter (optional)",
        list(usual),
        index=None,
        key="study_parameter",
        format_func=lambda text: (
            f"{titles.get(text.partition('.')[0])}: {text.partition('.')[2]} (usually {usual[text]})"
        ),
    )
    if target is None:
        return {}, method_names
    owner = target.partition(".")[0]
    if owner not in method_names:
        method_names = [owner] if method_names == [registry.LOSING] else [*method_names, owner]
        st.caption(plain(f"{' and '.join(titles[name] for name in method_names)} will run."))
    text = st.text_input("Its values", str(usual[target]), key=f"study_values_{target}", help="Separated by commas.")
    return ({target: text} if text.strip() else {}), method_names


def _foreseen(read: ReadPrompts, arms: int) -> None:
    """What would be run, and which difference it could show."""
    st.caption(plain(plan_text(len(read.prompts), arms)))
    if read.faults:
        with st.expander(counted(len(read.faults), "row is left out", "rows are left out")):
            for sentence in read.faults[:50]:
                st.text(visible(page_words(sentence)))
