"""What the paper of RocketKV claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "RocketKV sec. 4.2, Fig. 5",
        "For about as many bytes read in a step it answers more than SnapKV, Quest and SparQ.",
        arm("rocketkv", attended=256),
        (arm("snapkv", tokens=240), arm("quest", tokens=48, group="mean"), arm("sparq", tokens=96, components=16)),
    ),
    Statement(
        "RocketKV sec. 4.2, Fig. 5",
        "Reading 256 tokens' worth a step loses hardly anything.",
        arm("rocketkv", attended=256),
        (arm("full"),),
        "as good",
        beside=(arm("rocketkv", attended=512),),
    ),
)
