"""What the paper of TOVA claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "TOVA sec. 6.1, Fig. 3",
        "It does better than windows, with first tokens and without, and than H2O.",
        arm("tova", "12.5%"),
        (arm("streaming_llm", "12.5%", sinks=0), arm("streaming_llm", "12.5%"), arm("h2o", "12.5%")),
        figure="kl",
    ),
    Statement(
        "TOVA abstract; sec. 6.1, Fig. 3",
        "An eighth of the cache can be as good as all of it.",
        arm("tova", "12.5%"),
        (arm("full"),),
        "as good",
        figure="kl",
        beside=(arm("tova", "25%"),),
    ),
)
