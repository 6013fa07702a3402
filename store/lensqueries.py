"""The statements behind what a run lost against full KV. As in ``queries``: values are bound, tables found by
`source`."""

from __future__ import annotations

from kvlens.store.schema import ORACLE_CODES
from kvlens.store.versions import source

LOSS = f"SELECT * FROM {source('loss')} ORDER BY step"


def _mass(code: str) -> str:
    """A stored code as a mass. Its root is exact in double precision."""
    return f"pow({code} / {ORACLE_CODES}.0, 2)"


#: One row per listed span, with masses; `{keys}` and `{where}` pick columns and rows of the table. `full`, `regret` and
#: `unread` are of full KV's own mass where it was recorded, else of the own-query mass.
_LISTED = f"""
    SELECT *, CASE WHEN reference IS NULL THEN own_regret ELSE least(greatest(reference - mass, 0),
      greatest(reference_unread, reference * own_regret / greatest(own, 1e-12))) END AS regret FROM (
    SELECT *, greatest(own - mass, 0) AS own_regret FROM (
      SELECT *, coalesce(reference, own) AS full_mass,
        CASE WHEN reference IS NULL THEN own_unread ELSE reference_unread END AS unread FROM (
        SELECT * EXCLUDE (full_code, code, unread_code, reference_code, reference_unread_code),
          {_mass("full_code")} AS own, {_mass("code")} AS mass, {_mass("unread_code")} AS own_unread,
          {_mass("reference_code")} AS reference, {_mass("reference_unread_code")} AS reference_unread FROM (
          SELECT {{keys}}, unnest(span) AS span, unnest(full_mass) AS full_code, unnest(mass) AS code,
            unnest(unread) AS unread_code, unnest(reference_mass) AS reference_code,
            unnest(reference_unread) AS reference_unread_code
          FROM {source("oracle")} {{where}}))))"""

_HEAD = "WHERE step = $step AND layer = $layer AND q_head = $q_head"
_ALWAYS = "WHERE layer = $layer AND q_head = $q_head"
_SHARES = """full_mass::FLOAT AS "full", mass::FLOAT AS mass, regret::FLOAT AS regret, unread::FLOAT AS unread,
    own::FLOAT AS own, own_regret::FLOAT AS own_regret, own_unread::FLOAT AS own_unread,
    reference::FLOAT AS reference"""
_TAIL = "coalesce(tail_reference, tail_full)"

ORACLE = f"""
    SELECT listed.span, {_SHARES}, span.kind, span.tok_start, span.tok_end, span.reason
    FROM ({_LISTED.format(keys="step", where=_HEAD)}) AS listed
      LEFT JOIN run.main.span AS span ON span.span = listed.span
    ORDER BY full_mass DESC, listed.span"""

HAS_REFERENCE = f"SELECT count(reference_mass) > 0 FROM {source('oracle')}"

ORACLE_TAIL = f"SELECT {_TAIL} FROM {source('oracle')} {_HEAD}"

ORACLE_STEP = f"""
    SELECT layer, q_head, q_head // $group AS kv_head, span, {_SHARES}
    FROM ({_LISTED.format(keys="layer, q_head", where="WHERE step = $step")})
    ORDER BY layer, q_head, full_mass DESC, span"""

ORACLE_HEAD = f"""
    SELECT step, span, {_SHARES} FROM ({_LISTED.format(keys="step", where=_ALWAYS)})
    ORDER BY step, full_mass DESC, span"""

ORACLE_LAYER = f"""
    SELECT q_head, step, span, {_SHARES} FROM ({_LISTED.format(keys="q_head, step", where="WHERE layer = $layer")})
    ORDER BY q_head, step, full_mass DESC, span"""

ORACLE_TAILS_OF_LAYER = (
    f"SELECT q_head, step, {_TAIL} AS tail_full FROM {source('oracle')} WHERE layer = $layer ORDER BY q_head, step"
)

ORACLE_TAILS = f"SELECT step, {_TAIL} AS tail_full FROM {source('oracle')} {_ALWAYS} ORDER BY step"

#: Masses on some spans together, of every query head and step that was sampled; what is not listed counts as 0.
MASS_ON_SPANS = f"""
    SELECT (step::BIGINT * $layers + layer) * $heads + q_head AS place, coalesce(listed."full", 0)::FLOAT AS "full",
      coalesce(listed.mass, 0)::FLOAT AS mass
    FROM {source("oracle")} AS sampled LEFT JOIN (
      SELECT step, layer, q_head, sum(full_mass) AS "full", sum(mass) AS mass
      FROM ({_LISTED.format(keys="step, layer, q_head", where="")})
      WHERE list_contains(string_split($spans, ' '), span::VARCHAR)
      GROUP BY step, layer, q_head) AS listed USING (step, layer, q_head)
    WHERE NOT isnan(coalesce(sampled.tail_reference, sampled.tail_full))"""

#: What no head could attend of what it wanted most: of every step and span the head that lost most.
HOLES = f"""
    SELECT step, span, max(lost)::FLOAT AS mass, arg_max(layer, lost) AS layer, arg_max(q_head, lost) AS q_head FROM (
      SELECT step, layer, q_head, span, coalesce(unread, regret) AS lost
      FROM ({_LISTED.format(keys="step, layer, q_head", where="")}))
    WHERE lost >= $least GROUP BY step, span ORDER BY step, span"""

#: What a query head attended in some form and less than full KV did, of spans that begin as summaries.
SUMMARY_LOSSES = f"""
    SELECT step, layer, q_head, listed.span AS span, regret::FLOAT AS mass
    FROM ({_LISTED.format(keys="step, layer, q_head", where="")}) AS listed
      JOIN run.main.span AS span ON span.span = listed.span AND span.state = 'coarse'
    WHERE regret >= $least AND coalesce(unread, regret) < $least ORDER BY layer, q_head, step, listed.span"""

#: A small effect is stored as 0.
_EFFECTS = f"SELECT layer, kv_head, span, effect, lead FROM {source('effect')} WHERE step = $step AND effect > 0"

EFFECTS = f"SELECT * FROM ({_EFFECTS}) ORDER BY effect DESC, layer, kv_head, span"

ALL_EFFECTS = f"SELECT * FROM {source('effect')} ORDER BY step, effect DESC, layer, kv_head, span"

#: Means over the query heads of a group; one that did not list a span counts as 0 there, so they are lower bounds.
TRIPLES = f"""
    SELECT layer, kv_head, span, coalesce("full", 0) AS "full", coalesce(mass, 0) AS mass, coalesce(own, 0) AS own,
      if("full" IS NULL AND (SELECT count(reference_mass) FROM {source("oracle")}) > 0, 0, reference) AS reference,
      coalesce(regret, 0) AS regret, if("full" IS NULL, 0, unread) AS unread,
      if("full" IS NULL, 0, hidden) AS hidden, effect FROM (
      SELECT layer, q_head // $group AS kv_head, span, (sum(full_mass) / $group)::FLOAT AS "full",
        (sum(mass) / $group)::FLOAT AS mass, (sum(own) / $group)::FLOAT AS own,
        (sum(reference) / $group)::FLOAT AS reference,
        (sum(regret) / $group)::FLOAT AS regret, (sum(unread) / $group)::FLOAT AS unread,
        (sum(greatest(unread - regret, 0)) / $group)::FLOAT AS hidden, sum(regret) AS total
      FROM ({_LISTED.format(keys="layer, q_head", where="WHERE step = $step")})
      GROUP BY layer, q_head // $group, span) AS listed
    FULL JOIN ({_EFFECTS}) AS stored USING (layer, kv_head, span)
    ORDER BY coalesce(total, 0) DESC, layer, kv_head, span"""

#: Means over all sampled query heads and steps; a span that one of them did not list counts as 0 there.
MEAN_FULL = f"""
    SELECT span, (sum(own) / (SELECT count(*) FROM {source("oracle")}))::FLOAT AS own,
      (sum(reference) / (SELECT count(reference_mass) FROM {source("oracle")}))::FLOAT AS reference
    FROM ({_LISTED.format(keys="step", where="")}) GROUP BY span ORDER BY span"""

ALL_ORACLE = f"""
    SELECT step, layer, q_head, span, own::FLOAT AS own_query_mass, reference::FLOAT AS reference_mass,
      mass::FLOAT AS mass, own_regret::FLOAT AS own_query_regret,
      CASE WHEN reference IS NOT NULL THEN regret END::FLOAT AS reference_regret, own_unread::FLOAT AS own_query_unread,
      reference_unread::FLOAT AS reference_unread
    FROM ({_LISTED.format(keys="step, layer, q_head", where="")}) ORDER BY step, layer, q_head, full_mass DESC, span"""

_LOST_LISTS = f"""
    SELECT step, layer, q_head, pos, ({_mass("code")})::FLOAT AS mass FROM (
      SELECT step, layer, q_head, unnest({{pos}}) AS pos, unnest({{mass}}) AS code
      FROM {source("oracle")} {{where}})"""

#: By full KV's own mass where it was recorded, else by the own-query mass.
_LOST = _LOST_LISTS.format(
    pos="coalesce(reference_lost_pos, lost_pos)", mass="coalesce(reference_lost_mass, lost_mass)", where="{where}"
)

LOST_TOKENS = f"""
    SELECT layer, q_head, q_head // $group AS kv_head, pos, mass FROM ({_LOST.format(where="WHERE step = $step")})
    ORDER BY layer, q_head, mass DESC, pos"""

LOST_BY_HEAD = f"SELECT step, pos, mass FROM ({_LOST.format(where=_ALWAYS)}) ORDER BY step, mass DESC, pos"

LOST_IN_LAYER = f"""
    SELECT q_head, step, pos, mass FROM ({_LOST.format(where="WHERE layer = $layer")})
    ORDER BY q_head, step, mass DESC, pos"""

_OWN_LOST = _LOST_LISTS.format(pos="lost_pos", mass="lost_mass", where="")
_REFERENCE_LOST = _LOST_LISTS.format(pos="reference_lost_pos", mass="reference_lost_mass", where="")
ALL_LOST_TOKENS = f"""
    SELECT step, layer, q_head, query, pos, mass FROM (
      SELECT *, 'own' AS query FROM ({_OWN_LOST}) UNION ALL SELECT *, 'reference' AS query FROM ({_REFERENCE_LOST}))
    ORDER BY step, layer, q_head, query, mass DESC, pos"""

REGRET_BY_STEP = f"""
    SELECT step, avg(missed::DOUBLE)::FLOAT AS regret_mean, max(missed) AS regret_max,
      first(layer ORDER BY missed DESC, layer, q_head) AS layer,
      first(q_head ORDER BY missed DESC, layer, q_head) AS q_head
    FROM (SELECT step, layer, q_head, coalesce(reference_regret, regret) AS missed FROM {source("head_step")})
    WHERE missed IS NOT NULL GROUP BY step ORDER BY step"""

SPAN_KEYS = (
    f"SELECT span, form, key FROM {source('span_key')} WHERE layer = $layer AND kv_head = $kv_head ORDER BY span"
)

#: One row per number of a key, index from 0, as CSV has no lists.
ALL_SPAN_KEYS = f"""
    SELECT layer, kv_head, span, form, (unnest(generate_series(1, len(key))) - 1)::INTEGER AS index,
      unnest(key) AS value
    FROM {source("span_key")} ORDER BY layer, kv_head, span, index"""
