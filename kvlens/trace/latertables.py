"""The tables that later versions added to the open trace format. 2: rankings of dropped tokens, phases of steps,
effects. 3: mean keys of spans."""

from __future__ import annotations

from kvlens.instruments import KEY_FORMS
from kvlens.store.schema import PHASE_COLUMNS
from kvlens.tables.column import ID, US
from kvlens.tables.dictionary import EVENTS
from kvlens.trace.columns import FLOAT, FLOATS, INTEGER, INTEGERS, TEXT, Column, Table
from kvlens.trace.documented import id_column

STEP = id_column("decode step; 0 is the first generated token")
LAYER = id_column("layer, counted from 0")
KV_HEAD = id_column("KV head within the layer")
PHASES = {
    "score_us": "the method ranked and selected",
    "plan_us": "the memory planned places and copies",
    "copy_us": "keys and values were copied",
    "wait_us": "the step waited for copies",
    "attend_us": "attention was computed",
    "record_us": "the step was recorded",
    "rest_us": "all else",
}
"""column of the table phase -> what happened in the time"""


LATER: dict[str, Table] = {
    "cut": Table(
        "ranking of tokens by which some were dropped for good",
        "Replay and Spans: where what was evicted stood in the method's ranking",
        {
            "step": id_column(EVENTS["step"].meaning),
            "layer": id_column("NULL: alike in all layers", False),
            "kv_head": id_column("NULL: alike for all KV heads", False),
            "candidates": Column(INTEGER, "tokens that were ranked", "tokens", True, most=2**32 - 1),
            "kept": Column(INTEGER, "of these, how many stayed", "tokens", True, most=2**32 - 1),
            "cut": Column(FLOAT, "lowest score that stayed, on the method's own scale; NULL: none", infinite=True),
            "span": Column(INTEGERS, "spans that lost tokens", ID, True),
            "dropped": Column(INTEGERS, "ranked tokens of each that are gone by this row", "tokens", True),
            "pos": Column(INTEGERS, "position of the best of them", "position", True),
            "rank": Column(INTEGERS, "its rank, 1 is the best", "rank", True),
            "score": Column(FLOATS, "its score; NULL: none", required=True),
        },
        between=True,
        equal_lists=(("span", "dropped", "pos", "rank", "score"),),
    ),
    "phase": Table(
        "decode step whose phases were timed",
        "Method: where the time of a step went",
        {"step": STEP} | {name: Column(INTEGER, PHASES[name], US, True) for name in PHASE_COLUMNS},
        ("step",),
    ),
    "effect": Table(
        "span, layer and KV head that decides a lost choice",
        "Replay and Spans: by how many logits each missed span moves the choice",
        {
            "step": STEP,
            "lead": Column(FLOAT, "full KV's token above the method's, under full KV; one value", "logits", True),
            "layer": LAYER,
            "kv_head": KV_HEAD,
            "span": id_column("the span"),
            "effect": Column(FLOAT, "the span's part of the lead, the most important first", "logits", True),
        },
        ("layer", "kv_head", "span"),
    ),
    "span_key": Table(
        "span, layer and KV head whose keys were averaged when the prefill had ended",
        "Spans: the map of the spans' keys",
        {
            "layer": LAYER,
            "kv_head": KV_HEAD,
            "span": id_column("the span"),
            "form": Column(
                TEXT,
                "whether keys were averaged without the rotary embedding; one value",
                required=True,
                words=KEY_FORMS,
            ),
            "key": Column(FLOATS, "mean key of the span's tokens; all lists have one length", required=True),
        },
        ("layer", "kv_head", "span"),
    ),
}
"""table -> what it holds"""
