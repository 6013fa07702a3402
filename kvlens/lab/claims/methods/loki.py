"""What the paper of Loki claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "Loki abstract",
        "A quarter of the tokens, chosen in a quarter of the dimensions, answers as full KV does.",
        arm("loki", "50%"),
        (arm("full"),),
        "as good",
        beside=(arm("loki", "50%", axes="prompt"),),
    ),
)
