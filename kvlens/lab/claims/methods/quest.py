"""What the paper of Quest claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "Quest sec. 4.2.2, Table 1",
        "It finds what H2O, TOVA and StreamingLLM have lost when the question comes, at the same budget.",
        arm("quest", "20%"),
        (arm("h2o", "20%"), arm("tova", "20%"), arm("streaming_llm", "20%")),
        question="after",
    ),
    Statement(
        "Quest sec. 4.2.1, Fig. 6",
        "Text is predicted as with full KV.",
        arm("quest", "20%"),
        (arm("full"),),
        "as good",
        figure="kl",
        beside=(arm("quest", "40%"),),
    ),
)
