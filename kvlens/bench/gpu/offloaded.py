"""transformers' own offloaded cache: every layer's keys and values go to host memory after their use and come back a layer ahead.

It is transformers' code as it is, on the same model, with transformers' SDPA attention: pageable host memory, whole tensors both ways, a
concatenation per layer and step, no graph.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from kvlens.bench.gpu.device import p95
from kvlens.bench.gpu.model import random_model
from kvlens.bench.gpu.part import Bench

SECONDS = 20.0
"""a step takes up to seconds: fewer than 200 are timed where they would take longer than this"""
FEWEST = 5


@torch.inference_mode()
def timed(bench: Bench, context: int) -> dict[str, Any]:
    """Columns of a step row. On the CPU there is nothing to offload to: the same cache without it."""
    from kvlens.attention import ATTENTION

    loaded = bench.keep_alone("model", lambda: random_model(bench))
    loaded.model.set_attn_implementation("sdpa")
    try:
        bench.device.reset_peak()
        cache = _filled(bench, loaded.model.config, context)
        token = torch.ones(1, 1, dtype=torch.long, device=bench.device.at)

        def step() -> None:
            logits = loaded.model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            token.copy_(logits[0, -1].argmax().view(1, 1))

        begun = time.monotonic()
        bench.device.times(step, 2)
        each = (time.monotonic() - begun) / 3
        count = bench.repeats if bench.dry else max(FEWEST, min(bench.repeats, int(SECONDS / each)))
        times = bench.device.times(step, count)
    finally:
        loaded.model.set_attn_implementation(ATTENTION)
    few = f"; {count} steps instead of {bench.repeats}" if count < bench.repeats else ""
    return {
        "graph": False, "steps": count, "median": statistics.median(times), "p95": p95(times), "stall": None,
        "peak_bytes": bench.device.peak_bytes(), "resident_bytes": 0, "kernels": "torch",
        "note": "transformers' DynamicCache with offloading and SDPA" + few,
    }  # fmt: skip


def _filled(bench: Bench, config: Any, context: int) -> Any:
    """A cache that holds `context` random tokens in every layer, all but the first layer's in host memory."""
    from transformers import DynamicCache

    kv, normal = bench.model.kv, bench.device.normal
    cache = DynamicCache(config=config, offloading=not bench.dry)
    layers: Any = cache.layers
    for at, layer in enumerate(layers):
        layer.update(*(normal(1, kv.kv_heads, context, kv.head_dim) for _ in range(2)))
        if at and not bench.dry:
            layer.offload()
            bench.device.wait()
    return cache
