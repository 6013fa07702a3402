"""What the paper of HeadKV claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "HeadKV sec. 4.2, Table 1",
        "Giving more of the budget to heads that retrieve does better than giving all heads the same.",
        arm("headkv", "20%"),
        (arm("headkv", "20%", heads="alike"),),
    ),
    Statement(
        "HeadKV abstract; sec. 4.2, Table 1",
        "It does better than SnapKV, PyramidKV and AdaKV at a small budget.",
        arm("headkv", "20%"),
        (arm("snapkv", "20%"), arm("pyramidkv", "20%"), arm("adakv", "20%")),
    ),
)
