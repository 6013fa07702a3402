"""CHESS's claims: dynamic against fixed reconstruction, the three phases over budgets, few pages against all, how often
it triggers, and what they rest on: that pages whose keys resemble the newest ones are the pages the answer needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from kvlens.engine.engine import Engine
from kvlens.lab.claims import Claim
from kvlens.lab.claims.methods.chess_cases import setting
from kvlens.lab.claims.methods.chess_runs import TRIGGERS, Interval, Measured, Point, measure
from kvlens.lab.claims.methods.chess_verdicts import CHANCE, about_every_ten, found_worse, phases
from kvlens.methods.calibration import read
from kvlens.methods.chess.method import Chess
from kvlens.methods.chess.trigger import THRESHOLDS
from kvlens.statistics import normal

LESS_OFTEN = "Dynamic reconstructs less often, {dynamic:.1f} times an answer, fixed {fixed:.1f} times."
NEAR = 0.1
"""ours: an oracle that is right on all but this share of full KV's answers shows what the others were lost by"""


def claims(engine: Engine, prompts: int, report: Callable[[str], None]) -> list[Claim]:
    """Five claims, `prompts` prompts of each task. Raises ValueError with one sentence for a model without
    thresholds."""
    name = engine.loaded.name
    calibrated = read(THRESHOLDS.file(Chess.name, Chess.Parameters(), name), Chess.name, engine.loaded.shape).figures
    found = measure(engine, setting(name), prompts, report)
    pages = calibrated["pages"][str(found.page)]
    return [_dynamic(found), _phases(found), _smallest(found), _rate(found, pages), _affinity(found)]


def _about(found: Measured) -> str:
    """Where it was measured, to go behind the figures."""
    return f"{found.at.named}, {found.at.length} tokens, preset {' and '.join(sorted(found.presets))}"


def _dynamic(found: Measured) -> Claim:
    arms, keeps = found.long, found.at.keep_long
    gains = {
        keep: normal([b.nats - a.nats for a, b in zip(arms[keep, "dynamic"], arms[keep, "fixed"], strict=True)])
        for keep in keeps
    }
    counts = {trigger: _mean("rebuilt", [p for keep in keeps for p in arms[keep, trigger]]) for trigger in TRIGGERS}
    worse = [f"{keep:.0%}" for keep, (_, _, high) in gains.items() if high < 0]
    holds = True if all(low > 0 for _, low, _ in gains.values()) else False if worse else None
    reasons = []
    if not holds:
        reasons.append(f"Dynamic is worse at {', '.join(worse)}." if worse else "At some budgets the interval holds 0.")
    if counts["dynamic"] > counts["fixed"]:
        reasons.append(
            "Here dynamic reconstructs more often than fixed, in the paper less often, so the two are not comparable."
        )
    elif not holds and counts["dynamic"] < counts["fixed"]:
        reasons.append(LESS_OFTEN.format(**counts))
    shown = "; ".join(f"{keep:.0%}: {_text(gain, 3)}" for keep, gain in gains.items())
    return Claim(
        "chess",
        "CHESS App. C, Fig. 9",
        "Reconstructing when the model is uncertain answers better than every 6 pages, at every budget.",
        f"Nats per token of {found.at.fed} that dynamic saves over fixed (95 %), by share attended: {shown}; "
        f"{len(arms[keeps[0], 'fixed'])} answers each, {counts['dynamic']:.1f} dynamic and {counts['fixed']:.1f} fixed "
        f"reconstructions per answer; {_about(found)}.",
        holds,
        " ".join(reasons),
        {"saved_nats": _plain(gains), "reconstructions": counts},
    )


def _phases(found: Measured) -> Claim:
    keeps = found.at.keep
    points = [found.asked[keep, "dynamic"] for keep in keeps]
    steps = [normal([b.nats - a.nats for a, b in zip(low, high, strict=True)]) for low, high in pairwise(points)]
    falls = [i for i, s in enumerate(steps) if s[1] > 0]
    holds = phases(steps)
    nats, right = ([_mean(name, ps) for ps in points] for name in ("nats", "right"))
    shown = "; ".join(
        f"{keep:.0%}: {a:.2f} nats, {b:.0%} of tokens right" for keep, a, b in zip(keeps, nats, right, strict=True)
    )
    reason = (
        "It does not recover."
        if falls
        else "Every step to a larger budget makes answers better."
        if holds is False
        else "No step to a larger budget is shown to make answers worse; a fall of "
        f"{max(high for _, _, high in steps):.2f} nats is not ruled out."
    )
    return Claim(
        "chess",
        "CHESS App. C, Fig. 9",
        "Quality first falls (distraction) and then recovers as the budget grows.",
        f"The right answer, per token, by share attended: {shown}; {len(points[0])} answers; {_about(found)}.",
        holds,
        "" if holds else reason,
        {"keep": list(keeps), "nats": nats, "right": right, "steps": steps},
    )


def _smallest(found: Measured) -> Claim:
    least = found.at.keep[0]
    few = found.asked[least, "dynamic"]
    lost = normal([a.nats - b.nats for a, b in zip(few, found.full, strict=True)])
    exact = [float(np.mean([p.right == 1 for p in ps])) for ps in (few, found.full, found.held)]
    holds = False if lost[1] > 0 else True if lost[2] <= 0 else None
    near = exact[2] >= (1 - NEAR) * exact[1]
    reason = (
        f"With the pages of the asked facts attended beside the selection {exact[2]:.2f} are exact: "
        + ("the selection does not find these pages (last claim)." if near else "more is lost than these pages.")
        + " Each of these answers stands in the text and cannot be guessed; the paper's task, LongBench v2, "
        "is multiple choice, where a guess is worth 25 points."
    )
    return Claim(
        "chess",
        "CHESS Table 1",
        "The smallest budget is not below full KV (33.2 against 30.2 at 1 %).",
        f"At {least:.0%} attended {exact[0]:.2f} of {len(few)} answers are exact, with full KV "
        f"{exact[1]:.2f}; the right answer costs "
        f"{_text(lost)} nats per token more (95 %); {_about(found)}. Sinks and newest pages alone are "
        f"{found.anyway:.1%}, so the paper's 1 % cannot be had.",
        holds,
        "" if holds else reason,
        {"exact": exact[:2], "exact_with_facts_held": exact[2], "lost_nats": lost},
    )


def _rate(found: Measured, calibrated: dict[str, Any]) -> Claim:
    arms = {keep: found.long[keep, "dynamic"] for keep in found.at.keep_long}
    own = {keep: points for (keep, _), points in found.own.items()}
    counts = {keep: _fired(points) for keep, points in arms.items()}
    own_counts = {keep: _fired(points) for keep, points in own.items()}
    every = [pages / fired if fired else math.inf for fired, pages in (*counts.values(), *own_counts.values())]
    holds = about_every_ten([*counts.values(), *own_counts.values()])
    shown = "; ".join(f"{keep:.0%}: {a} of {b} pages" for keep, (a, b) in counts.items())
    said = "".join(f", in its own words at {keep:.0%}: {a} of {b}" for keep, (a, b) in own_counts.items())
    limits = calibrated["entropy_nats"], calibrated["varentropy_page_nats2"]
    above = {keep: _above(points, limits) for keep, points in arms.items()}
    reason = (
        "Two 99th percentiles together fire on at most 1 % of the pages they were taken from, that is every "
        "100 pages or more rarely. "
    )
    if min(every) < 5:
        reason += (
            "What makes it fire is that pruning leaves the model less certain than the calibrated "
            f"{limits[0]:.3f} nats."
        )
    else:
        reason += why_rarely(every, {keep: (*above[keep], counts[keep][1]) for keep in above}, limits)
    return Claim(
        "chess",
        "CHESS App. C",
        "Dynamic reconstruction comes about every 10 pages.",
        f"Pages that trigger while {found.at.fed} is fed, by share attended: {shown}{said}; of the calibration's "
        f"pages, made with all of the cache, {calibrated['above_both']} of {calibrated['pages']}; {_about(found)}.",
        holds,
        "" if holds else reason,
        {
            "pages": _plain(counts),
            "own_words": _plain(own_counts),
            "above_each_threshold": _plain(above),
            "calibration": calibrated,
        },
    )


def why_rarely(every: list[float], above: dict[float, tuple[int, int, int]], limits: tuple[float, float]) -> str:
    """Why few pages trigger. every: pages per trigger, of each arm; above: by share, pages above the threshold of
    entropy, above that of varentropy, of how many; limits: the two thresholds."""
    each = "; ".join(f"{a} and {b} of {pages} at {keep:.0%}" for keep, (a, b, pages) in above.items())
    found = [pages for pages in every if math.isfinite(pages)]
    comes = f"Here it comes every {min(found):.0f} to {max(found):.0f} pages" if found else "Here no page triggers"
    never = ", under some arm never" if 0 < len(found) < len(every) else ""
    return (
        f"{comes}{never}. Above the threshold of entropy "
        f"({limits[0]:.2f} nats) and above that of varentropy ({limits[1]:.2f} nats squared), each by itself, are "
        f"{each}; only a page above both triggers."
    )


def _fired(points: list[Point]) -> tuple[int, int]:
    """Pages that triggered, pages that could."""
    return sum(p.uncertain for p in points), sum(p.judged for p in points)


def _above(points: list[Point], limits: tuple[float, float]) -> tuple[int, int]:
    """Pages above the threshold of entropy, pages above that of varentropy."""
    return sum(e > limits[0] for p in points for e, _ in p.pages), sum(
        v > limits[1] for p in points for _, v in p.pages
    )


def _affinity(found: Measured) -> Claim:
    ranks, least = found.ranks, found.at.keep[0]
    rank = normal([r["rank"] for r in ranks[least]])
    over = [normal([r["kept"] - r["chance"] for r in ranks[keep]]) for keep in found.at.keep]
    means = {
        keep: {name: float(np.mean([r[name] for r in ranks[keep]])) for name in ("kept", "flat", "chance", "spent")}
        for keep in found.at.keep
    }
    shown = "; ".join(
        f"{keep:.0%}: {m['kept']:.0%}, without hierarchy {m['flat']:.0%}, by chance {m['chance']:.0%}"
        for keep, m in means.items()
    )
    kept = [(means[keep]["kept"], means[keep]["chance"]) for keep in found.at.keep]
    holds = True if all(low > 0 for _, low, _ in over) else found_worse(rank, kept, len(ranks[least]))
    common, own = (normal(part) for part in found.parts)
    reason = why_missed(rank, common, own, {keep: m["spent"] for keep, m in means.items()})
    return Claim(
        "chess",
        "CHESS sec. 3.2, App. B.1",
        "Pages with keys like the newest pages' are the relevant ones, and the hierarchy keeps them.",
        f"Pages with the asked facts, at the first selection: mean rank {rank[0]:.2f} ({rank[1]:.2f} to "
        f"{rank[2]:.2f}; 0 best, 0.5 by "
        f"chance); kept, by share attended: {shown}; {len(ranks[least])} prompts; {_about(found)}.",
        holds,
        "" if holds else reason,
        {"rank": rank, "kept": _plain(means), "rank_by_parts": [common, own]},
    )


def why_missed(rank: Interval, common: Interval, own: Interval, spent: dict[float, float]) -> str:
    """Why the selection misses pages. common, own: their rank by each part of the score alone; spent: by share
    attended, the part of the selection that goes to pages attended anyway."""
    said = [
        "A score is a page's product with the mean page plus its product with what the anchor has of its own: the "
        f"first alone ranks these pages {common[0]:.2f} ({common[1]:.2f} to {common[2]:.2f}), the second "
        f"{own[0]:.2f} ({own[1]:.2f} to {own[2]:.2f})."
    ]
    if rank[2] < CHANCE:
        said.insert(0, "They rank better than chance.")
    if any(spent.values()):
        shares = ", ".join(f"{keep:.0%}: {share:.0%}" for keep, share in spent.items())
        said.append(f"Of the selected pages these are sinks or newest ones, attended anyway: {shares}.")
    return " ".join(said)


def _mean(name: str, points: Sequence[Point]) -> float:
    return float(np.mean([getattr(point, name) for point in points]))


def _text(found: Interval, digits: int = 2) -> str:
    return f"{found[0]:+.{digits}f} ({found[1]:+.{digits}f} to {found[2]:+.{digits}f})"


def _plain(by_keep: dict[float, Any]) -> dict[str, Any]:
    return {str(keep): value for keep, value in by_keep.items()}
