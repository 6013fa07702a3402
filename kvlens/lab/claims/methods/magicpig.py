"""What the authors of MagicPIG claim beside their code, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "MagicPIG, authors' code",
        "Sampled attention answers as full KV does.",
        arm("magicpig"),
        (arm("full"),),
        "as good",
        beside=(arm("magicpig", tables=75),),
    ),
    Statement(
        "MagicPIG, authors' code",
        "It answers more than Quest does.",
        arm("magicpig"),
        (arm("quest", "20%"),),
        beside=(arm("magicpig", centred="false"),),
    ),
)
