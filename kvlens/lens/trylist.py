"""The list of tries of a run, read from the traces of its repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd

from kvlens.lens.tries import Try
from kvlens.meta import RunMeta
from kvlens.store.errors import TraceError
from kvlens.store.reader import TraceReader, list_runs


def try_of(meta: RunMeta, uid: str) -> Try | None:
    """The try that a run's meta describes; None for other runs."""
    if not meta.interfered and not meta.changed:
        return None
    return Try(
        uid,
        meta.hold,
        dict(meta.changed),
        meta.whatif,
        meta.full_kv_bytes,
        meta.budget_bytes,
        meta.layers,
        meta.kv_heads,
        meta.drop,
    )


def uids(uid: str, table: pd.DataFrame) -> list[str]:
    """The tries on a run that came to an end, newest first. `table`: as list_runs gives it."""
    is_repeat = table["hold"].eq(True) | table["changed"].eq(True)
    return [
        str(uid_value)
        for uid_value in table.loc[(table["parent"] == uid) & is_repeat & (table["status"] == "completed"), "uid"]
    ]


def tries(uid: str, table: pd.DataFrame, meta_of: Callable[[str], RunMeta]) -> list[Try]:
    """What was tried on a run, newest first, without what the run held or dropped itself. Repeats that cannot be
    read are left out: the list of runs names them. meta_of: raises TraceError for those."""
    run_uids = uids(uid, table)
    beside = _read(run_uids, meta_of)
    try:
        had = meta_of(uid) if run_uids else None
    except TraceError:
        had = None
    if had is not None:
        beside = [trial.beyond(had) for trial in beside]
    # a run that holds something may have been repeated as it is
    return [trial for trial in beside if not trial.nothing or trial.summary is not None]


def _read(run_uids: Iterable[str], meta_of: Callable[[str], RunMeta]) -> Iterable[Try]:
    for run_uid in run_uids:
        try:
            tried = try_of(meta_of(run_uid), run_uid)
        except TraceError:
            continue
        if tried is not None:
            yield tried


def tries_in(runs_dir: Path, uid: str) -> list[Try]:
    """The same, read from the folder of runs."""

    def meta_of(run_uid: str) -> RunMeta:
        with TraceReader.open(runs_dir, run_uid) as reader:
            return reader.meta

    return tries(uid, list_runs(runs_dir), meta_of)
