"""What the paper of FINCH claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "FINCH abstract",
        "A quarter of the cache, chosen by the question, answers as full KV does.",
        arm("finch", "25%"),
        (arm("full"),),
        "as good",
        beside=(arm("finch", "25%", closed=False), arm("snapkv", "25%")),
    ),
)
