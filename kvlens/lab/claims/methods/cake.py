"""What the paper of CAKE claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "CAKE, results on LongBench",
        "It does better than SnapKV, PyramidKV, H2O, TOVA and StreamingLLM at the same budget.",
        arm("cake", "20%"),
        tuple(arm(name, "20%") for name in ("snapkv", "pyramidkv", "h2o", "tova", "streaming_llm")),
    ),
    Statement(
        "CAKE, ablation of the score",
        "Counting how a token's attention shifts does better than its mean alone.",
        arm("cake", "20%"),
        (arm("cake", "20%", gamma=0.0),),
    ),
)
