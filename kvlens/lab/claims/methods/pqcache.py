"""What the paper of PQCache claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "PQCache, results",
        "With a fifth of the tokens it does better than H2O, SnapKV, PyramidKV, InfLLM and SparQ of as few bytes.",
        arm("pqcache", "20%"),
        (
            arm("h2o", "20%"),
            arm("snapkv", "20%"),
            arm("pyramidkv", "20%"),
            arm("infllm", "20%"),
            arm("sparq", "20%", components=2),
        ),
    ),
    Statement(
        "PQCache, results",
        "A fifth of the tokens is nearly as good as all.",
        arm("pqcache", "20%"),
        (arm("full"),),
        "as good",
    ),
)
