"""Stored claims judged again from their figures: no model is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvlens import methods
from kvlens.lab.claims import Claim, read, written
from kvlens.lab.claims.arm_evidence import weigh
from kvlens.lab.claims.check import statements_of
from kvlens.lab.claims.family import decide
from kvlens.lab.claims.words import Wording
from kvlens.methods.statements import FIGURES, Statement
from kvlens.refusal import Refusal


def judge_again(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a result file with every claim judged by this version's statistics.

    A claim that compares arms is made again from the figures of its prompts; any other claim keeps its p values, and
    its verdict where it has none. Raises ValueError, one sentence, for a claim that this version does not state."""
    titles = {name: method.title for name, method in methods.registry().items()}
    parts = {}
    for name, part in result["methods"].items():
        wording = Wording(titles, part["about"]["model"])
        claims = [read(row) for row in part["claims"]]
        count = sum("verdict" in claim.figures or claim.test is not None for claim in claims)
        statements = {(row.source, row.says): row for row in statements_of(methods.get(name))}
        again = [_again(claim, name, statements, wording, count) for claim in claims]
        parts[name] = {**part, "claims": [written(claim) for claim in decide(again)]}
    return {**result, "methods": parts}


def _again(
    claim: Claim, method: str, statements: Mapping[tuple[str, str], Statement], wording: Wording, count: int
) -> Claim:
    if "verdict" not in claim.figures:
        return claim
    statement = statements.get((claim.source, claim.says))
    if statement is None or len(statement.arms) != len(claim.figures["arms"]):
        raise Refusal(
            f"the claim '{claim.source}: {claim.says}' is not stated by this version: measure it again.",
            code="claim_unknown",
        )
    if "text" in claim.figures:  # this version may feed other lengths
        statement = replace(statement, text=tuple(claim.figures["text"]))
    return weigh(statement, method, claim.figures["arms"], prompts_of(claim, statement), wording, count)


def prompts_of(claim: Claim, statement: Statement) -> int:
    """Return the number of prompts of each task, or of passages, that a claim was measured on."""
    trials = len(claim.figures["arms"][0]["values"])
    return trials // (1 if FIGURES[statement.figure].of_text else len(statement.tasks))
