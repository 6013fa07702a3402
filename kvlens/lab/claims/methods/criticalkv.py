"""What the paper of CriticalKV claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "CriticalKV abstract",
        "Weighing half of SnapKV's choice by what values do to the output loses less of a text.",
        arm("criticalkv", "20%"),
        (arm("snapkv", "20%"),),
        figure="kl",
        beside=(arm("criticalkv", "20%", first_stage=0.0),),
    ),
    Statement(
        "CriticalKV abstract",
        "It answers more than SnapKV with as many tokens.",
        arm("criticalkv", "20%"),
        (arm("snapkv", "20%"),),
    ),
)
