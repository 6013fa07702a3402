"""A statement's figures and reasons in words. Numbers come from compared.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvlens.lab.claims.arm_pairs import ArmPair, Compare
from kvlens.lab.claims.armstudy import ANSWER, LENGTH
from kvlens.lab.claims.plan import FEWEST
from kvlens.methods.statements import FIGURES, Arm, Figure, Statement
from kvlens.statistics import of_mean, wilson

SHARES = {"resident_share": "holds", "read_share": "reads"}
"""of full KV, means over an arm's trials: as rows name them -> in words"""


def arm_words(arm: Arm, titles: Mapping[str, str]) -> str:
    """Return 'TITLE at 20%, kernel=1'."""
    limit = f" at {arm.budget}" if arm.budget else ""
    changes = "".join(f", {name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in arm.changes)
    return f"{titles.get(arm.method, arm.method)}{limit}{changes}"


def where(statement: Statement, prompts: int, model: str) -> str:
    """Return the model, the prompts and the question's place in words."""
    if FIGURES[statement.figure].of_text:
        context, fed = statement.text
        return f"Model {model}, {prompts} passages of {context:,} tokens, the next {fed} fed and compared; no question"
    question_place = "read with its context" if statement.question == "in" else "fed after the context was placed"
    tasks = " and ".join(statement.tasks)
    conditions = f"the question {question_place}, {ANSWER} tokens of answer at most"
    return f"Model {model}, {LENGTH:,} tokens, {prompts} prompts of {tasks} each, {conditions}"


def arm_figure(row: Mapping[str, Any], figure: str) -> str:
    """Return 'TITLE at 20% 0.27 (0.14-0.44), holds 20%, reads 17%'."""
    values = [value for value in row["values"] if value is not None]
    if not values:
        short = row["infeasible"]
        return (
            f"{row['arm']} cannot be held, it needs {fmean(short):.0%}" if short else f"{row['arm']} could not be run"
        )
    mean = fmean(values)
    if figure == "exact":
        low, high = wilson(mean, len(values))
        result = f"{mean:.2f} ({low:.2f}-{high:.2f})"
    else:
        bounds = of_mean(values)
        result = f"{mean:.3f}" + (f" ({max(bounds[0], 0.0):.3f}-{bounds[1]:.3f})" if bounds else "")
    shares = [f"{word} {row[name]:.0%}" for name, word in SHARES.items() if row.get(name) is not None]
    return ", ".join((f"{row['arm']} {result}", *shares))


def gain_words(figure: Figure, pair: ArmPair) -> str:
    """Return '+0.10 (-0.05 to +0.28)': the gain with its 95 % interval."""
    digits = 2 if figure is FIGURES["exact"] else 3
    bounds = f" ({pair.bounds[0]:+.{digits}f} to {pair.bounds[1]:+.{digits}f})" if pair.bounds else ""
    return f"{fmean(pair.gains):+.{digits}f}{bounds}"


@dataclass(frozen=True)
class Wording:
    """Sentences on the arms of statements."""

    titles: Mapping[str, str]
    """of methods"""
    model: str

    def describe_figures(self, compare: Compare, prompts: int) -> str:
        """Return the figures, with n, intervals, presets and the condition."""
        statement, rows = compare.statement, compare.records
        count = 1 + len(statement.others)
        arm_texts = "; ".join(arm_figure(row, statement.figure) for row in rows[:count])
        beside = "; ".join(arm_figure(row, statement.figure) for row in rows[count:])
        gains = "; ".join(
            f"{gain_words(compare.figure, pair)} over {row['arm']}, n = {pair.n}"
            for row, pair in zip(rows[1:count], compare.pairs, strict=True)
            if pair.n
        )
        words = compare.figure.words
        return (
            f"{words[0].upper()}{words[1:]}: {arm_texts}."
            + (f" Beside them: {beside}." if beside else "")
            + (f" Gain (95 %): {gains}." if gains else "")
            + f" {where(statement, prompts, self.model)}; {self.presets(statement, rows)}."
        )

    def presets(self, statement: Statement, rows: Sequence[Mapping[str, Any]]) -> str:
        """Return 'presets: TITLE paper, TITLE defaults'."""
        names = dict.fromkeys(
            f"{self.titles.get(arm.method, arm.method)} {preset}"
            for arm, row in zip(statement.arms, rows, strict=True)
            for preset in row["presets"]
        )
        return f"presets: {', '.join(names)}"

    def reasons(self, compare: Compare, needed: int | None) -> tuple[str, str]:
        """Return why the statement would not hold, and why it would not be decided. needed: number of pairs."""
        refuted, undecided = list[str](), list[str]()
        if compare.statement.bounds is not None:
            return _outside(compare), _range_undecided(compare)
        for row, pair in zip(compare.records[1:], compare.pairs, strict=False):
            against, doubt = _against(compare, pair, row["arm"]), _doubt(compare, pair, row["arm"], needed)
            refuted += [against] if against else []
            undecided += [doubt] if doubt else []
        if not undecided:
            undecided.append("Each comparison is shown alone, and not over all claims of the paper.")
        refused = dict.fromkeys(text for row in compare.records for text in row.get("refused", ()))
        return " ".join((*refuted, *refused)), " ".join((*undecided, *refused))


def _against(compare: Compare, pair: ArmPair, name: str) -> str:
    """Return the sentence on a comparison that fails; '' if its interval does not."""
    margin, bounds = compare.figure.margin, pair.bounds
    if bounds is None or not pair.is_enough:
        return ""
    if bounds[1] < compare.least:
        if compare.statement.verdict == "better":
            return f"It is worse than {name}."
        return f"More is lost against {name} than the {margin:g} that we take for nothing."
    if compare.both_sides and bounds[0] > margin:
        return f"More is gained over {name} than the {margin:g} that we take for nothing."
    return ""


def _doubt(compare: Compare, pair: ArmPair, name: str, needed: int | None) -> str:
    """Return the sentence on a comparison that is not decided; '' if its interval is."""
    margin, bounds = compare.figure.margin, pair.bounds
    if not pair.is_enough:
        return f"On {pair.n} prompts both it and {name} could be run, {FEWEST} are needed to compare them."
    if compare.too_few_answers(pair):
        return f"{name} itself answers {pair.answered:.2f}: too little to lose, with any number of prompts."
    if bounds is None:
        return ""
    is_shown = bounds[0] > compare.least and (not compare.both_sides or bounds[1] < margin)
    if is_shown:
        return ""
    if _against(compare, pair, name):
        return f"Alone it is worse than {name}, and not over all claims of the paper."
    is_planned = needed is not None and pair.n >= needed
    if compare.statement.verdict == "better":
        return f"It is not told apart from {name}" + (
            f"; so many prompts would show a gain of {margin:g} in most cases." if is_planned else "."
        )
    return f"The difference from {name} is not shown to be below the {margin:g} that we take for nothing" + (
        "; so many prompts would show it of equal arms in most cases." if is_planned else "."
    )


def _outside(compare: Compare) -> str:
    """Return on which side of the paper's range the mean is."""
    values, (least, most) = compare.values(), compare.statement.bounds or (0.0, 0.0)
    if not values:
        return ""
    return f"The mean lies {'below' if fmean(values) < least else 'above'} the paper's range, {least:g} to {most:g}."


def _range_undecided(compare: Compare) -> str:
    """Return why a mean is not shown to lie within the paper's range."""
    values, (least, most) = compare.values(), compare.statement.bounds or (0.0, 0.0)
    if len(values) < FEWEST:
        return f"There are {len(values)} figures, {FEWEST} are needed."
    return f"The mean is not shown to lie on one side of an end of the paper's range, {least:g} to {most:g}."
