"""What the paper of ThinK claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "ThinK abstract",
        "Keys without 40 % of their channels answer as full KV does.",
        arm("thinkkv", pruned=0.4),
        (arm("full"),),
        "as good",
        beside=(arm("thinkkv", pruned=0.6),),
    ),
)
