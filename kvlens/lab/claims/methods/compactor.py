"""What the paper of Compactor claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "Compactor abstract",
        "Where the question is not known, it answers more than SnapKV with as many tokens.",
        arm("compactor", "40%"),
        (arm("snapkv", "40%"),),
        question="after",
        beside=(arm("compactor", "40%", blend=0.0),),
    ),
)
