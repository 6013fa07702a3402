"""What the paper of InfLLM claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "InfLLM sec. 4.3, Table 1",
        "It answers more than a sliding window with first tokens.",
        arm("infllm", "40%"),
        (arm("streaming_llm", "40%"),),
    ),
    Statement(
        "InfLLM sec. 4.6, Fig. 2",
        "Four tokens stand for a block better than one.",
        arm("infllm", "40%", representatives=4),
        (arm("infllm", "40%", representatives=1),),
        beside=(arm("infllm", "40%", representatives=8),),
    ),
)
