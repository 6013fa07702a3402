"""What the paper of KeyDiff claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "KeyDiff abstract",
        "Keys unlike the others are the ones that are attended.",
        arm("keydiff", "20%"),
        (arm("random", "20%", window=0),),
        figure="coverage",
    ),
    Statement(
        "KeyDiff abstract",
        "With 23 % less cache hardly anything is lost.",
        arm("keydiff", "77%"),
        (arm("full"),),
        "as good",
    ),
)
