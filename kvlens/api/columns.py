"""The columns of every table that a Run gives out: unit and meaning. docs/api.md is checked against it."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from kvlens.store.queries import head_table_columns
from kvlens.store.schema import UNITS
from kvlens.studies.figures import FIGURES


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    unit: str
    """"" for names, texts and flags"""
    meaning: str


ID, COUNT, SHARE, BYTES, US, NATS = "id", "count", "share 0..1", "bytes", "µs", "nats"

_HEAD_MEANINGS = {
    "mass_sink": (SHARE, "attention mass on sink tokens"),
    "mass_anchor": (SHARE, "attention mass on anchor tokens"),
    "mass_window": (SHARE, "attention mass on the window of newest tokens"),
    "mass_resident": (SHARE, "attention mass on exact tokens of resident spans"),
    "mass_coarse": (SHARE, "attention mass on summaries of spans"),
    "mass_reconstructed": (SHARE, "attention mass on tokens rebuilt from low-rank factors"),
    "mass_mean": (SHARE, "share of the output taken from a mean value in place of entries"),
    "mass_quantised": (SHARE, "attention mass on tokens stored in few bits"),
    "entropy": (NATS, "entropy of the attention weights"),
    "qcos": ("cosine", "similarity of this step's query and the previous step's, after RoPE"),
    "coverage": (SHARE, "own-query mass on tokens attended exactly"),
    "selection_recall": (SHARE, "of the tokens with most own-query mass, the share attended in any form but a summary"),
    "regret": (SHARE, "sum over spans of own-query mass minus the method's, where positive"),
    "unread": (SHARE, "own-query mass on tokens attended in no form"),
    "reference_regret": (SHARE, "sum over spans of full KV's own mass minus the method's, where positive"),
    "reference_unread": (SHARE, "full KV's own mass on tokens attended in no form"),
    "n_zoomed": ("spans", "spans read token by token in place of their summary"),
    "zoom_rate": (SHARE, "zoomed spans as a share of the spans that could be zoomed"),
}
_AGGREGATES = {
    "mean": "mean over steps",
    "min": "smallest over steps",
    "max": "largest over steps",
    "total": "sum over steps",
}
_KV_MEANINGS = {
    "h2d_bytes": (BYTES, "moved to the device for the KV head"),
    "d2h_bytes": (BYTES, "moved to host memory for the KV head"),
    "blocking_bytes": (BYTES, "moved to the device while the step waited"),
    "resident_bytes": (BYTES, "on the device for the KV head"),
    "recalled_tokens": ("tokens", "moved to the device for the KV head"),
    "reused_tokens": ("tokens", "selected and already on the device"),
    "similarity": ("cosine", "similarity of successive queries, where the method decides by it"),
}


def _heads() -> dict[str, Column]:
    """The columns of `TraceReader.head_table`, in its order."""
    columns = {
        "run_uid": Column("", "the run"),
        "method": Column("", "its method"),
        "model": Column("", "its model"),
        "layer": Column(ID, "layer, counted from 0"),
        "q_head": Column(ID, "query head within the layer"),
        "kv_head": Column(ID, "KV head that the query head reads"),
        "n_steps": Column("steps", "decode steps that the row covers"),
    }
    stored = {UNITS.get(name, name): name for name in _HEAD_MEANINGS}
    for name in head_table_columns():
        metric, _, aggregate = name.rpartition("_")
        if name == "n_corrected":
            columns[name] = Column("steps", "steps at which the method corrected its selection for this head")
            continue
        if metric.startswith("kv_head_"):
            unit, meaning = _KV_MEANINGS[metric.removeprefix("kv_head_")]
        else:
            unit, meaning = _HEAD_MEANINGS[stored[metric]]
        columns[name] = Column(unit, f"{meaning}; {_AGGREGATES[aggregate]}")
    return columns


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
        "", "state at birth: resident, coarse, reconstructed, cold, evicted, partial, quantised or partly_recalled"
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
DECISIONS = {
    "step": Column("step", "decode step; -1 is the end of prefill"),
    "layer": Column(ID, "layer; NaN: all layers"),
    "kv_head": Column(ID, "KV head; NaN: all KV heads of the layer"),
    "q_head": Column(ID, "query head; NaN: all query heads of the KV head"),
    "kind": Column(
        "",
        "span_open, zoom_in, zoom_out, recall, prefetch, correction, offload, evict, thin, release, "
        "refused, kept, hold or drop",
    ),
    "span": Column(ID, "span that the decision is about; NaN: none"),
    "value": Column(
        "tokens", "of hold and drop the tokens of the span; other kinds: the method's own figure; NaN: none"
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
METHODS = {
    "name": Column("", "what `method=` takes"),
    "title": Column("", "the paper's name for it"),
    "family": Column("", "what it does with KV"),
    "keeps_all": Column("", "True: all KV stays on the device and reading is what it saves"),
    "presets": Column("", "named sets of parameters; every method also has fit"),
    "parameters": Column("", "parameter -> its default"),
    "summary": Column("", "one sentence"),
    "paper": Column("", "where it was published"),
}
RUNS = {
    "uid": Column("", "names the run: `kvlens.open(uid)`"),
    "status": Column("", "completed, cancelled, failed, interrupted, unreadable, or running"),
    "created": Column("time", "UTC, ISO 8601"),
    "model": Column("", "its model"),
    "method": Column("", "its method"),
    "preset": Column("", "its preset; None: the defaults"),
    "stand_in": Column("", "parts of the method that were untrained or uncalibrated; None: none"),
    "budget": Column("", "as it was asked for; a share is of full KV in the number format `dtype`"),
    "dtype": Column("", "number format of the run's KV, which shares of full KV are of; None: not recorded"),
    "task": Column("", "of a generated prompt"),
    "prompt_tokens": Column("tokens", "of the prompt"),
    "steps": Column("steps", "decode steps"),
    "max_new": Column("tokens", "to generate at most"),
    "duration_s": Column("seconds", "of the run"),
    "peak_bytes": Column(BYTES, "most KV bytes on the device inside a step"),
    "full_kv_bytes": Column(BYTES, "of full KV in the number format `dtype`"),
    "budget_bytes": Column(BYTES, "that the budget came to; NaN: no limit"),
    "h2d_bytes": Column(BYTES, "moved from host to device"),
    "d2h_bytes": Column(BYTES, "moved from device to host"),
    "disk_bytes": Column(BYTES, "of the trace on disk"),
    "output_text": Column("", "the generated text"),
    "error": Column("", "why it failed; None: it did not"),
    "reference": Column("", "uid of the full-KV run that it was compared with"),
    "parent": Column("", "uid of the run that it repeats"),
    "forced": Column("", "True: it was fed full KV's tokens"),
    "reference_key": Column("", "two runs with the same key have the same reference"),
    "hold": Column("", "True: a counterfactual held or dropped tokens"),
    "drop": Column("", "True: a counterfactual dropped tokens"),
    "changed": Column("", "True: a counterfactual changed the budget or parameters"),
    "name": Column("", "given by a person"),
    "note": Column("", "given by a person"),
    "tags": Column("", "given by a person"),
    "held_to": Column("", "the budget, or the share of tokens of a method that keeps all"),
    "problem": Column("", "code by which the trace cannot be read, such as trace_damaged; None: it can be read"),
    "outcome": Column("", "what came of it, in words"),
    "outcome_kinds": Column("", "the same as codes: right, wrong, lost, diverged, kept, unknown"),
    "expected": Column("", "the expected answer"),
    "left_full_kv_at_step": Column("step", "first step whose most probable token is not full KV's; NaN: none"),
    "kl_nats": Column(NATS, "KL(full KV || method) at that step"),
    "margin_logits": Column("logits", "logit of the method's token above that of full KV's, at that step"),
    "at_stop_token": Column("", "one of the two tokens ends the output"),
}
RACE = {
    "method": Column("", "full KV first"),
    "preset": Column("", "as it was asked for"),
    "stand_in": Column("", "parts of the method that are untrained or uncalibrated; '': none"),
    "state": Column("", "completed, refused, failed or cancelled"),
    "right": Column("", "the output is the expected answer; None: no answer is known"),
    "lost_at_step": Column("step", "first step whose most probable token is not full KV's; NA: none"),
    "output": Column("", "the generated text"),
    "note": Column("", "why the method was refused, or what it ran with"),
    "uid": Column("", "of the lane's run; None: nothing was stored"),
}
_STUDY_INTERVAL = {
    "right_low": Column(SHARE, "lower end of Wilson's 95 % interval of right"),
    "right_high": Column(SHARE, "upper end of it"),
}
STUDY = {
    "arm": Column("", "names the configuration"),
    "label": Column("", "its method and whatever tells it from the other arms"),
    "method": Column("", "its method"),
    "preset": Column("", "as it was asked for"),
    "budget": Column("", "what the method is held to"),
    "question": Column("", "in or after"),
    "seed": Column("", "of sampling and of methods that draw"),
    "n": Column("prompts", "whose answer is judged"),
    "refused": Column("trials", "that could not be run, for example since the budget is too small"),
    "failed": Column("trials", "that ended with an error"),
    **{name: Column(unit, f"{meaning}; mean over trials") for name, (meaning, unit) in FIGURES.items()},
    **_STUDY_INTERVAL,
}
TABLES = {
    "methods": METHODS,
    "runs": RUNS,
    "race": RACE,
    "study": STUDY,
    "heads": _heads(),
    "steps": STEPS,
    "spans": SPANS,
    "missed": MISSED,
    "decisions": DECISIONS,
    "transfers": TRANSFERS,
}
"""method of Run, or function of kvlens -> its columns"""


def described(frame: pd.DataFrame, table: str) -> pd.DataFrame:
    """Return the frame with `attrs["units"]` and `attrs["columns"]`, column -> unit and column -> meaning. Columns that
    are parameters of methods have none."""
    columns = TABLES[table]
    documented = [name for name in frame.columns if name in columns]
    frame.attrs["units"] = {name: columns[name].unit for name in documented}
    frame.attrs["columns"] = {name: columns[name].meaning for name in documented}
    return frame


def documentation(table: str) -> str:
    """Return the Markdown table of a table's columns."""
    rows = [f"| `{name}` | {column.unit or '-'} | {column.meaning} |" for name, column in TABLES[table].items()]
    return "\n".join(
        ["| column | unit | meaning |", "| --- | --- | --- |", *(row.replace("||", "\\|\\|") for row in rows)]
    )
