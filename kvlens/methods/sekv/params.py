"""SeKV's parameters and presets: what the paper publishes, and where it is silent, what we decided
(docs/evidence/sekv.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlens.methods.fitting import clamp, tokens_within
from kvlens.methods.parameters import param
from kvlens.shape import KVShape

BY_PIECE = {"mean": 1, "bound": 2}
"""routers that find a span by its pieces -> vectors that are kept of a piece"""


@dataclass(frozen=True)
class SeKVParameters:
    """Lengths are in tokens. Defaults are the paper's (appendix A) where it gives one."""

    alpha: float = param(
        1.0, "a token is a boundary when its surprisal exceeds mu + alpha * sigma (sec. 3.1)", symbol="α"
    )
    l_min: int = param(16, "shorter spans are not compressed (sec. 3.2)", symbol="L_min")
    window: int = param(512, "newest tokens kept exactly (eq. 17; Table 7)", symbol="w")
    dim: int = param(32, "size of the routing space (eq. 3)", symbol="d'")
    max_rank: int = param(32, "largest rank of a span's factors (eq. 6)", symbol="R_max")

    segmentation: str = param(
        "feasible",
        "paper: every token above the threshold is an anchor and short spans stay raw (takes far more than a "
        "small budget); "
        "feasible: same signal with span lengths l_min..l_max and a cap on anchors; chunks: every l_max tokens "
        "(ablation)",
        choices=("feasible", "paper", "chunks"),
        ours=True,
    )
    l_max: int = param(128, "longest span; at least 2 * l_min", ours=True)
    anchor_share: float = param(0.25, "most anchors, as a share of the device budget", ours=True)
    whole_share: float = param(
        0.0,
        "share of the device budget, at most, for KV heads that keep every token on the device and are neither "
        "summarised nor expanded (a departure); without a budget there are none",
        ours=True,
    )
    whole_by: str = param(
        "needle",
        "which KV heads these are: those with the best score of a map of the model's heads, needle: on the answer of "
        "needle prompts while it is copied, or induction: on what came after earlier copies of a drawn token",
        choices=("needle", "induction"),
        ours=True,
    )
    calibration: str = param(
        "", "whole_share: file made by `kvlens calibrate heads`; empty: the one shipped for the model", ours=True
    )
    coarse: bool = param(
        True, "off: spans have no coarse entry, and what is not expanded is not attended (a departure)", ours=True
    )
    anchors: bool = param(True, "off: boundaries cut spans but their tokens are not kept (ablation)", ours=True)
    sinks: int = param(4, "first tokens always kept; the paper names none and token 0 has no surprisal", ours=True)
    block: int = param(
        128,
        "decoded tokens leave the window and become spans in blocks of this size, with mu and sigma of the prompt",
        ours=True,
    )
    weights: str = param(
        "surprisal",
        "mean of a span weighted by surprisal (eq. 2) or uniform (ablation)",
        choices=("surprisal", "uniform"),
        ours=True,
    )
    router: str = param(
        "pca",
        (
            "trained: W, tau and gates from a file (the paper's method); pca: fitted on the prompt, nothing "
            "learned (a stand-in); mean: not eq. 5 but what attention would give a coarse entry of the span's best "
            "piece, q . mean key / sqrt(D) + log|piece|: no projection, no unit norm, dim plays no part (a departure); "
            "bound: the most that q . key / sqrt(D) can be in the span's best piece by the ranges of its keys (Quest's "
            "bound; a departure)"
        ),
        choices=("pca", "trained", "mean", "bound"),
        ours=True,
    )
    piece: int = param(
        0,
        "routers mean and bound: a span is found by pieces of at most so many tokens, whose mean keys are weighted as "
        "in eq. 2; 0: by the whole span",
        ours=True,
    )
    index: str = param(
        "exact",
        "routers mean and bound: how the keys lie in the routing table; int8: in 8 bits with a scale each",
        choices=("exact", "int8"),
        ours=True,
    )
    router_file: str = param("", "safetensors of the trained router; empty: the one shipped for the model", ours=True)
    zoom: str = param(
        "sync",
        "sync: a span expanded at a step is read token by token at that step, which waits for it; next: from the next "
        "step on; off: spans are always coarse (ablation)",
        choices=("sync", "next", "off"),
        ours=True,
    )
    zones: str = param(
        "head",
        "who shares the room for expanded spans, in which those with the largest scores stay (sec. 3.3): head: every "
        "KV head has an equal part; layer: the KV heads of a layer share one; model: all KV heads of all layers do, as "
        "published; scores of layers that are still to come in a step are those of the step before",
        choices=("head", "layer", "model"),
        ours=True,
    )
    pool: str = param(
        "max",
        "a span's priority when not all fit, over the query heads of its KV head that ask for it (eq. 9): the largest "
        "score, the mean score, or share: the mean of the shares that each query head's scores give the span of all "
        "spans",
        choices=("max", "mean", "share"),
        ours=True,
    )
    reconstruction: bool = param(
        True, "off: expansion is decided and logged, yet spans stay coarse (ablation)", ours=True
    )
    zoom_rate: float = param(
        0.05,
        "all routers but trained: share of (query, span) pairs above the threshold, over the last 128 prompt queries; "
        "1: every span is asked for and the budget decides",
        ours=True,
    )
    tau: float = param(
        -1.0, "one threshold for all heads instead of the router's (ablation); negative: the router's", ours=True
    )
    energy: float = param(0.95, "without trained gates: share of a span's energy that its factors keep", ours=True)
    gate_drop: float = param(0.05, "trained gates: components with a gate up to this are dropped", ours=True)
    form: str = param(
        "smaller",
        "how spans lie in host memory: factors, raw, or the smaller one of the two per span",
        choices=("smaller", "factors", "raw"),
        ours=True,
    )
    pre_rope: bool = param(
        False,
        "on: keys are decomposed before their rotary embedding and turned to their positions again when they "
        "come back; coarse means "
        "and spans stored raw stay as attention uses them. Needs a model with a fixed rotary embedding",
        ours=True,
    )

    def __post_init__(self) -> None:
        for name in ("l_min", "window", "dim", "max_rank", "block"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1.")
        if self.l_max < 2 * self.l_min:
            raise ValueError(f"l_max must be at least 2 * l_min = {2 * self.l_min}.")
        for name in ("sinks", "piece"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0.")
        for name in ("anchor_share", "zoom_rate", "energy", "gate_drop", "whole_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1.")
        if self.tau >= 1:
            raise ValueError("tau must be below 1.")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """The window is .156 of the budget, as 512 of 10 % of 32K tokens (sec. 4.1), 16 tokens at least; routing has a
        quarter of the head size, as 32 of 128 (app. A); all KV heads of the model share the room for expanded spans
        (sec. 3.3). Ours, where the paper is silent: spans have at most 64 tokens, so that one that is expanded finds
        room, under budgets of less than 128 tokens 32; blocks are a quarter of the window, but not shorter than a span;
        anchors take at most a tenth of the budget; ranks at most half of the head size, the paper's 32 at most."""
        room = tokens_within(shape, budget_bytes, prompt_tokens + max_new)
        window = clamp(room * 512 / 3277 // 8 * 8, 16, 512)
        return {
            "window": window,
            "block": clamp(window / 4, 16, 128),
            "l_min": 16,
            "l_max": 64 if room >= 128 else 32,
            "dim": clamp(shape.head_dim / 4, 1, 32),
            "max_rank": clamp(shape.head_dim / 2, 1, 32),
            "anchor_share": 0.1,
            "zones": "model",
        }


#: 'paper' has the paper's numbers and, where they cannot hold a budget, our rules (segmentation=feasible); its router
#: is not the trained one. Its room for expanded spans is one for the model, as the paper's budget is; the presets below
#: were measured with an equal part for each KV head. 'paper-literal' takes the segmentation as printed and stores every
#: span as factors, whatever is larger; the rest is as in 'paper'.
#: 'demo' is scaled to head size 32: of 10 % of 2048 tokens (205 tokens per layer and KV head) about 70 go to coarse
#: entries and summaries (1.5 per span), 10 to anchors, 35 to sinks and window, 15 to tables, buffers and a leaving
#: block, 65 to expanded spans.
#: 'smollm2' is 'paper' with the router that was trained for that model, whose routing space has a quarter of the head
#: size (docs/evidence/sekv-router.md).
#: 'bound' departs from the paper where a real model loses its answers under it (evidence/sekv.md, 'On a real model'):
#: spans are found by the bound of their keys in place of eq. 5, as many are expanded as the budget holds, and they lie
#: in host memory as they are, since factors with 95 % of the energy lose digits.
#: 'no-coarse' answers at half of that budget: what is not expanded is not attended, which leaves the coarse entries'
#: slots to expanded spans; these are short, and found by the weight that their mean keys would have. Its blocks of 8
#: tokens are shorter than l_min: what was decoded stays on the device as it is, all run long, and is counted from the
#: start.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"zones": "model"},
    "paper-literal": {"segmentation": "paper", "form": "factors", "zones": "model"},
    "smollm2": {"zones": "model", "dim": 16, "router": "trained"},
    "demo": {
        "window": 24,
        "block": 8,
        "l_min": 8,
        "l_max": 64,
        "dim": 8,
        "max_rank": 16,
        "anchor_share": 0.05,
        "router": "trained",
    },
    "bound": {
        "window": 24,
        "block": 16,
        "l_max": 64,
        "anchor_share": 0.0,
        "router": "bound",
        "piece": 8,
        "index": "int8",
        "zoom_rate": 1.0,
        "form": "raw",
    },
    "no-coarse": {
        "window": 16,
        "block": 8,
        "l_max": 32,
        "anchor_share": 0.0,
        "router": "mean",
        "index": "int8",
        "zoom_rate": 1.0,
        "form": "raw",
        "coarse": False,
    },
}
