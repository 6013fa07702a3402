"""Schema v12 of a run's trace file: one DuckDB file per run, written once, immutable afterwards.

The columns of the per-head tables come from ``kvlens.rows``, so the contract is stated in one place. A change there
changes the file: raise ``SCHEMA_VERSION`` with it (``tests/unit/test_store_schema.py`` compares the statements with a
fingerprint). No primary keys: they double the file. The writer enforces the order of steps, and a run is checked for
completeness at its end.
"""

from __future__ import annotations

from kvlens.rows import EVENT_KINDS, HEAD_COLUMNS, KV_COLUMNS, SCHEMA_VERSION

#: How ``head_span.mass`` is coded: mass = (code / 255)^2, so that small masses keep their relative precision.
MASS_CODEC = "sqrt_u8"
#: How the masses of ``oracle`` are coded: mass = (code / 65535)^2. Finer, as regret is the difference of two of them.
ORACLE_CODEC = "sqrt_u16"
ORACLE_CODES = 65_535
#: Span ids are USMALLINT.
MAX_SPAN = 65_535

TRACE_LEVELS = ("summary", "heads", "spans")

_HEAD_TYPES = {"n_zoomed": "USMALLINT", "corrected": "BOOLEAN", "zoom_asked": "USMALLINT", "zoom_refused": "USMALLINT"}
_KV_TYPES = {name: "UBIGINT" if name.endswith("_bytes") else "UINTEGER" for name in KV_COLUMNS} | {
    "similarity": "FLOAT"
}

#: Units of the columns whose stored name does not carry them; used wherever columns leave the store (exports,
#: summaries).
UNITS = {
    "entropy": "entropy_nats",
    "mass_mean": "mass_substitute",
    "n_zoomed": "n_zoomed_spans",
    "zoom_asked": "zoom_asked_spans",
    "zoom_refused": "zoom_refused_spans",
    "surprisal": "surprisal_nats",
    "mean_surprisal": "mean_surprisal_nats",
    "logprob": "logprob_nats",
    "next_entropy": "next_entropy_nats",
    "kl": "kl_nats",
    "ref_logprob": "ref_logprob_nats",
    "effect": "effect_logits",
    "lead": "lead_logits",
}


def head_type(column: str) -> str:
    """SQL type of a column of head_step."""
    return _HEAD_TYPES.get(column, "FLOAT")


def kv_type(column: str) -> str:
    """SQL type of a column of kv_step."""
    return _KV_TYPES[column]


def layer_type(column: str) -> str:
    """SQL type of a KV metric in layer_step: the sum over KV heads of a count, the mean of anything else."""
    return "FLOAT" if kv_type(column) == "FLOAT" else "UBIGINT"


def _columns(pairs: dict[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in pairs.items())


def moments(columns: tuple[str, ...]) -> dict[str, str]:
    """Four columns per metric from which mean, extremes and totals over the run can be had, and two runs' parts be
    merged."""
    parts = {"n": "UINTEGER", "sum": "DOUBLE", "min": "DOUBLE", "max": "DOUBLE"}
    return {f"{c}_{part}": kind for c in columns for part, kind in parts.items()}


#: NaN of a journal's vector or of a score is NULL inside the list.
JOURNAL = (
    "CREATE TABLE journal (step INTEGER NOT NULL, layer UTINYINT, kv_head UTINYINT, name VARCHAR NOT "
    "NULL, values FLOAT[] NOT NULL)"
)
KV_SPAN = (
    "CREATE TABLE kv_span (step UINTEGER NOT NULL, layer UTINYINT NOT NULL, kv_head UTINYINT NOT NULL, "
    "span USMALLINT[] NOT NULL, score FLOAT[] NOT NULL, chosen BOOLEAN[] NOT NULL, n_candidates UINTEGER NOT NULL)"
)
#: Rankings of tokens by which some were dropped for good; the lists have one entry per span that lost tokens.
CUT = (
    "CREATE TABLE cut (step INTEGER NOT NULL, layer UTINYINT, kv_head UTINYINT, candidates UINTEGER NOT NULL, "
    "kept UINTEGER NOT NULL, cut FLOAT, span INTEGER[] NOT NULL, dropped INTEGER[] NOT NULL, pos INTEGER[] NOT NULL, "
    "rank INTEGER[] NOT NULL, score FLOAT[] NOT NULL)"
)
LOSS = (
    "CREATE TABLE loss (step UINTEGER NOT NULL, ref_token INTEGER NOT NULL, ref_text VARCHAR NOT NULL, "
    "top_token INTEGER NOT NULL, "
    "top_text VARCHAR NOT NULL, agrees BOOLEAN NOT NULL, kl FLOAT, ref_logprob FLOAT, logprob FLOAT, logit_diff FLOAT, "
    "ref_rank UINTEGER NOT NULL)"
)
#: full_mass (own-query mass), mass, unread, reference_mass (full KV's own), reference_unread of each listed span,
#: lost_mass and reference_lost_mass of the positions in lost_pos and reference_lost_pos: coded as ORACLE_CODEC says.
ORACLE_LOST = {"unread": "USMALLINT[]", "lost_pos": "UINTEGER[]", "lost_mass": "USMALLINT[]"}
ORACLE_REFERENCE = {
    "reference_mass": "USMALLINT[]",
    "tail_reference": "FLOAT",
    "reference_unread": "USMALLINT[]",
    "reference_lost_pos": "UINTEGER[]",
    "reference_lost_mass": "USMALLINT[]",
}
ORACLE = (
    "CREATE TABLE oracle (step UINTEGER NOT NULL, layer UTINYINT NOT NULL, q_head UTINYINT NOT NULL, "
    "span USMALLINT[] NOT NULL, full_mass USMALLINT[] NOT NULL, mass USMALLINT[] NOT NULL, tail_full FLOAT NOT NULL, "
    f"{_columns(ORACLE_LOST | ORACLE_REFERENCE)})"
)
SPAN_KEY = (
    "CREATE TABLE span_key (layer UTINYINT NOT NULL, kv_head UTINYINT NOT NULL, span USMALLINT NOT NULL, form "
    "VARCHAR NOT NULL, "
    "key FLOAT[] NOT NULL)"
)
#: One row per triple; lead is the step's, the same in all of its rows.
EFFECT = (
    "CREATE TABLE effect (step UINTEGER NOT NULL, lead FLOAT NOT NULL, layer UTINYINT NOT NULL, "
    "kv_head UTINYINT NOT NULL, span USMALLINT NOT NULL, effect FLOAT NOT NULL)"
)

#: One row per decision; asked = granted + refused + missed. NULL layer, kv_head: all; NULL q_head: of the KV head.
DECISION = (
    "CREATE TABLE decision (step INTEGER NOT NULL, layer UTINYINT, kv_head UTINYINT, q_head UTINYINT, "
    "kind VARCHAR NOT NULL, unit VARCHAR NOT NULL, candidates UINTEGER, asked UINTEGER NOT NULL, "
    "granted UINTEGER NOT NULL, refused UINTEGER NOT NULL, missed UINTEGER NOT NULL, score FLOAT, cut FLOAT, "
    "refused_span USMALLINT[] NOT NULL, missed_span USMALLINT[] NOT NULL)"
)
#: How long a step's engine thread was in each phase; the parts add up to the step's dur_us.
PHASE_COLUMNS = ("score_us", "plan_us", "copy_us", "wait_us", "attend_us", "record_us", "rest_us")
PHASE = f"CREATE TABLE phase (step UINTEGER NOT NULL, {_columns(dict.fromkeys(PHASE_COLUMNS, 'UBIGINT'))})"


def statements() -> list[str]:
    """The statements that make an empty trace file."""
    kinds = ", ".join(f"'{kind}'" for kind in EVENT_KINDS)
    head = _columns({name: head_type(name) for name in HEAD_COLUMNS})
    kv = _columns({name: kv_type(name) for name in KV_COLUMNS})
    means = ", ".join(f"{name} FLOAT" for name in HEAD_COLUMNS)
    layer_kv = _columns({name: layer_type(name) for name in KV_COLUMNS})
    return [
        f"CREATE TYPE event_kind AS ENUM ({kinds})",
        "CREATE TABLE meta (key VARCHAR NOT NULL, value VARCHAR NOT NULL)",
        "CREATE TABLE run_state (status VARCHAR NOT NULL, last_step INTEGER NOT NULL, error VARCHAR)",
        "CREATE TABLE token (pos UINTEGER NOT NULL, step UINTEGER, token_id INTEGER NOT NULL, text VARCHAR NOT NULL, "
        "char_start UINTEGER, char_end UINTEGER, surprisal FLOAT, logprob FLOAT, next_entropy FLOAT, t_us UBIGINT)",
        "CREATE TABLE step (step UINTEGER NOT NULL, t_us UBIGINT NOT NULL, dur_us UBIGINT NOT NULL, "
        "wait_us UBIGINT, record_us UBIGINT, resident_bytes UBIGINT NOT NULL, "
        "peak_bytes UBIGINT NOT NULL, cold_bytes UBIGINT, h2d_bytes UBIGINT, d2h_bytes UBIGINT)",
        "CREATE TABLE span (span USMALLINT NOT NULL, kind VARCHAR NOT NULL, tok_start UINTEGER NOT NULL, "
        "tok_end UINTEGER NOT NULL, born_step INTEGER NOT NULL, died_step INTEGER, reason VARCHAR NOT NULL, "
        "mean_surprisal FLOAT, state VARCHAR NOT NULL)",
        "CREATE TABLE span_head (span USMALLINT NOT NULL, layer UTINYINT NOT NULL, kv_head UTINYINT NOT NULL, "
        "form VARCHAR NOT NULL, rank_k USMALLINT, rank_v USMALLINT, cold_bytes UBIGINT NOT NULL, err_k FLOAT, "
        "err_v FLOAT)",
        "CREATE TABLE head_step (step UINTEGER NOT NULL, layer UTINYINT NOT NULL, q_head UTINYINT NOT NULL, "
        f"kv_head UTINYINT NOT NULL, {head})",
        f"CREATE TABLE kv_step (step UINTEGER NOT NULL, layer UTINYINT NOT NULL, kv_head UTINYINT NOT NULL, {kv})",
        "CREATE TABLE head_span (step UINTEGER NOT NULL, layer UTINYINT NOT NULL, q_head UTINYINT NOT NULL, "
        "span USMALLINT[] NOT NULL, mass UTINYINT[] NOT NULL, tail_mass FLOAT)",
        "CREATE TABLE transfer (step INTEGER NOT NULL, layer UTINYINT NOT NULL, kv_head UTINYINT, span USMALLINT, "
        "direction VARCHAR NOT NULL, cause VARCHAR NOT NULL, bytes UBIGINT NOT NULL, start_us BIGINT NOT NULL, "
        "end_us BIGINT NOT NULL, wait_us BIGINT NOT NULL, blocking BOOLEAN NOT NULL)",
        "CREATE TABLE event (step INTEGER NOT NULL, layer UTINYINT, kv_head UTINYINT, q_head UTINYINT, "
        "kind event_kind NOT NULL, span USMALLINT, value FLOAT, after_attention BOOLEAN)",
        (
            "CREATE TABLE self_check (name VARCHAR NOT NULL, passed BOOLEAN NOT NULL, value DOUBLE, detail VARCHAR "
            "NOT NULL)"
        ),
        "CREATE TABLE head_run (layer UTINYINT NOT NULL, q_head UTINYINT NOT NULL, kv_head UTINYINT NOT NULL, "
        f"n_steps UINTEGER NOT NULL, {_columns(moments(HEAD_COLUMNS))})",
        "CREATE TABLE kv_run (layer UTINYINT NOT NULL, kv_head UTINYINT NOT NULL, n_steps UINTEGER NOT NULL, "
        f"{_columns(moments(KV_COLUMNS))})",
        f"CREATE TABLE layer_step (step UINTEGER NOT NULL, layer UTINYINT NOT NULL, {means}, {layer_kv})",
        JOURNAL,
        KV_SPAN,
        LOSS,
        ORACLE,
        SPAN_KEY,
        CUT,
        EFFECT,
        DECISION,
        PHASE,
    ]


#: Every table a reader may touch, hence the allow-list for identifiers.
TABLES = (
    "meta",
    "run_state",
    "token",
    "step",
    "span",
    "span_head",
    "head_step",
    "kv_step",
    "head_span",
    "transfer",
    "event",
    "self_check",
    "head_run",
    "kv_run",
    "layer_step",
    "journal",
    "kv_span",
    "loss",
    "oracle",
    "span_key",
    "cut",
    "effect",
    "decision",
    "phase",
)

__all__ = [
    "DECISION",
    "EFFECT",
    "JOURNAL",
    "KV_SPAN",
    "LOSS",
    "MASS_CODEC",
    "MAX_SPAN",
    "ORACLE",
    "ORACLE_CODEC",
    "ORACLE_CODES",
    "ORACLE_LOST",
    "ORACLE_REFERENCE",
    "PHASE",
    "PHASE_COLUMNS",
    "SCHEMA_VERSION",
    "SPAN_KEY",
    "TABLES",
    "TRACE_LEVELS",
    "UNITS",
    "head_type",
    "kv_type",
    "layer_type",
    "moments",
    "statements",
]
