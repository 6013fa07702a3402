"""SentKVCompress's claims: how much is reused and what truncation takes of it, what punctuation and length control do
for accuracy, what the extremes weigh, and whether a tenth of the tokens answers as well as all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from kvlens.engine.engine import Engine
from kvlens.lab.claims import Claim
from kvlens.lab.claims.methods.sentkv_cases import ABLATIONS, CAUSES, EXACT, Case, case_of
from kvlens.lab.claims.methods.sentkv_runs import FULL, Seen, measure
from kvlens.statistics import normal, sign_test, wilson

REUSED = (0.65, 0.75)
"""about 70 %"""
DROP = 0.22
"""how much accuracy each part is worth, by the paper"""
SIGNIFICANT = 0.05


def claims(engine: Engine, prompts: int, report: Callable[[str], None]) -> list[Claim]:
    """Four claims, `prompts` prompts of each task of the model's case, with the paper's parameters (L = 14, Delta = 8,
    usage 0.1)."""
    case = case_of(engine.loaded.name)
    seen = measure(engine, case, prompts, report)
    ours = seen[next(iter(ABLATIONS))]
    return [reuse(case, ours), ablation(case, seen), weight(case, ours), against_full(case, seen)]


def _exact(points: list[Seen]) -> float:
    return float(np.mean([point.right == 1 for point in points]))


def _compare(a: list[Seen], b: list[Seen]) -> tuple[int, int, float]:
    """Prompts on which a, and on which b, had more right, and the sign test's p."""
    better = sum(x.right > y.right for x, y in zip(a, b, strict=True))
    worse = sum(x.right < y.right for x, y in zip(a, b, strict=True))
    return better, worse, sign_test(better, worse)


def reuse(case: Case, points: list[Seen]) -> Claim:
    """Abstract, sec. 1. An answer of one token has no step after the first."""
    told = [point for point in points if point.reused]
    reused, reusable, similarity = (
        [x for point in told for x in getattr(point, name)] for name in ("reused", "reusable", "similarity")
    )
    mean, most = float(np.mean(reused)), float(np.mean(reusable))
    by_prompt = [float(np.mean(point.reused)) for point in told]
    _, lower, upper = normal(by_prompt)
    moved, ideal = (float(sum(getattr(point, name) for point in told)) for name in ("moved", "ideal"))
    low, high = np.percentile(reused, [10, 90])
    cosine, r = float(np.mean(similarity)), float(np.corrcoef(similarity, reused)[0, 1])
    tasks = {
        name: float(np.mean([x for p in told if p.task == name for x in p.reused]))
        for name in case.tasks
        if any(p.task == name for p in told)
    }
    least, largest = REUSED
    holds = True if least <= lower and upper <= largest else False if upper < least or lower > largest else None
    return Claim(
        "sentkv",
        "SentKVCompress abstract, sec. 1",
        "About 70 % of the selected KV is reused from the step before.",
        f"Reused {mean:.3f} of the wanted tokens (10th to 90th percentile {low:.2f} to {high:.2f}; mean of prompts "
        f"{np.mean(by_prompt):.3f}, 95 % {lower:.3f} to {upper:.3f}), {most:.3f} without truncation to the smallest "
        f"head; truncation moved {moved / ideal - 1:.0%} more bytes. {len(reused)} (step, layer, KV head); "
        f"{case.about(len(points))}.",
        holds,
        ""
        if holds
        else f"Truncation takes {most - mean:.3f} of it. Queries of neighbouring steps have a mean cosine of "
        f"{cosine:.2f} here (correlation with the reuse rate: {r:.2f}). The paper does not say on which texts its rate "
        "was taken.",
        {
            "reused": mean,
            "interval_over_prompts": [lower, upper],
            "by_task": tasks,
            "reusable": most,
            "percentiles_10_90": [float(low), float(high)],
            "moved_bytes": moved,
            "ideal_bytes": ideal,
            "query_cosine": cosine,
            "correlation": r,
        },
    )


def _part(ours: list[Seen], without: list[Seen]) -> tuple[bool | None, dict[str, float]]:
    """Whether leaving a part out costs DROP of exact match or more (None: too few prompts to say), and the numbers."""
    better, worse, p = _compare(ours, without)
    base, exact, n = _exact(ours), _exact(without), len(ours)
    drop = 1 - exact / base if base else 0.0
    lost = sum(x.right == 1 > y.right for x, y in zip(ours, without, strict=True))
    most = wilson(lost / n, n)[1] / base if base else 1.0
    costs = True if drop >= DROP and p < SIGNIFICANT else False if most < DROP else None
    return costs, {"exact": exact, "drop": drop, "drop_at_most": most, "worse": better, "better": worse, "p": p}


def _chunk(points: list[Seen]) -> float:
    """Mean tokens of a chunk: one minimum and one maximum are one token's KV."""
    return float(np.mean([point.extremes[1] / point.extremes[0] for point in points]))


def _change(drop: float) -> str:
    """A drop in words: a negative one is a gain."""
    return f"{abs(drop):.0%} {'less' if drop >= 0 else 'more'}"


def ablation(case: Case, seen: Mapping[str, list[Seen]]) -> Claim:
    """Fig. 8 (a)."""
    first, *names = ABLATIONS
    ours = seen[first]
    verdicts, figures = zip(*(_part(ours, seen[name]) for name in names), strict=True)
    lines = [
        f"{name} {f['exact']:.2f} ({_change(f['drop'])}; {f['worse']} prompts worse, {f['better']} better, p = "
        f"{f['p']:.2g})"
        for name, f in zip(names, figures, strict=True)
    ]
    holds = False if False in verdicts else None if None in verdicts else True
    seen_drops = ", ".join(_change(f["drop"]) for f in figures)
    bounds = ", ".join(f"{min(1.0, f['drop_at_most']):.0%}" for f in figures)
    chunks = ", ".join(f"{_chunk(seen[name]):.1f}" for name in ABLATIONS)
    return Claim(
        "sentkv",
        "SentKVCompress Fig. 8 (a), sec. 5.4",
        "Without length control, without punctuation, or without choosing the punctuation, accuracy falls by more than "
        "22 %.",
        f"Exact match {_exact(ours):.2f} with both; {'; '.join(lines)}. Chunks of {chunks} tokens on average; "
        f"{case.about(len(ours))}.",
        holds,
        ""
        if holds
        else f"Seen are {seen_drops}; upper bounds (95 %) of the drops are {bounds}. {case.sentences}".rstrip(),
        {first: {"exact": _exact(ours)}, **dict(zip(names, figures, strict=True))},
    )


def weight(case: Case, points: list[Seen]) -> Claim:
    """Sec. 1, contribution 2."""
    shares = [point.extremes[0] / point.extremes[1] for point in points]
    mean = float(np.mean(shares))
    holds = round(mean, 2) <= 0.07
    side = "shorter" if mean > 1 / 14 else "longer"
    return Claim(
        "sentkv",
        "SentKVCompress sec. 1, contribution 2",
        "What selection reads (the extremes) takes 7 % of the KV.",
        f"{mean:.1%} ({min(shares):.1%} to {max(shares):.1%}); {case.about(len(shares))}.",
        holds,
        ""
        if holds
        else "One minimum and one maximum per chunk are one token's KV, so the share is 1 / mean chunk length: 7.1 % "
        f"at 14 tokens, and here chunks have {1 / mean:.1f} on average, since the marks cut them {side}.",
        {"mean": mean, "least": min(shares), "most": max(shares)},
    )


def against_full(case: Case, seen: Mapping[str, list[Seen]]) -> Claim:
    """Sec. 1, 3. Where arms tell a bad ranking from too few tokens, what they answer on their prompts is said."""
    ours, full = seen[next(iter(ABLATIONS))], seen[FULL]
    better, worse, p = _compare(ours, full)
    mine, all_of_it = _exact(ours), _exact(full)
    holds: bool | None = True if mine >= all_of_it else False if p < SIGNIFICANT else None
    told = {name: _exact(seen[name]) for name in CAUSES if name in seen}
    among = {"full KV": full, "usage 0.1": ours}
    same = {name: _exact([x for x in points if x.task in case.causes]) for name, points in among.items() if told}
    causes = ", ".join(f"{name} {share:.2f}" for name, share in (same | told).items())
    ranking = (
        f" The same number of tokens, {EXACT}, answers {told[EXACT] - same['usage 0.1']:+.2f} of "
        f"{', '.join(case.causes)} more than ranked by chunks."
        if EXACT in told
        else ""
    )
    return Claim(
        "sentkv",
        "SentKVCompress sec. 1, 3 (26.86 against 26.27)",
        "Chunks at 10 % of the tokens answer at least as well as all tokens.",
        f"Exact match {mine:.2f} at usage 0.1, {all_of_it:.2f} with all tokens; {worse} prompts worse, {better} "
        f"better, p = {p:.2g}; {case.about(len(ours))}."
        + (f" On {', '.join(case.causes)}: {causes}." if causes else ""),
        holds,
        ""
        if holds
        else "Too few prompts differ to decide."
        if holds is None
        else f"The paper's own Table 2 has 42.62 at usage 0.1 against 43.10 for full attention, a loss of 1 %; here it "
        f"is {1 - mine / all_of_it:.0%}.{ranking}",
        {"usage 0.1": mine, "full": all_of_it, "worse": worse, "better": better, "p": p}
        | ({"causes": same | told} if told else {}),
    )
