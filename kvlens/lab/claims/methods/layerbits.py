"""What the papers behind bits by layer claim, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "KVTuner sec. 4",
        "More bits for keys and fewer for values lose less of a text than the other way round.",
        arm("layerbits", keys=4, values=2),
        (arm("layerbits", keys=2, values=4),),
        figure="kl",
    ),
)
