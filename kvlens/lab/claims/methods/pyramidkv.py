"""What the paper of PyramidKV claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import ONE_NEEDLE, Statement, arm

STATEMENTS = (
    Statement(
        "PyramidKV sec. 5.2, Table 1",
        "Budgets that fall from layer to layer do better than equal ones, where budgets are small.",
        arm("pyramidkv", "10%"),
        (arm("pyramidkv", "10%", beta=1.0),),
        figure="kl",
    ),
    Statement(
        "PyramidKV abstract; sec. 5.3, Fig. 4",
        "A needle is found as with full KV.",
        arm("pyramidkv", "20%"),
        (arm("full"),),
        "as good",
        tasks=ONE_NEEDLE,
        beside=(arm("pyramidkv", "20%", beta=1.0), arm("snapkv", "20%")),
    ),
)
