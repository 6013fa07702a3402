"""SeKV on the GPU bench (kvlens/lab/gpu/settings.py): spans cut evenly and kept as factors, room for as many as are
expanded at a time. Anchors are left out: what surprises random weights means nothing."""

from __future__ import annotations

import math
from typing import Any

from kvlens.budget import Budget
from kvlens.kernels.lowrank_bytes import factor_bytes
from kvlens.lab.gpu.floors import StepShape, missed
from kvlens.lab.gpu.settings import Headline, Rates, Setting
from kvlens.methods.sekv import layout as sekv_layout
from kvlens.methods.sekv.spans import segment
from kvlens.shape import KVShape
from kvlens.spans import Surprisal

SPAN, RANK, ROUTE, SINKS = 64, 16, 32, 4
"""tokens and rank of a span's factors, size of a routing summary, first tokens kept"""


def window(context: int) -> int:
    return min(512, context // 2)


def zoomed(context: int, rates: Rates) -> int:
    """Spans that a KV head expands."""
    return max(1, math.ceil(rates["zoom"] * (context // SPAN)))


def overrides(context: int) -> dict[str, Any]:
    cut = {"segmentation": "chunks", "l_max": SPAN, "l_min": 16, "window": window(context), "sinks": SINKS}
    # the static step and its kernels have equal zones a head
    return {**cut, "max_rank": RANK, "form": "factors", "dim": ROUTE, "zones": "head"}


def size(params: Any, kv: KVShape, context: int, max_new: int, rates: Rates) -> Budget:
    """Bytes with room for the spans that are expanded at a time, and those that a step replaces."""
    spans = segment(params, [1.0] * (context - 1 - params.window), 0, Surprisal(1.0, 1.0), 0)
    plan = sekv_layout.plan(params, spans, context - 1, max_new)
    room = max(plan.longest, zoomed(context, rates) * SPAN)
    return Budget(float(plan.bytes(params, kv, room)), "bytes", "the zoomed spans'")


def shape(kv: KVShape, context: int, rates: Rates) -> StepShape:
    """Spans come as factors and are reconstructed into slots."""
    spans, target = context // SPAN, zoomed(context, rates)
    tokens = window(context) + spans + SPAN * target
    return StepShape(
        tokens,
        tokens,
        index_bytes=kv.group * spans * ROUTE * kv.itemsize,
        wanted=target,
        missed=missed(rates["miss"], target, spans),
        unit_tokens=SPAN,
        unit_bytes=factor_bytes(SPAN, RANK, RANK, kv.head_dim, kv.itemsize),
    )


SETTINGS = (
    Setting(
        "sekv",
        "SeKV",
        "sekv",
        shape,
        overrides,
        size,
        {"miss": 0.3, "zoom": 0.05},
        ours=("miss", "zoom"),
        about="512 window, spans of 64 tokens as factors of rank 16, room for as many as the zoom rate expands, "
        "reconstructed into slots; pca router",
    ),
)
HEADLINES = (Headline("SeKV memory at 128K", 0.533, "memory saved", ("full", 131072, 1), ("sekv", 131072, 1)),)
ON_DEVICE = (({"form": "raw"}, 0.0), ({"form": "factors"}, 0.02))
"""the ranks of factors come from a decomposition on the device, so their bytes may differ a little"""
