"""What a run logs, as typed rows: the contract between the engine's recorder and the trace store.

Arrays are NumPy, struct-of-arrays, indexed [layer, head]. NaN in a float array means 'not recorded' and is stored as
NULL, never as 0. Units are in the names: bytes, tokens, us (microseconds), nats.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SCHEMA_VERSION = 13

#: Roles of an attended entry. For every (step, layer, query head) the masses over these roles add up to 1 (within
#: 1e-3). sink, anchor, window: full-resolution tokens kept hot for their own reason; resident: exact tokens of a span
#: that is hot; coarse: a summary entry of merged tokens; reconstructed: tokens rebuilt from a low-rank basis; mean:
#: what the output takes from a mean value instead of entries (Selection.blend), and the share of a sink logit, which
#: has no key (gpt-oss); quantised: tokens that lie packed; rewritten: tokens whose keys or values are others than the
#: written ones (an observed cache merged or rounded them).
ROLES = ("sink", "anchor", "window", "resident", "coarse", "reconstructed", "mean", "quantised", "rewritten")
MASS_COLUMNS = tuple(f"mass_{role}" for role in ROLES)

#: Per (step, layer, query head). Units: masses and coverage are shares 0..1, entropy in nats, n_zoomed spans. qcos:
#: cosine of this step's query and the last step's, post-RoPE. Own-query mass is full attention by the run's own query
#: over the exact keys. coverage: own-query mass on tokens attended exactly; unread: on tokens attended in no form, not
#: rebuilt and not through a summary either, so that 1 - coverage - unread lies on tokens read rebuilt or summarised.
#: regret: sum over all spans of max(0, own-query mass on the span - the method's), a share 0..1; a summary's mass is
#: the method's too. reference_unread, reference_regret: the same two of full KV's own mass. selection_recall: of the k
#: tokens with most own-query mass the share that was attended in any form but a summary, k being how many tokens were.
#: zoom_asked: spans for which the query head asked for tokens; of these n_zoomed were read token by token, and
#: zoom_refused had no room on the device.
HEAD_COLUMNS = (
    *MASS_COLUMNS,
    "entropy",
    "qcos",
    "coverage",
    "selection_recall",
    "regret",
    "unread",
    "reference_regret",
    "reference_unread",
    "n_zoomed",
    "zoom_rate",
    "corrected",
    "zoom_asked",
    "zoom_refused",
)
#: Per (step, layer, KV head). attended_tokens = entries in the softmax that are tokens (exact or reconstructed);
#: read_bytes: keys and values of the entries that some query head of the KV head attends, and what of the method's
#: index was read to choose them; blocking_bytes: the part of h2d_bytes the step's attention waits for; ideal_bytes:
#: what would have moved had every token that was wanted and hot been reused; n_* count spans, *_tokens tokens;
#: similarity: cosine of this step's queries and the last step's, mean over the group, where the method decides by it.
KV_COLUMNS = (
    "h2d_bytes",
    "d2h_bytes",
    "blocking_bytes",
    "ideal_bytes",
    "resident_bytes",
    "read_bytes",
    "attended_tokens",
    "attended_coarse",
    "n_recalled",
    "n_reused",
    "recalled_tokens",
    "reused_tokens",
    "similarity",
)

#: Of these, the columns that a method fills itself; all others are measured.
METHOD_HEAD_COLUMNS = ("corrected",)
METHOD_KV_COLUMNS = ("similarity",)

#: Causes of a transfer. offload: prompt KV leaves the device after prefill; leave: decoded tokens leave the window;
#: zoom: a span fetched because a head expanded it; recall / prefetch / correction: other methods' fetches.
CAUSES = ("offload", "leave", "zoom", "recall", "prefetch", "correction")
#: Kinds of events. release: the device's copy of a span is given up, the cold tier's stays; evict: the tokens are gone
#: for good; thin: the first of its tokens is, where they go one by one; rewrite: some of its tokens are attended as
#: other keys or values than the written ones, value as their largest relative error; kept: for this (layer, KV head)
#: all of the span is on the device from now on, whatever its state at birth says of the others; hold: from this step on
#: the span is kept exactly for a (layer, KV head) by a counterfactual, whatever the method does, or, where value says
#: how many, some of its tokens; drop: from this step on a (layer, KV head) attends it no more, by a counterfactual,
#: wherever it lies, value as of hold; part: the device has value tokens of the span, not all; span_close: in the
#: format, and logged by no method here.
EVENT_KINDS = (
    "span_open",
    "span_close",
    "zoom_in",
    "zoom_out",
    "recall",
    "evict",
    "thin",
    "offload",
    "correction",
    "prefetch",
    "refused",
    "release",
    "hold",
    "kept",
    "drop",
    "part",
    "rewrite",
)
#: partial: some of the span's tokens are on the device, the others are gone; quantised: all of them are on the device,
#: in few bits; partly_recalled: some of its tokens were recalled to the device, the others not; rewritten: all of them
#: are on the device, some as other keys or values than the written ones.
SPAN_STATES = (
    "resident",
    "coarse",
    "reconstructed",
    "cold",
    "evicted",
    "partial",
    "quantised",
    "partly_recalled",
    "rewritten",
)


@dataclass(frozen=True)
class PromptToken:
    """A token of the prompt."""

    pos: int
    token_id: int
    text: str
    char_start: int | None
    char_end: int | None
    surprisal: float | None
    """nats; None for the first token, which nothing predicts, and while they are not computed"""


@dataclass(frozen=True)
class SpanRow:
    """Token range [tok_start, tok_end). The spans alive at a step partition all positions written so far, except that
    the span of kind 'window' is the remainder: its stored range is the one at its birth."""

    span: int
    kind: str
    """sink | anchor | window | entropy | page | evicted | ... : what made it"""
    tok_start: int
    tok_end: int
    born_step: int
    """-1: at the end of prefill"""
    reason: str
    """why it begins and ends where it does, one sentence"""
    mean_surprisal: float | None = None
    state: str = "resident"
    """state at birth, one of SPAN_STATES"""


@dataclass(frozen=True)
class SpanHeadRow:
    """How one span lies in the cold tier for one (layer, KV head)."""

    span: int
    layer: int
    kv_head: int
    form: str
    """raw | factors, or quantised: in few bits on the device"""
    rank_k: int | None
    rank_v: int | None
    cold_bytes: int
    err_k: float | None
    """relative Frobenius error of the reconstructed keys, None when stored raw"""
    err_v: float | None


@dataclass(frozen=True)
class TransferRow:
    """One movement between tiers as the ledger saw it. Times in us since the run began (perf_counter)."""

    step: int
    """-1: at the end of prefill"""
    layer: int
    kv_head: int | None
    """None: one copy for all KV heads of the layer"""
    span: int | None
    direction: str
    """h2d (cold to hot) | d2h (hot to cold)"""
    cause: str
    bytes: int
    start_us: int
    end_us: int
    wait_us: int
    """how long the engine stood still for this copy"""
    blocking: bool


@dataclass(frozen=True)
class EventRow:
    """What happened to a span."""

    step: int
    layer: int | None
    kv_head: int | None
    q_head: int | None
    kind: str
    span: int | None
    value: float | None = None
    after_attention: bool | None = None
    """it happened when the layer had attended in this step, which saw the state before; None: not recorded"""


@dataclass(frozen=True)
class JournalRow:
    """What a method says of its own decisions: a named vector. Method.journal_names says what each name means, with its
    unit."""

    step: int
    """-1: at the end of prefill"""
    layer: int | None
    """None: for all layers"""
    kv_head: int | None
    """None: for all KV heads"""
    name: str
    values: np.ndarray
    """float32 [n]; NaN = none"""
