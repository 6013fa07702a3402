"""Sentences of the core, which name options of the command line, in the words of a Python call."""

from __future__ import annotations

import re

_EXPORT = re.compile(r"kvlens export \S+ --what (\w+)")
_SETTING = re.compile(r"--set (\w+)=(\S+?)(?=[,;:.]?(?:\s|$))")
_VALUED = re.compile(
    r"--(chat|question|turns|preset|device|dtype|budget) (on|off|in|after|anew|fit|cpu|cuda|bfloat16|\d[\w.%]*)"
)
_SHARE = re.compile(r"--budget to (\d[\d.]*(?:%|\d))")
_NO_OPTION = re.compile(r"--no-([a-z]+)")
_OPTION = re.compile(r"--([a-z][a-z-]*)")


def in_python(sentence: str) -> str:
    """Return the sentence, ended by a full stop, with options as keywords; commands in backticks stay as they are.

    >>> in_python("shorten the prompt or lower --max-new.")
    'shorten the prompt or lower max_new.'
    >>> in_python("run with --chat off, or raise --budget to 23.5%.")
    'run with chat="off", or raise budget to "23.5%".'
    """
    parts = _EXPORT.sub(r"run.\1()", sentence).rstrip(".").split("`")
    return "`".join(part if number % 2 else _keywords(part) for number, part in enumerate(parts)) + "."


def _keywords(text: str) -> str:
    text = _SETTING.sub(r"\1=\2", text)
    text = _SHARE.sub(r'budget to "\1"', text)
    text = _VALUED.sub(r'\1="\2"', text)
    text = _NO_OPTION.sub(r"\1=False", text)
    return _OPTION.sub(lambda option: option[1].replace("-", "_"), text)
