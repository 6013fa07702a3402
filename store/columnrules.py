"""What the columns of a sound trace hold: the rules that ``integrity`` checks once, so that readers may trust them.

A rule is a condition of one row. A row is damaged if the condition is false, and sound if it is NULL. Rules follow
from a column's type and name, so that a new column of a known name has rules without a line here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import duckdb

from kvlens.decisions import DECISION_KINDS, DECISION_UNITS
from kvlens.rows import CAUSES, EVENT_KINDS, MASS_COLUMNS, SPAN_STATES
from kvlens.store.schema import statements
from kvlens.store.sizes import Sizes
from kvlens.store.versions import ADDED

MOST_INTEGER = (1 << 62) - 1
"""so that sums of a few do not wrap"""
MOST_TEXT = 1 << 16
"""bytes of one text in a row"""
MOST_META = 16 << 20
"""bytes of one value of the meta, as of run.json"""
SHARE_TOLERANCE = 2e-3
"""shares are sums of float32 numbers, stored to 1e-4"""
SHARES = (
    *MASS_COLUMNS,
    "coverage",
    "selection_recall",
    "regret",
    "unread",
    "reference_regret",
    "reference_unread",
    "zoom_rate",
    "tail_mass",
    "tail_full",
    "tail_reference",
)
_COSINES = ("qcos", "similarity")
_WORDS = {
    ("span", "state"): SPAN_STATES,
    ("transfer", "direction"): ("h2d", "d2h"),
    ("transfer", "cause"): CAUSES,
    ("event", "kind"): EVENT_KINDS,
    ("decision", "kind"): DECISION_KINDS,
    ("decision", "unit"): DECISION_UNITS,
}
_RANGES = (("tok_start", "tok_end"), ("char_start", "char_end"), ("start_us", "end_us"))
"""the first is not above the second"""
_LISTS = {
    "oracle": (
        ("span", "full_mass", "mass", "unread", "reference_mass", "reference_unread"),
        ("lost_pos", "lost_mass"),
        ("reference_lost_pos", "reference_lost_mass"),
    ),
    "decision": (("refused_span",), ("missed_span",)),
}
"""columns whose lists have one length; of other tables: all lists"""
_GAPS = (("journal", "values"), ("kv_span", "score"), ("cut", "score"))
"""lists in which NULL is a number that was not recorded"""
_UNBOUNDED = (
    ("event", "value"),
    ("cut", "cut"),
    ("decision", "score"),
    ("decision", "cut"),
    ("self_check", "value"),
    ("span_head", "err_k"),
    ("span_head", "err_v"),
)
"""figures on a scale of a method's or a check's own, infinity included"""
INFINITE = (("token", "logprob"), ("loss", "kl"), ("loss", "ref_logprob"), ("loss", "logprob"), ("loss", "logit_diff"))
"""figures that are infinite where a token has no probability at all, as suppressed tokens have none"""
_OPEN = (("cut", "span"), ("cut", "pos"), ("cut", "rank"))
"""signed lists in which -1 is none"""
KEYS = {
    "meta": ("key",),
    "token": ("pos",),
    "step": ("step",),
    "span": ("span",),
    "span_head": ("span", "layer", "kv_head"),
    "head_step": ("step", "layer", "q_head"),
    "kv_step": ("step", "layer", "kv_head"),
    "head_span": ("step", "layer", "q_head"),
    "head_run": ("layer", "q_head"),
    "kv_run": ("layer", "kv_head"),
    "layer_step": ("step", "layer"),
    "kv_span": ("step", "layer", "kv_head"),
    "loss": ("step",),
    "oracle": ("step", "layer", "q_head"),
    "span_key": ("layer", "kv_head", "span"),
    "effect": ("step", "layer", "kv_head", "span"),
    "phase": ("step",),
}
"""columns no two rows of a table have in common"""


@dataclass(frozen=True)
class Column:
    """A column as the schema declares it."""

    kind: str
    """SQL type, ENUM without its values"""
    required: bool
    """NOT NULL"""


@dataclass(frozen=True)
class Rule:
    """One condition of a table's rows."""

    column: str
    fault: str
    """a key of kvlens.store.errors.FAULTS"""
    holds: str
    """SQL; NULL counts as true"""


def sound(table_rules: Sequence[Rule]) -> str:
    """Return one SQL condition for all rules of a table."""
    return " AND ".join(f"({rule.holds})" for rule in table_rules)


def bare(kind: str) -> str:
    """Return an SQL type without the values of an ENUM."""
    return "ENUM" if kind.startswith("ENUM") else kind


@cache
def _declared() -> dict[str, dict[str, Column]]:
    con = duckdb.connect(":memory:")
    try:
        for statement in statements():
            con.execute(statement)
        rows = con.execute(
            "SELECT table_name, column_name, data_type, NOT is_nullable FROM duckdb_columns() "
            "WHERE database_name = 'memory' AND schema_name = 'main' ORDER BY table_oid, column_index"
        ).fetchall()
    finally:
        con.close()
    tables: dict[str, dict[str, Column]] = {}
    for table, name, kind, required in rows:
        tables.setdefault(table, {})[name] = Column(bare(kind), required)
    return tables


def declared(version: int | None) -> dict[str, dict[str, Column]]:
    """Table -> column -> how a file of a schema declares it; None: of this schema."""
    later = [added for number, added in ADDED.items() if version is not None and number > version]
    absent = {table for added in later for table in added.tables}
    columns = {(table, name) for added in later for table, names in added.columns.items() for name in names}
    return {
        table: {name: column for name, column in columns_of_table.items() if (table, name) not in columns}
        for table, columns_of_table in _declared().items()
        if table not in absent
    }


def rules(table: str, columns: dict[str, Column], sizes: Sizes) -> Iterator[Rule]:
    """The rules of a table's rows."""
    limits = sizes.limits(table)
    lists = [name for name, column in columns.items() if column.kind.endswith("[]")]
    for name, column in columns.items():
        quoted = f'"{name}"'
        if column.required:
            yield Rule(name, "null", f"{quoted} IS NOT NULL")
        if name in lists:
            yield from _list_rules(table, name, column, limits)
        elif (table, name) in _UNBOUNDED:
            continue
        elif (table, name) in INFINITE:
            yield Rule(name, "not_finite", f"NOT isnan({quoted})")
        elif column.kind in ("FLOAT", "DOUBLE"):
            yield _figure_rule(name)
            if (table, name) == ("effect", "effect"):
                yield Rule(name, "out_of_range", "effect >= 0")
        elif column.kind == "VARCHAR":
            most = MOST_META if table == "meta" else MOST_TEXT
            yield Rule(name, "too_long", f"strlen({quoted}) <= {most}")
        elif name in limits or column.kind in ("BIGINT", "UBIGINT"):
            least, most = limits.get(name, (0, MOST_INTEGER))
            yield Rule(name, "out_of_range", f"{quoted} BETWEEN {least} AND {most}")
        if words := _WORDS.get((table, name)):
            yield Rule(name, "unknown_word", f"{quoted}::VARCHAR IN ({', '.join(repr(word) for word in words)})")
    if table == "token":  # the prompt's positions first, then one per step
        yield Rule("pos", "misplaced", f"pos = coalesce({sizes.prompt} + step::BIGINT, least(pos, {sizes.prompt - 1}))")
    if table == "head_step":
        yield Rule("kv_head", "wrong_group", f"q_head // {sizes.q_heads // sizes.kv_heads} = kv_head")
    if table == "decision":
        yield Rule("asked", "out_of_range", "asked::BIGINT = granted::BIGINT + refused + missed")
    for start, end in _RANGES:
        if start in columns and end in columns:
            yield Rule(end, "reversed", f"{start} <= {end}")
    for group in _LISTS.get(table, (tuple(lists),)):
        for name in group[1:]:
            if name in columns:
                yield Rule(name, "unequal_lists", f'len("{group[0]}") = len("{name}")')


def packed(key: tuple[str, ...], sizes: Sizes) -> str:
    """Return SQL for the key of a row as one number, which is faster to count than a tuple. Ids are inside their
    ranges."""
    if len(key) == 1:
        return key[0]
    radix = {"layer": sizes.layers, "q_head": sizes.q_heads, "kv_head": sizes.kv_heads, "span": sizes.spans}
    terms = [
        f"{name}::BIGINT * {math.prod(radix[later] for later in key[index + 1 :])}" for index, name in enumerate(key)
    ]
    return f"({' + '.join(terms)})"


def _figure_rule(name: str) -> Rule:
    if name in SHARES:
        return Rule(name, "out_of_range", f'"{name}" BETWEEN {-SHARE_TOLERANCE} AND {1 + SHARE_TOLERANCE}')
    if name in _COSINES:
        return Rule(name, "out_of_range", f'abs("{name}") <= {1 + SHARE_TOLERANCE}')
    return Rule(name, "not_finite", f'isfinite("{name}")')


def _list_rules(table: str, name: str, column: Column, limits: dict[str, tuple[int, int]]) -> Iterator[Rule]:
    quoted = f'"{name}"'
    if (table, name) in _GAPS:
        return
    yield Rule(name, "null", f"list_count({quoted}) = len({quoted})")
    if column.kind in ("FLOAT[]", "DOUBLE[]"):
        # the largest of floats is NaN where one is NaN
        yield Rule(name, "not_finite", f"isfinite(list_max({quoted})) AND isfinite(list_min({quoted}))")
    elif name in limits:
        least, most = limits[name]
        least = -1 if (table, name) in _OPEN else least
        yield Rule(name, "out_of_range", f"list_min({quoted}) >= {least} AND list_max({quoted}) <= {most}")
