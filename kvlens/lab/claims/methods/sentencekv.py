"""What the paper of SentenceKV claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "SentenceKV sec. 5.2, Table 1",
        "It finds more needles than SnapKV, Quest and H2O.",
        arm("sentencekv", "40%"),
        (arm("snapkv", "40%"), arm("quest", "40%"), arm("h2o", "40%")),
    ),
)
