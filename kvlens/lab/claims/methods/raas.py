"""What the paper of RaaS claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import LONG, Statement, arm

STATEMENTS = (
    Statement(
        "RaaS abstract",
        "Of a long text that it writes itself it loses no more than Quest, which keeps everything.",
        arm("raas", "60%", keep_prompt=True),
        (arm("quest", "60%"),),
        "as good",
        figure="kl",
        text=LONG,
    ),
    Statement(
        "RaaS, results",
        "Of a long text that it writes itself it loses less than H2O and StreamingLLM at the same budget.",
        arm("raas", "60%", keep_prompt=True),
        (arm("h2o", "60%"), arm("streaming_llm", "60%")),
        figure="kl",
        text=LONG,
    ),
)
