"""What the paper of SimLayerKV claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "SimLayerKV sec. 5",
        "Keeping whole layers answers more than keeping the first and newest tokens of all layers.",
        arm("simlayerkv", "60%"),
        (arm("streaming_llm", "60%"),),
    ),
)
