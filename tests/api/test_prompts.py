"""What `kvlens.run` takes as a prompt: text, files, prompts and chat messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvlens
from kvlens.api.prompts import prompt_of
from kvlens.text.chat import BadTemplate, Template, choose
from kvlens.text.messages import conversation
from kvlens.text.prompts import BadPrompt, PromptText, tokenize

TEMPLATE = Template(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    {},
)
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "Ada."},
    {"role": "user", "content": "Born when?"},
]


def test_messages_are_taken_apart() -> None:
    found = conversation(TALK)
    assert (found.prompt.text, found.system) == ("Born when?", "Be short.")
    assert found.turns == (("user", "Who?"), ("assistant", "Ada."))
    begun = conversation([*TALK, {"role": "assistant", "content": "In"}])
    assert (begun.prompt, begun.turns) == (PromptText("Born when?", answer_prefix="In"), found.turns)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "system", "content": "x"}],
        [{"role": "assistant", "content": "x"}],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        ["user"],
    ],
)
def test_messages_that_are_none(messages: Any) -> None:
    with pytest.raises(BadPrompt):
        conversation(messages)


def test_earlier_turns_stand_before_the_text() -> None:
    found = conversation(TALK)
    form = choose(TEMPLATE, "auto", found.system, found.turns)
    assert form is not None
    fed, first, kept = form.around(found.prompt.text)
    assert fed == TEMPLATE.render((TALK, True))[0]
    assert fed[first : first + kept[1]] == "Born when?"
    with pytest.raises(BadTemplate):
        choose(None, "auto", None, found.turns)
    with pytest.raises(BadTemplate):
        choose(TEMPLATE, "off", None, found.turns)


def test_a_conversation_is_fed_as_the_tokenizer_renders_it(smollm2: Any) -> None:
    found = conversation(TALK)
    prompt = tokenize(found.prompt, smollm2.tokenizer, None, 4, "auto", found.system, "in", None, found.turns)
    rendered = smollm2.tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert list(prompt.ids) == smollm2.tokenizer(rendered, add_special_tokens=False).input_ids


def test_text_file_and_prompt_are_one_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("It is red.", encoding="utf-8")
    found = [prompt_of(text, "What?", "red", "It is") for text in ("It is red.", file, PromptText("It is red."))]
    assert found[0] == found[1] == found[2]
    assert (found[0].prompt.question, found[0].prompt.answer, found[0].prompt.needle) == (10, "red", ((0, 5),))


def test_a_system_message_is_said_once() -> None:
    with pytest.raises(kvlens.RequestError) as error:
        kvlens.run(TALK, model="demo", system="Be long.")
    assert error.value.code == "system_twice"


def test_the_toy_has_no_chat_form_for_messages() -> None:
    with pytest.raises(kvlens.RequestError) as error:
        kvlens.run(TALK, model="demo", progress=False)
    assert error.value.code == "template_failed"


def test_a_single_message_needs_no_chat_form(runs: Path) -> None:
    sample = kvlens.sample("demo")
    messages = [{"role": "user", "content": sample.text}]
    keywords: dict[str, Any] = {"model": "demo", "max_new": 3, "progress": False, "against_full": False}
    run = kvlens.run(messages, "streaming_llm", "40%", **keywords)
    assert run.verdict.outcome == "not_compared"
    assert "turns" not in (run.meta.request or {})
    assert run.output == kvlens.run(sample.text, "streaming_llm", "40%", **keywords).output


def test_the_path_of_a_file_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompt.txt").write_text("a prompt", encoding="utf-8")
    for path in ("prompt.txt", str(tmp_path / "prompt.txt")):
        with pytest.raises(kvlens.RequestError) as refusal:
            prompt_of(path, None, None, None)
        assert (refusal.value.code, refusal.value.values) == ("bad_prompt", {"detail": "path_as_text", "path": path})
    assert prompt_of(Path("prompt.txt"), None, None, None).prompt.text == "a prompt"
    for text in ("prompt", "prompt.txt\n", str(tmp_path), "a" * 5000):
        assert prompt_of(text, None, None, None).prompt.text == text
