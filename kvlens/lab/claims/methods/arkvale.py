"""What the paper of ArkVale claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "ArkVale, passkeys and LongBench",
        "Bringing pages back does better than evicting for good.",
        arm("arkvale", "40%"),
        (arm("h2o", "40%"), arm("tova", "40%"), arm("streaming_llm", "40%")),
    ),
    Statement(
        "ArkVale abstract",
        "With pages that are brought back hardly anything is lost.",
        arm("arkvale", "40%"),
        (arm("full"),),
        "as good",
        beside=(arm("arkvale", "40%", group="kv_head"),),
    ),
)
