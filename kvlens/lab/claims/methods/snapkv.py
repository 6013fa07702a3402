"""What the paper of SnapKV claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import ONE_NEEDLE, Statement, arm

STATEMENTS = (
    Statement(
        "SnapKV sec. 5.2, Fig. 8",
        "Pooling the scores of neighbouring positions retrieves more than ranking each token by itself.",
        arm("snapkv", "40%"),
        (arm("snapkv", "40%", kernel=1),),
        beside=(arm("snapkv", "40%", kernel=21),),
    ),
    Statement(
        "SnapKV sec. 5.1, Fig. 6",
        "A needle is found as with full KV.",
        arm("snapkv", "40%"),
        (arm("full"),),
        "as good",
        tasks=ONE_NEEDLE,
        beside=(arm("snapkv", "40%", kernel=21),),
    ),
)
