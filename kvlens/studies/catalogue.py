"""The stored studies of a folder, one row each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvlens.models.find import short_model
from kvlens.store.errors import TraceError
from kvlens.studies import storage
from kvlens.studies.table import Results


@dataclass(frozen=True)
class StudyRow:
    """A stored study, as lists show it."""

    id: str
    created: str
    name: str
    model: str
    methods: str
    prompts: int
    ended: int
    planned: int
    running: bool
    """some process is carrying it out"""


def studies_in(runs_dir: Path) -> list[StudyRow]:
    """Return the studies of a folder, newest first; those that cannot be read are left out."""
    rows = []
    for study_id in storage.ids(runs_dir):
        try:
            results = Results.read(runs_dir, study_id)
        except TraceError:
            continue
        info = results.info
        plan = info.plan
        names = dict.fromkeys((*(row.method for row in plan.entrants), *(row.arm.method for row in plan.listed)))
        rows.append(
            StudyRow(
                study_id,
                info.created,
                info.plan.name,
                short_model(info.plan.shared.model),
                ", ".join(names),
                len(results.prompts),
                results.ended,
                results.planned,
                storage.is_running(runs_dir, study_id),
            )
        )
    return rows
