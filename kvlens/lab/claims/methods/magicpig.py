"""What the paper of MagicPIG claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "MagicPIG abstract",
        "Sampled attention answers as full KV does.",
        arm("magicpig"),
        (arm("full"),),
        "as good",
        beside=(arm("magicpig", tables=75),),
    ),
    Statement(
        "MagicPIG sec. 4.3",
        "Keys that are hashed around their mean lose less of a text than keys as they are.",
        arm("magicpig"),
        (arm("magicpig", centred="false"),),
        figure="kl",
    ),
)
