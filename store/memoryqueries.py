"""The statements behind the Memory page. As in ``queries``: values are bound, and the run's file is attached read-only
as `run`."""

from __future__ import annotations

from kvlens.store.queries import TOP_SPANS

#: A copy for all KV heads of a layer stays one row here.
TRANSFERS_BETWEEN = """
    SELECT * FROM run.main.transfer WHERE step >= $start AND step < $stop ORDER BY start_us, rowid"""

_LAYER = "unnest(CASE WHEN layer IS NULL THEN range($layers) ELSE [layer::BIGINT] END) AS layer"
_KV_HEAD = "unnest(CASE WHEN head IS NULL THEN range($kv_heads) ELSE [head::BIGINT] END) AS kv_head"
_LAYERS = "layer >= $first_layer AND layer < $stop_layer"
#: Place in the order of all events: the step, then the order within it. Step -1 comes first.
_AT = "((step::BIGINT + 1) << 40)"

#: One row per copy to the device and KV head it was for, of the layers [first_layer, stop_layer), with what the top
#: spans of that KV head's query heads say of its use.
#:
#: The copy could be read at the steps [first_step, last_step]. A blocking copy: from its own step; one in the
#: background: from the event of its cause that tells of its arrival. Until the next event that takes the span from that
#: KV head, that event's step included, since the order within a step is not known to the attention; without one until
#: the run's end. Both widen the stretch and so find more use, never less. A zoom_out of a single query head does not
#: end it. verdict, the first that holds: 'no span' the copy names none; 'pending' it had not arrived when the run
#: ended; 'not recorded' no top spans at first_step; 'listed' some query head of the KV head listed the span among its
#: top spans at some step of the stretch, largest_mass is the most it gave; 'unlisted' none did: then each gave it at
#: most at_most at each of these steps, the smaller of the tail and of the least mass it listed (both rounded up by what
#: storing them rounds).
MOVED_SPANS = f"""
    WITH copy AS (
      SELECT id, step, layer, {_KV_HEAD}, span, cause, blocking,
        CASE WHEN head IS NULL THEN bytes // $kv_heads ELSE bytes END::BIGINT AS bytes
      FROM (SELECT *, rowid AS id, kv_head AS head FROM run.main.transfer WHERE direction = 'h2d' AND {_LAYERS})
    ), told AS (
      SELECT moment, step, kind, q_head, span, layer, {_KV_HEAD} FROM (SELECT * FROM (
        SELECT {_AT} + rowid AS moment, step, kind::VARCHAR AS kind, q_head, span, coalesce(kv_head,
          q_head // $group) AS head, {_LAYER}
        FROM run.main.event WHERE span IS NOT NULL
          AND kind IN ('zoom_in', 'recall', 'prefetch', 'correction', 'zoom_out', 'release', 'offload', 'evict'))
        WHERE {_LAYERS})
    ), came AS (
      SELECT moment, step, span, layer, kv_head, CASE kind WHEN 'zoom_in' THEN 'zoom' ELSE kind END AS cause
      FROM told WHERE kind IN ('zoom_in', 'recall', 'prefetch', 'correction')
    ), went AS (
      SELECT moment, step, span, layer, kv_head FROM told
      WHERE kind IN ('release', 'offload', 'evict') OR (kind = 'zoom_out' AND q_head IS NULL)
    ), arrived AS (
      SELECT copy.*, CASE WHEN copy.blocking THEN copy.step ELSE came.step END AS first_step,
        CASE WHEN copy.blocking AND came.step IS DISTINCT FROM copy.step THEN (copy.step::BIGINT + 1) << 40
          ELSE came.moment END AS moment
      FROM copy ASOF LEFT JOIN came ON came.layer = copy.layer AND came.kv_head = copy.kv_head AND came.span = copy.span
        AND came.cause = copy.cause AND came.moment >= (copy.step::BIGINT + 1) << 40
    ), stay AS (
      SELECT arrived.* EXCLUDE (moment), coalesce(went.step, $steps - 1) AS last_step
      FROM arrived ASOF LEFT JOIN went ON went.layer = arrived.layer AND went.kv_head = arrived.kv_head
        AND went.span = arrived.span
        AND went.moment > arrived.moment
    ), listing AS (
      SELECT step, layer, q_head // $group AS kv_head, span, max(mass) AS mass
      FROM ({TOP_SPANS.format(keys="step, layer, q_head", where=f"WHERE {_LAYERS}")}) GROUP BY ALL
    ), beyond AS (
      SELECT step, layer, q_head // $group AS kv_head,
        max(least(tail_mass + 0.00005, pow((list_min(mass) + 0.5) / 255.0, 2))) AS at_most
      FROM run.main.head_span WHERE {_LAYERS} GROUP BY step, layer, q_head // $group
    ), used AS (
      SELECT stay.id, stay.kv_head, max(listing.mass) AS mass FROM stay JOIN listing
        ON listing.layer = stay.layer AND listing.kv_head = stay.kv_head AND listing.span = stay.span
        AND listing.step >= stay.first_step AND listing.step <= stay.last_step
      GROUP BY stay.id, stay.kv_head
    ), judged AS (
      SELECT stay.*, used.mass AS largest_mass, CASE
        WHEN stay.span IS NULL THEN 'no span' WHEN stay.first_step IS NULL OR stay.first_step >= $steps THEN 'pending'
        WHEN beyond.step IS NULL THEN 'not recorded' WHEN used.mass IS NULL THEN 'unlisted' ELSE 'listed' END AS verdict
      FROM stay LEFT JOIN used ON used.id = stay.id AND used.kv_head = stay.kv_head
      LEFT JOIN beyond ON beyond.step = stay.first_step AND beyond.layer = stay.layer AND beyond.kv_head = stay.kv_head
    ), bound AS (
      SELECT judged.id, judged.kv_head, max(beyond.at_most) AS at_most FROM judged JOIN beyond
        ON beyond.layer = judged.layer AND beyond.kv_head = judged.kv_head
        AND beyond.step >= judged.first_step AND beyond.step <= judged.last_step
      WHERE judged.verdict = 'unlisted' GROUP BY judged.id, judged.kv_head
    )
    SELECT judged.id, judged.step, judged.layer, judged.kv_head, judged.span, judged.cause, judged.blocking,
      judged.bytes,
      judged.verdict,
      CASE WHEN verdict IN ('listed', 'unlisted') THEN judged.first_step END AS first_step,
      CASE WHEN verdict IN ('listed', 'unlisted') THEN judged.last_step END AS last_step,
      judged.largest_mass::DOUBLE AS largest_mass, bound.at_most::DOUBLE AS at_most
    FROM judged LEFT JOIN bound ON bound.id = judged.id AND bound.kv_head = judged.kv_head
    ORDER BY judged.id, judged.kv_head"""

#: What truncating the reuse cost: bytes to the device beyond the ideal, where the ideal is recorded. `cells`: (step,
#: layer, KV head).
TRUNCATION = """
    SELECT layer, kv_head, sum(h2d_bytes)::BIGINT AS moved_bytes, sum(ideal_bytes)::BIGINT AS ideal_bytes,
      count(*) AS cells
    FROM {kv_step} WHERE ideal_bytes IS NOT NULL AND h2d_bytes IS NOT NULL GROUP BY layer, kv_head
    ORDER BY layer, kv_head"""
