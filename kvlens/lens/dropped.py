"""What a KV head dropped of a span for good, and where it stood in the ranking: read from the recorded cuts, of any
method."""

from __future__ import annotations

import math

from kvlens.lens.facts import Facts


def dropped(facts: Facts) -> str | None:
    """Return what was evicted, without the last full stop; None: no cut was recorded for this span and KV head."""
    rows = facts.reader.cuts(facts.step, facts.layer, facts.kv_head, facts.span)
    if rows.empty:
        return None
    removed, last = int(rows["dropped"].sum()), rows.iloc[-1]
    span = facts.reader.span(facts.span)
    tokens = span.tok_end - span.tok_start
    position = int(last["step"])
    when = "at the end of prefill" if position < 0 else f"one by one, the last of them at step {position}"
    sentence = f"{removed} of its {tokens} tokens were evicted {when}"
    if last["score"] is None or math.isnan(float(last["score"])):
        return f"{sentence}, by their position"
    best = rows.iloc[int(rows["rank"].argmin())]
    stayed = "" if math.isnan(float(best["cut"])) else f", lowest kept score {float(best['cut']):.3g}"
    rank, candidates, n_kept = (int(best[name]) for name in ("rank", "candidates", "kept"))
    return (
        f"{sentence}. The method kept {n_kept} of {candidates} tokens by score. Token {int(best['pos'])} came closest: "
        f"rank {rank} (score {float(best['score']):.3g}{stayed})"
    )
