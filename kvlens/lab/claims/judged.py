"""Whether a paper's statement holds, of what its arms came to: paired differences on the same prompts, with their 95 %
intervals. Plain Python; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any

from kvlens.lab.claims import Claim
from kvlens.lab.claims.arms import ANSWER, LENGTH, Place, Rows, places
from kvlens.methods.statements import FIGURES, Arm, Figure, Statement
from kvlens.statistics import of_mean, paired_shares, wilson

FEWEST = 10
"""ours: fewer pairs decide nothing"""
ANSWERED = 0.5
"""ours: where the other arm itself answers fewer of the prompts, hardly anything can be lost against it, and *as good*
and *alike* say nothing"""
SHARES = {"resident_share": "holds", "read_share": "reads"}
"""of full KV, means over an arm's trials: as rows name them -> in words"""


@dataclass(frozen=True)
class Compared:
    """The first arm against another on the prompts that both could be held to. Differences count as gains of the
    first, whatever the figure's sense."""

    other: Arm
    n: int
    gain: float
    low: float
    high: float
    answered: float
    """mean of the other arm's figure"""

    def surely_below(self, least: float, among: int) -> bool:
        """The gain lies below `least`, with 95 % confidence over `among` comparisons together (Bonferroni)."""
        wider = NormalDist().inv_cdf(1 - 0.025 / among) / NormalDist().inv_cdf(0.975)
        middle = (self.high + self.low) / 2
        return math.isfinite(middle) and middle + wider * (self.high - middle) < least


@dataclass(frozen=True)
class Trials:
    """What came of a statement's arms, by place."""

    statement: Statement
    at: Sequence[Place]
    rows: Rows

    @property
    def figure(self) -> Figure:
        return FIGURES[self.statement.figure]

    @property
    def least(self) -> float:
        """The gain that has to be passed: none, or minus the margin."""
        return 0.0 if self.statement.verdict == "better" else -self.figure.margin

    def too_few_answers(self, pair: Compared) -> bool:
        """So few of the other arm's answers are right that hardly any can be lost against it."""
        return self.statement.verdict != "better" and self.statement.figure == "exact" and pair.answered < ANSWERED

    def of(self, arm: Arm) -> list[dict[str, Any]]:
        """All trials of an arm."""
        return [self.rows[arm, place] for place in self.at]

    def values(self, arm: Arm, name: str) -> list[float]:
        """A column of those that could be held."""
        return [row[name] for row in self.of(arm) if row.get(name) is not None]

    def compared(self, other_arm: Arm) -> Compared:
        """Gains of the first arm over another, prompt by prompt."""
        name, sign = self.statement.figure, 1 if self.figure.more_is_better else -1
        pairs = [
            (ours[name], theirs[name])
            for ours, theirs in zip(self.of(self.statement.first), self.of(other_arm), strict=True)
            if ours.get(name) is not None and theirs.get(name) is not None
        ]
        gains = [sign * (ours - theirs) for ours, theirs in pairs]
        if not gains:
            return Compared(other_arm, 0, math.nan, -math.inf, math.inf, math.nan)
        if name == "exact":
            bounds = paired_shares(sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains), len(gains))
        else:
            bounds = of_mean(gains) or (-math.inf, math.inf)
        return Compared(other_arm, len(gains), fmean(gains), *bounds, fmean(theirs for _, theirs in pairs))


def judge(statement: Statement, method: str, rows: Rows, prompts: int, titles: Mapping[str, str], model: str) -> Claim:
    """The claim that a statement comes to. titles: of methods."""
    trials = Trials(statement, places(statement, prompts), rows)
    pairs = [trials.compared(other_arm) for other_arm in statement.others]
    words = {arm: arm_words(arm, titles) for arm in statement.arms}
    holds = verdict(trials, pairs)
    return Claim(
        method,
        statement.source,
        statement.says,
        measured(trials, pairs, words, titles, prompts, model),
        holds,
        "" if holds else why(trials, pairs, words),
        {
            "figure": statement.figure,
            "verdict": statement.verdict,
            "margin": trials.figure.margin if statement.verdict in ("as good", "alike") else None,
            "bounds": statement.bounds,
            "places": [list(place) for place in trials.at],
            "arms": [_arm(trials, arm, words[arm]) for arm in statement.arms],
            "gains": [
                {"over": words[pair.other], "n": pair.n, "gain": pair.gain, "low": pair.low, "high": pair.high}
                for pair in pairs
            ],
        },
    )


def verdict(trials: Trials, pairs: Sequence[Compared]) -> bool | None:
    """Return the verdict. *within*: see `lies_within`. *better*: every interval lies above 0. *as good*: every interval
    lies above minus the margin. *alike*: every interval lies within the margin. It does not hold where one lies wholly
    outside. Else, and for few pairs or few right answers, nothing is decided."""
    if trials.statement.bounds is not None:
        return lies_within(trials.values(trials.statement.first, trials.statement.figure), trials.statement.bounds)
    enough = [pair for pair in pairs if pair.n >= FEWEST]
    both = trials.statement.verdict == "alike"
    if any(pair.surely_below(trials.least, len(pairs)) for pair in enough):
        return False
    if both and any(pair.low > trials.figure.margin for pair in enough):
        return False
    if len(enough) < len(pairs) or any(trials.too_few_answers(pair) for pair in pairs):
        return None
    inside = all(pair.low > trials.least and (not both or pair.high < trials.figure.margin) for pair in pairs)
    return True if inside else None


def lies_within(values: Sequence[float], bounds: tuple[float, float]) -> bool | None:
    """Return whether the 95 % interval of the mean lies in the bounds; False if it lies outside them; None if it holds
    a bound, or for fewer than FEWEST values."""
    interval = of_mean(values) if len(values) >= FEWEST else None
    if interval is None:
        return None
    (low, high), (least, most) = interval, bounds
    if high < least or most < low:
        return False
    return True if least <= low and high <= most else None


def measured(
    trials: Trials,
    pairs: Sequence[Compared],
    words: Mapping[Arm, str],
    titles: Mapping[str, str],
    prompts: int,
    model: str,
) -> str:
    """What was found, with n, intervals, presets and where."""
    statement, figure = trials.statement, trials.figure
    arm_texts = "; ".join(_said(trials, arm, words[arm]) for arm in (statement.first, *statement.others))
    beside = "; ".join(_said(trials, arm, words[arm]) for arm in statement.beside)
    gains = "; ".join(f"{_gain(figure, pair)} over {words[pair.other]}, n = {pair.n}" for pair in pairs if pair.n)
    return (
        f"{figure.words[0].upper()}{figure.words[1:]}: {arm_texts}."
        + (f" Beside them: {beside}." if beside else "")
        + (f" Gain (95 %): {gains}." if gains else "")
        + f" {where(statement, prompts, model)}; {_presets(trials, titles)}."
    )


def why(trials: Trials, pairs: Sequence[Compared], words: Mapping[Arm, str]) -> str:
    """Why it does not hold, or is not decided."""
    statement, margin, sentences = trials.statement, trials.figure.margin, list[str]()
    if statement.bounds is not None:
        sentences.append(_why_outside(trials.values(statement.first, statement.figure), statement.bounds))
    for pair in pairs:
        name = words[pair.other]
        if pair.n < FEWEST:
            sentences.append(
                f"On {pair.n} prompts both it and {name} could be run, {FEWEST} are needed to compare them."
            )
        elif statement.verdict == "better":
            if pair.surely_below(0.0, len(pairs)):
                sentences.append(f"It is worse than {name}.")
            elif pair.low <= 0:
                sentences.append(f"It is not told apart from {name}.")
        elif pair.surely_below(trials.least, len(pairs)):
            sentences.append(f"More is lost against {name} than the {margin:g} that we take for nothing.")
        elif trials.too_few_answers(pair):
            sentences.append(f"{name} itself answers {pair.answered:.2f}: too little to lose.")
        elif statement.verdict == "alike" and pair.low > margin:
            sentences.append(f"More is gained over {name} than the {margin:g} that we take for nothing.")
        elif pair.low <= trials.least or (statement.verdict == "alike" and pair.high >= margin):
            sentences.append(
                f"The difference from {name} is not shown to be below the {margin:g} that we take for nothing."
            )
    refused = {row["refused"]: None for arm in statement.arms for row in trials.of(arm) if "refused" in row}
    return " ".join((*sentences, *refused))


def _why_outside(values: Sequence[float], bounds: tuple[float, float]) -> str:
    """Return why a mean is not shown to lie within the bounds."""
    if len(values) < FEWEST:
        return f"There are {len(values)} figures, {FEWEST} are needed."
    least, most = bounds
    if lies_within(values, bounds) is None:
        return f"The interval of the mean holds an end of the paper's range, {least:g} to {most:g}."
    return f"The mean lies {'below' if fmean(values) < least else 'above'} the paper's range, {least:g} to {most:g}."


def where(statement: Statement, prompts: int, model: str) -> str:
    """On what it was measured."""
    if FIGURES[statement.figure].of_text:
        context, fed = statement.text
        return f"Model {model}, {prompts} passages of {context:,} tokens, the next {fed} fed and compared; no question"
    question_place = "read with its context" if statement.question == "in" else "fed after the context was placed"
    tasks = " and ".join(statement.tasks)
    conditions = f"the question {question_place}, {ANSWER} tokens of answer at most"
    return f"Model {model}, {LENGTH:,} tokens, {prompts} prompts of {tasks} each, {conditions}"


def arm_words(arm: Arm, titles: Mapping[str, str]) -> str:
    """'TITLE at 20%, kernel=1'."""
    limit = f" at {arm.budget}" if arm.budget else ""
    changes = "".join(f", {name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in arm.changes)
    return f"{titles.get(arm.method, arm.method)}{limit}{changes}"


def _arm(trials: Trials, arm: Arm, words: str) -> dict[str, Any]:
    """An arm's numbers, plain JSON."""
    return {
        "arm": words,
        "values": [row.get(trials.statement.figure) for row in trials.of(arm)],
        **{name: _mean(trials.values(arm, name)) for name in SHARES},
        "presets": sorted({row.get("preset") or "defaults" for row in trials.of(arm)}),
        "infeasible": trials.values(arm, "infeasible"),
        "failed_self_checks": sum(row.get("passed") is False for row in trials.of(arm)),
    }


def _said(trials: Trials, arm: Arm, words: str) -> str:
    """'TITLE at 20% 0.27 (0.14-0.44), holds 20%, reads 17%'."""
    values = trials.values(arm, trials.statement.figure)
    if not values:
        short = trials.values(arm, "infeasible")
        return f"{words} cannot be held, it needs {fmean(short):.0%}" if short else f"{words} cannot be run"
    mean = fmean(values)
    if trials.statement.figure == "exact":
        low, high = wilson(mean, len(values))
        came = f"{mean:.2f} ({low:.2f}-{high:.2f})"
    else:
        bounds = of_mean(values)
        came = f"{mean:.3f}" + (f" ({max(bounds[0], 0.0):.3f}-{bounds[1]:.3f})" if bounds else "")
    shares = [
        f"{word} {fmean(shares_recorded):.0%}"
        for name, word in SHARES.items()
        if (shares_recorded := trials.values(arm, name))
    ]
    return ", ".join((f"{words} {came}", *shares))


def _gain(figure: Figure, pair: Compared) -> str:
    digits = 2 if figure is FIGURES["exact"] else 3
    bounds = f" ({pair.low:+.{digits}f} to {pair.high:+.{digits}f})" if math.isfinite(pair.low) else ""
    return f"{pair.gain:+.{digits}f}{bounds}"


def _presets(trials: Trials, titles: Mapping[str, str]) -> str:
    """'presets: TITLE paper, TITLE defaults'."""
    presets = dict.fromkeys(
        f"{titles.get(arm.method, arm.method)} {row.get('preset') or 'defaults'}"
        for arm in trials.statement.arms
        for row in trials.of(arm)
    )
    return f"presets: {', '.join(presets)}"


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
