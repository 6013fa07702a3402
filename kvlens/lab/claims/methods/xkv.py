"""What the paper of xKV claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "xKV abstract",
        "Layers that share a basis answer as full KV does.",
        arm("xkv", "40%"),
        (arm("full"),),
        "as good",
    ),
    Statement(
        "xKV, authors' code",
        "Four layers that share a basis lose less of a text than layers by themselves with a quarter of the rank.",
        arm("xkv", rank_k=128, rank_v=192),
        (arm("xkv", layers_per_group=1, rank_k=32, rank_v=48),),
        figure="kl",
    ),
)
