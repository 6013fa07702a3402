"""What the paper of CurDKV claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "CurDKV abstract",
        "Weighing values as well as keys answers more than SnapKV and ChunkKV do.",
        arm("curdkv", "20%"),
        (arm("snapkv", "20%"), arm("chunkkv", "20%")),
        beside=(arm("curdkv", "20%", leverage="key"),),
    ),
    Statement(
        "CurDKV, ablation of the leverage",
        "Keys and values together do better than values alone.",
        arm("curdkv", "40%"),
        (arm("curdkv", "40%", leverage="value"),),
        figure="kl",
    ),
)
