"""What the paper of Expected Attention claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "Expected Attention sec. 4.1, Table 1",
        "Where the question is not known, it answers more than SnapKV, TOVA and KeyDiff.",
        arm("expected_attention", "40%"),
        (arm("snapkv", "40%"), arm("tova", "40%"), arm("keydiff", "40%")),
        question="after",
        beside=(arm("expected_attention", "40%", epsilon=0.0),),
    ),
)
