"""SeKV's eq. 18-20: what spans take as factors, in host memory and on their way."""

from __future__ import annotations

import numpy as np

from kvlens.lab.claims import Claim
from kvlens.lab.claims.methods.sekv_runs import Pair, Seen, exact
from kvlens.lab.claims.methods.sekv_setting import ENERGY, FACTORS, Setting, Whole
from kvlens.statistics import sign_test

QUANTITIES = (
    ("SeKV eq. 18-19", "spans take less as factors than exact", ("stored", "exact")),
    ("SeKV eq. 20", "an expanded span moves fewer bytes as factors than exact", ("moved", "moved_exact")),
)


def weights(setting: Setting, base: Whole, of: dict[str, list[Seen]]) -> list[Claim]:
    """Of the arm whose spans are all factors, whatever its answers; these are told beside where nothing was trained."""
    out, seen = [], of[FACTORS]
    raw = float(np.mean([lies for one in of["SeKV"] for lies in one.raw]))
    for source, says, pair in QUANTITIES:
        less, whole = totals(seen, pair)
        measured = (
            f"{less / max(1, whole):.2f} of exact when all spans are factors; {raw:.0%} of (span, KV head) are "
            f"smaller raw{'' if setting.trained else f' with R_max {base.params.max_rank}'} (n={len(seen)} runs)"
        )
        reason = "" if less < whole else "at half the head size as rank, factors of short spans outweigh the spans"
        if 0.9 * whole < less < whole:
            reason = "barely: the paper says so of ranks far below the head size, and here the rank is half of it"
        if not setting.trained:
            told, reason = _by_rank(setting, base, of, pair)
            measured += told
        figures = {"bytes": less, "exact_bytes": whole, "raw": raw}
        out.append(Claim("sekv", source, says, measured, bool(less < whole), reason, figures))
    return out


def totals(seen: list[Seen], pair: tuple[str, str]) -> tuple[int, int]:
    """Bytes over all runs as they lie or move, and as exact tokens."""
    less, whole = (sum(getattr(one, attribute) for one in seen) for attribute in pair)
    return less, whole


def even_rank(tokens: float, head_dim: int) -> float:
    """The rank at which factors weigh what the span does: r (|S| + d + 1) = |S| d."""
    return tokens * head_dim / (tokens + head_dim + 1)


def _by_rank(setting: Setting, base: Whole, of: dict[str, list[Seen]], pair: tuple[str, str]) -> tuple[str, str]:
    """(what is added to `measured`, reason) where no gates are trained and an energy chooses the ranks: what ranks of
    the paper's proportion do to answers, and what the usual energy takes and does."""
    factors, other, kept = of[FACTORS], of[ENERGY], f"{base.params.energy:.0%}"
    (mine, own), (low, exactly) = totals(factors, pair), totals(other, pair)
    capped, thinned = (Pair(of["SeKV"], arm) for arm in (factors, other))
    measured = (
        f"; {setting.model}, ranks up to {base.quarter} of head size {base.head_dim} (the paper's 32 of 128) for "
        f"{kept} of a span's energy, mean {mean_rank(factors):.1f}: exact match {exact(factors)}, {exact(of['SeKV'])} "
        f"of the whole method with R_max {base.params.max_rank} ({_split(capped)}). Ranks for 95 %, mean "
        f"{mean_rank(other):.1f}: {low / max(1, exactly):.2f} of exact, exact match {exact(other)} ({_split(thinned)})"
    )
    tokens = float(np.mean([count for one in factors for count in one.tokens]))
    reason = (
        f"no gates are trained for {setting.model}, an energy chooses the ranks; spans have {tokens:.0f} tokens on "
        f"average, whose factors are smaller below rank {even_rank(tokens, base.head_dim):.1f}"
    )
    if mine >= own:
        return measured, reason
    return measured, f"it costs answers here; {reason}" if capped.verdict else ""


def _split(pair: Pair) -> str:
    """'9 prompts only with the whole method, 1 only without, p = 0.021'."""
    p = sign_test(pair.better, pair.worse)
    return f"{pair.better} prompts only with the whole method, {pair.worse} only without, p = {p:.2g}"


def mean_rank(seen: list[Seen]) -> float:
    """Of keys and values of all spans, over layers and KV heads."""
    return float(np.mean(np.concatenate([ranks for one in seen for ranks in one.ranks])))
