"""FreeKV's claims: how alike queries of adjacent steps are, how often that leads to corrections, and what tau and the
group's pooling do for accuracy."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from kvlens.engine.engine import Engine
from kvlens.lab.claims import Claim
from kvlens.lab.claims.methods.freekv_cases import Case, case_of
from kvlens.lab.claims.methods.freekv_runs import BUDGET, COMPARED, FULL, Seen, at, measure
from kvlens.lab.claims.methods.freekv_similarity import of_similarity
from kvlens.methods.freekv.params import POOLINGS
from kvlens.statistics import normal, sign_test

PAPER_RATES = {0.8: (0.04, 0.22), 0.9: (0.17, 0.52)}
"""Table 9: smallest and largest correction rate"""
SIGNIFICANT = 0.05


def claims(engine: Engine, prompts: int, report: Callable[[str], None]) -> list[Claim]:
    """`prompts` prompts of each task of the model's case. FullKV tells of the similarity, FreeKV's arms of everything
    else."""
    case = case_of(engine.loaded.name)
    seen = measure(engine, case, prompts, report)
    about = case.about(prompts)
    taus = {tau: list(seen[at(tau)].values()) for tau in case.taus}
    wider = {tau: list(seen[at(tau, case.wider)].values()) for tau in COMPARED} if case.wider else {}
    cosines = [np.stack(trial.qcos) for trial in seen[FULL].values() if trial.qcos]
    return [
        *of_similarity(case, cosines, engine.loaded.shape.group, about),
        *rates(case, taus, about),
        accuracy(case, taus, BUDGET, about),
        *([accuracy(case, wider, case.wider, about)] if wider else []),
        poolings(
            {
                "MeanS": [trial for (task, _), trial in seen[at(1.0)].items() if task in case.pooled],
                **{name: list(seen[name].values()) for name in POOLINGS[1:]},
            },
            f"{case.model}, {prompts} prompts of each of {', '.join(case.pooled)}, {_held(taus[1.0], BUDGET)}",
        ),
    ]


def _held(seen: list[Seen], budget: str) -> str:
    """What an arm was held to, in words."""
    return f"budget {budget}, {'; '.join(sorted({trial.settings for trial in seen}))}"


def rates(case: Case, trials: dict[float, list[Seen]], about: str) -> list[Claim]:
    """App. B.3 and Table 9. Prompts whose answer has one token have no step that could be corrected."""
    told = {tau: [float(np.mean(t.corrected)) for t in seen if t.corrected] for tau, seen in trials.items()}
    rate = {tau: float(np.mean(found)) for tau, found in told.items()}
    within = {tau: normal(told[tau])[1:] for tau in PAPER_RATES}
    waited = {tau: sum(t.blocking for t in seen) / max(1.0, sum(t.moved for t in seen)) for tau, seen in trials.items()}
    listed = ", ".join(f"{tau:g}: {rate[tau]:.3f}" for tau in rate)
    rising = all(rate[a] <= rate[b] for a, b in pairwise(sorted(rate))) and rate[0.0] == 0 and rate[1.0] == 1
    out = [tau for tau, (low, high) in PAPER_RATES.items() if within[tau][1] < low or within[tau][0] > high]
    inside = all(low <= within[tau][0] and within[tau][1] <= high for tau, (low, high) in PAPER_RATES.items())
    holds = False if out else True if inside else None
    figures = {
        "rate": {str(tau): round(x, 4) for tau, x in rate.items()},
        "interval": {str(tau): [round(x, 4) for x in ends] for tau, ends in within.items()},
        "blocking_share_of_bytes": {str(tau): round(x, 4) for tau, x in waited.items()},
    }
    few = " and ".join(f"{rate[tau]:.3f} ({low:.3f} to {high:.3f}) at {tau:g}" for tau, (low, high) in within.items())
    return [
        Claim(
            "freekv",
            "FreeKV app. B.3, Table 9",
            "A higher tau corrects more.",
            f"Correction rate at tau {listed}; share of bytes waited for "
            f"{', '.join(f'{t:g}: {x:.3f}' for t, x in waited.items())} (step 0 left out); {about}.",
            rising,
            "" if rising else "The rates do not rise from 0 to 1.",
            figures,
        ),
        Claim(
            "freekv",
            "FreeKV Table 9",
            "Few heads are corrected: 0.04 to 0.22 at tau 0.8, 0.17 to 0.52 at tau 0.9.",
            f"{few} (95 % over {len(told[0.8])} prompts), layers that are compressed; {about}.",
            holds,
            ""
            if holds
            else "An interval reaches over an end of the paper's range."
            if holds is None
            else f"Outside at {' and '.join(f'{tau:g}' for tau in out)}: that many (step, layer, KV head) of "
            f"{case.model} have a mean cosine below tau, by the similarity above.",
            figures,
        ),
    ]


def paired(a: list[Seen], b: list[Seen]) -> tuple[float, float]:
    """(mean difference of a over b, p of the sign test over prompts)."""
    pairs = [(x.right, y.right) for x, y in zip(a, b, strict=True)]
    return float(np.mean([x - y for x, y in pairs])), sign_test(
        sum(x > y for x, y in pairs), sum(x < y for x, y in pairs)
    )


def _right(seen: list[Seen]) -> float:
    return float(np.mean([trial.right for trial in seen]))


def _whole(seen: list[Seen]) -> float:
    return float(np.mean([trial.right == 1 for trial in seen]))


def _answered(seen: list[Seen]) -> list[Seen]:
    """Trials whose fed tokens are the right answer."""
    return [trial for trial in seen if trial.answers]


def accuracy(case: Case, trials: dict[float, list[Seen]], budget: str, about: str) -> Claim:
    """Table 7 at one budget, on the prompts that are answered at all."""
    says = (
        f"Correction buys accuracy: tau 0.9 answers better than no correction, and as well as no speculation ({budget} "
        "of full KV)."
    )
    answered = {tau: _answered(seen) for tau, seen in trials.items()}
    if not answered[0.0]:
        why = f"{case.model} answers none of these prompts with full KV."
        return Claim("freekv", "FreeKV Table 7", says, about, None, why)
    right = {tau: _right(seen) for tau, seen in answered.items()}
    exact = {tau: _whole(seen) for tau, seen in answered.items()}
    gain, p = paired(answered[0.9], answered[0.0])
    behind, p_behind = paired(answered[0.9], answered[1.0])
    most, p_most = paired(answered[1.0], answered[0.0])
    lags = behind < 0 and p_behind <= SIGNIFICANT
    holds = False if lags else None if p > SIGNIFICANT else gain > 0
    why = (
        "0.9 answers worse than no speculation."
        if lags
        else "The difference is within chance."
        if holds is None
        else "Correction did not help here."
    )
    return Claim(
        "freekv",
        "FreeKV Table 7",
        says,
        f"Right tokens of the answer at tau {', '.join(f'{t:g}: {x:.3f}' for t, x in right.items())}; whole answers "
        f"{', '.join(f'{t:g}: {x:.2f}' for t, x in exact.items())}; 0.9 against 0: {gain:+.3f}, p {p:.3g} "
        f"(sign test over prompts); 0.9 against 1: {behind:+.3f}, p {p_behind:.2g}; n = {len(answered[0.0])} of "
        f"{len(trials[0.0])} prompts, those on which what is fed is the right answer; {about}, "
        f"{_held(trials[0.0], budget)}.",
        holds,
        "" if holds else f"{why} No speculation at all (tau 1) against no correction: {most:+.3f}, p {p_most:.2g}.",
        {
            "right": {str(t): round(x, 4) for t, x in right.items()},
            "exact": {str(t): round(x, 4) for t, x in exact.items()},
            "by_task": _by_task(answered),
            "n": len(answered[0.0]),
        },
    )


def _by_task(seen: dict[float, list[Seen]]) -> dict[str, dict[str, float]]:
    """Task -> tau -> share of whole answers."""
    names = dict.fromkeys(trial.task for trial in seen[0.0])
    return {
        name: {str(tau): round(_whole([x for x in found if x.task == name]), 4) for tau, found in seen.items()}
        for name in names
    }


def poolings(trials: dict[str, list[Seen]], about: str) -> Claim:
    """Table 5, on the prompts that are answered at all."""
    says = "Of the six poolings the mean of the softmax over a group (MeanS) answers best."
    answered = {name: _answered(seen) for name, seen in trials.items()}
    if not answered["MeanS"]:
        return Claim("freekv", "FreeKV Table 5", says, about, None, "None of these prompts is answered with full KV.")
    right = {name: _right(seen) for name, seen in answered.items()}
    best = max(right, key=lambda name: right[name])
    against = {name: paired(answered["MeanS"], seen) for name, seen in answered.items() if name != "MeanS"}
    worse = [name for name, (gain, p) in against.items() if gain < 0 and p <= SIGNIFICANT]
    open_ = [name for name, (_, p) in against.items() if p > SIGNIFICANT]
    holds = False if worse else None if open_ else True
    listed = ", ".join(f"{name} {g:+.3f} (p {p:.2g})" for name, (g, p) in against.items())
    return Claim(
        "freekv",
        "FreeKV Table 5",
        says,
        f"Right tokens without speculation: {', '.join(f'{name} {x:.3f}' for name, x in right.items())}; best {best}; "
        f"MeanS against the others: {listed}; n = {len(answered['MeanS'])}; {about}.",
        holds,
        ""
        if holds
        else f"{', '.join(worse)} {'is' if len(worse) == 1 else 'are'} better here."
        if worse
        else f"Within chance: {', '.join(open_)}.",
        {"right": {name: round(x, 4) for name, x in right.items()}, "n": len(answered["MeanS"])},
    )
