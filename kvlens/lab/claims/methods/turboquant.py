"""What the paper of TurboQuant claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "TurboQuant sec. 4.3, Fig. 4",
        "A needle is found as with full KV.",
        arm("turboquant", key_bits=4, value_bits=4),
        (arm("full"),),
        "as good",
    ),
    Statement(
        "TurboQuant sec. 4.3, Table 1",
        "Three bits lose less of a text than KIVI's two.",
        arm("turboquant", key_bits=3, value_bits=3),
        (arm("kivi", residual=32),),
        figure="kl",
        beside=(arm("turboquant", key_bits=3, value_bits=3, corrected=False),),
    ),
)
