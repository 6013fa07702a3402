"""Sentences of the command line in the words of the pages: an option is called by its field."""

from __future__ import annotations

import re

from kvlens.models.sizes import OTHER_FORMAT, OTHER_MODEL

FIELDS = {
    "ask": "Question",
    "budget": "Budget",
    "chat": "Chat form",
    "chat-arg": "Template argument",
    "from-step": "from step",
    "max-new": "Max new tokens",
    "methods": "Methods",
    "model": "Model",
    "preset": "Preset",
    "question": "Question",
    "seed": "Seed",
    "segment": "Segment",
    "system": "System message",
}
"""option -> label of the field that sets it"""
_SET = re.compile(r"--set (?=[a-z_]+=)")
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z-]*[a-z])")


def page_words(sentence: str) -> str:
    """Return a sentence with its options named as the pages name them: 'raise --budget to 0.3' says 'raise Budget to
    0.3', and '--set keep=0.3' 'the parameter keep=0.3'. An option without a field is called by its name. The number
    format has none at all: where it is the remedy, the remedy that pages have takes its place."""
    sentence = _SET.sub("the parameter ", sentence.replace(OTHER_FORMAT, OTHER_MODEL))
    return _OPTION.sub(lambda option: FIELDS.get(option[1], option[1]), sentence)
