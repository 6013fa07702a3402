"""Every SQL statement of the reader. Values are bound parameters; the only identifiers put into text come from the
allow-lists of ``kvlens.rows`` through `column`. The run's file is attached read-only as `run`; what earlier schemas
lack is found by `source`."""

from __future__ import annotations

from dataclasses import fields

from kvlens.rows import HEAD_COLUMNS, KV_COLUMNS, SpanRow
from kvlens.store.schema import ORACLE_CODES
from kvlens.store.versions import source

TOKENS = "SELECT * FROM run.main.token ORDER BY pos"
SPANS = "SELECT * FROM run.main.span ORDER BY span"
_SPAN_COLUMNS = ", ".join(field.name for field in fields(SpanRow))
SPAN_ROWS = f"SELECT {_SPAN_COLUMNS} FROM run.main.span ORDER BY span"
PROMPT_TOKENS = "SELECT count(*) FROM run.main.token WHERE step IS NULL"
SPAN_ROW = f"SELECT {_SPAN_COLUMNS} FROM run.main.span WHERE span = $span"
STEPS = "SELECT * FROM run.main.step ORDER BY step"
SELF_CHECKS = "SELECT * FROM run.main.self_check ORDER BY rowid"
META = "SELECT key, value FROM run.main.meta"
LONG_META = "SELECT key FROM run.main.meta WHERE strlen(value) > $most"
HAS_ROLLUP = f"SELECT count(*) FROM {source('head_run')}"
STATE = "SELECT status, last_step, error FROM run.main.run_state"
TABLES = "SELECT table_name FROM duckdb_tables() WHERE database_name = 'run' AND schema_name = 'main'"
MORE_THAN_TABLES = """
    SELECT view_name FROM duckdb_views() WHERE database_name = 'run' AND NOT internal
    UNION ALL SELECT function_name FROM duckdb_functions() WHERE database_name = 'run' AND NOT internal"""

SPAN_HEADS = """
    SELECT * FROM run.main.span_head
    WHERE ($layer IS NULL OR layer = $layer) AND ($kv_head IS NULL OR kv_head = $kv_head)
    ORDER BY span, layer, kv_head"""

#: A row without a KV head (one copy or event for all of a layer's heads) belongs to every head, one without a layer to
#: every layer.
TRANSFERS = """
    SELECT * FROM run.main.transfer
    WHERE ($step IS NULL OR step = $step) AND ($layer IS NULL OR layer = $layer)
      AND ($kv_head IS NULL OR kv_head IS NULL OR kv_head = $kv_head)
    ORDER BY step, start_us, rowid"""

ALL_TRANSFERS = "SELECT * FROM run.main.transfer ORDER BY step, start_us, rowid"

_EVENT = "step, layer, kv_head, q_head, kind::VARCHAR AS kind, span, value, after_attention"

ALL_EVENTS = f"SELECT {_EVENT} FROM {source('event')} ORDER BY step, place"

EVENTS = f"""
    SELECT {_EVENT} FROM {source("event")}
    WHERE ($step IS NULL OR step = $step) AND ($layer IS NULL OR layer IS NULL OR layer = $layer)
      AND ($kv_head IS NULL OR coalesce(kv_head, q_head // $group, $kv_head) = $kv_head)
    ORDER BY step, place"""

TELLS_MOMENTS = f"SELECT count(*) = count(after_attention) FROM {source('event')}"

#: Copies may overlap, so the sum of their durations can exceed the step's. Lines of one copy have its times, and it
#: counts once: copies of a direction come one after the other, so no two of them have both times in common, or they
#: took no microsecond.
TRANSFER_TIMES = """
    SELECT step, direction, cause, sum(bytes)::BIGINT AS bytes, coalesce(sum(bytes) FILTER (blocking),
      0)::BIGINT AS blocking_bytes,
      len(list_distinct(list([start_us, end_us]))) AS n,
      list_sum(list_transform(list_distinct(list([start_us, end_us])), lambda x: x[2] - x[1]))::BIGINT AS moving_us,
      sum(wait_us)::BIGINT AS wait_us
    FROM run.main.transfer GROUP BY step, direction, cause ORDER BY step, direction, cause"""

_JOURNAL = "layer, kv_head, name"

#: NULL inside a vector is handed back as NaN.
JOURNAL = f"""
    SELECT step, {_JOURNAL}, list_transform("values", lambda x: coalesce(x, 'nan'::FLOAT)) AS "values"
      FROM {source("journal")}
    WHERE $name IS NULL OR name = $name ORDER BY step, layer NULLS FIRST, kv_head NULLS FIRST, name"""

JOURNAL_NAMES = f"SELECT DISTINCT name FROM {source('journal')} ORDER BY name"

#: One row per number of a vector, index from 0, as CSV has no lists.
CUTS = f"""
    SELECT step, layer, kv_head, candidates, kept, cut, unnest(span) AS span, unnest(dropped) AS dropped,
      unnest(pos) AS pos, unnest(rank) AS rank, unnest(score) AS score FROM {source("cut")}"""

ANY_CUT = f"SELECT 1 FROM {source('cut')} LIMIT 1"

CUTS_OF_HEAD = f"""
    SELECT step, candidates, kept, cut, span, dropped, pos, rank, score FROM ({CUTS})
    WHERE step <= $step AND (layer IS NULL OR layer = $layer) AND (kv_head IS NULL OR kv_head = $kv_head)
      AND span = $span ORDER BY step"""

CUTS_OF_SPAN = f"""
    SELECT layer, kv_head, sum(dropped)::BIGINT AS dropped FROM ({CUTS})
    WHERE step <= $step AND span = $span GROUP BY layer, kv_head"""

ALL_CUTS = f"SELECT * FROM ({CUTS}) ORDER BY step, layer NULLS FIRST, kv_head NULLS FIRST, span"

DECISIONS = f"""
    SELECT step, layer, kv_head, q_head, kind, unit, candidates, asked, granted, refused, missed, score, cut,
      refused_span, missed_span FROM {source("decision")}
    WHERE ($kind IS NULL OR kind = $kind) AND ($step IS NULL OR step = $step)
      AND ($layer IS NULL OR layer IS NULL OR layer = $layer)
      AND ($kv_head IS NULL OR kv_head IS NULL OR kv_head = $kv_head)
    ORDER BY step, layer NULLS FIRST, kv_head NULLS FIRST, q_head NULLS FIRST, kind"""

DECISION_COUNTS = f"""
    SELECT kind, unit, count(*) AS decisions, sum(asked)::BIGINT AS asked, sum(granted)::BIGINT AS granted,
      sum(refused)::BIGINT AS refused, sum(missed)::BIGINT AS missed
    FROM {source("decision")} GROUP BY kind, unit ORDER BY kind, unit"""

#: Span ids by spaces, as CSV has no lists.
ALL_DECISIONS = f"""
    SELECT step, layer, kv_head, q_head, kind, unit, candidates, asked, granted, refused, missed, score, cut,
      array_to_string(refused_span, ' ') AS refused_span, array_to_string(missed_span, ' ') AS missed_span
    FROM {source("decision")} ORDER BY step, layer NULLS FIRST, kv_head NULLS FIRST, q_head NULLS FIRST, kind"""

ALL_PHASES = f"SELECT * FROM {source('phase')} ORDER BY step"

KV_STEPS = (
    f"SELECT step, layer, kv_head, {', '.join(KV_COLUMNS)} FROM {source('kv_step')} ORDER BY step, layer, kv_head"
)

ALL_META = "SELECT key, value FROM run.main.meta ORDER BY key"

ALL_JOURNAL = f"""
    SELECT step, {_JOURNAL}, (unnest(generate_series(1, len("values"))) - 1)::INTEGER AS index,
      unnest("values") AS value
    FROM {source("journal")} ORDER BY step, layer NULLS FIRST, kv_head NULLS FIRST, name, index"""

_RANKED = (
    "unnest(span) AS span, unnest(score) AS score, unnest(chosen) AS chosen, unnest(generate_series(1, "
    "len(span)))::INTEGER AS rank"
)

SCORES = f"""
    SELECT {_RANKED} FROM {source("kv_span")}
    WHERE step = $step AND layer = $layer AND kv_head = $kv_head ORDER BY rank"""

CANDIDATES = (
    f"SELECT n_candidates FROM {source('kv_span')} WHERE step = $step AND layer = $layer AND kv_head = $kv_head"
)

ANY_SCORE = f"SELECT 1 FROM {source('kv_span')} LIMIT 1"

ALL_SCORES = (
    f"SELECT step, layer, kv_head, {_RANKED}, n_candidates FROM {source('kv_span')} ORDER BY step, layer, kv_head, rank"
)

#: What happened to spans of KV heads, in the order it happened; `owner`: the KV head, NULL: all; `after`: when the step
#: had attended. A counterfactual that holds some of a span's tokens moves nothing of the method's.
_STATE_EVENTS = f"""
    SELECT coalesce(kv_head, q_head // $group) AS owner, step, span, kind::VARCHAR AS kind, q_head,
      coalesce(after_attention, false) AS after
    FROM {source("event")}
    WHERE span IS NOT NULL AND (layer IS NULL OR layer = $layer)
      AND coalesce(kv_head, q_head // $group, $first) BETWEEN $first AND $last
      AND kind::VARCHAR IN ('zoom_in', 'zoom_out', 'recall', 'prefetch', 'correction', 'offload', 'evict',
        'thin', 'release', 'hold', 'kept', 'part', 'rewrite')
      AND (kind::VARCHAR <> 'hold' OR value IS NULL) {{until}}
    ORDER BY step, place"""

#: `step` is the first one that attends under what the event made of the span. {which}: ONE_OF_TOLD or nothing.
ALL_STATE_EVENTS = f"""
    SELECT owner, step + after::INTEGER AS step, span, kind, q_head
    FROM ({_STATE_EVENTS.format(until="{which}")}) WHERE step + after::INTEGER < $steps"""

STATE_EVENTS = f"""
    SELECT span, kind, q_head, after AND step = $step FROM ({_STATE_EVENTS.format(until="AND step <= $step")})"""

SPANS_EVER = """
    SELECT head.kv_head, span.span, span.state, span_head.form, span.born_step
    FROM range($first, $last + 1) AS head(kv_head) CROSS JOIN run.main.span AS span
    LEFT JOIN run.main.span_head AS span_head
      ON span_head.span = span.span AND span_head.layer = $layer AND span_head.kv_head = head.kv_head
    WHERE true {which} ORDER BY head.kv_head, span.span"""

#: These restrict SPANS_EVER and ALL_STATE_EVENTS to the spans in $spans.
ONE_OF_EVER = "AND span.span IN (SELECT unnest($spans))"
ONE_OF_TOLD = "AND span IN (SELECT unnest($spans))"

SPANS_ALIVE = """
    SELECT span.span, span.state, span_head.form FROM run.main.span AS span
    LEFT JOIN run.main.span_head AS span_head
      ON span_head.span = span.span AND span_head.layer = $layer AND span_head.kv_head = $kv_head
    WHERE span.born_step <= $step AND (span.died_step IS NULL OR span.died_step > $step)
    ORDER BY span.span"""

_MASS = "(code / 255.0) * (code / 255.0)"

#: The top spans of query heads. A span that full attention listed too has its mass there in more digits (oracle).
TOP_SPANS = f"""
    SELECT {{keys}}, top.span AS span, coalesce(fine.mass, {_MASS})::FLOAT AS mass FROM (
      SELECT step, layer, q_head, unnest(span) AS span, unnest(mass) AS code FROM run.main.head_span {{where}}) AS top
    LEFT JOIN (
      SELECT step, layer, q_head, span, pow(code / {ORACLE_CODES}.0, 2) AS mass FROM (
        SELECT step, layer, q_head, unnest(span) AS span, unnest(mass) AS code FROM {source("oracle")} {{where}})
    ) AS fine USING (step, layer, q_head, span)"""

HEAD_SPANS = f"""
    SELECT top.span, top.mass, span.kind, span.tok_start, span.tok_end, span.reason FROM (
      {TOP_SPANS.format(keys="step", where="WHERE step = $step AND layer = $layer AND q_head = $q_head")}) AS top
    LEFT JOIN run.main.span AS span ON span.span = top.span
    ORDER BY top.mass DESC, top.span"""

TAIL_MASS = "SELECT tail_mass FROM run.main.head_span WHERE step = $step AND layer = $layer AND q_head = $q_head"

SPAN_MASS = f"""
    SELECT step, span, mass FROM ({TOP_SPANS.format(keys="step", where="WHERE layer = $layer AND q_head = $q_head")})
    ORDER BY step, span"""

SPAN_MASS_OF_LAYER = f"""
    SELECT q_head, step, span, mass FROM ({TOP_SPANS.format(keys="q_head, step", where="WHERE layer = $layer")})
    ORDER BY q_head, step, span"""

#: A head that did not list a span in its top spans counts as 0 there, so the mean is a lower bound.
MEAN_SPAN_MASS = f"""
    SELECT span, (sum(mass::DOUBLE) / $rows)::FLOAT AS mass
    FROM ({TOP_SPANS.format(keys="step", where="WHERE step >= $start AND step < $stop")})
    GROUP BY span ORDER BY span"""

MEAN_SPAN_MASS_BY_STEP = f"""
    SELECT step, span, (sum(mass::DOUBLE) / $rows)::FLOAT AS mass FROM ({TOP_SPANS.format(keys="step", where="")})
    GROUP BY step, span ORDER BY step, span"""

ALL_SPAN_MASS = f"""
    SELECT step, layer, q_head, span, mass FROM ({TOP_SPANS.format(keys="step, layer, q_head", where="")})
    ORDER BY step, layer, q_head, mass DESC, span"""

HEAD_STEPS = f"SELECT {{columns}} FROM {source('head_step')} ORDER BY step, layer, q_head"

HEAD_TIMELINE = f"""
    SELECT step, {", ".join(f"h.{c}" for c in HEAD_COLUMNS)}, {", ".join(f"k.{c}" for c in KV_COLUMNS)}
    FROM (SELECT * FROM {source("head_step")} WHERE layer = $layer AND q_head = $q_head) AS h
    LEFT JOIN (SELECT * FROM {source("kv_step")} WHERE layer = $layer AND kv_head = $kv_head) AS k USING (step)
    ORDER BY step"""
