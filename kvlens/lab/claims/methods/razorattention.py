"""What the paper of RazorAttention claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "RazorAttention, ablation of the compensation token",
        "One entry that stands for what is dropped does better than none.",
        arm("razorattention", "40%"),
        (arm("razorattention", "40%", compensate=False),),
        figure="kl",
    ),
    Statement(
        "RazorAttention abstract",
        "A cache that is much smaller (by 70 % there, 60 % here) loses hardly anything.",
        arm("razorattention", "40%"),
        (arm("full"),),
        "as good",
    ),
    Statement(
        "RazorAttention, ablation of the retrieval heads",
        "With 14 % of the heads kept whole for induction more is answered than with 5 %.",
        arm("razorattention", "40%"),
        (arm("razorattention", "40%", induction=0.05),),
    ),
)
