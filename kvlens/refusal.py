"""Errors that a reader can meet: one sentence for people, a code and typed values for programs and tests."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class Coded(Exception):
    """An error of one sentence. Subclasses may set `code` for all of their errors."""

    code: str = ""
    """a name that stays the same when the sentence is mended; empty: only the class tells the error"""
    values: Mapping[str, Any] = MappingProxyType({})
    """the figures and names of the sentence"""

    def __init__(self, sentence: str = "", *, code: str = "", **values: Any) -> None:
        super().__init__(sentence)
        if code:
            self.code = code
        if values:
            self.values = values


class Refusal(Coded, ValueError):
    """Something that was asked for and cannot be done."""


class BadValue(Refusal):
    """A setting outside its range; values name the setting and the value."""

    code = "bad_value"
