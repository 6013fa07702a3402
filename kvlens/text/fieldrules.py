"""Sentences that refuse the value of a field in a request or a file: the field's name, what it takes, and the value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from kvlens.text.failures import one_line

_BOUNDS = {
    "greater_than": ("must be above {}", "gt"),
    "greater_than_equal": ("must be at least {}", "ge"),
    "less_than": ("must be below {}", "lt"),
    "less_than_equal": ("must be at most {}", "le"),
    "literal_error": ("must be one of {}", "expected"),
}
"""type of a fault -> what a sentence says of it, and the bound that it names"""
_KINDS = {
    "float": "must be a number",
    "finite": "must be a finite number",
    "int": "must be a whole number",
    "bool": "must be true or false",
    "string": "must be a text",
    "tuple": "must be a list",
    "list": "must be a list",
    "dict": "must be a mapping of names to values",
}
"""beginning of a fault's type -> what a sentence says of it"""
_OTHER = "has another form than the field takes"


def rule_of(fault: Mapping[str, Any]) -> str:
    """Return the rule that a value breaks, without its name and value: 'must be at least 1'. fault: of
    ValidationError.errors()."""
    kind = str(fault["type"])
    if kind in _BOUNDS:
        text, bound = _BOUNDS[kind]
        return text.format(fault["ctx"][bound])
    if kind == "value_error":
        return f"is refused ({fault['ctx']['error']})"
    return _KINDS.get(kind.partition("_")[0], _OTHER)


def name_of(fault: Mapping[str, Any]) -> str:
    """Return the name of a fault's field, with its place in a list; '' for the request as a whole."""
    return ".".join(map(str, fault["loc"]))


def fault_sentence(error: ValidationError, spelled: Callable[[str], str] = str) -> str:
    """Return one sentence without a full stop for the first fault: 'max_new must be at least 1, not 0'. A sentence of
    kvlens's own comes as it is. spelled: how the sentence writes a field's name."""
    fault = error.errors()[0]
    name, value = spelled(name_of(fault)), one_line(repr(fault["input"]))
    if fault["type"] != "value_error":
        return f"{name or 'the request'} {rule_of(fault)}, not {value}"
    reason = str(fault["ctx"]["error"]).rstrip(".")
    return f"{name}={value} is not possible: {reason}" if name else reason
