"""What is expected of RetroInfer, as comparisons of arms: the paper's text was not at hand."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "ours",
        "Few clusters read exactly, and more of them estimated, answer as full KV does.",
        arm("retroinfer", "20%"),
        (arm("full"),),
        "as good",
    ),
    Statement(
        "ours",
        "The estimation zone loses less of a text than the retrieval zone alone.",
        arm("retroinfer", "20%"),
        (arm("retroinfer", "20%", estimation=0.0),),
        figure="kl",
    ),
)
