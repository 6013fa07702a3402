"""The faults of a study file, gathered, so that one refusal names them all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from kvlens.studies.errors import BadStudy
from kvlens.studies.limits import SHARES, Thresholds
from kvlens.text.fieldrules import rule_of


class Faults:
    """Owns the faults that were found so far."""

    def __init__(self, file: str) -> None:
        """file: the name of the study file."""
        self._file = file
        self._words: dict[str, str] = {}

    def add(self, key: str, words: str) -> None:
        """Note a fault of a key."""
        self._words[key] = words

    @contextmanager
    def gathered(self, table: str = "") -> Iterator[None]:
        """Note what a validation inside refuses. table: the file's table that is validated; '': the top of the file."""
        try:
            yield
        except ValidationError as error:
            for problem in error.errors():
                keys = [*([table] if table else []), *map(str, problem["loc"])]
                name = f"[{table}] {'.'.join(keys[1:])}" if table else ".".join(keys)
                self.add(".".join(keys), f"{name or 'a value'} {_words(table, problem)}")

    def check(self) -> None:
        """Raise BadStudy `bad_plan_file` if there is a fault."""
        if self._words:
            raise BadStudy("bad_plan_file", f"{self._file}: {'; '.join(self._words.values())}.", tuple(self._words))


def _words(table: str, problem: Mapping[str, Any]) -> str:
    """Return what is wrong with a value, without its name: 'must lie between 0 and 1, not 2'."""
    kind, key = str(problem["type"]), str((problem["loc"] or ("",))[-1])
    if kind == "extra_forbidden":
        return f"is not known; there are {', '.join(Thresholds.model_fields)}" if table else "is not known"
    if table and key in SHARES and kind in ("greater_than", "less_than"):
        rule = "must lie between 0 and 1"
    else:
        rule = rule_of(problem)
    return f"{rule}, not {problem['input']!r}"
