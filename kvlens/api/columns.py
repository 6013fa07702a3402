"""The columns of every table that the API gives out. docs/api.md is checked against it."""

from __future__ import annotations

import pandas as pd

from kvlens.studies.figures import FIGURES
from kvlens.tables.column import BYTES, NATS, SHARE, Column, describe, row_of
from kvlens.tables.dictionary import RECORDED

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
    "budget": Column(
        "",
        "as it was asked for; a share is of full KV in the number format `dtype`. 1.0: no limit; `held_to` says which "
        "share of the tokens a method that keeps all KV attends",
    ),
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
    "batched": Column("prompts", "that shared the run's decode steps, at most; its duration is of all; NaN: none"),
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
    "differs": Column("", "parameters, place of the question and seed that tell it from the listed runs of its method"),
    "held_to": Column("", "the budget, or the share of tokens of a method that keeps all"),
    "problem": Column("", "code by which the trace cannot be read, such as trace_damaged; None: it can be read"),
    "outcome": Column("", "what came of it, in words"),
    "outcome_kinds": Column("", "the same as codes: right, wrong, cut_off, lost, diverged, kept, unsound, unknown"),
    "expected": Column("", "the expected answer"),
    "left_full_kv_at_step": Column("step", "first step whose most probable token is not full KV's; NaN: none"),
    "kl_at_loss_nats": Column(NATS, "KL(full KV || method) at that step"),
    "margin_logits": Column("logits", "logit of the method's token above that of full KV's, at that step"),
    "at_stop_token": Column("", "one of the two tokens ends the output"),
}
RACE = {
    "method": Column("", "full KV first"),
    "preset": Column("", "as it was asked for"),
    "stand_in": Column("", "parts of the method that are untrained or uncalibrated; '': none"),
    "differs": Column("", "parameters that tell the lane from another lane of its method; '': no other has its method"),
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
    "ran_preset": Column("", "the presets that its trials ran with; '': none has ended, or full KV"),
    "n": Column("prompts", "whose answer is judged"),
    "refused": Column("trials", "that could not be run, for example since the budget is too small"),
    "failed": Column("trials", "that ended with an error"),
    **{name: Column(unit, f"{meaning}; mean over trials") for name, (meaning, unit) in FIGURES.items()},
    **_STUDY_INTERVAL,
}
RETRIEVAL_HEADS = {
    "layer": Column("id", "layer, counted from 0"),
    "q_head": Column("id", "query head within the layer"),
    "mean": Column(SHARE, "full KV's mass on the needle's spans, mean over prompts; a lower bound", "n"),
    "spread": Column(SHARE, "standard deviation of the mass over prompts", "n"),
    "least": Column(SHARE, "smallest mass of a prompt"),
    "most": Column(SHARE, "largest mass of a prompt"),
    "n": Column("prompts", "with a marked needle; runs of one prompt count once"),
    "rank": Column("rank", "mean rank over prompts; 1 is the most mass", "n"),
    "top_share": Column(SHARE, "share of the prompts in which the head is among the top 10 %", "n"),
}
TABLES = {
    "retrieval_heads": RETRIEVAL_HEADS,
    "methods": METHODS,
    "runs": RUNS,
    "race": RACE,
    "study": STUDY,
    **RECORDED,
}
"""method of Run, or function of kvlens -> its columns"""


def described(frame: pd.DataFrame, table: str) -> pd.DataFrame:
    """Return the frame with `attrs["units"]` and `attrs["columns"]`, column -> unit and column -> meaning. Columns that
    are parameters of methods have none."""
    return describe(frame, TABLES[table])


def documentation(table: str) -> str:
    """Return the Markdown table of a table's columns."""
    rows = [row_of(name, column) for name, column in TABLES[table].items()]
    return "\n".join(["| column | unit | meaning |", "| --- | --- | --- |", *rows])
