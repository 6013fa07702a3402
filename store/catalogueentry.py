"""A run in the catalogue of its folder, and the line that holds it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvlens.store.outcomefacts import OutcomeFacts, parsed_facts
from kvlens.store.runinfo import CREATED_US, SUMMARY

VERSION = 2
"""of a line's form"""
UNREADABLE = "unreadable"
"""status of a row whose run.json cannot be read"""
_ALWAYS = {"uid", "status", "created"}
TEXTS, NUMBERS, FLAGS = (
    tuple(name for name, kind in SUMMARY.items() if kind is held and name not in _ALWAYS) for held in (str, float, bool)
)
ABOUT = ("name", "note", "tags", "about_error")
"""what about.json adds to a row; about_error: one sentence where it cannot be read, else None"""
_TYPES: dict[str, Any] = (
    dict.fromkeys((*TEXTS, "about_error"), (str, type(None)))
    | dict.fromkeys((*NUMBERS, CREATED_US), (float, int, type(None)))
    | dict.fromkeys(("uid", "status", "created", "name", "note"), str)
    | dict.fromkeys(FLAGS, (bool, type(None)))
    | {"tags": tuple}
)
Stamp = tuple[int, ...]
"""(time of change in ns, bytes, inode) of run.json, then of about.json; -1: no such file"""


@dataclass(frozen=True)
class Entry:
    """A run as its files were when they were read."""

    stamp: Stamp
    row: dict[str, Any]
    """of `list_runs`"""
    trace: tuple[int, int] | None = None
    """(time of change in ns, bytes) of the trace that `facts` or `problem` were read from"""
    facts: OutcomeFacts | None = None
    problem: str = ""
    """code of the error by which the trace cannot be read; known to this process alone"""

    @property
    def was_read(self) -> bool:
        """run.json and about.json were."""
        return self.row["status"] != UNREADABLE and self.row.get("about_error") is None


def entry_line(uid: str, entry: Entry) -> bytes:
    """Return an entry as a line; facts are kept, problems are not."""
    values = {"v": VERSION, "uid": uid, "stamp": entry.stamp, "row": entry.row}
    if entry.facts is not None:
        values |= {"trace": entry.trace, "facts": entry.facts.model_dump(mode="json")}
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


@lru_cache(maxsize=1024)
def _check_types(names: tuple[str, ...], kinds: tuple[type, ...]) -> None:
    """Raise KeyError or ValueError where a row's cells are not what they should be; most rows are alike."""
    if not all(issubclass(kind, _TYPES[name]) for name, kind in zip(names, kinds, strict=True)):
        raise ValueError


def parse_line(line: bytes) -> tuple[str, Entry]:
    """Return the run id and the entry of a line. Raises ValueError, TypeError or KeyError for a line that
    `entry_line` did not make."""
    values = json.loads(line)
    row, uid = values["row"], values["uid"]
    row["tags"] = tuple(map(str, row["tags"]))
    if values["v"] != VERSION or row["uid"] != uid or not row.keys() >= _ALWAYS:
        raise ValueError
    _check_types(tuple(row), tuple(map(type, row.values())))
    facts = parsed_facts(values.get("facts"))
    trace = None if facts is None else tuple(values["trace"])
    entry = Entry(tuple(values["stamp"]), row, trace, facts)
    if not entry.was_read:
        raise ValueError
    return uid, entry
