"""Runs the interface tests look at: made up, small, written through the real writer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import duckdb
from streamlit.testing.v1 import AppTest
from writtenonce import written_once

from tests.synthetic import write_synthetic

Visit = Callable[..., AppTest]
"""visit(folder, page, **url_parameters)"""
ROOT = Path(__file__).resolve().parent.parent
MARKUP = "<b>x</b>"
"""text of one token: shown as it is or the page is unsafe"""


@dataclass(frozen=True)
class Runs:
    """A folder with five runs."""

    folder: Path
    whole: str
    """completed: 3 layers, 8 query heads, 2 KV heads, 60 steps, a token with markup, a marked needle"""
    cancelled: str
    """recorded to step 9"""
    summary: str
    """trace level 'summary': no figures per step and head"""
    broken: str
    """its trace is not a database"""
    long: str
    """3,200 prompt tokens, more than the strip keeps in the page"""


@written_once
def write_runs(folder: Path) -> Runs:
    """Writes the runs; `whole` is the newest."""
    long = write_synthetic(folder, 2, 4, 2, 6, 60, seed=5, uid="20260101-000000-long", prompt_tokens=3200)
    summary = write_synthetic(folder, 2, 4, 2, 8, 10, seed=3, uid="20260101-000001-summary", trace_level="summary")
    cancelled = write_synthetic(
        folder, 2, 4, 2, 10, 12, seed=2, uid="20260101-000002-cancel", status="cancelled", error="Cancelled."
    )
    broken = write_synthetic(folder, 2, 4, 2, 4, 8, seed=4, uid="20260101-000003-broken", prompt_tokens=120)
    trace = folder / broken / "trace.duckdb"
    trace.chmod(0o644)
    trace.write_bytes(b"not a database" * 1000)
    known = {"prompt_tokens": 300, "needle": [[30, 60]], "answer": "4172"}
    whole = write_synthetic(folder, 3, 8, 2, 60, 20, seed=1, uid="20260101-000004-whole", **known)
    put_markup(folder / whole / "trace.duckdb")
    for number, uid in enumerate((long, summary, cancelled, broken, whole)):
        redate(folder / uid / "run.json", f"2026-01-01T00:00:0{number}+00:00")
    return Runs(folder, whole, cancelled, summary, broken, long)


def put_markup(trace: Path) -> None:
    """Gives the last prompt token, which the replay shows first, a text that looks like markup."""
    trace.chmod(0o644)
    with duckdb.connect(str(trace)) as con:
        con.execute(
            "UPDATE token SET text = $text WHERE pos = (SELECT max(pos) FROM token WHERE step IS NULL)",
            {"text": MARKUP},
        )


def redate(path: Path, created: str) -> None:
    """Sets when a run was made, so that their order is known."""
    info = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(info | {"created": created}), encoding="utf-8")
