"""The tables of the open trace format: one declaration, from which the checker, the reader and docs/trace-format.md are
made.

A table has the rows and columns of the stored trace (docs/trace-schema.md) where both have it. Masses are plain shares.
"""

from __future__ import annotations

from kvlens.rows import CAUSES, EVENT_KINDS, HEAD_COLUMNS, KV_COLUMNS, SPAN_STATES
from kvlens.tables.column import BYTES, ID, NATS, SHARE, US
from kvlens.tables.dictionary import DECISIONS, EVENTS, SPANS, STEPS, TRANSFERS
from kvlens.trace.columns import FLAG, FLAGS, FLOAT, FLOATS, INTEGER, INTEGERS, TEXT, Column, Table
from kvlens.trace.documented import decision_column, head_column, id_column, kv_column, mass_column, step_column
from kvlens.trace.latertables import KV_HEAD, LATER, LAYER, STEP

_Q_HEAD = id_column("query head within the layer")


TABLES: dict[str, Table] = {
    "token": Table(
        "position",
        "the text of the run",
        {
            "pos": id_column("position; the prompt's first, then one per step"),
            "token_id": Column(INTEGER, "of the model's vocabulary", ID, True),
            "text": Column(TEXT, "the token's text", required=True),
            "step": id_column("step that chose the token, or was fed it; NULL: a token of the prompt", False),
            "char_start": Column(INTEGER, "first character in the prompt's text", "character"),
            "char_end": Column(INTEGER, "character behind the last one", "character"),
            "surprisal": Column(FLOAT, "of a token of the prompt", NATS),
            "logprob": Column(FLOAT, STEPS["logprob_nats"].meaning, NATS, infinite=True),
            "next_entropy": Column(FLOAT, STEPS["next_entropy_nats"].meaning, NATS),
        },
        ("pos",),
        required=True,
    ),
    "step": Table(
        "decode step",
        "time and bytes of every step",
        {
            "step": STEP,
            "t_us": step_column("t_us", True),
            "dur_us": step_column("dur_us", True),
            "resident_bytes": step_column("resident_bytes", True),
            "peak_bytes": step_column("peak_bytes", True),
            "cold_bytes": step_column("cold_bytes"),
            "wait_us": step_column("wait_us"),
            "record_us": step_column("record_us"),
        },
        ("step",),
        required=True,
    ),
    "span": Table(
        "span: a page, chunk, sentence or cluster",
        "the map of the context",
        {
            "span": id_column("number of the span, 0 to 65535"),
            "tok_start": Column(INTEGER, SPANS["tok_start"].meaning, "position", True),
            "tok_end": Column(INTEGER, SPANS["tok_end"].meaning, "position", True),
            "kind": Column(TEXT, f"{SPANS['kind'].meaning}; NULL: span"),
            "state": Column(TEXT, "state at birth; NULL: resident", words=SPAN_STATES),
            "born_step": Column(INTEGER, f"{SPANS['born_step'].meaning}; NULL: -1", "step", least=-1),
            "reason": Column(TEXT, SPANS["reason"].meaning),
            "mean_surprisal": Column(FLOAT, "mean over the span's tokens", NATS),
        },
        ("span",),
        required=True,
    ),
    "head_step": Table(
        "step, layer and query head",
        "Heads: where attention went, and what it did not read",
        {"step": STEP, "layer": LAYER, "q_head": _Q_HEAD, **{name: head_column(name) for name in HEAD_COLUMNS}},
        ("step", "layer", "q_head"),
        required=True,
    ),
    "kv_step": Table(
        "step, layer and KV head",
        "Memory and Heads: bytes moved, read and held by KV head",
        {"step": STEP, "layer": LAYER, "kv_head": KV_HEAD, **{name: kv_column(name) for name in KV_COLUMNS}},
        ("step", "layer", "kv_head"),
    ),
    "head_span": Table(
        "step, layer and query head",
        "Replay and Spans: the spans that a query head attended most",
        {
            "step": STEP,
            "layer": LAYER,
            "q_head": _Q_HEAD,
            "span": Column(INTEGERS, "spans with most mass", ID, True),
            "mass": mass_column("the method's attention mass on each", True),
            "tail_mass": Column(FLOAT, "mass on all other spans", SHARE, least=0, most=1),
        },
        ("step", "layer", "q_head"),
        equal_lists=(("span", "mass"),),
    ),
    "event": Table(
        "event of a span",
        "Replay: the state of every span by step (recalled, released, evicted)",
        {
            "step": id_column(EVENTS["step"].meaning),
            "kind": Column(TEXT, "what happened", required=True, words=EVENT_KINDS),
            **{name: id_column(EVENTS[name].meaning, False) for name in ("layer", "kv_head", "q_head", "span")},
            "value": Column(FLOAT, EVENTS["value"].meaning, infinite=True),
            "after_attention": Column(FLAG, EVENTS["after_attention"].meaning),
        },
        between=True,
    ),
    "transfer": Table(
        "copy between device and host",
        "Memory: copies, their times and what waited for them",
        {
            "step": id_column(TRANSFERS["step"].meaning),
            "layer": LAYER,
            "kv_head": id_column(TRANSFERS["kv_head"].meaning, False),
            "span": id_column(TRANSFERS["span"].meaning, False),
            "direction": Column(TEXT, TRANSFERS["direction"].meaning, required=True, words=("h2d", "d2h")),
            "cause": Column(TEXT, "why", required=True, words=CAUSES),
            "bytes": Column(INTEGER, TRANSFERS["bytes"].meaning, BYTES, True),
            "start_us": Column(INTEGER, TRANSFERS["start_us"].meaning, US, True),
            "end_us": Column(INTEGER, TRANSFERS["end_us"].meaning, US, True),
            "wait_us": Column(INTEGER, TRANSFERS["wait_us"].meaning, US, True),
            "blocking": Column(FLAG, TRANSFERS["blocking"].meaning, required=True),
        },
        between=True,
    ),
    "span_head": Table(
        "span, layer and KV head in another form",
        "Spans: ranks, errors and bytes of what lies in host memory or packed",
        {
            "span": id_column("the span"),
            "layer": LAYER,
            "kv_head": KV_HEAD,
            "form": Column(TEXT, "raw or factors in host memory; quantised: packed on the device", required=True),
            "rank_k": Column(INTEGER, "rank of the keys' factors; NULL: raw", "rank", most=65535),
            "rank_v": Column(INTEGER, "rank of the values' factors; NULL: raw", "rank", most=65535),
            "cold_bytes": Column(INTEGER, "bytes of the form", BYTES, True),
            "err_k": Column(FLOAT, "relative Frobenius error of the keys; NULL: raw", infinite=True),
            "err_v": Column(FLOAT, "relative Frobenius error of the values; NULL: raw", infinite=True),
        },
        ("span", "layer", "kv_head"),
    ),
    "kv_span": Table(
        "step, layer and KV head that ranked spans",
        "Replay: the method's own ranking, its rank and cut of a missed span",
        {
            "step": STEP,
            "layer": LAYER,
            "kv_head": KV_HEAD,
            "span": Column(INTEGERS, "the best candidates, best first", ID, True),
            "score": Column(FLOATS, "score of each, on the method's own scale; NULL: none", required=True),
            "chosen": Column(FLAGS, "True: the method took the candidate", required=True),
            "n_candidates": Column(INTEGER, "how many were ranked", "spans", True, most=2**32 - 1),
        },
        ("step", "layer", "kv_head"),
        equal_lists=(("span", "score", "chosen"),),
    ),
    "decision": Table(
        "decision of the method",
        "Method and the ledger: what was asked, granted, refused, missed",
        {name: decision_column(name) for name in DECISIONS},
        between=True,
    ),
    "journal": Table(
        "named vector that the method noted",
        "Method: the method's own figures by step",
        {
            "step": id_column(EVENTS["step"].meaning),
            "layer": id_column(EVENTS["layer"].meaning, False),
            "kv_head": id_column(EVENTS["kv_head"].meaning, False),
            "name": Column(TEXT, "name of the vector", required=True),
            "values": Column(FLOATS, "the numbers; NULL: none", required=True),
        },
        between=True,
    ),
    "loss": Table(
        "step that was compared with full KV in the same context",
        "the verdict: where the run left full KV, and by how much",
        {
            "step": STEP,
            "ref_token": Column(INTEGER, "token that full KV chose", ID, True),
            "ref_text": Column(TEXT, "its text", required=True),
            "top_token": Column(INTEGER, "most probable token under the method", ID, True),
            "top_text": Column(TEXT, "its text", required=True),
            "agrees": Column(FLAG, "both have the same most probable token", required=True),
            "kl": Column(FLOAT, STEPS["kl_nats"].meaning, NATS, infinite=True),
            "ref_logprob": Column(FLOAT, "of ref_token under full KV", NATS, infinite=True),
            "logprob": Column(FLOAT, "of ref_token under the method", NATS, infinite=True),
            "logit_diff": Column(FLOAT, "logit of ref_token, method - full KV", "logits", infinite=True),
            "ref_rank": Column(INTEGER, STEPS["full_token_rank"].meaning, "rank", True, most=2**32 - 1),
        },
        ("step",),
    ),
    "oracle": Table(
        "step, layer and query head at which full attention was computed",
        "the holes: which head missed which span, and the heads' regret",
        {
            "step": STEP,
            "layer": LAYER,
            "q_head": _Q_HEAD,
            "span": Column(INTEGERS, "spans with most of full attention's mass", ID, True),
            "full_mass": mass_column("full attention's mass on each, by the run's own query over all keys", True),
            "mass": mass_column("the method's mass on each", True),
            "tail_full": Column(FLOAT, "full attention's mass on all other spans", SHARE, True, 0, 1),
            "unread": mass_column("of full_mass, the part on tokens that were not read in any form"),
            "lost_pos": Column(INTEGERS, "positions with most unread mass", "position"),
            "lost_mass": mass_column("full attention's mass on each position"),
            "reference_mass": mass_column("mass of a full-KV run fed the same tokens, on each span"),
            "tail_reference": Column(FLOAT, "the same on all other spans", SHARE, least=0, most=1),
            "reference_unread": mass_column("of reference_mass, the part on tokens that were not read in any form"),
            "reference_lost_pos": Column(INTEGERS, "positions with most unread mass of full KV's own", "position"),
            "reference_lost_mass": mass_column("full KV's own mass on each position"),
        },
        ("step", "layer", "q_head"),
        equal_lists=(
            ("span", "full_mass", "mass", "unread", "reference_mass", "reference_unread"),
            ("lost_pos", "lost_mass"),
            ("reference_lost_pos", "reference_lost_mass"),
        ),
    ),
    **LATER,
}
"""table -> what it holds"""
