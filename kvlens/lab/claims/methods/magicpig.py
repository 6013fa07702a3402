"""What is expected of MagicPIG, as comparisons of arms: the paper's text was not at hand."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "ours",
        "Sampled attention answers as full KV does.",
        arm("magicpig"),
        (arm("full"),),
        "as good",
        beside=(arm("magicpig", tables=75), arm("magicpig", centred="false")),
    ),
)
