"""Why CompressKV does not hold all of a page: the scores of its tokens when prefill ended. For traces of schema 3 and
before, which have no cuts."""

from __future__ import annotations

import numpy as np

from kvlens.lens.facts import Facts
from kvlens.lens.method_reasons import Told, read_newest


def told(facts: Facts) -> Told | None:
    """How many of the span's tokens this layer kept, and where the best of the others stood."""
    reader, step, layer = facts.reader, facts.step, facts.layer
    row = reader.span(facts.span)
    if facts.state not in ("partial", "resident") or row.born_step >= 0:
        return None
    kept_tokens, _ = read_newest(reader, "kept_tokens", step, layer)
    score, _ = read_newest(reader, "token_score", step, layer)
    if kept_tokens is None or score is None:
        return None
    position = slice(row.tok_start, row.tok_end)
    dropped = kept_tokens[position] == 0
    if not dropped.any():
        return None
    ranked = np.isfinite(score)
    best = np.nanmax(np.where(dropped, score[position], np.nan))
    rank = int((score[ranked] > best).sum()) + 1
    n_kept, candidates = int((kept_tokens[ranked] == 1).sum()), int(ranked.sum())
    return "partly_evicted", (
        f"{int(dropped.sum())} of its {len(dropped)} tokens were evicted at the end of prefill in this layer. The "
        f"layer kept {n_kept} of {candidates} tokens by the choosing heads' attention. The span's best evicted token "
        f"has rank {rank}"
    )
