"""What the paper of AdaKV claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "Ada-KV abstract",
        "Dividing a layer's budget over its heads by their attention does better than dividing it equally.",
        arm("adakv", "40%"),
        (arm("adakv", "40%", floor=1.0),),
    ),
    Statement(
        "Ada-KV abstract",
        "Dividing it so does better in text that asks nothing, too.",
        arm("adakv", "20%"),
        (arm("adakv", "20%", floor=1.0),),
        figure="kl",
    ),
)
