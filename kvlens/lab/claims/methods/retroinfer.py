"""What the authors of RetroInfer claim, and why their code estimates, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "RetroInfer, authors' code",
        "Few clusters read exactly, and more of them estimated, answer as full KV does.",
        arm("retroinfer", "20%"),
        (arm("full"),),
        "as good",
    ),
    Statement(
        "RetroInfer, authors' code",
        "The estimation zone loses less of a text than the retrieval zone alone.",
        arm("retroinfer", "20%"),
        (arm("retroinfer", "20%", estimation=0.0),),
        figure="kl",
    ),
)
