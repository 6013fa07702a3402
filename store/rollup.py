"""Rollups: what a page that shows a whole run needs, computed once when the run ends.

``head_run`` and ``kv_run`` keep, per head and metric, the count, sum, minimum and maximum over the steps (so NULLs are
not zeros and parts can be merged); ``layer_step`` keeps, for each step and layer, the mean over query heads and the sum
(of a cosine the mean) over KV heads.
At trace level 'summary' the rows per step and head are not stored: then every flushed block is merged into these tables
instead. The same tables say whether the store kept its promises: `stored_checks`.
"""

from __future__ import annotations

import contextlib
import json

import duckdb

from kvlens.records import SelfCheck
from kvlens.rows import HEAD_COLUMNS, KV_COLUMNS, MASS_COLUMNS
from kvlens.store.schema import layer_type

_HEAD_KEYS = ("layer", "q_head")
_KV_KEYS = ("layer", "kv_head")


def _aggregate(relation: str, keys: tuple[str, ...], extra: str, columns: tuple[str, ...]) -> str:
    """Moments of a relation that holds one row per step and head."""
    metrics = ", ".join(
        (
            f"count({c})::UINTEGER AS {c}_n, sum({c}::DOUBLE) AS {c}_sum, min({c}::DOUBLE) AS {c}_min, "
            f"max({c}::DOUBLE) AS {c}_max"
        )
        for c in columns
    )
    basis = ", ".join(keys)
    return f"SELECT {basis}, {extra}count(*)::UINTEGER AS n_steps, {metrics} FROM {relation} GROUP BY {basis}"


def _merge(relation: str, keys: tuple[str, ...], extra: str, columns: tuple[str, ...]) -> str:
    """Moments of moments."""
    metrics = ", ".join(
        f"sum({c}_n)::UINTEGER AS {c}_n, sum({c}_sum) AS {c}_sum, min({c}_min) AS {c}_min, max({c}_max) AS {c}_max"
        for c in columns
    )
    basis = ", ".join(keys)
    return f"SELECT {basis}, {extra}sum(n_steps)::UINTEGER AS n_steps, {metrics} FROM ({relation}) GROUP BY {basis}"


def head_run_sql(relation: str = "head_step") -> str:
    """One row per query head over all steps of `relation`."""
    return _aggregate(relation, _HEAD_KEYS, "any_value(kv_head) AS kv_head, ", HEAD_COLUMNS)


def kv_run_sql(relation: str = "kv_step") -> str:
    """One row per KV head over all steps of `relation`."""
    return _aggregate(relation, _KV_KEYS, "", KV_COLUMNS)


def layer_step_sql(heads: str = "head_step", kvs: str = "kv_step") -> str:
    """One row per step and layer: means over query heads, sums (of a cosine the mean) over KV heads."""
    means = ", ".join(f"avg({c}::DOUBLE)::FLOAT AS {c}" for c in HEAD_COLUMNS)
    kinds = {c: layer_type(c) for c in KV_COLUMNS}
    sums = ", ".join(
        f"avg({c}::DOUBLE)::FLOAT AS {c}" if kind == "FLOAT" else f"sum({c})::{kind} AS {c}"
        for c, kind in kinds.items()
    )
    return (
        f"SELECT * FROM (SELECT step, layer, {means} FROM {heads} GROUP BY step, layer) AS h "
        f"LEFT JOIN (SELECT step, layer, {sums} FROM {kvs} GROUP BY step, layer) AS k USING (step, layer) "
        f"ORDER BY step, layer"
    )


def rebuild(con: duckdb.DuckDBPyConnection) -> None:
    """Fills the rollup tables from head_step and kv_step; does nothing where those hold no rows (trace level
    'summary')."""
    results = (
        con.execute("SELECT 1 FROM head_step LIMIT 1").fetchone()
        or con.execute("SELECT 1 FROM kv_step LIMIT 1").fetchone()
    )
    if results is None:
        return
    con.begin()
    try:
        for table, query in (("head_run", head_run_sql()), ("kv_run", kv_run_sql()), ("layer_step", layer_step_sql())):
            con.execute(f"DELETE FROM {table}")
            order = "" if table == "layer_step" else " ORDER BY ALL"
            con.execute(f"INSERT INTO {table} BY NAME {query}{order}")
        con.commit()
    except BaseException:
        with contextlib.suppress(duckdb.Error):  # after some failures DuckDB has rolled back already
            con.rollback()
        raise


def merge_block(con: duckdb.DuckDBPyConnection, heads: str, kvs: str) -> None:
    """Adds one block (two registered relations) to the rollups, inside the caller's transaction."""
    con.execute(f"INSERT INTO layer_step BY NAME {layer_step_sql(heads, kvs)}")
    parts = (
        ("head_run", head_run_sql(heads), _HEAD_KEYS, "any_value(kv_head) AS kv_head, ", HEAD_COLUMNS),
        ("kv_run", kv_run_sql(kvs), _KV_KEYS, "", KV_COLUMNS),
    )
    for table, block, keys, extra, columns in parts:
        both = f"SELECT * FROM {table} UNION ALL BY NAME ({block})"
        con.execute(f"CREATE OR REPLACE TEMP TABLE merged AS {_merge(both, keys, extra, columns)}")
        con.execute(f"DELETE FROM {table}")
        con.execute(f"INSERT INTO {table} BY NAME SELECT * FROM merged ORDER BY ALL")
        con.execute("DROP TABLE merged")


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
