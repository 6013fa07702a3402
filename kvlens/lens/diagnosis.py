"""Many losses at once: why the stored runs of a folder lost, grouped by cause, each with where it was missed most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvlens.budget import NO_LIMIT, Budget, in_words
from kvlens.lens.knob import limit_of
from kvlens.lens.listing import budget_of
from kvlens.lens.severity import severity, unmissed_words
from kvlens.lens.verdict import verdict
from kvlens.methods.naming import stand_in
from kvlens.store.cells import records
from kvlens.store.reader import TraceError, TraceReader, list_runs

NOT_RECORDED, NOTHING_MISSED = "not_recorded", "nothing_missed"
"""kinds of a loss without a missed span: its full attention was not recorded at its step; or it was, and the run
missed nothing there that counts"""


@dataclass(frozen=True)
class Wanted:
    """Which runs are asked about; None: all. Raises ValueError with one sentence for a budget that no run has."""

    method: str | None = None
    model: str | None = None
    budget: str | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget != NO_LIMIT:
            Budget.parse(self.budget)

    def takes(self, row: dict[str, object]) -> bool:
        request = (("method", self.method), ("model", self.model), ("task", self.task))
        if not all(value is None or str(row[name]) == value for name, value in request):
            return False
        return self.budget is None or in_words(self.budget) == budget_of(row)


@dataclass(frozen=True)
class Lost:
    """A run that lost, and what it missed most at the step where it did."""

    uid: str
    model: str
    method: str
    preset: str | None
    limit: str
    """what it was held to: a budget, or the share or number of tokens a method attends that keeps all"""
    step: int
    outcome: str
    """as Severity.words has it"""
    kind: str
    """one of lens.reasons.KINDS, NOT_RECORDED or NOTHING_MISSED"""
    says: str
    layer: int | None = None
    kv_head: int | None = None
    tokens: tuple[int, int] | None = None
    """[start, end) of the span"""
    needle: bool | None = None
    """the span holds part of the answer's words; None: they are not known"""
    stand_in: str = ""
    """parts of its method that were untrained or uncalibrated (kvlens/methods/naming.py)"""


@dataclass(frozen=True)
class Cause:
    """Losses of one kind of one method on one model under one limit."""

    model: str
    method: str
    limit: str
    kind: str
    lost: tuple[Lost, ...]
    stand_in: str = ""
    """parts of the method that were untrained or uncalibrated in all these runs"""

    @property
    def heads(self) -> list[tuple[tuple[int, int], int]]:
        """((layer, KV head), runs in which it missed most), the most frequent first."""
        runs = Counter((run.layer, run.kv_head) for run in self.lost if run.layer is not None)
        return [((layer, head), n) for (layer, head), n in sorted(runs.items(), key=lambda item: (-item[1], item[0]))]  # type: ignore[misc]

    @property
    def of_the_answer(self) -> tuple[int, int]:
        """Of how many runs it is known whether what was missed most holds part of the answer's words, second; of how
        many it does, first."""
        recorded = [item.needle for item in self.lost if item.needle is not None]
        return sum(recorded), len(recorded)


@dataclass(frozen=True)
class Diagnosis:
    """compared: runs that were compared with full KV; mild: of these, runs whose first other token is not known to have
    cost anything that was asked for (lens.severity); unread: one sentence per run that cannot be read."""

    compared: int
    mild: int
    causes: tuple[Cause, ...]
    unread: tuple[str, ...]

    @property
    def lost(self) -> tuple[Lost, ...]:
        return tuple(item for cause in self.causes for item in cause.lost)


def diagnose(
    runs_dir: Path, target: Wanted, report: Callable[[int, int], None] = lambda count, total: None
) -> Diagnosis:
    """Of the runs that chose their own tokens and were compared with full KV; what-ifs and fed runs are none. Causes
    come most frequent first. report(count, total): runs that were read."""
    table = list_runs(runs_dir)
    rows = [row for row in records(table) if _stands_alone(row) and target.takes(row)]
    entries, mild, compared, unread = [], 0, 0, []
    for count, row in enumerate(rows):
        report(count, len(rows))
        try:
            with TraceReader.open(runs_dir, str(row["uid"])) as reader:
                if reader.loss().empty:
                    continue
                compared += 1
                item = _lost(reader)
        except TraceError as problem:
            unread.append(str(problem))
            continue
        if item is None:
            continue
        if isinstance(item, str):
            mild += 1
        else:
            entries.append(item)
    report(len(rows), len(rows))
    return Diagnosis(compared, mild, tuple(_grouped(entries)), tuple(unread))


def _stands_alone(row: dict[str, object]) -> bool:
    tried = row["hold"] or row["changed"]
    return row["status"] == "completed" and not tried and row["forced"] is not True


def _lost(reader: TraceReader) -> Lost | str | None:
    """None: nothing was lost; words: something was, and nothing that was asked for."""
    loss_verdict = verdict(reader, missed=False)
    if loss_verdict is None:
        return None
    outcome = severity(reader, loss_verdict)
    if outcome.mild:
        return outcome.words()
    whole, meta = verdict(reader), reader.meta
    words = stand_in(str(meta.method), meta.config)
    missed = None if whole is None else whole.missed
    about = (
        reader.uid,
        str(meta.model),
        str(meta.method),
        meta.preset,
        limit_of(meta),
        loss_verdict.step,
        outcome.words(),
    )
    if missed is None:
        if whole is not None and whole.nothing_missed:
            return Lost(*about, NOTHING_MISSED, unmissed_words(whole, outcome), stand_in=words)
        return Lost(*about, NOT_RECORDED, "full attention by span was not recorded at its step", stand_in=words)
    return Lost(
        *about,
        missed.reason.kind,
        missed.reason.says,
        missed.layer,
        missed.kv_head,
        (missed.tok_start, missed.tok_end),
        _holds(reader, missed.tok_start, missed.tok_end),
        words,
    )


def _holds(reader: TraceReader, start: int, end: int) -> bool | None:
    """Whether tokens [start, end) hold part of the answer's words."""
    ranges = reader.meta.needle
    if not ranges:
        return None
    tokens = reader.tokens().query("pos >= @start and pos < @end")
    return any(bool(((tokens["char_start"] < b) & (tokens["char_end"] > a)).any()) for a, b in ranges)


def _grouped(lost: Iterable[Lost]) -> list[Cause]:
    groups: dict[tuple[tuple[str, str, str, str], str], list[Lost]] = {}
    for item in lost:
        groups.setdefault(((item.model, item.method, item.limit, item.kind), item.stand_in), []).append(item)
    causes = [Cause(*key, tuple(results), words) for (key, words), results in groups.items()]
    return sorted(causes, key=lambda cause: (-len(cause.lost), cause.model, cause.method, cause.limit, cause.kind))
