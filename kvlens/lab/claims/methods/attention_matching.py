"""What the paper of Attention Matching claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "Attention Matching abstract",
        "Fitted entries lose less of a text than the same tokens kept as they are.",
        arm("attention_matching", "10%"),
        (arm("attention_matching", "10%", fitted="nothing"),),
        figure="kl",
        beside=(arm("attention_matching", "10%", fitted="weights"), arm("attention_matching", "10%", reading="prompt")),
    ),
    Statement(
        "Attention Matching abstract",
        "It answers more than an eviction with as many bytes.",
        arm("attention_matching", "10%"),
        (arm("kvzip", "10%"),),
        question="after",
    ),
)
