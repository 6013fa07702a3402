"""What the paper of LagKV claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement("LagKV abstract", "Half can go with hardly any loss.", arm("lagkv", "50%"), (arm("full"),), "as good"),
    Statement(
        "LagKV sec. 4",
        "Without looking at any query it answers more than tokens drawn by chance do.",
        arm("lagkv", "50%"),
        (arm("random", "50%"),),
        question="after",
    ),
)
