"""What the paper of SparQ claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "SparQ end of sec. 4",
        "Where query heads share keys, the mean value in place of what is not attended is better left out.",
        arm("sparq", "5%", mean_value="false"),
        (arm("sparq", "5%", mean_value="true"),),
        figure="kl",
    ),
    Statement(
        "SparQ sec. 5.2, Table 2",
        "Reading an eighth of the bytes costs little.",
        arm("sparq", "7%", components=8, local=16),
        (arm("full"),),
        "as good",
        beside=(arm("sparq", "10%", components=16, local=16),),
    ),
)
