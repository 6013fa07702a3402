"""What the paper of H2O claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "H2O sec. 5.1, Fig. 4, Tables 1 and 2",
        "A fifth of the cache is as good as all of it.",
        arm("h2o", "20%"),
        (arm("full"),),
        "as good",
        figure="kl",
        beside=(arm("h2o", "40%"),),
    ),
    Statement(
        "H2O sec. 5.1, Table 2",
        "Tokens that received most attention beside the newest do better than the newest alone.",
        arm("h2o", "20%"),
        (arm("streaming_llm", "20%", sinks=0),),
        figure="kl",
        beside=(arm("streaming_llm", "20%"),),
    ),
)
