"""What the paper of TidalDecode claims, as comparisons of arms."""

from __future__ import annotations

from kvlens.methods.statements import Statement, arm

STATEMENTS = (
    Statement(
        "TidalDecode abstract",
        "Reading few positions, chosen by two layers, answers as full KV does.",
        arm("tidaldecode"),
        (arm("full"),),
        "as good",
        beside=(arm("tidaldecode", reselect_layer=0),),
    ),
    Statement(
        "TidalDecode sec. 4",
        "A second layer that chooses anew answers more than one layer alone.",
        arm("tidaldecode", tokens=64),
        (arm("tidaldecode", tokens=64, reselect_layer=0),),
    ),
)
