"""A question that is fed once its context was read and placed: the same tokens, counted by the budget, none of them the
answer's; what was dropped before it is said to have been."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import raises_code

from kvlens import tasks
from kvlens.app.compare.settings import settings as settings_of
from kvlens.budget import Budget
from kvlens.demo import demo_path
from kvlens.engine.engine import Engine, Options
from kvlens.engine.models import load
from kvlens.lab.training.demo.tokenizer import load_tokenizer
from kvlens.lens.reasonkinds import KINDS
from kvlens.lens.reasons import explain
from kvlens.methods.full import FullKV
from kvlens.player import payload
from kvlens.player.codec import unpack
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader
from kvlens.tasks.encoding import encoding_of
from kvlens.text.promptfiles import decode
from kvlens.text.prompts import BadPrompt, PromptText, asking, tokenize

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NAMES = [name for name, task in tasks.registry().items() if not task.demo_language and task.placed]


def carry(request: RunRequest, source: PromptText, runs: Path) -> tuple[str, str, str]:
    return carry_out(request, source, runs, lambda *_: None, lambda: False)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(demo_path())


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    length=st.integers(1800, 2600),
    depth=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    seed=st.integers(0, 2**31),
    chat=st.sampled_from(["on", "off"]),
)
def test_needle_and_answer_stand_where_the_offsets_say_in_any_form_and_order(
    name: str, length: int, depth: float, seed: int, chat: str
) -> None:
    tokenizer = load_tokenizer(demo_path())
    tokenizer.chat_template = TEMPLATE
    asked = tasks.ask(tasks.get(name), length, depth, seed, encoding_of(tokenizer, chat))
    source = tasks.prompt_of(asked)
    read, after = (tokenize(source, tokenizer, 1 << 20, 8, chat, question=order) for order in ("in", "after"))
    assert read.ids == after.ids + after.asked
    assert len(read.ids) <= length
    said = [source.text[a:b] for found in after.offsets if found for a, b in [found]]
    assert "".join(said) == source.text[: after.offsets[-1][1]]  # type: ignore[index]
    assert source.question is not None
    assert source.text[source.question :].strip().startswith(("Question: ", "Count down from ", "List the months "))
    assert after.offsets[-1] is not None
    assert after.offsets[-1][1] <= source.question, "no character of the question is read with the context"
    for (start, end), answer in zip(asked.needle, asked.answers, strict=False):
        pieces = [p for p, o in zip(after.pieces, after.offsets, strict=True) if o and o[0] < end and o[1] > start]
        assert source.text[start:end] in "".join(pieces)
        assert name == "variable_tracking" or answer in source.text[start:end]


def test_the_question_after_the_context_is_the_same_run_under_full_kv() -> None:
    """Full KV keeps everything, so the order changes nothing; steps that feed the question are steps."""
    loaded = load("demo")
    asked = tasks.ask(tasks.get("needle"), 300, 0.5, 3, encoding_of(loaded.tokenizer))
    engine, source = Engine(loaded), tasks.prompt_of(asked)
    read, after = (tokenize(source, loaded.tokenizer, 8192, 8, question=order) for order in ("in", "after"))
    one, two = (engine.run(prompt, FullKV, FullKV.Parameters(), None, Options(max_new=8)) for prompt in (read, after))
    assert two.ids == [*after.asked, *one.ids]
    assert (two.text, two.stopped) == (one.text, one.stopped)
    planned = Options(max_new=8)
    contexts = engine.context(read, Budget.parse("20%"), planned), engine.context(after, Budget.parse("20%"), planned)
    assert contexts[0].budget_bytes == contexts[1].budget_bytes, "the same tokens in all"
    assert contexts[1].max_new == len(after.asked) + 8


def test_several_questions_find_the_same_placement() -> None:
    """The context is read once; every question is fed to the same placement of it."""
    from kvlens import methods

    loaded = load("demo")
    engine = Engine(loaded)
    context = tasks.ask(tasks.get("needle"), 400, 0.5, 3, encoding_of(loaded.tokenizer))
    text = context.text[: context.question]
    prompts = [
        tokenize(asking(PromptText(text), words), loaded.tokenizer, 8192, 8, question="after")
        for words in ("What is the code of the gate?", "Who is at the gate and what is the code there?")
    ]
    assert prompts[0].ids == prompts[1].ids
    read = engine.read(prompts[0], received=True)
    most = max(len(prompt.asked) for prompt in prompts) + 4
    placed = []
    for prompt in prompts:
        method = methods.get("snapkv")
        params = methods.make_parameters(method, None, {})
        options = Options(max_new=4, planned=most - len(prompt.asked), forced=(*prompt.asked, 5, 6, 7, 8))
        assert engine.context(prompt, None, options).max_new == most
        sink = Kept()
        engine.run(prompt, method, params, Budget.parse("50%"), options, sink, read=read)
        placed.append(sink.rows)
    assert placed[0] == placed[1]
    assert placed[0]


class Kept:
    """A sink that keeps where prefill left the spans."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def prefill(self, record: Any) -> None:
        self.rows = [(row.span, row.tok_start, row.tok_end, row.state) for row in record.spans]

    def step(self, record: Any) -> None:
        """Only the placement is compared."""


def test_a_stored_run_says_which_it_was_and_what_went_before_the_question(tmp_path: Path) -> None:
    asked = tasks.ask(tasks.get("needle"), 400, 0.3, 3, encoding_of(load("demo").tokenizer))
    source = tasks.prompt_of(asked)
    request = RunRequest(
        model="demo",
        method="streaming_llm",
        budget="40%",
        max_new=8,
        question="after",
        against=True,
        threads=1,
        overrides={},
    )
    uid, _, text = carry(request, source, tmp_path)
    with TraceReader.open(tmp_path, uid) as reader:
        meta, tokens, loss = reader.meta, reader.tokens(), reader.loss()
        assert (meta.question, meta.question_start) == ("after", source.question)
        assert (meta.asked_new, meta.max_new) == (8, 8 + meta.asked_steps)
        assert settings_of(reader)["max_new"] == 8, "as it was asked for, whenever the question is fed"
        with TraceReader.open(tmp_path, str(meta.reference)) as full:
            assert meta.reference_output == full.meta.output_text, "without the question that was fed"
        fed = tokens[tokens["step"].notna()].sort_values("step")["text"]
        question = "".join(fed.iloc[: meta.asked_steps])
        assert source.text.endswith(question), "the question's tokens, as they were fed"
        assert "Question" in question
        assert loss["step"].min() == meta.asked_steps, "no step of the question is a loss"
        header, arrays = unpack(payload.run_payload(reader, "id", [], []))
        first, answer = header["prompt"], header["prompt"] + header["asked"]
        assert "".join(header["texts"][first:answer]) == question, "what the strip marks as the question's"
        assert arrays["pos_of_step"][: header["asked"]].tolist() == list(range(first, answer))
        needle = tokens[(tokens["char_end"] > meta.needle[0][0]) & (tokens["char_start"] < meta.needle[0][1])]["pos"]
        spans = reader.spans()
        lost = spans[(spans["tok_start"] <= needle.min()) & (spans["tok_end"] > needle.min())].iloc[-1]
        reason = explain(reader, meta.asked_steps, 0, 0, int(lost["span"]))
    assert "unasked" in reason.kind
    assert KINDS["evicted_unasked"].partition(" ")[2] in reason.says
    stored = json.loads((tmp_path / uid / "run.json").read_text())
    assert stored["output_text"] == text
    request = request.model_copy(update={"question": "in"})
    with TraceReader.open(tmp_path, carry(request, source, tmp_path)[0]) as reader:
        assert (reader.meta.question, reader.meta.asked_steps) == ("in", 0)
        lost = reader.spans().query("tok_start <= @needle.min() < tok_end").iloc[-1]
        reason = explain(reader, 7, 0, 0, int(lost["span"]))
    assert "evicted" in reason.kind
    assert "question" not in reason.kind + reason.says


def test_a_prompt_that_does_not_say_where_its_question_begins_is_refused_in_one_sentence(tokenizer: Any) -> None:
    with raises_code("question_unmarked", BadPrompt):
        tokenize(PromptText("The gate is open. Is it?"), tokenizer, 512, 4, question="after")
    with pytest.raises(BadPrompt, match="fewer than 2 tokens"):
        tokenize(PromptText("The gate is open", question=0), tokenizer, 512, 4, question="after")
    with raises_code("question_empty", BadPrompt):
        asking(PromptText("A text."), "  ")
    with pytest.raises(BadPrompt, match="outside the text"):
        decode(b'{"text": "A text.", "question": 90}', "p.json")
    with pytest.raises(ValueError, match="before"):
        RunRequest(model="demo", question="before")
    made = asking(PromptText("A text.\n"), "What is it?")
    assert made.text[made.question :] == "\n\nWhat is it?"
    again = decode(json.dumps({"text": made.text, "question": made.question}).encode(), "p.json")
    assert again == replace(made, answer=None)
