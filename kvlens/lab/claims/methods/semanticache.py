"""What the paper of SemantiCache claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "SemantiCache abstract",
        "It answers as the model with all of its cache does.",
        arm("semanticache", "40%"),
        (arm("full"),),
        "as good",
    ),
)
