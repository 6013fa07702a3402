"""What the paper of ShadowKV claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "ShadowKV sec. 3.1; sec. 5.3, Fig. 9",
        "Keys at the paper's rank answer as whole keys do.",
        arm("shadowkv", tokens=96, chunk=8, rank=0.15625),
        (arm("shadowkv", tokens=96, chunk=8, rank=1.0),),
        "as good",
        beside=(arm("shadowkv", tokens=96, chunk=8, rank=0.0735),),
    ),
    Statement(
        "ShadowKV app. A.8, Table 15",
        "Keeping unusual chunks whole answers more than not.",
        arm("shadowkv", "40%"),
        (arm("shadowkv", "40%", outliers=0),),
    ),
)
