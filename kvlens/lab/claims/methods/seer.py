"""What the paper of SeerAttention-R claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "SeerAttention-R sec. 4.2",
        "An eighth of the tokens, in the blocks that the trained gate chooses, answers as full KV does.",
        arm("seer", keep=0.125),
        (arm("full"),),
        "as good",
        beside=(arm("seer", keep=0.125, gate="drawn"),),
    ),
    Statement(
        "SeerAttention-R sec. 4.2",
        "The trained gate answers more than Quest, which no training needs, at the same number of tokens.",
        arm("seer", keep=0.125),
        (arm("quest", keep=0.125, dense_layers=0),),
        beside=(arm("quest", keep=0.125),),
    ),
)
