"""What the paper of DMS claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "DMS sec. 5",
        "A threshold that leaves a cache of half the size answers as full KV does.",
        arm("scorecut", "50%"),
        (arm("full"),),
        "as good",
        beside=(arm("snapkv", "50%"), arm("scorecut", "50%", cut=1.0)),
    ),
)
