"""What the paper of MiniCache claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "MiniCache abstract",
        "The deeper half of the layers, merged in pairs, answers as full KV does.",
        arm("minicache"),
        (arm("full"),),
        "as good",
        beside=(arm("minicache", exact=0.0),),
    ),
    Statement(
        "MiniCache sec. 4",
        "Merging the first layers as well loses more of a text than merging the deeper half.",
        arm("minicache"),
        (arm("minicache", begin=0.0),),
        figure="kl",
    ),
)
