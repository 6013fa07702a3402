"""Two made-up runs of one prompt that part at a known step, and runs that cannot be laid beside them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import duckdb
from uiruns import MARKUP, redate
from writtenonce import written_once

from tests.synthetic import write_synthetic

STEPS, PARTED = 30, 12
LAYERS, HEADS, KV_HEADS = 3, 8, 2


@dataclass(frozen=True)
class PairRuns:
    """A folder with five runs; the newest is `plain`."""

    folder: Path
    run: str
    """'sekv', compared with `reference`; coverage is recorded"""
    reference: str
    """'full', the same prompt; other tokens from step PARTED on; coverage half of run's per step and head, NULL in
    layer 2; no loss"""
    other: str
    """another prompt"""
    recut: str
    """the same text as run's in other tokens"""
    plain: str
    """the same prompt as run, the same tokens, no reference; 20 steps"""


@written_once
def write_pair(folder: Path) -> PairRuns:
    """Writes the runs."""
    made = {"layers": LAYERS, "q_heads": HEADS, "kv_heads": KV_HEADS, "spans": 20, "prompt_tokens": 300, "seed": 1}
    reference = write_synthetic(
        folder,
        steps=STEPS,
        uid="20260102-000000-full",
        method="full",
        budget=None,
        budget_bytes=None,
        preset=None,
        **made,
    )
    run = write_synthetic(
        folder, steps=STEPS, uid="20260102-000001-sekv", reference=reference, loss_step=PARTED, answer="4172", **made
    )
    other = write_synthetic(folder, steps=10, uid="20260102-000002-other", **{**made, "prompt_tokens": 200})
    recut = write_synthetic(folder, steps=10, uid="20260102-000002-recut", **made)
    plain = write_synthetic(folder, steps=20, uid="20260102-000003-plain", **made)
    for uid in (reference, run, plain):
        with _edit(folder, uid) as con:
            con.execute("UPDATE token SET text = $text WHERE pos = 5", {"text": MARKUP})
    with _edit(folder, run) as con:
        tokens = con.execute("SELECT step, token_id, text FROM token WHERE step < 20 ORDER BY step").fetchall()
    with _edit(folder, reference) as con:
        con.execute(f"UPDATE token SET token_id = token_id + 1, text = '<i>' WHERE step >= {PARTED}")
        con.execute("DELETE FROM loss")
        con.execute(f"ATTACH '{folder / run / 'trace.duckdb'}' AS other (READ_ONLY)")
        con.execute(
            "UPDATE head_step SET coverage = CASE WHEN o.layer < 2 THEN o.coverage / 2 END FROM "
            "other.main.head_step AS o "
            "WHERE head_step.step = o.step AND head_step.layer = o.layer AND head_step.q_head = o.q_head"
        )
    with _edit(folder, recut) as con:
        con.execute("UPDATE token SET token_id = token_id + 7")
    with _edit(folder, plain) as con:
        for step, token_id, text in tokens:
            con.execute(
                "UPDATE token SET token_id = $i, text = $t WHERE step = $s", {"i": token_id, "t": text, "s": step}
            )
    for number, uid in enumerate((reference, run, other, recut, plain)):
        redate(folder / uid / "run.json", f"2026-01-02T00:00:0{number}+00:00")
    return PairRuns(folder, run, reference, other, recut, plain)


def set_info(runs: PairRuns, uid: str, **changes: object) -> None:
    """Changes run.json."""
    path = runs.folder / uid / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def _edit(folder: Path, uid: str) -> duckdb.DuckDBPyConnection:
    trace = folder / uid / "trace.duckdb"
    trace.chmod(0o644)
    return duckdb.connect(str(trace))
