"""CHESS's claims: dynamic against fixed reconstruction, the three phases over budgets, few pages against all, how often
it triggers, and what they rest on: that pages whose keys resemble the newest ones are the pages the answer needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from kvlens.bench.claims import Claim
from kvlens.engine.engine import Engine
from kvlens.methods import make_parameters
from kvlens.methods.calibration import read
from kvlens.methods.chess.claims_cases import Interval, Notes, Point, forced, interval, make_case, needed, watching
from kvlens.methods.chess.method import Chess
from kvlens.methods.chess.trigger import SHIPPED
from kvlens.methods.full import FullKV, FullParameters

TASKS = (("list", 12), ("chain", 6), ("note", 1))
"""long answers: about 100, 47 and 20 tokens; with how many entries or hops"""
KEEP = (0.05, 0.1, 0.2, 0.4, 0.7)
"""shares of attended tokens; sinks and window alone are 2.3 % of 2048, so the paper's 1 % cannot be had here"""
TRIGGERS = ("dynamic", "fixed")


Arms = dict[tuple[float, str], list[Point]]


def claims(engine: Engine, prompts: int, report: Callable[[str], None]) -> list[Claim]:
    """Five claims, `prompts` prompts of each task. Raises ValueError for a model other than the demo model."""
    if engine.loaded.name != "demo":
        raise ValueError(
            "CHESS's claims are checked on the demo model only, for which thresholds are shipped: use --model demo."
        )
    arms: Arms = {(keep, trigger): [] for keep in KEEP for trigger in TRIGGERS}
    full: list[Point] = []
    ranks: dict[float, list[dict[str, float]]] = {keep: [] for keep in KEEP}
    for index in range(prompts):
        for task, size in TASKS:
            case = make_case(engine, task, size, index)
            full.append(forced(engine, case, FullKV, FullParameters())[0])
            for (keep, trigger), points in arms.items():
                notes: Notes = []
                point, first = forced(engine, case, watching(notes), _params(keep, trigger), notes)
                points.append(point)
                if trigger == "dynamic":
                    ranks[keep] += needed(case, first)
        report(f"chess: {index + 1} of {prompts} prompts of each task")
    return [_dynamic(arms), _phases(arms), _smallest(arms, full), _rate(arms, engine), _affinity(ranks)]


def _params(keep: float, trigger: str) -> Any:
    return make_parameters(Chess, "demo", {"keep": keep, "trigger": trigger})


def _dynamic(arms: Arms) -> Claim:
    gains = {
        keep: interval([b.nats - a.nats for a, b in zip(arms[keep, "dynamic"], arms[keep, "fixed"], strict=True)])
        for keep in KEEP
    }
    counts = {trigger: _mean("rebuilt", [p for keep in KEEP for p in arms[keep, trigger]]) for trigger in TRIGGERS}
    worse = [f"{keep:.0%}" for keep, (_, _, high) in gains.items() if high < 0]
    holds = True if all(low > 0 for _, low, _ in gains.values()) else False if worse else None
    reasons = []
    if not holds:
        reasons.append(f"Dynamic is worse at {', '.join(worse)}." if worse else "At some budgets the interval holds 0.")
    if counts["dynamic"] > counts["fixed"]:
        reasons.append(
            "Here dynamic reconstructs more often than fixed, in the paper less often, so the two are not comparable."
        )
    shown = "; ".join(f"{keep:.0%}: {_text(gain, 3)}" for keep, gain in gains.items())
    return Claim(
        "chess",
        "CHESS App. C, Fig. 9",
        "Reconstructing when the model is uncertain answers better than every 6 pages, at every budget.",
        f"Nats per token of the right answer that dynamic saves over fixed (95 %), by share attended: {shown}; "
        f"{len(arms[KEEP[0], 'fixed'])} answers each, {counts['dynamic']:.1f} dynamic and {counts['fixed']:.1f} fixed "
        "reconstructions per answer.",
        holds,
        " ".join(reasons),
        {"saved_nats": _plain(gains), "reconstructions": counts},
    )


def _phases(arms: Arms) -> Claim:
    points = [arms[keep, "dynamic"] for keep in KEEP]
    steps = [interval([b.nats - a.nats for a, b in zip(low, high, strict=True)]) for low, high in pairwise(points)]
    falls, rises = [i for i, s in enumerate(steps) if s[1] > 0], [i for i, s in enumerate(steps) if s[2] < 0]
    holds = bool(falls and rises and falls[0] < rises[-1])
    nats, right = ([_mean(name, ps) for ps in points] for name in ("nats", "right"))
    shown = "; ".join(
        f"{keep:.0%}: {a:.2f} nats, {b:.0%} of tokens right" for keep, a, b in zip(KEEP, nats, right, strict=True)
    )
    reason = (
        "It does not recover." if falls else "No step to a larger budget makes answers worse beyond its 95 % interval."
    )
    return Claim(
        "chess",
        "CHESS App. C, Fig. 9",
        "Quality first falls (distraction) and then recovers as the budget grows.",
        f"The right answer, per token, by share attended: {shown}; {len(points[0])} answers.",
        holds,
        "" if holds else reason,
        {"keep": list(KEEP), "nats": nats, "right": right, "steps": steps},
    )


def _smallest(arms: Arms, full: list[Point]) -> Claim:
    few = arms[KEEP[0], "dynamic"]
    lost = interval([a.nats - b.nats for a, b in zip(few, full, strict=True)])
    exact = [float(np.mean([p.right == 1 for p in ps])) for ps in (few, full)]
    holds = False if lost[1] > 0 else True if lost[2] <= 0 else None
    reason = (
        "Each of these answers stands in one place of the text and cannot be guessed, and the selection does "
        "not find that place (last "
        "claim); the paper's task, LongBench v2, is multiple choice, where a guess is worth 25 points."
    )
    return Claim(
        "chess",
        "CHESS Table 1",
        "The smallest budget is not below full KV (33.2 against 30.2 at 1 %).",
        f"At {KEEP[0]:.0%} attended {exact[0]:.2f} of {len(few)} answers are exact, with full KV "
        f"{exact[1]:.2f}; the right answer costs "
        f"{_text(lost)} nats per token more (95 %).",
        holds,
        "" if holds else reason,
        {"exact": exact, "lost_nats": lost},
    )


def _rate(arms: Arms, engine: Engine) -> Claim:
    shape = engine.loaded.shape
    found = read(SHIPPED["demo"], "chess", shape).figures["pages"][str(_params(KEEP[0], "never").page)]
    counts = {
        keep: (sum(p.uncertain for p in arms[keep, "dynamic"]), sum(p.judged for p in arms[keep, "dynamic"]))
        for keep in KEEP
    }
    every = {keep: pages / uncertain if uncertain else math.inf for keep, (uncertain, pages) in counts.items()}
    shown = "; ".join(f"{keep:.0%}: {a} of {b} pages" for keep, (a, b) in counts.items())
    holds = all(5 <= value <= 20 for value in every.values())
    reason = (
        "Two 99th percentiles together fire on at most 1 % of the pages they were taken from, that is every "
        "100 pages or more rarely. What "
        f"makes it fire is that pruning leaves the model less certain than the calibrated "
        f"{found['entropy_nats']:.3f} nats."
    )
    return Claim(
        "chess",
        "CHESS App. C",
        "Dynamic reconstruction comes about every 10 pages.",
        f"Pages that trigger while the right answer is fed, by share attended: {shown}; of the calibration's "
        f"pages, made with all "
        f"of the cache, {found['above_both']} of {found['pages']}.",
        holds,
        "" if holds else reason,
        {"pages": _plain(counts), "calibration": found},
    )


def _affinity(ranks: dict[float, list[dict[str, float]]]) -> Claim:
    rank = interval([r["rank"] for r in ranks[KEEP[0]]])
    over = [interval([r["kept"] - r["chance"] for r in rs]) for rs in ranks.values()]
    means = {
        keep: {name: float(np.mean([r[name] for r in rs])) for name in ("kept", "flat", "chance")}
        for keep, rs in ranks.items()
    }
    shown = "; ".join(
        f"{keep:.0%}: {m['kept']:.0%}, without hierarchy {m['flat']:.0%}, by chance {m['chance']:.0%}"
        for keep, m in means.items()
    )
    holds = all(low > 0 for _, low, _ in over)
    reason = (
        "A score is a page's product with the mean page, which is low for an unusual page such as one with a "
        "name and digits, plus its "
        "product with what the anchor has of its own, which ranks these pages at chance (docs/fidelity.md)."
    )
    return Claim(
        "chess",
        "CHESS sec. 3.2, App. B.1",
        "Pages with keys like the newest pages' are the relevant ones, and the hierarchy keeps them.",
        f"Pages with the asked facts, at the first selection: mean rank {rank[0]:.2f} ({rank[1]:.2f} to "
        f"{rank[2]:.2f}; 0 best, 0.5 by "
        f"chance); kept, by share attended: {shown}; {len(ranks[KEEP[0]])} prompts.",
        holds,
        "" if holds else reason,
        {"rank": rank, "kept": _plain(means)},
    )


def _mean(name: str, points: Sequence[Point]) -> float:
    return float(np.mean([getattr(point, name) for point in points]))


def _text(found: Interval, digits: int = 2) -> str:
    return f"{found[0]:+.{digits}f} ({found[1]:+.{digits}f} to {found[2]:+.{digits}f})"


def _plain(by_keep: dict[float, Any]) -> dict[str, Any]:
    return {str(keep): value for keep, value in by_keep.items()}
