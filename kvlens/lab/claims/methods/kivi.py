"""What the paper of KIVI claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "KIVI, accuracy at 2 bits",
        "Two bits answer nearly as sixteen do.",
        arm("kivi"),
        (arm("full"),),
        "as good",
        beside=(arm("kivi", bits=4),),
    ),
    Statement(
        "KIVI, ablation of the residual",
        "How many of the newest tokens stay in full precision, 32 or 128, makes no difference.",
        arm("kivi", residual=32),
        (arm("kivi"),),
        "alike",
    ),
)
