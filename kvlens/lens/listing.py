"""What a list of runs says of each beyond its run.json: what came of it, and which prompt it answered.

Read from the trace once and kept in the folder of runs, known by when the trace was last changed and by the sources
that decide what an outcome is called. The file may be deleted at any time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from kvlens import tasks
from kvlens.lens.knob import limit_of
from kvlens.lens.severity import KINDS, Outcome, outcome
from kvlens.memory.budget import of_run
from kvlens.models.find import short_model
from kvlens.store.errors import MemoryShort
from kvlens.store.files import read_plain, write_plain
from kvlens.store.reader import RunBusy, TraceError, TraceReader
from kvlens.text.plaintext import visible

FILE = ".outcomes.json"
SHOWN = 200
"""characters that are kept of a prompt's beginning, of its end and of the expected answer"""


class Told(BaseModel):
    """What is told of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stamp: int
    """when its trace was last changed, ns"""
    outcome: Outcome
    prompt: str | None = None
    """names the prompt by its text; None: the text was not kept"""
    begins: str = ""
    ends: str = ""
    """its first and last characters, on one line"""
    limit: str = ""
    """what it was held to: a budget, or the share or number of tokens a method attends that keeps all"""
    problem: str = ""
    """code of the error by which its trace cannot be read; '': it was read"""


class _Kept(BaseModel):
    model_config = ConfigDict(extra="forbid")

    rules: str
    runs: dict[str, Told]


class Listing:
    """What is known of the runs of one folder. May be used from several threads."""

    def __init__(self, runs_dir: Path) -> None:
        self._folder, self._lock = runs_dir, threading.Lock()
        self._known = _read(runs_dir / FILE)

    def of(self, uids: Sequence[str], within_s: float = float("inf")) -> list[Told | None]:
        """In the order of `uids`; nothing is known of a run that is being written. None: not read yet, since those
        before it took `within_s` seconds."""
        with self._lock:
            until, news = time.monotonic() + within_s, False
            listed_runs: list[Told | None] = []
            for uid in uids:
                stamp, known_run = _stamp(self._folder, uid), self._known.get(uid)
                if known_run is None or known_run.stamp != stamp:
                    known_run = None
                    if time.monotonic() < until:
                        try:
                            self._known[uid] = known_run = _told(self._folder, uid, stamp)
                            news = True
                        except (RunBusy, MemoryShort):
                            known_run = Told(stamp=stamp, outcome=Outcome(""))
                listed_runs.append(known_run)
            if news:
                self._keep()
            return listed_runs

    def _keep(self) -> None:
        """A folder that cannot be written is read again the next time."""
        known_runs = {
            uid: listed_run
            for uid, listed_run in self._known.items()
            if listed_run.stamp == _stamp(self._folder, uid) and (self._folder / uid).is_dir()
        }
        temporary = self._folder / f"{FILE}.{os.getpid()}.{secrets.token_hex(4)}"
        content = _Kept(rules=_rules(), runs=known_runs).model_dump_json().encode("utf-8", "replace")
        with contextlib.suppress(OSError):
            write_plain(temporary, content, durable=False)
            os.replace(temporary, self._folder / FILE)


def _read(path: Path) -> dict[str, Told]:
    try:
        stored = _Kept.model_validate_json(read_plain(path))
    except (OSError, ValidationError):
        return {}
    return stored.runs if stored.rules == _rules() else {}


@cache
def _rules() -> str:
    """Names the sources that say what an outcome is: another version of them reads the traces again."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(tasks.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _stamp(folder: Path, uid: str) -> int:
    try:
        return (folder / uid / "trace.duckdb").stat().st_mtime_ns
    except (OSError, ValueError):
        return 0


def _told(folder: Path, uid: str, stamp: int) -> Told:
    """Raises RunBusy, and MemoryShort where DuckDB lacks memory: neither is the trace's fault."""
    try:
        with TraceReader.open(folder, uid) as reader:
            came, text = outcome(reader), reader.prompt_text()
            name = reader.meta.prompt_sha256 or (hashlib.sha256(text.encode()).hexdigest() if text else None)
            limit = limit_of(reader.meta)
    except (RunBusy, MemoryShort):
        raise
    except TraceError as error:
        return Told(stamp=stamp, outcome=Outcome(""), problem=getattr(error, "code", "trace_failed"))
    came = replace(came, expected=came.expected and came.expected[:SHOWN])
    begins, ends = _line(text[:SHOWN]), _line(text[-SHOWN:])
    return Told(stamp=stamp, outcome=came, prompt=name and name[:64], begins=begins, ends=ends, limit=limit)


def _line(text: str) -> str:
    return " ".join(visible(text).split())


def limit_in(row: Mapping[Any, Any], listed_run: Told | None) -> str:
    """What a list says that a run was held to; of one whose trace was not read, its budget."""
    return listed_run.limit if listed_run is not None and listed_run.limit else budget_of(row)


def budget_of(row: Mapping[Any, Any]) -> str:
    """What a list calls a run's budget, of a row of `store.catalog.list_runs`; '' where the run does not say."""
    asked_budget, limit = row.get("budget"), row.get("budget_bytes")
    if not isinstance(asked_budget, str):
        return ""
    return of_run(asked_budget, None if limit is None or limit != limit else int(limit))


@dataclass(frozen=True)
class Search:
    """Which runs of a list are wanted; None and '': all."""

    text: str = ""
    """words, all of which are in a run's prompt (its beginning or its end), expected answer, output, name, note, tags,
    task or uid; letters of either case"""
    method: str | None = None
    model: str | None = None
    """as the run has it, or without the folders before it"""
    outcome: str | None = None
    """one of severity.KINDS"""
    tag: str | None = None

    def check(self) -> None:
        """Raises ValueError with one sentence for an outcome that there is not."""
        if self.outcome is not None and self.outcome not in KINDS:
            kind_list = "; ".join(f"{kind} ({means})" for kind, means in KINDS.items())
            raise ValueError(f"'{self.outcome}' is no outcome; there are {kind_list}.")

    def takes(self, row: Mapping[str, Any], listed_run: Told | None) -> bool:
        """row: of `store.catalog.list_runs`. A run that was not read yet has no outcome and no prompt."""
        model = _text(row["model"])
        if self.method and row["method"] != self.method:
            return False
        if self.model and self.model not in (model, short_model(model)):
            return False
        if self.tag and self.tag not in row["tags"]:
            return False
        if self.outcome and (listed_run is None or self.outcome not in listed_run.outcome.kinds):
            return False
        texts = [_text(row[name]) for name in ("uid", "name", "note", "task", "output_text")]
        texts += [
            *row["tags"],
            *(
                (listed_run.begins, listed_run.ends, listed_run.outcome.expected or "")
                if listed_run is not None
                else ()
            ),
        ]
        searched_text = "\n".join(texts).casefold()
        return all(word in searched_text for word in self.text.casefold().split())


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
