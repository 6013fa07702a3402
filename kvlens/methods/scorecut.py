"""A threshold in place of a budget: tokens whose score reaches it stay, however many these are."""

from __future__ import annotations

from dataclasses import dataclass

from kvlens.methods.families.score_threshold import ScoreThreshold, ScoreThresholdParameters, refuses_threshold
from kvlens.methods.snapkv import SnapKV, SnapKVParameters
from kvlens.methods.wrappers import Lending, Lent


@dataclass(frozen=True)
class ScoreCutParameters(ScoreThresholdParameters, SnapKVParameters):
    """Lengths are in tokens."""


class ScoreCut(ScoreThreshold, SnapKV):
    """Scores as SnapKV; a token stays if its score reaches the cut, so that a text with much to keep keeps more. DMS
    decides for each token by a trained threshold, without a budget; here the threshold cuts any method's score, and
    nothing is trained. `scorecut:METHOD` cuts another score.

    Departures: only the prompt is cut, once; DMS trains its decisions, delays them and goes on while decoding. The cut
    counts standard deviations of the layer's scores, so that one number suits any score; `scale=score` takes scores as
    they are.
    """

    name = "scorecut"
    title = "Score cut"
    paper = (
        "after Łańcucki et al., Inference-Time Hyper-Scaling with KV Cache Compression, NeurIPS 2025 (DMS), without "
        "its training"
    )
    summary = (
        "drops prompt tokens once, when prefill ends: what the last prompt tokens attend to more than a threshold "
        "stays, however much that is"
    )
    Parameters = ScoreCutParameters
    presets = {"paper": {}, "demo": {"window": 8}}  # noqa: RUF012
    lends = Lending(
        front=Lent(
            "scorecut",
            ScoreThreshold,
            ScoreThresholdParameters,
            "tokens whose score reaches a threshold stay, however many",
            refuses_threshold,
        )
    )
    params: ScoreCutParameters
