"""Each method as whole steps run it: parameters and budget that make the shape of kvlens/gpu/bench/floors.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlens import methods
from kvlens.gpu.bench.floors import CHESS_EVERY, CHUNK, PAGE, RANK, ROUTE, SINKS, SPAN, StepShape
from kvlens.kernels.choice import Backend
from kvlens.memory.budget import Budget
from kvlens.methods.base import Method
from kvlens.shape import KVShape


@dataclass(frozen=True)
class Setting:
    """What StaticDecoder is given. kernels: None: what it would choose; blocking: every KV head's wishes are waited
    for; alike: all KV heads want the same."""

    method: type[Method]
    params: Any
    budget: Budget | None = None
    kernels: Backend | None = None
    blocking: bool = False
    alike: bool = False


def setting(name: str, shape: StepShape, kv: KVShape, context: int, max_new: int) -> Setting:
    """Raises ValueError for a method that the part does not know."""
    found = methods.get({"full_sdpa": "full", "blocking": "freekv"}.get(name, name))
    make = found.Parameters
    if name in ("full", "full_sdpa"):
        return Setting(found, make(page=1024), kernels="torch" if name == "full_sdpa" else None)
    if name == "streaming_llm":
        return Setting(found, make(page=1024), Budget.parse("10%"))
    if name == "compresskv":
        return Setting(found, make(tokens=shape.pages * PAGE, floor=32, heads="all", layers="equal", page=1024))
    if name == "chess":
        return Setting(found, make(trigger="fixed", interval=CHESS_EVERY // PAGE))
    if name in ("freekv", "blocking"):
        fixed = (shape.pages - shape.wanted) // 2 * PAGE
        params = make(tokens=2 * fixed + shape.wanted * PAGE, sinks=fixed, window=fixed, dense_layers=0)
        return Setting(found, params, blocking=name == "blocking", alike=name == "blocking")
    if name == "sentkv":
        return Setting(found, make(usage=0.1, length=CHUNK, deviation=1, marks="one", sinks=SINKS))
    if name == "sekv":
        params = make(
            segmentation="chunks",
            l_max=SPAN,
            l_min=16,
            max_rank=RANK,
            form="factors",
            dim=ROUTE,
            window=min(512, context // 2),
            sinks=SINKS,
        )
        return Setting(found, params, _zoom_budget(params, shape, kv, context, max_new))
    raise ValueError(f"no setting for '{name}' in whole steps.")


def _zoom_budget(params: Any, shape: StepShape, kv: KVShape, context: int, max_new: int) -> Budget:
    """Bytes with room for the spans that are expanded at a time, and those that a step replaces."""
    from kvlens.methods.sekv import layout as sekv_layout
    from kvlens.methods.sekv.spans import segment
    from kvlens.spans import Surprisal

    spans = segment(params, [1.0] * (context - 1 - params.window), 0, Surprisal(1.0, 1.0), 0)
    plan = sekv_layout.plan(params, spans, context - 1, max_new)
    return Budget(float(plan.bytes(params, kv, max(plan.longest, shape.wanted * SPAN))), "bytes", "the zoomed spans'")
