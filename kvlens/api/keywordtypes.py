"""Types of keywords: a keyword of another type than it takes is refused before anything is run."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from kvlens.api.errors import RequestError


def check_flags(**flags: Any) -> None:
    """Raise RequestError `bad_value` for a keyword that is neither True nor False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise refused_type(name, flag, "True or False")


def check_numbers(form: str, **numbers: Any) -> None:
    """Raise RequestError `bad_value` for a keyword that is no number. form: what it takes, in words; None: not
    passed."""
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, Real)):
            raise refused_type(name, number, form)


def check_mappings(form: str, **mappings: Any) -> None:
    """Raise RequestError `bad_value` for a keyword that is no mapping. form: what it maps, in words; None: not
    passed."""
    for name, mapping in mappings.items():
        if mapping is not None and not isinstance(mapping, Mapping):
            raise refused_type(name, mapping, f"a mapping of {form}")


def refused_type(name: str, value: Any, form: str) -> RequestError:
    """Return the error for a keyword of another type than it takes. form: what it takes, in words."""
    return RequestError("bad_value", f"{name}= takes {form}, not {value!r}.", name=name, value=value)
