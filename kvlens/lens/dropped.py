"""What a KV head dropped of a span for good, and where it stood in the ranking: read from the recorded cuts, of any
method."""

from __future__ import annotations

import math

from kvlens.lens.facts import Facts

MOST_DIGITS = 10
"""of a score in words; two float32 differ in the ninth at the latest"""


def dropped(facts: Facts) -> str | None:
    """Return what was evicted and by which ranking, without the last full stop; None: no cut was recorded for this span
    and KV head."""
    rows = facts.reader.cuts(facts.step, facts.layer, facts.kv_head, facts.span)
    if rows.empty:
        return None
    removed, last = int(rows["dropped"].sum()), rows.iloc[-1]
    span = facts.reader.span(facts.span)
    tokens = span.tok_end - span.tok_start
    position = int(last["step"])
    when = "at the end of prefill" if position < 0 else f"one by one, the last of them at step {position}"
    return f"{removed} of its {tokens} tokens were evicted {when}{ranking_words(facts)}"


def ranking_words(facts: Facts) -> str:
    """Return ', by their position', or '. The method kept 22 of 800 tokens by score. Token 388 came closest: ...'; ''
    if no cut was recorded for this span and KV head."""
    rows = facts.reader.cuts(facts.step, facts.layer, facts.kv_head, facts.span)
    if rows.empty:
        return ""
    last = rows.iloc[-1]
    if last["score"] is None or math.isnan(float(last["score"])):
        return ", by their position"
    best = rows.iloc[int(rows["rank"].argmin())]
    score, stayed = distinct(float(best["score"]), float(best["cut"]))
    rank, candidates, n_kept = (int(best[name]) for name in ("rank", "candidates", "kept"))
    return (
        f". The method kept {n_kept} of {candidates} tokens by score. Token {int(best['pos'])} came closest: "
        f"rank {rank} (score {score}{f', lowest kept score {stayed}' if stayed else ''})"
    )


def distinct(score: float, cut: float) -> tuple[str, str]:
    """Return both scores with three digits, or with as many as tell them apart; '' for a cut that is NaN."""
    if math.isnan(cut):
        return f"{score:.3g}", ""
    digits = next((n for n in range(3, MOST_DIGITS) if f"{score:.{n}g}" != f"{cut:.{n}g}"), 3)
    return f"{score:.{digits}g}", f"{cut:.{digits}g}"


def kept_by_others(facts: Facts) -> str:
    """Return '. Other KV heads kept 0 to 13; 28 of 90 kept none' of the span's tokens, by the recorded cuts up to the
    step; '' if the cuts are the same for all KV heads, or none was recorded."""
    removed, reader = facts.reader.cuts_of_span(facts.step, facts.span), facts.reader
    if removed.empty or removed[["layer", "kv_head"]].isna().any(axis=None):
        return ""
    acting = sum(not window for window in reader.meta.windows or ()) or reader.n_layers
    size, heads = facts.tokens[1] - facts.tokens[0], acting * reader.kv_heads
    is_other = (removed["layer"] != facts.layer) | (removed["kv_head"] != facts.kv_head)
    dropped_tokens = removed.loc[is_other, "dropped"].astype(int)
    kept_tokens = (size - dropped_tokens).tolist() + [size] * (heads - 1 - len(dropped_tokens))
    if not kept_tokens:
        return ""
    none = kept_tokens.count(0) + 1
    return f". Other KV heads kept {min(kept_tokens)} to {max(kept_tokens)}; {none} of {heads} kept none"
