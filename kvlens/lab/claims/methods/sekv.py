"""SeKV's claims: where it zooms (Fig. 5), what its parts and sizes are worth (Tables 5 and 7), what factors weigh
(eq. 18-20)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvlens.methods.statements import Statement, arm

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine
    from kvlens.lab.claims import Claim

WHOLE: dict[str, Any] = {"router": "pca", "zoom_rate": 1.0, "energy": 0.99}
"""SeKV without a trained router: every span is asked for, the budget decides, factors keep enough energy for digits"""
GATED: dict[str, Any] = {"router": "pca", "zoom_rate": 0.3, "energy": 0.99}
"""as WHOLE, with a threshold that 30 % of (query, span) pairs exceed; the heads' thresholds have the mean 0.95"""
FACTORS: dict[str, Any] = {**WHOLE, "form": "factors", "max_rank": 16}
"""as WHOLE, with every span as factors; a quarter of the head size is the paper's proportion, 32 of 128"""

STATEMENTS = (
    Statement(
        "SeKV Table 5",
        "Spans that are cut where tokens surprise answer more than fixed chunks.",
        arm("sekv", "50%", **WHOLE),
        (arm("sekv", "50%", **WHOLE, segmentation="chunks", l_max=24, l_min=12),),
        tasks=("niah_single",),
    ),
    Statement(
        "SeKV Table 5",
        "With anchor tokens more is answered than without.",
        arm("sekv", "50%", **WHOLE),
        (arm("sekv", "50%", **WHOLE, anchors=False),),
        tasks=("niah_single",),
    ),
    Statement(
        "SeKV Table 5",
        "Summaries weighted by surprisal answer more than uniform means.",
        arm("sekv", "50%", **WHOLE),
        (arm("sekv", "50%", **WHOLE, weights="uniform"),),
        tasks=("niah_single",),
    ),
    Statement(
        "SeKV Table 5",
        "With SVD reconstruction more is answered than without.",
        arm("sekv", "50%", **WHOLE),
        (arm("sekv", "50%", **WHOLE, zoom="off"),),
        tasks=("niah_single",),
    ),
    Statement(
        "SeKV Table 5",
        "A threshold per head answers more than one for all heads.",
        arm("sekv", "50%", **GATED),
        (arm("sekv", "50%", **GATED, tau=0.95),),
        tasks=("niah_single",),
    ),
    Statement(
        "SeKV Table 5",
        "The trained zoom-in answers more than an untrained one.",
        arm("sekv", "50%", router="trained"),
        (arm("sekv", "50%", router="pca"),),
        tasks=("niah_single",),
        beside=(arm("sekv", router="pca", form="raw"), arm("sekv", form="raw", router="mean", piece=1)),
    ),
    Statement(
        "SeKV Table 7",
        "A tighter cap on the rank costs answers.",
        arm("sekv", "50%", **WHOLE),
        (arm("sekv", "50%", **WHOLE, max_rank=16), arm("sekv", "50%", **WHOLE, max_rank=8)),
        tasks=("niah_single",),
    ),
    Statement(
        "SeKV Table 7",
        "alpha = 1 answers more than 0.5 and than 2.",
        arm("sekv", "50%", **WHOLE, anchor_share=1.0),
        (
            arm("sekv", "50%", **WHOLE, anchor_share=1.0, alpha=0.5),
            arm("sekv", "50%", **WHOLE, anchor_share=1.0, alpha=2.0),
        ),
        tasks=("niah_single",),
    ),
    Statement(
        "SeKV Table 7",
        "A larger window answers more, from half to the default size.",
        arm("sekv", "50%", **WHOLE),
        (arm("sekv", "50%", **WHOLE, window=40),),
        tasks=("niah_single",),
    ),
    Statement(
        "SeKV eq. 18-19",
        "Spans take less host memory as factors than as tokens.",
        arm("sekv", "50%", **FACTORS),
        (arm("sekv", "50%", **WHOLE, form="raw"),),
        figure="cold_share",
        tasks=("niah_single",),
    ),
    Statement(
        "SeKV eq. 20",
        "An expanded span moves fewer bytes as factors than as tokens.",
        arm("sekv", "50%", **FACTORS),
        (arm("sekv", "50%", **WHOLE, form="raw"),),
        figure="moved_share",
        tasks=("niah_single",),
    ),
)


def claims(engine: Engine, prompts: int, report: Callable[[str], None]) -> list[Claim]:
    """Check what the trained router does; without a router that was trained for the model nothing is decided."""
    from kvlens.lab.claims.methods.sekv_gates import judge, undecided, watch
    from kvlens.methods.sekv.trained import ROUTER

    if engine.loaded.name not in ROUTER.shipped:
        return undecided(engine.loaded.name)
    return judge(watch(engine, prompts, report), prompts, engine.loaded.name)
