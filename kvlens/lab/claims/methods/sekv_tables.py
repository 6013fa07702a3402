"""SeKV's Tables 5 and 7: what its parts and its sizes are worth."""

from __future__ import annotations

import numpy as np

from kvlens.lab.claims import Claim
from kvlens.lab.claims.methods.sekv_runs import Pair, Seen, exact
from kvlens.lab.claims.methods.sekv_setting import (
    ALL,
    BY_BEST,
    BY_GATE,
    FITTED,
    UNTRAINED_SHARE,
    Setting,
    Whole,
    parts,
    ranks,
    windows,
)
from kvlens.statistics import sign_test

Runs = dict[str, list[Seen]]
FEW = "so few prompts do not decide it"


def tables(setting: Setting, base: Whole, of: Runs) -> list[Claim]:
    """The claims of both tables from the runs of the setting's arms."""
    where = f"{setting.where}, n={len(of['SeKV'])}, live{told(setting, base)}"
    zoom_in = [] if setting.trained else [_zoom_in(setting, of, where)]
    return [*_parts(setting, of, where), *zoom_in, _largest(setting, of, where), *_sizes(setting, base, of, where)]


def told(setting: Setting, base: Whole) -> str:
    """What the whole method is, where its preset alone does not say it."""
    if setting.trained:
        return ""
    of = base.params
    sizes = f"w {of.window}, spans of {of.l_min} to {of.l_max}, d' {of.dim}, R_max {of.max_rank}"
    return (
        f"; {setting.model}, question known, preset {base.preset}: {sizes}; with the untrained router, as many spans "
        f"as the budget holds, {of.energy:.0%} of a span's energy"
    )


# ---- Table 5
def _parts(setting: Setting, of: Runs, where: str) -> list[Claim]:
    out = []
    for part in parts(setting):
        a, b = of[part.against], of[part.arm]
        pair = Pair(a, b)
        measured = (
            f"exact match {exact(a)} with and {exact(b)} without; {pair.better} prompts only "
            f"with, {pair.worse} "
            f"only without, p = {sign_test(pair.better, pair.worse):.2g} ({where}{_rate(setting, part.against)})"
        )
        figures = {"with": [s.right for s in a], "without": [s.right for s in b]}
        says = f"without {part.missing} answers get worse"
        out.append(Claim("sekv", "SeKV Table 5", says, measured, pair.verdict, undecided(pair), figures))
    return out


def _rate(setting: Setting, against: str) -> str:
    return "" if against == "SeKV" else f", but {setting.gate:.0%} of (query, span) pairs above the threshold"


def undecided(pair: Pair) -> str:
    """Why a pair says nothing, or the opposite; '' where it says what is claimed."""
    if any(seen.infeasible is not None for seen in (*pair.a, *pair.b)):
        return "an arm is refused on some prompts: the budget cannot hold it"
    if pair.floor:
        return "neither answers a prompt, so nothing can be told"
    return {None: FEW, False: "it is better without", True: ""}[pair.verdict]


def _zoom_in(setting: Setting, of: Runs, where: str) -> Claim:
    """What a trained gate would have to bring, since there is none."""
    whole, fitted, gate, best = (of[name] for name in ("SeKV", FITTED, BY_GATE, BY_BEST))
    pair = Pair(best, gate)
    measured = (
        f"exact match {exact(fitted)} with the untrained gate at its usual {UNTRAINED_SHARE:.0%} of spans, "
        f"{exact(whole)} with as many as the budget holds, {exact(of[ALL])} by full KV ({where}). Without a limit and "
        f"with exact spans, {UNTRAINED_SHARE:.0%} of them: {exact(gate)} when eq. 5 untrained finds them, "
        f"{exact(best)} when their best token does (n={len(best)}; {pair.better} prompts only so, {pair.worse} only by "
        f"eq. 5, p = {sign_test(pair.better, pair.worse):.2g})"
    )
    reason = f"no router is shipped for {setting.model}, so there is no arm with it; "
    if pair.verdict:
        reason += (
            f"that the untrained gate finds the wrong spans, and that {UNTRAINED_SHARE:.0%} of them would do, the last "
            "two arms show"
        )
    else:
        reason += f"whether a better choice of as many spans would do, {len(best)} prompts do not show"
    figures = {name: [seen.right for seen in of[name]] for name in ("SeKV", FITTED, BY_GATE, BY_BEST, ALL)}
    says = "without the trained zoom-in answers get worse"
    return Claim("sekv", "SeKV Table 5", says, measured, None, reason, figures)


def _largest(setting: Setting, of: Runs, where: str) -> Claim:
    shares = {part.arm: share(of[part.arm]) for part in parts(setting) if part.against == "SeKV"}
    order = sorted(shares, key=lambda name: shares[name])
    measured = f"exact match by missing part: {', '.join(f'{name} {shares[name]:.2f}' for name in order)} ({where})"
    largest = {"untrained router", "no reconstruction"} & set(shares)
    most = all(shares[name] < min(shares[other] for other in shares if other not in largest) for name in largest)
    reason = "" if most else "another part is worth as much here"
    if not setting.trained:
        of_it = "reconstruction is worth most of those" if most else "reconstruction is not worth most even of those"
        reason = f"no router is shipped for {setting.model}; {of_it} that can be taken away here"
    says = "reconstruction and trained zoom-in are worth most (by point estimates)"
    return Claim("sekv", "SeKV Table 5", says, measured, most if setting.trained else None, reason, shares)


def share(seen: list[Seen]) -> float:
    """Of right answers."""
    return sum(one.right for one in seen) / len(seen)


# ---- Table 7
def _sizes(setting: Setting, base: Whole, of: Runs, where: str) -> list[Claim]:
    def compare(says: str, names: list[str], pairs: list[tuple[str, str]], reason: str) -> Claim:
        told = [Pair(of[a], of[b]) for a, b in pairs]
        verdicts = [pair.verdict for pair in told]
        holds = False if False in verdicts else None if None in verdicts else True
        better = ", ".join(
            f"{a} against {b} {pair.better} to {pair.worse}, p = {sign_test(pair.better, pair.worse):.2g}"
            for (a, b), pair in zip(pairs, told, strict=True)
        )
        measured = f"exact match {', '.join(f'{name}: {exact(of[name])}' for name in names)}; {better} ({where})"
        why = "" if holds else "of a pair that the prompts tell apart the other one is better"
        if holds is None:
            apart = [f"{a} is better than {b}" for (a, b), verdict in zip(pairs, verdicts, strict=True) if verdict]
            why = "; ".join((reason, *apart))
        if any(seen.infeasible is not None for name in names for seen in of[name]):
            why = "an arm is refused on some prompts: the budget cannot hold it"
        rights = {name: [seen.right for seen in of[name]] for name in names}
        return Claim("sekv", "SeKV Table 7", says, measured, holds, why, rights)

    largest = base.params.max_rank
    low, middle = (f"R_max {rank}" for rank in ranks(base.params))
    sides = [f"w {window}" for window in windows(setting, base.params)]
    smaller, larger = sides[0], sides[1:]
    return [
        compare(
            f"a tighter cap on the rank costs accuracy (SeKV: R_max {largest} of head size {base.head_dim})",
            [low, middle, "SeKV"],
            [(middle, low), ("SeKV", middle)],
            "at least one neighbouring pair cannot be told apart",
        ),
        _at_cap(setting, of),
        compare(
            "alpha = 1 is better than 0.5 and than 2 (no cap on anchors)",
            ["alpha 0.5", "alpha 1", "alpha 2"],
            [("alpha 1", "alpha 0.5"), ("alpha 1", "alpha 2")],
            "differences that so few prompts cannot show, or none",
        ),
        compare(
            f"a larger window helps from half to the default size (SeKV: w {base.params.window})",
            [smaller, "SeKV", *larger],
            [("SeKV", smaller)],
            f"{'the question stands in the window either way: ' if setting.trained else ''}differences that so few "
            "prompts cannot show, or none",
        ),
    ]


def _at_cap(setting: Setting, of: Runs) -> Claim:
    """With a trained router g_phi's own ranks; else those that an energy needs, which decides nothing about gates."""
    seen = of["SeKV" if setting.trained else FITTED]
    found, caps = (np.concatenate([x for one in seen for x in getattr(one, name)]) for name in ("ranks", "caps"))
    at_cap = float((found >= caps).mean())
    measured = f"{at_cap:.0%} of {found.size} ranks are at the cap (mean {found.mean():.1f})"
    holds: bool | None = at_cap < 0.5
    reason = "" if holds else "the demo router's gates, trained for a few hundred steps, hardly close any component"
    if not setting.trained:
        measured += f"; {setting.model}, of the components with 95 % of a span's energy"
        holds, reason = None, f"no gates are shipped for {setting.model}: an energy chooses the ranks in their place"
    figures = {"at_cap": at_cap, "mean": float(found.mean())}
    return Claim(
        "sekv",
        "SeKV Table 7",
        "the gates rarely ask for as many components as the cap allows",
        measured,
        holds,
        reason,
        figures,
    )
