"""SeKV's eq. 18-20: what spans take as factors, in host memory and on their way."""

from __future__ import annotations

import numpy as np

from kvlens.bench.claims import Claim
from kvlens.bench.intervals import sign_test
from kvlens.methods.sekv.claims_runs import Pair, Seen, exact
from kvlens.methods.sekv.claims_setting import ENERGY, FACTORS, Setting, Whole

QUANTITIES = (
    ("SeKV eq. 18-19", "spans take less as factors than exact", ("stored", "exact")),
    ("SeKV eq. 20", "an expanded span moves fewer bytes as factors than exact", ("moved", "moved_exact")),
)


def weights(setting: Setting, base: Whole, of: dict[str, list[Seen]]) -> list[Claim]:
    """Of the arm whose spans are all factors; where nothing was trained, beside one whose factors keep less."""
    out, seen = [], of[FACTORS]
    raw = float(np.mean([lies for one in of["SeKV"] for lies in one.raw]))
    for source, says, pair in QUANTITIES:
        less, whole = totals(seen, pair)
        measured = (
            f"{less / max(1, whole):.2f} of exact when all spans are factors; {raw:.0%} of (span, KV head) are "
            f"smaller raw "
            f"(n={len(seen)} runs)"
        )
        reason = "" if less < whole else "at half the head size as rank, factors of short spans outweigh the spans"
        if 0.9 * whole < less < whole:
            reason = "barely: the paper says so of ranks far below the head size, and here the rank is half of it"
        holds: bool | None = bool(less < whole)
        if not setting.trained:
            told, holds, reason = _by_energy(setting, base, of, pair)
            measured += told
        figures = {"bytes": less, "exact_bytes": whole, "raw": raw}
        out.append(Claim("sekv", source, says, measured, holds, reason, figures))
    return out


def totals(seen: list[Seen], pair: tuple[str, str]) -> tuple[int, int]:
    """Bytes over all runs as they lie or move, and as exact tokens."""
    less, whole = (sum(getattr(one, attribute) for one in seen) for attribute in pair)
    return less, whole


def even_rank(tokens: float, head_dim: int) -> float:
    """The rank at which factors weigh what the span does: r (|S| + d + 1) = |S| d."""
    return tokens * head_dim / (tokens + head_dim + 1)


def _by_energy(
    setting: Setting, base: Whole, of: dict[str, list[Seen]], pair: tuple[str, str]
) -> tuple[str, bool | None, str]:
    """(what is added to `measured`, holds, reason) where no gates are trained: factors with the energy of the whole
    method beside those with the usual one, which decide only if their answers are as good."""
    all_factors, other, kept = of[FACTORS], of[ENERGY], f"{base.params.energy:.0%}"
    (less, whole), (low, exactly) = totals(all_factors, pair), totals(other, pair)
    rank, lower = mean_rank(all_factors), mean_rank(other)
    answers = Pair(of["SeKV"], other)
    measured = (
        f"; {setting.model}, factors with {kept} of a span's energy (mean rank {rank:.1f}). With 95 % (mean rank "
        f"{lower:.1f}) {low / max(1, exactly):.2f} of exact (n={len(other)}); exact match {exact(other)} with 95 %, "
        f"{exact(of['SeKV'])} with {kept} ({answers.worse} prompts only with 95 %, {answers.better} only with {kept}, "
        f"p = {sign_test(answers.better, answers.worse):.2g})"
    )
    if less < whole and low < exactly:
        return measured, True, ""
    tokens = float(np.mean([count for one in all_factors for count in one.tokens]))
    reason = (
        f"no gates are trained for {setting.model}, an energy chooses the ranks; spans have {tokens:.0f} tokens on "
        f"average, whose factors are smaller below rank {even_rank(tokens, base.head_dim):.1f} at head size "
        f"{base.head_dim}"
    )
    if less < whole or low >= exactly or answers.verdict:
        return measured, False, reason
    return measured, None, f"it holds with 95 % of the energy and not with {kept}; {reason}"


def mean_rank(seen: list[Seen]) -> float:
    """Of keys and values of all spans, over layers and KV heads."""
    return float(np.mean(np.concatenate([ranks for one in seen for ranks in one.ranks])))
