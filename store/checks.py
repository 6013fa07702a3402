"""What the store checks itself when a run ends."""

from __future__ import annotations

import json

import duckdb

from kvlens.records import SelfCheck
from kvlens.rows import MASS_COLUMNS

#: Sum of the masses over roles of every row that logged them all; allowed error as in kvlens.rows.
_MASS_TOLERANCE = 1e-3


def stored_checks(con: duckdb.DuckDBPyConnection) -> list[SelfCheck]:
    """What the store itself promises: no row missing, and masses that add up as stored."""
    row = con.execute("SELECT last_step FROM run_state").fetchone()
    sizes = {key: json.loads(value) for key, value in con.execute("SELECT key, value FROM meta").fetchall()}
    steps = (row[0] if row else -1) + 1
    want = steps * sizes["layers"] * sizes["q_heads"]
    counted = con.execute("SELECT count(*), count(DISTINCT (step, layer, q_head)) FROM head_step").fetchone()
    assert counted is not None
    logged = [
        name for name in MASS_COLUMNS if con.execute(f"SELECT count({name}) > 0 FROM head_step").fetchone() == (True,)
    ]
    checks = [
        SelfCheck(
            "stored_rows_complete",
            counted == (want, want),
            float(counted[0]),
            f"{counted[0]} rows of steps x layers x query heads stored, {want} expected",
        )
    ]
    if logged:
        # a NaN is stored as NULL: a mass that is recorded in some rows has to be a number in all of them
        total, numbers = " + ".join(logged), " AND ".join(f"isfinite({name})" for name in logged)
        results = con.execute(
            f"SELECT max(abs({total} - 1)), count(*) FILTER (NOT coalesce({numbers}, false)) FROM head_step"
        ).fetchone()
        assert results is not None
        worst, none = results
        passed = none == 0 and worst is not None and worst <= _MASS_TOLERANCE
        detail = (
            f"largest |sum of masses over roles - 1| over all steps, layers and query heads, as stored; "
            f"allowed {_MASS_TOLERANCE}; {none} rows with a mass that is no number"
        )
        checks.append(SelfCheck("stored_masses_sum_to_one", passed, None if worst is None else round(worst, 6), detail))
    return checks
