"""What is wrong with a class that is offered as a method, before it is run: its name, its texts, what it lacks."""

from __future__ import annotations

import dataclasses
import re

from kvlens.methods.base import Method, Sizing
from kvlens.text.plaintext import visible

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)
"""names of methods: they become parts of file names, addresses and command lines"""
LONGEST = {"title": 80, "summary": 600, "paper": 600}
"""characters of the texts that lists and pages print"""


def name_fault(method: type[Method]) -> str | None:
    """Return what is wrong with a method's name or texts, in words that follow its name; None: nothing."""
    if not (isinstance(method.name, str) and NAME.fullmatch(method.name)):
        return "has a name other than up to 64 letters, digits, '_', '.' and '-': rename it"
    for field, most in LONGEST.items():
        text = getattr(method, field, None)
        if not (isinstance(text, str) and len(text) <= most and visible(text) == text and text.isprintable()):
            return f"has a {field} that is not one line of at most {most} printable characters: shorten or clean it"
    return None


def find_lack(method: type[Method]) -> str | None:
    """Return what a method's class lacks to be listed and sized, in words that follow its name; None: nothing."""
    parameters = getattr(method, "Parameters", None)
    if not (isinstance(parameters, type) and dataclasses.is_dataclass(parameters)):
        return "lacks Parameters: name a dataclass there, its fields made with kvlens.methods.parameters.param"
    if getattr(method.floor_bytes, "__func__", None) is vars(Sizing)["floor_bytes"].__func__:
        return "lacks floor_bytes: write that class method, or derive the class from one of kvlens.methods.families"
    return None
