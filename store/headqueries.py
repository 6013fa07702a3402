"""Queries over the tables of heads: cubes, summaries and the table of one step."""

from __future__ import annotations

from kvlens.rows import HEAD_COLUMNS
from kvlens.store.schema import UNITS
from kvlens.store.versions import source

AGGREGATES = {"mean": "avg", "max": "max", "min": "min", "sum": "sum"}


def column(name: str, allowed: tuple[str, ...]) -> str:
    """`name` if it is one of `allowed`, else ValueError: the only way a name gets into a statement."""
    if name not in allowed:
        raise ValueError(f"{name!r} is not a metric of this table; there are {', '.join(allowed)}.")
    return name


def recorded(table: str, columns: tuple[str, ...], suffix: str = "") -> str:
    """How many rows hold a value, per column."""
    return f"SELECT {', '.join(f'count({c}{suffix})' for c in columns)} FROM {source(table)}"


def recorded_rollup(table: str, columns: tuple[str, ...]) -> str:
    """As `recorded`, from a rollup."""
    return f"SELECT {', '.join(f'coalesce(sum({c}_n), 0)' for c in columns)} FROM {source(table)}"


def cube(table: str, head: str, metric: str) -> str:
    """One metric as (position in a [step, layer, head] array, value)."""
    return (
        f"SELECT (step::BIGINT * $layers + layer) * $heads + {head} AS place, "
        f"coalesce({metric}::FLOAT, 'nan'::FLOAT) AS value FROM {source(table)}"
    )


def head_summary(metric: str, aggregate: str) -> str:
    """One metric per layer and query head over a range of steps."""
    return (
        "SELECT layer::BIGINT * $heads + q_head AS place, "
        f"coalesce({AGGREGATES[aggregate]}({metric}::DOUBLE), 'nan'::DOUBLE)::FLOAT AS value "
        f"FROM {source('head_step')} WHERE step >= $start AND step < $stop GROUP BY layer, q_head"
    )


def head_summary_rollup(metric: str, aggregate: str) -> str:
    """As `head_summary` over the whole run, from the rollup."""
    value = f"{metric}_sum / nullif({metric}_n, 0)" if aggregate == "mean" else f"{metric}_{aggregate}"
    place = "layer::BIGINT * $heads + q_head AS place"
    return f"SELECT {place}, coalesce({value}, 'nan'::DOUBLE)::FLOAT AS value FROM {source('head_run')}"


def _head_table(expressions: dict[str, str], heads: str, kvs: str) -> str:
    columns = ", ".join(f"{sql} AS {name}" for name, sql in expressions.items())
    return (
        f"SELECT $uid AS run_uid, $method AS method, $model AS model, h.layer, h.q_head, h.kv_head, "
        f"h.n_steps::INTEGER AS n_steps, "
        f"{columns} FROM ({heads}) AS h LEFT JOIN ({kvs}) AS k ON k.layer = h.layer AND k.kv_head = h.kv_head "
        "ORDER BY h.layer, h.q_head"
    )


def head_table_columns() -> dict[str, str]:
    """Exported per-head statistics: name with unit -> expression over moments (h: query head, k: its KV head)."""
    columns: dict[str, str] = {}
    for c in HEAD_COLUMNS:
        name = UNITS.get(c, c)
        mean = f"h.{c}_sum / nullif(h.{c}_n, 0)"
        if c == "corrected":
            columns["n_corrected"] = f"h.{c}_sum"
            columns["n_decided"] = f"nullif(h.{c}_n, 0)"
            continue
        columns[f"{name}_mean"] = mean
        if c in ("qcos", "coverage", "selection_recall"):
            columns[f"{name}_min"] = f"h.{c}_min"
        if c in ("regret", "reference_regret"):
            columns[f"{name}_max"] = f"h.{c}_max"
        if c == "n_zoomed":
            columns[f"{name}_max"] = f"h.{c}_max"
        if c in ("n_zoomed", "zoom_asked", "zoom_refused"):
            columns[f"{name}_total"] = f"h.{c}_sum"
    columns["kv_head_h2d_bytes_total"] = "k.h2d_bytes_sum"
    columns["kv_head_d2h_bytes_total"] = "k.d2h_bytes_sum"
    columns["kv_head_blocking_bytes_total"] = "k.blocking_bytes_sum"
    columns["kv_head_resident_bytes_mean"] = "k.resident_bytes_sum / nullif(k.resident_bytes_n, 0)"
    columns["kv_head_recalled_tokens_total"] = "k.recalled_tokens_sum"
    columns["kv_head_reused_tokens_total"] = "k.reused_tokens_sum"
    columns["kv_head_similarity_mean"] = "k.similarity_sum / nullif(k.similarity_n, 0)"
    return columns


def head_table(heads: str, kvs: str) -> str:
    """Per-head statistics from two relations of moments."""
    return _head_table(head_table_columns(), heads, kvs)
