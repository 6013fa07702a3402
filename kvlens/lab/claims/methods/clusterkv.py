"""What the paper of ClusterKV claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "ClusterKV abstract",
        "It does better than Quest and InfiniGen at the same budget.",
        arm("clusterkv", "20%"),
        (arm("quest", "20%"), arm("infinigen", "20%")),
    ),
    Statement(
        "ClusterKV abstract",
        "With a budget that holds a fifth hardly anything is lost.",
        arm("clusterkv", "20%"),
        (arm("full"),),
        "as good",
    ),
)
