"""The chat form: a user's text inside what a model's chat template puts around it, up to where the answer begins.

The template is Jinja, rendered in a process of its own (kvlens.text.rendering) with a mark in place of the text: what
stands before and behind the mark is the same for every text, so every character of the text keeps its place, moved by
the length of what is before it. No transformers here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvlens.files import MOST_JSON, load_json, read_bounded
from kvlens.text.rendering import BadTemplate, render

__all__ = ["BadTemplate", "ChatForm", "Template", "choose", "refuse_change", "stop_ids", "template_in", "template_of"]

CHOICES = ("auto", "on", "off")
MARK, REPLY = "\u2063kvlens text\u2063", "\u2063kvlens reply\u2063"
"""stand for the user's text and the model's answer; no template writes them by itself"""
SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token")
RESERVED = frozenset(("messages", "add_generation_prompt", "tools", "documents", *SPECIALS))
"""names that kvlens gives a template itself"""
_TAGS, _STRINGS = re.compile(r"\{[%{].*?[%}]\}", re.DOTALL), re.compile(r"'[^']*'|\"[^\"]*\"")


@dataclass(frozen=True)
class Template:
    """A model's chat template with the special tokens that it may write."""

    text: str
    specials: Mapping[str, str]
    name: str = "default"

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def render(
        self, *renders: tuple[list[dict[str, str]], bool], arguments: Mapping[str, Any] | None = None
    ) -> tuple[str, ...]:
        """Return the text of each (messages, whether an answer begins), as the model reads it. Raises BadTemplate when
        the template fails or does not end."""
        return render(self.text, self.specials, renders, arguments)

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Raise BadTemplate for an argument that the template does not know."""
        code = " ".join(_STRINGS.sub("", tag) for tag in _TAGS.findall(self.text))
        for name in arguments:
            if name in RESERVED or not re.search(rf"\b{re.escape(name)}\b", code):
                raise BadTemplate(
                    f"chat_argument_unknown: the model's chat template takes no '{name}': leave it out of --chat-arg."
                )

    def end_of_answer(self) -> str:
        """What the template writes behind an answer; empty where it cannot be told."""
        try:
            messages = [{"role": "user", "content": MARK}, {"role": "assistant", "content": REPLY}]
            (whole,) = self.render((messages, False))
        except BadTemplate:
            return ""
        return whole.partition(REPLY)[2]


@dataclass(frozen=True)
class ChatForm:
    """What stands around a user's text."""

    before: str
    after: str
    name: str = "default"
    """of the template"""
    sha256: str = ""
    """of the template's text"""
    system: str | None = None
    trims: bool = False
    """the template drops white space at the text's ends"""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """what the template was given besides messages"""

    @classmethod
    def read_stored(cls, chat: Mapping[str, Any]) -> ChatForm:
        """Return the form of a stored run: the very text around its prompt, whatever the template writes today."""
        return cls(
            str(chat["before"]),
            str(chat["after"]),
            str(chat.get("template") or "default"),
            str(chat.get("template_sha256") or ""),
            chat.get("system"),
            bool(chat.get("trims")),
            dict(chat.get("arguments") or {}),
        )

    def around(self, text: str) -> tuple[str, int, tuple[int, int]]:
        """(the text as it is fed, where its first character stands or would stand in it, the range of it that is
        fed)."""
        leading_spaces = len(text) - len(text.lstrip()) if self.trims else 0
        last = max(leading_spaces, len(text.rstrip()) if self.trims else len(text))
        return (
            f"{self.before}{text[leading_spaces:last]}{self.after}",
            len(self.before) - leading_spaces,
            (leading_spaces, last),
        )

    def meta(self) -> dict[str, Any]:
        """For the trace; with the prompt's text and the answer's prefix, the whole text as it is fed."""
        return {
            "template": self.name,
            "template_sha256": self.sha256,
            "system": self.system,
            "before": self.before,
            "after": self.after,
            "trims": self.trims,
            **({"arguments": dict(self.arguments)} if self.arguments else {}),
        }


def choose(
    template: Template | None,
    chat: str = "auto",
    system: str | None = None,
    turns: Sequence[tuple[str, str]] = (),
    arguments: Mapping[str, Any] | None = None,
) -> ChatForm | None:
    """The form of a run; None: the text as it is. auto: chat where there is a template. turns: earlier (role, text) of
    the conversation, between the system message and the text. arguments: for the template, such as enable_thinking.

    Raises BadTemplate for a choice that is not known, --chat on without a template, --system or earlier turns without
    the chat form, and a template that fails or has no place for what was asked."""
    if chat not in CHOICES:
        raise BadTemplate(f"--chat takes auto, on or off, not '{chat}'.")
    if template is None and chat == "on":
        raise BadTemplate("--chat on needs a model with a chat template, and this one has none: run with --chat off.")
    if template is None or chat == "off":
        if system is not None:
            raise BadTemplate("--system needs the chat form, which this run does not have.")
        if turns:
            raise BadTemplate("a conversation of several turns needs the chat form, which this run does not have.")
        if arguments:
            raise BadTemplate("--chat-arg needs the chat form, which this run does not have.")
        return None
    template.check_arguments(arguments or {})
    opening_messages = [] if system is None else [{"role": "system", "content": system}]
    opening_messages += [{"role": role, "content": text} for role, text in turns]
    marked = [[*opening_messages, {"role": "user", "content": content}] for content in (MARK, f" {MARK} ")]
    plain, spaced = template.render(*((messages, True) for messages in marked), arguments=arguments)
    text_before, mark, text_after = plain.partition(MARK)
    if not mark:
        raise BadTemplate("the model's chat template leaves out what the user says: run with --chat off.")
    if system is not None and system.strip() not in text_before + text_after:
        raise BadTemplate("the model's chat template has no place for a system message: leave out --system.")
    trims = spaced == f"{text_before}{MARK}{text_after}"
    if not trims and spaced != f"{text_before} {MARK} {text_after}":
        raise BadTemplate("the model's chat template changes what the user says: run with --chat off.")
    values = dict(arguments or {})
    return ChatForm(text_before, text_after, template.name, template.sha256, system, trims, values)


def refuse_change(template: Template, form: ChatForm, text: str, turns: Sequence[tuple[str, str]] = ()) -> None:
    """Raise BadTemplate if the template changes this very text, for example by its content; names the first place.
    turns: the earlier ones of the form."""
    messages = [] if form.system is None else [{"role": "system", "content": form.system}]
    messages += [{"role": role, "content": turn_text} for role, turn_text in turns]
    (rendered,) = template.render(([*messages, {"role": "user", "content": text}], True), arguments=form.arguments)
    fed = form.around(text)[0]
    if rendered == fed:
        return
    first_difference = next(
        (
            first_difference
            for first_difference, (ours, theirs) in enumerate(zip(fed, rendered, strict=False))
            if ours != theirs
        ),
        len(fed),
    )
    place = max(0, first_difference - len(form.before))
    raise BadTemplate(
        f"the model's chat template changes this text at character {place:,} ({text[place : place + 20]!r}): run with "
        "--chat off, or change the text there."
    )


def template_of(tokenizer: Any) -> Template | None:
    """The chat template of a transformers tokenizer, the one named default where it has several."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    specials = {name: str(token) for name in SPECIALS if (token := getattr(tokenizer, name, None)) is not None}
    return Template(template, specials) if isinstance(template, str) and template else None


def template_in(folder: Path) -> Template | None:
    """The chat template that lies in a model's folder."""
    try:
        config = load_json(folder / "tokenizer_config.json")
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    template = config.get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    apart = folder / "chat_template.jinja"
    if apart.is_file():
        try:
            template = read_bounded(apart, MOST_JSON).decode("utf-8")
        except (OSError, ValueError):
            return None
    texts = {
        name: token.get("content", "") if isinstance(token, dict) else token
        for name in SPECIALS
        if (token := config.get(name))
    }
    return Template(template, texts) if isinstance(template, str) and template else None


def stop_ids(tokenizer: Any) -> frozenset[int]:
    """The tokens by which an answer in the chat form ends: the first special one behind an answer, and the tokenizer's
    own end of text. Empty without a template."""
    template = template_of(tokenizer)
    if template is None:
        return frozenset()
    special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    behind = tokenizer.encode(template.end_of_answer(), add_special_tokens=False)
    first_special = next((token for token in behind if token in special), None)
    return frozenset(token for token in (first_special, tokenizer.eos_token_id) if token is not None)
