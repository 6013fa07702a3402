"""What the paper of Q-Filters claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "Q-Filters sec. 4",
        "Keys along the filter lose less of a text than tokens drawn by chance do.",
        arm("qfilters", "40%"),
        (arm("random", "40%"),),
        figure="kl",
        beside=(arm("qfilters", "40%", filters="drawn"),),
    ),
)
