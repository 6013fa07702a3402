"""The chat form: what transformers would feed, every character of the text at its place, and one sentence for what
cannot be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from kvlens.runs.request import parse_chat_args
from kvlens.text.chat import BadTemplate, ChatForm, Template, choose, refuse_change, stop_ids, template_in, template_of
from kvlens.text.prompts import PromptText, tokenize

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMING = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n\n{{ message['content'] | trim }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
)
SHOUTING = "{% for message in messages %}{{ message['content'] | upper }}{% endfor %}"
DEAF = "{{ bos_token }}hello"
IGNORING = "{% for message in messages %}{% if message.role == 'user' %}<{{ message.content }}>{% endif %}{% endfor %}"
TEXTS = (
    "What is 12?",
    " leading and trailing \n",
    "\n\nnew lines\n",
    "<|im_end|> in words",
    "ümläute 漢字 🙂",
    "{{ 7 * 7 }}",
)


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """A token per byte, and the control tokens of the templates."""
    made = Tokenizer(BPE({letter: at for at, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])
    said = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="<|im_end|>")
    said.chat_template = template
    return said


def fed(source: PromptText, template: str, **more: Any) -> Any:
    return tokenize(source, tokenizer(template), 4096, 8, **more)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("template", [CHATML, TRIMMING, STRICT])
def test_the_tokens_are_those_of_transformers(template: str, text: str) -> None:
    reader = tokenizer(template)
    messages = [{"role": "user", "content": text}]
    wanted = reader.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(fed(PromptText(text), template).ids) == wanted
    if template != STRICT:
        said = [{"role": "system", "content": "Be brief."}, *messages]
        wanted = reader.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        assert list(fed(PromptText(text), template, system="Be brief.").ids) == wanted


@pytest.mark.parametrize("text", ["The code is 4821, said Ann.", "  The code is 4821, said Ann.\n"])
@pytest.mark.parametrize("template", [CHATML, TRIMMING])
def test_every_character_keeps_its_place(template: str, text: str) -> None:
    start = text.index("4821")
    prompt = fed(PromptText(text, "4821", ((start, start + 4),), answer_prefix="It is"), template)
    places = [at for at, offset in enumerate(prompt.offsets) if offset and start <= offset[0] < start + 4]
    assert [prompt.pieces[at] for at in places] == ["4", "8", "2", "1"]
    inside = [offset for offset in prompt.offsets if offset]
    assert "".join(text[a:b] for a, b in inside) == (text.strip() if template == TRIMMING else text)
    assert all(text[o[0] : o[1]] == piece for o, piece in zip(prompt.offsets, prompt.pieces, strict=True) if o)
    assert prompt.offsets[-1] is None, "the answer's prefix is not of the text"
    meta = prompt.form.meta()
    inner = text.strip() if meta["trims"] else text
    assert "".join(prompt.pieces) == meta["before"] + inner + meta["after"] + "It is"


def test_without_a_template_the_text_is_fed_as_it_is() -> None:
    for reader, chat in ((tokenizer(None), "auto"), (tokenizer(CHATML), "off")):
        prompt = tokenize(PromptText("ab", answer_prefix=" c"), reader, 99, 1, chat)
        assert prompt.form is None
        assert "".join(prompt.pieces) == "ab c"
        assert prompt.offsets == ((0, 1), (1, 2), None, None)


@pytest.mark.parametrize(
    ("template", "chat", "system", "expected"),
    [
        (None, "on", None, "needs a model with a chat template"),
        (None, "auto", "Be brief.", "--system needs the chat form"),
        (CHATML, "off", "Be brief.", "--system needs the chat form"),
        (CHATML, "maybe", None, "takes auto, on or off"),
        (STRICT, "auto", "Be brief.", "System role not supported"),
        (IGNORING, "auto", "Be brief.", "no place for a system message"),
        (SHOUTING, "auto", None, "leaves out what the user says"),
        (DEAF, "auto", None, "leaves out what the user says"),
        ("{% for", "auto", None, "chat template fails"),
        ("{{ messages[7].content }}", "auto", None, "chat template fails"),
        ("{{ raise_exception('no\nmore') }}", "auto", None, "chat template fails (no)"),
        ("{{ ''.__class__.__mro__ }}", "auto", None, "chat template fails"),
        ("{{ 1 / 0 }}", "auto", None, "chat template fails (division by zero)"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(template: str | None, chat: str, system: str | None, expected: str) -> None:
    with pytest.raises(BadTemplate) as said:
        choose(template_of(tokenizer(template)), chat, system)
    assert expected in str(said.value)
    assert "\n" not in str(said.value)


def test_an_answer_stops_where_the_template_ends_it() -> None:
    reader = tokenizer(CHATML)
    reader.eos_token = "<s>"
    assert stop_ids(reader) == {reader.convert_tokens_to_ids("<|im_end|>"), reader.convert_tokens_to_ids("<s>")}
    assert stop_ids(tokenizer(None)) == frozenset()
    assert stop_ids(tokenizer("{{ raise_exception('x') }}")) == {reader.convert_tokens_to_ids("<|im_end|>")}


def test_the_template_in_a_folder_is_the_tokenizers(tmp_path: Path) -> None:
    reader = tokenizer(TRIMMING)
    reader.save_pretrained(tmp_path)
    found, wanted = template_in(tmp_path), template_of(PreTrainedTokenizerFast.from_pretrained(tmp_path))
    assert isinstance(found, Template)
    assert wanted is not None
    messages = [{"role": "user", "content": "x"}]
    assert found.render((messages, True)) == wanted.render((messages, True))
    assert found.sha256 == wanted.sha256
    assert template_in(tmp_path / "absent") is None


TRAINING = (
    "{% for message in messages %}{% if message.role == 'user' %}<|im_start|>{{ message.content }}<|im_end|>"
    "{% else %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def test_the_generation_block_is_its_content() -> None:
    assert list(fed(PromptText("What is 12?"), TRAINING).ids) == tokenizer(TRAINING).apply_chat_template(
        [{"role": "user", "content": "What is 12?"}], add_generation_prompt=True, return_dict=False
    )
    assert stop_ids(tokenizer(TRAINING)) == {tokenizer(None).convert_tokens_to_ids("<|im_end|>")}


def test_a_stored_form_is_fed_whatever_the_template_writes_today() -> None:
    first = fed(PromptText("What is 12?"), "Today is Monday. " + CHATML)
    again = tokenize(
        PromptText("What is 12?"),
        tokenizer("Today is Tuesday. " + CHATML),
        4096,
        8,
        form=ChatForm.read_stored(first.form.meta()),
    )
    assert again.ids == first.ids
    assert again.form == first.form


def test_a_template_that_changes_this_text_is_refused_with_the_place() -> None:
    cutting = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
    assert fed(PromptText("What is 12?"), cutting).form is not None
    with pytest.raises(BadTemplate) as changed:
        fed(PromptText("Say </think> and 12"), cutting)
    assert "at character 0" in str(changed.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
        "{{ ('x' * 99999) * 99999 }}",
    ],
)
def test_a_template_without_end_or_measure_is_one_sentence(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlens.text.rendering.SECONDS", 4)
    with pytest.raises(BadTemplate) as failed:
        choose(template_of(tokenizer(template)))
    assert failed.value.code == "template_failed"


THINKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def test_arguments_reach_the_template_and_the_trace() -> None:
    template = Template(THINKS, {})
    usual, brief = choose(template), choose(template, arguments={"enable_thinking": False})
    assert usual is not None
    assert brief is not None
    assert usual.after == "</><assistant>"
    assert brief.after == "</><assistant><think>\n\n</think>\n\n"
    assert "arguments" not in usual.meta()
    assert ChatForm.read_stored(brief.meta()) == brief
    refuse_change(template, brief, "a text")


@pytest.mark.parametrize("name", ["enable_reasoning", "messages", "think"])
def test_an_argument_that_the_template_does_not_take_is_refused(name: str) -> None:
    with pytest.raises(BadTemplate, match="chat_argument_unknown"):
        choose(Template(THINKS, {}), arguments={name: True})


def test_special_tokens_are_no_arguments_and_other_names_are() -> None:
    named = "{{ bos_token }}" + THINKS + "{{ auto }}"
    with pytest.raises(BadTemplate, match="chat_argument_unknown"):
        choose(Template(named, {"bos_token": "<s>"}), arguments={"bos_token": "X"})
    form = choose(Template(named, {"bos_token": "<s>"}), arguments={"auto": "Y"})
    assert form is not None
    assert form.before.startswith("<s>")
    assert form.after.endswith("Y")


def test_arguments_need_the_chat_form() -> None:
    with pytest.raises(BadTemplate):
        choose(Template(THINKS, {}), "off", arguments={"enable_thinking": False})


def test_values_of_arguments_are_json_or_text() -> None:
    assert parse_chat_args(["enable_thinking=false", "effort=low", "depth=3"]) == {
        "enable_thinking": False,
        "effort": "low",
        "depth": 3,
    }
