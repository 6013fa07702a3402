"""What the paper of DuoAttention claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "DuoAttention sec. 3.2, Figs. 6 and 7",
        "With half of the heads streaming hardly anything is lost.",
        arm("duoattention", sparsity=0.5),
        (arm("full"),),
        "as good",
    ),
    Statement(
        "DuoAttention sec. 3.2, Figs. 6 and 7",
        "It answers more than StreamingLLM, H2O and TOVA at the same budget.",
        arm("duoattention", "40%"),
        (arm("streaming_llm", "40%"), arm("h2o", "40%"), arm("tova", "40%")),
    ),
)
