"""What the paper of R-KV claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import LONG, Statement, arm

STATEMENTS = (
    Statement(
        "R-KV abstract",
        "Of a long text that it writes itself a third of the cache is as good as all of it.",
        arm("rkv", "34%"),
        (arm("full"),),
        "as good",
        figure="kl",
        text=LONG,
    ),
    Statement(
        "R-KV sec. 5",
        "Counting redundancy beside attention loses less of such a text than attention alone.",
        arm("rkv", "34%"),
        (arm("rkv", "34%", weight=1.0),),
        figure="kl",
        text=LONG,
    ),
)
