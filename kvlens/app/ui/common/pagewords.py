"""Sentences of the command line in the words of the pages: an option is called by its field."""

from __future__ import annotations

import re

from kvlens.models.sizes import OTHER_FORMAT, OTHER_MODEL

FIELDS = {
    "ask": "Question",
    "budget": "Budget",
    "chat": "Chat form",
    "chat-arg": "Template arguments",
    "from-step": "from step",
    "max-new": "Max new tokens",
    "methods": "Methods",
    "model": "Model",
    "preset": "Preset",
    "question": "Question",
    "seed": "Seed",
    "segment": "Segments",
    "system": "System message",
    "turns": "Turns",
}
"""option -> label of the field that sets it"""
_SET = re.compile(r"--set (?=[a-z_]+=)")
METHOD_LIST = "`kvlens methods` lists all"
"""how the core ends the refusal of an unknown method"""
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z-]*[a-z])( (?:take|need)s\b)?")


def page_words(sentence: str) -> str:
    """Return a sentence with its options named as the pages name them: 'raise --budget to 30%' says 'raise Budget to
    30%', and '--set keep=0.3' 'the parameter keep=0.3'. '--segment takes' says 'Segments take'. An option without a
    field is called by its name. The number format has none at all: where it is the remedy, the remedy that pages have
    takes its place."""
    sentence = sentence.replace(OTHER_FORMAT, OTHER_MODEL).replace(METHOD_LIST, "the field Method lists all")
    sentence = _SET.sub("the parameter ", sentence)
    return _OPTION.sub(_label, sentence)


def _label(option: re.Match[str]) -> str:
    """Return an option's field, and its verb as the field's number has it."""
    label, verb = FIELDS.get(option[1], option[1]), option[2] or ""
    return label + (verb.removesuffix("s") if label.endswith("s") else verb)
