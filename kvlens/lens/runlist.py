"""The runs of a folder as one table: what each is, and what came of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from kvlens.collecting import uncollected
from kvlens.lens.listing import ListedRun, Search, differences_in, limit_in, listing_of
from kvlens.lens.severity import Outcome
from kvlens.store.cells import records
from kvlens.store.reader import list_runs


def search_runs(folder: Path, search: Search) -> pd.DataFrame:
    """Return one row per run that the search takes, newest first: the columns of `list_runs`, differs (what tells the
    run from the other rows of its method), held_to (the budget, or the share of tokens of a method that keeps all),
    problem (the code by which the trace cannot be read, else None) and those of `Outcome.columns`.

    `attrs["stored"]` counts all runs of the folder, `attrs["problems"]` lists names and notes that cannot be read.
    Raises ValueError for an outcome that does not exist."""
    search.check()
    frame = list_runs(folder)
    return _table(frame, listing_of(folder).read(frame["uid"].tolist()), search)


@uncollected()
def _table(frame: pd.DataFrame, outcomes_stored: list[ListedRun | None], search: Search) -> pd.DataFrame:
    """Return the rows of `list_runs` that the search takes, with what is told of each."""
    listed_rows = records(frame)
    matches = [search.takes(row, outcome) for row, outcome in zip(listed_rows, outcomes_stored, strict=True)]
    rows = [(row, outcome) for row, outcome, take in zip(listed_rows, outcomes_stored, matches, strict=True) if take]
    outcomes = [None if outcome is None else outcome.outcome for _, outcome in rows]
    listed = frame[np.array(matches, bool)].copy()
    listed["differs"] = differences_in([row for row, _ in rows], [outcome for _, outcome in rows])
    listed["held_to"] = [limit_in(row, outcome) for row, outcome in rows]
    listed["problem"] = [(outcome is not None and outcome.problem) or None for _, outcome in rows]
    columns = [None if outcome is None else outcome.columns() for outcome in outcomes]
    for name in Outcome("").columns():
        listed[name] = [None if values is None else values[name] for values in columns]
    listed.attrs |= {"stored": len(frame), "problems": frame["about_error"].dropna().tolist()}
    return listed
