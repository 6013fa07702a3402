"""What the paper of KVzip claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "KVzip abstract",
        "Where the question is not known, it answers more than SnapKV with as many tokens.",
        arm("kvzip", "30%"),
        (arm("snapkv", "30%"),),
        question="after",
        beside=(arm("kvzip", "30%", share="head"),),
    ),
    Statement(
        "KVzip abstract",
        "Three tenths of the cache answer as full KV does.",
        arm("kvzip", "30%"),
        (arm("full"),),
        "as good",
        question="after",
    ),
)
