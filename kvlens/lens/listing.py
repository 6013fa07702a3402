"""What a list of runs says of each beyond its run.json: what came of it, and which prompt it answered.

Outcomes are derived from recorded facts (kvlens.store.outcomefacts): those in run.json, else those that the folder's
catalogue keeps, else those of the trace, which is then opened once."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvlens.budget import of_run
from kvlens.collecting import uncollected
from kvlens.lens.runsettings import settings_by
from kvlens.lens.severity import KINDS, Outcome, outcome_of
from kvlens.methods.differences import BUDGET, QUESTION, SEED, RunSettings, tell_apart
from kvlens.models.find import short_model
from kvlens.refusal import Refusal
from kvlens.store.catalog import run_entries
from kvlens.store.catalogueentry import Entry
from kvlens.store.errors import MemoryShort
from kvlens.store.outcomefacts import EXCERPT, OutcomeFacts, trace_stamp
from kvlens.store.reader import RunBusy, TraceError, TraceReader
from kvlens.store.runcatalogue import catalogue_of


@dataclass(frozen=True)
class ListedRun:
    """What is told of a run."""

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
    settings: RunSettings | None = None
    """what it ran with; None: not known"""


class Listing:
    """What is known of the runs of one folder. May be used from several threads."""

    def __init__(self, runs_dir: Path) -> None:
        self._folder, self._lock = runs_dir, threading.Lock()
        self._known: dict[str, tuple[Entry, ListedRun]] = {}

    def read(self, uids: Sequence[str], within_s: float = float("inf")) -> list[ListedRun | None]:
        """In the order of `uids`; nothing is known of a run that is being written. None: not read yet, since those
        before it took `within_s` seconds."""
        with self._lock:
            until, catalogue = time.monotonic() + within_s, catalogue_of(self._folder)
            if any(catalogue.entry(uid) is None for uid in uids):
                run_entries(self._folder)
            root = str(self._folder)
            with uncollected():
                traces = [trace_stamp(f"{root}/{uid}/trace.duckdb") for uid in uids]
                entries = [catalogue.entry(uid) for uid in uids]
                listed_runs = [
                    self._told(uid, entry) if entry is not None and trace is not None and entry.trace == trace else None
                    for uid, entry, trace in zip(uids, entries, traces, strict=True)
                ]
            for number, listed_run in enumerate(listed_runs):
                if listed_run is None and time.monotonic() < until:
                    listed_runs[number] = self._read(uids[number], traces[number])
            return listed_runs

    def _told(self, uid: str, entry: Entry) -> ListedRun:
        """Return what is told of an entry, derived once."""
        known_entry, listed_run = self._known.get(uid, (None, None))
        if listed_run is None or known_entry is not entry:
            listed_run = told_of(entry.facts, entry.problem)
            self._known[uid] = entry, listed_run
        return listed_run

    def _read(self, uid: str, trace: tuple[int, int] | None) -> ListedRun:
        """Read the facts of a run from its trace and keep them. A run that is being written, and one that DuckDB lacks
        memory for, is asked again the next time: neither is the trace's fault."""
        try:
            facts, problem = read_trace(self._folder, uid), ""
        except (RunBusy, MemoryShort):
            return told_of(None, "")
        except TraceError as error:
            facts, problem = None, error.code or "trace_failed"
        if trace is not None:
            catalogue_of(self._folder).keep(uid, trace, facts, problem)
        return told_of(facts, problem)


@lru_cache(maxsize=4)
def listing_of(folder: Path) -> Listing:
    """Return the listing of a folder that this process uses."""
    return Listing(folder)


def read_trace(folder: Path, uid: str) -> OutcomeFacts:
    """Read the recorded facts of a run from its trace. Raises TraceError."""
    with TraceReader.open(folder, uid) as reader:
        return reader.outcome_facts()


def told_of(facts: OutcomeFacts | None, problem: str) -> ListedRun:
    """Return what a list tells of a run with these facts, or with this problem."""
    if facts is None:
        return ListedRun(Outcome(""), problem=problem)
    came = outcome_of(facts)
    if came.expected and len(came.expected) > EXCERPT:
        came = replace(came, expected=came.expected[:EXCERPT])
    settings = settings_by(facts)
    return ListedRun(came, facts.prompt, facts.begins, facts.ends, settings.conditions[BUDGET], settings=settings)


def differences_in(
    rows: Sequence[Mapping[Any, Any]],
    listed_runs: Sequence[ListedRun | None],
    conditions: Sequence[str] = (QUESTION, SEED),
) -> list[str]:
    """Return of each run of a list the words that tell it from the list's other runs of its method: 'tau 0.9, seed 3'.
    conditions: settings besides parameters that the list shows nowhere else."""
    settings = [None if item is None else item.settings for item in listed_runs]
    return tell_apart([str(row.get("method")) for row in rows], settings, conditions)


def limit_in(row: Mapping[Any, Any], listed_run: ListedRun | None) -> str:
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
            raise Refusal(
                f"'{self.outcome}' is no outcome; there are {kind_list}.", code="unknown_outcome", outcome=self.outcome
            )

    def takes(self, row: Mapping[str, Any], listed_run: ListedRun | None) -> bool:
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
