"""The cuts that SeKV offers to the Spans page. No torch."""

from __future__ import annotations

from kvlens.methods.segmenter import PromptFacts, Segmenter
from kvlens.methods.sekv import layout
from kvlens.methods.sekv.params import SeKVParameters


def most_anchors(params: SeKVParameters, prompt: PromptFacts) -> int | None:
    """What the budget leaves for anchors (sec. 3.3); None: no limit."""
    return layout.anchor_cap(params, prompt.shape, prompt.budget_bytes)


SEGMENTERS = (
    Segmenter(
        "entropy (SeKV)",
        ("alpha", "l_min", "l_max", "anchor_share", "sinks", "window"),
        {"segmentation": "feasible"},
        alpha="alpha",
        most_anchors=most_anchors,
    ),
    Segmenter(
        "entropy as printed (SeKV)", ("alpha", "l_min", "sinks", "window"), {"segmentation": "paper"}, alpha="alpha"
    ),
)
