"""The data dictionary: every column of every recorded table, with its unit, its meaning and what it is a part of.

Frames of a Run, exports and docs/api.md take their columns from here.
"""

from __future__ import annotations

import pandas as pd

from kvlens.recording.metrics import METRICS
from kvlens.rows import HEAD_COLUMNS, KV_COLUMNS
from kvlens.store.schema import UNITS
from kvlens.tables.column import BYTES, ID, NATS, SHARE, US, Column
from kvlens.tables.headtable import head_columns

_STEP = {
    "step": Column("step", "decode step; 0 is the first generated token"),
    "layer": Column(ID, "layer, counted from 0"),
}
HEAD_STEPS = {
    **_STEP,
    "q_head": Column(ID, "query head within the layer"),
    "kv_head": Column(ID, "KV head that the query head reads"),
    **{
        UNITS.get(name, name): Column(SHARE if METRICS[name].unit == "share" else METRICS[name].unit, METRICS[name].doc)
        for name in HEAD_COLUMNS
    },
}
KV_STEPS = {
    **_STEP,
    "kv_head": Column(ID, "KV head within the layer"),
    **{name: Column(METRICS[name].unit, METRICS[name].doc) for name in KV_COLUMNS},
}
READERS = {
    "layer": Column(ID, "layer, counted from 0"),
    "q_head": Column(ID, "query head within the layer"),
    "full_mass": Column(
        SHARE, "full KV's own mass on the spans, else full attention's by the run's own query; a lower bound", "n_steps"
    ),
    "mass": Column(SHARE, "this run's mass on the spans; a lower bound", "n_steps"),
    "n_steps": Column("steps", "at which full attention was sampled; the masses are means over them"),
}
SEGMENTS = {
    "segment": Column("", "name of a part of the prompt: system, instruction, documents, question, turns, thinking"),
    "tokens": Column("tokens", "of the segment"),
    "kept_share": Column(SHARE, "tokens that are on the device after the last step, mean over KV heads", "tokens"),
    "evicted_share": Column(SHARE, "tokens that are gone for good, mean over KV heads", "tokens"),
    "heads": Column("KV heads", "of all layers on which the method acts"),
    "evicted_heads": Column(
        "KV heads", "that have no token of the segment left, on the device or in host memory", "heads"
    ),
    "full_mass": Column(
        SHARE,
        "full KV's mass on the segment (by the run's own queries where full KV's were not recorded), mean over sampled "
        "steps, acting layers and query heads; an estimate where a span crosses the segment's border; NaN: no "
        "token of it belongs to a span, as of a question that is fed after the context",
    ),
    "mass": Column(
        SHARE, "this run's mass on the segment, the same mean; an estimate where a span crosses the segment's border"
    ),
    "largest_effect_logits": Column(
        "logits",
        "the largest effect of one KV head and span of the segment, in the round that placed it; an estimate where a "
        "span crosses the segment's border; NaN: no effects",
    ),
}
DECISIONS = {
    "step": Column("step", "decode step; -1 is the end of prefill"),
    "layer": Column(ID, "layer; NaN: all layers"),
    "kv_head": Column(ID, "KV head; NaN: all KV heads"),
    "q_head": Column(ID, "query head; NaN: the decision belongs to the KV head"),
    "kind": Column("", "zoom, recall, correction, reconstruction, eviction or selection"),
    "unit": Column("", "spans or tokens: what the counts count"),
    "candidates": Column("spans or tokens", "among which was decided; NaN: not recorded"),
    "asked": Column("spans or tokens", "that the method asked for; of an eviction, that it gave up", "candidates"),
    "granted": Column("spans or tokens", "of these, read in this step's attention", "asked"),
    "refused": Column("spans or tokens", "of these, without room on the device", "asked"),
    "missed": Column("spans or tokens", "of these, neither: they came after this step's attention", "asked"),
    "score": Column("", "what decided: a gate's value, or the highest score that was left out; NaN: none"),
    "cut": Column("", "what the score was compared with: a threshold, or the lowest score taken; NaN: none"),
    "refused_span": Column(ID, "the refused spans, by spaces"),
    "missed_span": Column(ID, "the missed spans, by spaces"),
}
PHASES = {
    "step": Column("step", "decode step"),
    "score_us": Column(US, "the method chose what to read", "dur_us of the step"),
    "plan_us": Column(US, "the memory fitted the choice into its room", "dur_us of the step"),
    "copy_us": Column(US, "copies were started and their slots named", "dur_us of the step"),
    "wait_us": Column(US, "the engine waited for copies", "dur_us of the step"),
    "attend_us": Column(US, "attention", "dur_us of the step"),
    "record_us": Column(US, "recording, which the step's duration does not contain"),
    "rest_us": Column(US, "the rest of the model", "dur_us of the step"),
}
META = {"key": Column("", "name of an entry (docs/trace-schema.md)"), "value": Column("", "its value as JSON")}
STEPS = {
    "step": Column(ID, "decode step; 0 is the first generated token"),
    "token_id": Column(ID, "token that the step chose, or was fed"),
    "text": Column("", "its text"),
    "logprob_nats": Column(NATS, "its log-probability under the method"),
    "next_entropy_nats": Column(NATS, "entropy of the distribution that it was chosen from"),
    "full_text": Column("", "token that full KV chose; None: the step was not compared"),
    "top_text": Column("", "most probable token under the method; None: the step was not compared"),
    "agrees": Column("", "the most probable token equals full KV's; None: the step was not compared"),
    "kl_nats": Column(NATS, "KL(full KV || method) of the next-token distributions"),
    "full_logprob_nats": Column(NATS, "log-probability of full KV's token under full KV"),
    "full_token_logprob_nats": Column(NATS, "log-probability of full KV's token under the method"),
    "full_token_rank": Column("rank", "rank of full KV's token under the method; 0 is the most probable"),
    "t_us": Column(US, "start of the step since the run began"),
    "dur_us": Column(US, "duration of the step without recording"),
    "wait_us": Column(US, "time that the engine waited for copies"),
    "record_us": Column(US, "time that recording took"),
    "resident_bytes": Column(BYTES, "KV bytes on the device after the step"),
    "peak_bytes": Column(BYTES, "most KV bytes on the device inside the step"),
    "cold_bytes": Column(BYTES, "KV bytes in host memory after the step"),
    "h2d_bytes": Column(BYTES, "moved from host to device in the step"),
    "d2h_bytes": Column(BYTES, "moved from device to host in the step"),
}
SPANS = {
    "span": Column(ID, "span; an argument of hold and drop"),
    "kind": Column("", "what made the span: window, sink, page, entropy, evicted, ..."),
    "tok_start": Column("position", "first token"),
    "tok_end": Column("position", "token behind the last one"),
    "text": Column("", "the tokens' text, of the window as it was at its birth"),
    "born_step": Column("step", "step at which the span was made; -1 is the end of prefill"),
    "died_step": Column("step", "first step without the span; NaN: it lives to the end"),
    "reason": Column("", "why the span begins and ends where it does"),
    "mean_surprisal_nats": Column(NATS, "mean surprisal of the span's tokens; NaN: not recorded"),
    "state": Column(
        "",
        "state at birth: resident, coarse, reconstructed, cold, evicted, partial, quantised, partly_recalled or "
        "rewritten",
    ),
    "mean_mass": Column(
        SHARE, "attention mass per step and query head; a lower bound, since only top spans are recorded"
    ),
    "mean_reference_mass": Column(SHARE, "full KV's own mass, likewise; NaN: not recorded"),
    "mean_own_query_mass": Column(SHARE, "full attention's mass by the run's own query, likewise; NaN: not recorded"),
}
MISSED = {
    "layer": Column(ID, "layer"),
    "kv_head": Column(ID, "KV head that missed the span"),
    "span": Column(ID, "span that it missed"),
    "place": Column(
        "rank", "place in the ranking of effects, from 1 on; NaN: no effect was recorded, ordered by regret"
    ),
    "effect_logits": Column("logits", "effect on the lost steps of the answer, in the round that placed it"),
    "regret": Column(SHARE, "full attention's mass minus the method's at the step of loss, mean over the query heads"),
}
EVENTS = {
    "step": Column("step", "decode step; -1 is the end of prefill"),
    "layer": Column(ID, "layer; NaN: all layers"),
    "kv_head": Column(ID, "KV head; NaN: all KV heads of the layer"),
    "q_head": Column(ID, "query head; NaN: all query heads of the KV head"),
    "kind": Column(
        "",
        "span_open, zoom_in, zoom_out, recall, prefetch, correction, offload, evict, thin, release, "
        "refused, part, kept, hold, drop or rewrite",
    ),
    "span": Column(ID, "span that the event is about; NaN: none"),
    "value": Column(
        "",
        "tokens of refused, evict, offload, hold, drop and part; bytes of recall, prefetch, correction and zoom_in; "
        "NaN: none",
    ),
    "after_attention": Column("", "True: the step had attended when it happened, so it counts from the next step on"),
}
TRANSFERS = {
    "step": Column("step", "decode step; -1 is the end of prefill"),
    "layer": Column(ID, "layer"),
    "kv_head": Column(ID, "KV head; NaN: one copy for all KV heads of the layer"),
    "span": Column(ID, "span; NaN: the copy names none"),
    "direction": Column("", "h2d (host to device) or d2h"),
    "cause": Column("", "offload, leave, zoom, recall, prefetch or correction"),
    "bytes": Column(BYTES, "bytes of the tensors moved"),
    "start_us": Column(US, "start of the copy since the run began; the same in all lines of one copy"),
    "end_us": Column(US, "end of the copy since the run began"),
    "wait_us": Column(US, "time that the engine waited for the copy"),
    "blocking": Column("", "True: the step's attention waited for the copy"),
}
RUN = {
    "uid": Column("", "the run"),
    "model": Column("", "its model"),
    "method": Column("", "its method"),
    "preset": Column("", "its preset; empty: the defaults"),
    "stand_in": Column("", "parts of the method that were untrained or uncalibrated; empty: none"),
    "budget": Column("", "as it was asked for", "full_kv_bytes"),
    "budget_bytes": Column(BYTES, "that the budget came to; empty: no limit", "full_kv_bytes"),
    "full_kv_bytes": Column(BYTES, "of full KV in the number format `dtype`"),
    "dtype": Column("", "number format of the run's KV"),
    "prompt_tokens": Column("tokens", "of the prompt"),
    "task": Column("", "of a generated prompt"),
    "prompt_sha256": Column("", "SHA-256 of the prompt's text: equal prompts have equal ones"),
    "question_known": Column("", "true: the method had the question when it placed the context"),
    "seed": Column("", "of sampling and of methods that draw"),
    "forced": Column("", "true: the run was fed full KV's tokens"),
    "outcome": Column("", "what came of the run, in words"),
    "outcome_kinds": Column("", "the same as codes, by spaces: right, wrong, lost, diverged, kept, unsound, unknown"),
    "left_full_kv_at_step": Column("step", "first step whose most probable token is not full KV's; empty: none"),
    "ttft_us": Column(US, "until the first token of the answer, the reading of the prompt included"),
    "tpot_us": Column(US, "mean duration of the steps after the first token", "steps after the first token"),
    "end_to_end_us": Column(US, "until the last token"),
    "batched": Column(
        "prompts", "that shared the run's decode steps, at most; times of such a run do not compare; empty: none"
    ),
    "link": Column("", "what copies went through; times of different links do not compare"),
}
"""columns that say of which run a row is; `param_NAME` follow, one for each parameter of some method"""
RECORDED = {
    "heads": head_columns(),
    "head-steps": HEAD_STEPS,
    "kv-steps": KV_STEPS,
    "steps": STEPS,
    "spans": SPANS,
    "missed": MISSED,
    "decisions": DECISIONS,
    "readers": READERS,
    "events": EVENTS,
    "segments": SEGMENTS,
    "transfers": TRANSFERS,
    "phases": PHASES,
    "meta": META,
}
"""table -> its columns"""


def dictionary() -> pd.DataFrame:
    """Return the data dictionary, a row per column: table, column, unit, denominator, meaning. The table `run` has the
    columns that say of which run a row is."""
    tables = {"run": RUN, **RECORDED}
    rows = [
        (table, name, column.unit, column.denominator, column.meaning)
        for table, columns in tables.items()
        for name, column in columns.items()
    ]
    return pd.DataFrame(rows, columns=["table", "column", "unit", "denominator", "meaning"])
