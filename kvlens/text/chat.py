"""The chat form: a user's text inside what a model's chat template puts around it, up to where the answer begins.

The template is Jinja, run in a sandbox with what Hugging Face's templates may use. It is rendered once with a mark in
place of the text: what stands before and behind the mark is the same for every text, so every character of the text
keeps its place, moved by the length of what is before it. No transformers here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

CHOICES = ("auto", "on", "off")
MARK, REPLY = "\u2063kvlens text\u2063", "\u2063kvlens reply\u2063"
"""stand for the user's text and the model's answer; no template writes them by itself"""
SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token")


class BadTemplate(ValueError):
    """What is wrong with a chat template, or with what was asked of it, in one sentence."""


@dataclass(frozen=True)
class Template:
    """A model's chat template with the special tokens that it may write."""

    text: str
    specials: Mapping[str, str]
    name: str = "default"

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def render(self, messages: list[dict[str, str]], begin_answer: bool) -> str:
        """The messages as the model reads them. Raises BadTemplate when the template raises."""
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(said: str) -> None:
            raise jinja2.TemplateError(said)

        extensions = ["jinja2.ext.loopcontrols"]
        world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        world.filters["tojson"] = lambda value, **more: json.dumps(value, ensure_ascii=False, **more)
        world.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
        try:
            return world.from_string(self.text).render(
                messages=messages, add_generation_prompt=begin_answer, tools=None, documents=None, **self.specials
            )
        except Exception as error:  # a template is a stranger's program
            said = str(error).strip().partition("\n")[0][:160] or type(error).__name__
            raise BadTemplate(f"the model's chat template fails ({said}): run with --chat off.") from None

    def end_of_answer(self) -> str:
        """What the template writes behind an answer; empty where it cannot be told."""
        try:
            whole = self.render([{"role": "user", "content": MARK}, {"role": "assistant", "content": REPLY}], False)
        except BadTemplate:
            return ""
        return whole.partition(REPLY)[2]


@dataclass(frozen=True)
class ChatForm:
    """What stands around a user's text."""

    before: str
    after: str
    template: Template
    system: str | None = None
    trims: bool = False
    """the template drops white space at the text's ends"""

    def around(self, text: str) -> tuple[str, int, tuple[int, int]]:
        """(the text as it is fed, where its first character stands or would stand in it, the range of it that is
        fed)."""
        first = len(text) - len(text.lstrip()) if self.trims else 0
        last = max(first, len(text.rstrip()) if self.trims else len(text))
        return f"{self.before}{text[first:last]}{self.after}", len(self.before) - first, (first, last)

    def meta(self) -> dict[str, Any]:
        """For the trace; with the prompt's text and the answer's prefix, the whole text as it is fed."""
        return {
            "template": self.template.name,
            "template_sha256": self.template.sha256,
            "system": self.system,
            "before": self.before,
            "after": self.after,
            "trims": self.trims,
        }


def choose(template: Template | None, chat: str = "auto", system: str | None = None) -> ChatForm | None:
    """The form of a run; None: the text as it is. auto: chat where there is a template.

    Raises BadTemplate for a choice that is not known, --chat on without a template, --system without the chat form, and
    a template that fails or has no place for what was asked."""
    if chat not in CHOICES:
        raise BadTemplate(f"--chat takes auto, on or off, not '{chat}'.")
    if template is None and chat == "on":
        raise BadTemplate("--chat on needs a model with a chat template, and this one has none: run with --chat off.")
    if template is None or chat == "off":
        if system is not None:
            raise BadTemplate("--system needs the chat form, which this run does not have.")
        return None
    first = [] if system is None else [{"role": "system", "content": system}]
    before, found, after = template.render([*first, {"role": "user", "content": MARK}], True).partition(MARK)
    if not found:
        raise BadTemplate("the model's chat template leaves out what the user says: run with --chat off.")
    if system is not None and system.strip() not in before + after:
        raise BadTemplate("the model's chat template has no place for a system message: leave out --system.")
    spaced = template.render([*first, {"role": "user", "content": f" {MARK} "}], True)
    trims = spaced == f"{before}{MARK}{after}"
    if not trims and spaced != f"{before} {MARK} {after}":
        raise BadTemplate("the model's chat template changes what the user says: run with --chat off.")
    return ChatForm(before, after, template, system, trims)


def template_of(tokenizer: Any) -> Template | None:
    """The chat template of a transformers tokenizer, the one named default where it has several."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, dict):
        found = found.get("default")
    specials = {name: str(token) for name in SPECIALS if (token := getattr(tokenizer, name, None)) is not None}
    return Template(found, specials) if isinstance(found, str) and found else None


def template_in(folder: Path) -> Template | None:
    """The chat template that lies in a model's folder."""
    try:
        said = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = said.get("chat_template")
    if isinstance(found, list):
        found = next((entry.get("template") for entry in found if entry.get("name") == "default"), None)
    apart = folder / "chat_template.jinja"
    if apart.is_file():
        found = apart.read_text(encoding="utf-8")
    texts = {
        name: token["content"] if isinstance(token, dict) else token for name in SPECIALS if (token := said.get(name))
    }
    return Template(found, texts) if isinstance(found, str) and found else None


def stop_ids(tokenizer: Any) -> frozenset[int]:
    """The tokens by which an answer in the chat form ends: the first special one behind an answer, and the tokenizer's
    own end of text. Empty without a template."""
    template = template_of(tokenizer)
    if template is None:
        return frozenset()
    special = {at for at, token in tokenizer.added_tokens_decoder.items() if token.special}
    behind = tokenizer.encode(template.end_of_answer(), add_special_tokens=False)
    first = next((token for token in behind if token in special), None)
    return frozenset(token for token in (first, tokenizer.eos_token_id) if token is not None)
