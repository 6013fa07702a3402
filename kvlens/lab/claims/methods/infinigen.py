"""What the paper of InfiniGen claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "InfiniGen, similarity of neighbouring layers",
        "What a layer asks for can be foreseen from the input of the layer before it.",
        arm("infinigen", "40%"),
        (arm("infinigen", "40%", ahead=False),),
        "as good",
        figure="coverage",
    ),
    Statement(
        "InfiniGen, accuracy by relative KV size",
        "With more than a tenth of the cache hardly anything is lost.",
        arm("infinigen", "40%"),
        (arm("full"),),
        "as good",
        beside=(arm("infinigen", "40%", sinks=1),),
    ),
)
