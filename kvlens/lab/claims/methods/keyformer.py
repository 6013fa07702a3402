"""What the paper of Keyformer claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "Keyformer sec. 4, Table 1",
        "Noise and a rising temperature lose less of a text than plain sums of attention do.",
        arm("keyformer", "50%"),
        (arm("h2o", "50%"),),
        figure="kl",
        beside=(arm("keyformer", "50%", noise=False),),
    ),
    Statement(
        "Keyformer abstract",
        "Half of the cache is as good as all of it.",
        arm("keyformer", "50%"),
        (arm("full"),),
        "as good",
        figure="kl",
    ),
)
