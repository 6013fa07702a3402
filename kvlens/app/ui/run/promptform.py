"""The prompt: a generated task, an upload or pasted text."""

from __future__ import annotations

from dataclasses import replace

import streamlit as st

from kvlens import tasks
from kvlens.app.ui.common import sentences
from kvlens.app.ui.common.promptfields import segment_lines, turns_are_carried
from kvlens.app.ui.common.request import PromptChoice
from kvlens.app.ui.common.sample import SAMPLE, generate
from kvlens.app.ui.common.tokens import counting
from kvlens.app.ui.common.widgets import error, plain
from kvlens.app.ui.run.modelform import ModelChoice
from kvlens.app.ui.run.upload import uploaded_file
from kvlens.models.find import DEMO
from kvlens.tasks import Encoding
from kvlens.text.carried import has_user_turns
from kvlens.text.messages import decode_conversation
from kvlens.text.plaintext import visible
from kvlens.text.promptfiles import MAX_BYTES
from kvlens.text.prompts import BadPrompt, PromptText, asking, checked, expecting, segmented
from kvlens.text.segments import BadSegment
from kvlens.text.units import counted

_TASK_WORDS = {
    "needle": "needle: one fact hidden in filler, asked for at the end",
    "multikey": "multikey: the asked fact among others of its kind",
    "chain": "chain: facts that must be followed one after the other",
    "note": "note: a longer note to recite",
    "list": "list: several facts to gather",
}
REAL_TASK = "niah_single"
"""the task that the form opens with for a real model"""


def prompt_for(choice: ModelChoice) -> PromptChoice | None:
    """Draws the form for a model; None while there is no usable prompt (the reason is on the page)."""
    try:
        if choice.problem:
            raise ValueError(choice.problem)
        encoding, stand_in = counting(choice.model, choice.chat, choice.system, choice.chat_args)
    except ValueError as problem:
        error(str(problem))
        return None
    prompt = _in_turns(_in_segments(prompt_form(encoding, choice.model == DEMO)))
    if prompt is not None and choice.system is not None and prompt.system is not None:
        error(sentences.TWO_SYSTEM_MESSAGES)
        return None
    placed_first = choice.question == "after" and prompt is not None and not prompt.carried
    if prompt is not None and placed_first and prompt.prompt.question is None:
        error(sentences.NO_QUESTION_START)
        return None
    if prompt is not None and not encoding.chat and prompt.prompt.text != prompt.prompt.text.rstrip():
        st.caption("The text ends with white space, which is part of the prompt: the model continues after it.")
    if stand_in is not None:
        st.caption(plain(f"{stand_in} Until then, lengths count tokens of the demo model."))
    return prompt


def _in_segments(choice: PromptChoice | None) -> PromptChoice | None:
    """Draw the field for segments -> the prompt with them; None where a segment is refused."""
    if choice is None:
        return None
    lines = segment_lines("form_segments")
    try:
        return replace(choice, prompt=segmented(choice.prompt, lines))
    except BadSegment as problem:
        error(str(problem))
        return None


def _in_turns(choice: PromptChoice | None) -> PromptChoice | None:
    """Draw the choice of turns below a conversation with several user messages -> the prompt with it."""
    if choice is None or not has_user_turns(choice.turns):
        return choice
    return replace(choice, carried=turns_are_carried("form_turns"))


def prompt_form(encoding: Encoding, toy: bool) -> PromptChoice | None:
    """Draws the form; None while there is no usable prompt (the reason is on the page)."""
    kinds = ("Generated task", "Upload", "Paste")
    kind = st.segmented_control(
        "Prompt", kinds, default=kinds[0], key="form_source", required=True, persist_state="session"
    )
    if kind == "Upload":
        return _upload()
    if kind == "Paste":
        return _paste()
    return _generated(encoding, toy)


def _generated(encoding: Encoding, toy: bool) -> PromptChoice | None:
    entries = {entry["name"]: entry for entry in tasks.catalogue() if entry["demo_language"] == toy}
    names = list(entries)
    task = st.selectbox(
        "Task",
        names,
        index=names.index(SAMPLE[0] if toy else REAL_TASK),
        format_func=lambda name: _TASK_WORDS.get(name, f"{name}: {entries[name]['summary']}"),
        key="form_task" if toy else "form_task_real",
        persist_state="session",
    )
    left_column, middle, right = st.columns(3)
    length = left_column.number_input(
        "Length (tokens)", 32, 65_536, SAMPLE[1], step=128, key="form_length", persist_state="session"
    )
    depth = middle.slider(
        "Depth (0 % = start)",
        0,
        100,
        round(SAMPLE[2] * 100),
        5,
        key="form_depth",
        persist_state="session",
        format="%d %%",
    )
    seed = right.number_input("Prompt seed", 0, 2**31 - 1, SAMPLE[3], key="form_prompt_seed", persist_state="session")
    try:
        choice = generate(encoding, task, int(length), depth / 100, int(seed))
    except ValueError as problem:
        error(f"{problem}.".replace("..", "."))
        return None
    _show(choice)
    return choice


def _upload() -> PromptChoice | None:
    file = uploaded_file()
    if file is None:
        return None
    name, content = file
    try:
        talk = decode_conversation(content, name)
        prompt = talk.prompt if talk.prompt.answer else _expected(talk.prompt)
        choice = PromptChoice(prompt, name, talk.turns, talk.system)
    except BadPrompt as problem:
        error(str(problem))
        return None
    _show(choice)
    return choice


def _paste() -> PromptChoice | None:
    text = st.text_area("Prompt text", height=220, max_chars=MAX_BYTES, key="form_text", persist_state="session")
    if not text:
        st.caption("Paste a text; the model continues it.")
        return None
    try:
        return PromptChoice(_expected(checked(PromptText(text), "the pasted text")), "pasted text")
    except BadPrompt as problem:
        error(str(problem))
        return None


def _expected(prompt: PromptText) -> PromptText:
    """Asks for a question about the text, what a right output says and where the text holds it; none has to be given.
    Raises BadPrompt."""
    expected_text = st.text_input(
        "Question about the text (optional)",
        key="form_asked",
        persist_state="session",
        help="Added after the text. A run can read it with the text, or after the method has placed the text.",
    )
    if expected_text.strip():
        prompt = asking(prompt, expected_text)
    left_column, right = st.columns([2, 3])
    answer = left_column.text_input(
        "Expected answer (optional)",
        key="form_answer",
        persist_state="session",
        help="A run counts as right if its output contains this text.",
    )
    passage = right.text_input(
        "Passage that holds it (optional)",
        key="form_passage",
        persist_state="session",
        help="Words exactly as the prompt has them. All pages mark their tokens, and the verdict names their spans.",
    )
    if (words := answer.strip()) and not passage.strip() and words.casefold() not in prompt.text.casefold():
        st.caption(sentences.ANSWER_NOT_IN_TEXT)
    return expecting(prompt, answer, passage)


def _show(choice: PromptChoice) -> None:
    """The prompt, literally, with the facts that matter for judging the run."""
    prompt = choice.prompt
    if prompt.needle:
        where = ", ".join(f"characters {start:,}–{end:,}" for start, end in prompt.needle)
        needle_text = " | ".join(prompt.text[start:end] for start, end in prompt.needle)
        st.text(visible(f"Passage that holds the answer: {needle_text}  ({where})"))
    if prompt.answer:
        st.text(visible(f"Expected answer: {prompt.answer.strip()}"))
    if prompt.answer_prefix:
        st.text(visible(f"The answer begins with: {prompt.answer_prefix.strip()}"))
    if choice.turns:
        _show_turns(choice)
    with st.expander(f"Prompt text ({len(prompt.text):,} characters)"):
        st.code(visible(prompt.text), language=None, wrap_lines=True, height=240)


def _show_turns(choice: PromptChoice) -> None:
    """Draw the messages before the last one of a conversation, literally."""
    system = [("system", choice.system)] if choice.system else []
    messages = [*system, *choice.turns]
    with st.expander(counted(len(messages), "earlier message")):
        text = "\n\n".join(f"{role}: {words}" for role, words in messages)
        st.code(visible(text), language=None, wrap_lines=True, height=160)
