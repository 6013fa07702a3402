"""transformers alone, on the same model with its own SDPA attention: what whole steps are held against.

Eager: its growing cache, a concatenation per layer and step, no graph. Static: its static cache, the model compiled by
inductor with CUDA graphs, as its documentation advises. Offloaded: the growing cache in pageable host memory, every
layer's keys and values there after their use and back a layer ahead. Several sequences are one batch of each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from kvlens.lab.gpu.device import Step, p95
from kvlens.lab.gpu.model import random_model
from kvlens.lab.gpu.part import Bench
from kvlens.lab.gpu.settings import OFFLOADED, STATIC
from kvlens.models.device import host_bytes

SECONDS = 20.0
"""a step takes up to seconds: fewer than 200 are timed where they would take longer than this"""
FEWEST = 5
ROOM = 1.25
"""host memory asked for beside the cache, as a share of it: layers come and go"""


def refused(bench: Bench, name: str, context: int, batch: int, link: float | None) -> str | None:
    """Why it is not tried: host memory that does not suffice, or a bus that would be held too long. link: bytes per
    second, if known."""
    if name != OFFLOADED:
        return None
    whole = batch * bench.model.kv.full_kv_bytes(context)
    free = host_bytes()
    if free is not None and ROOM * whole > free and not bench.dry:
        return (
            f"does not fit: needs {ROOM * whole / 1e9:.1f} GB of host memory, {free / 1e9:.1f} GB free; "
            f"--batches 1 needs less"
        )
    wait = FEWEST * 2 * whole / link if link else 0.0
    if wait > SECONDS and not bench.dry:
        return f"left out: {FEWEST} steps would hold the bus for {wait:.0f} s at the least"
    return None


@torch.inference_mode()
def timed(bench: Bench, name: str, context: int, batch: int) -> dict[str, Any]:
    """Columns of a step row. On the CPU nothing is offloaded and nothing compiled: the same caches without."""
    from kvlens.engine.hf_attention import attending

    loaded = bench.keep_alone("model", lambda: random_model(bench))
    with attending(loaded.model, "sdpa"):
        bench.device.reset_peak()
        cache, forward = _make_cache(bench, loaded.model, name, context, batch)
        step = _step(bench, forward, cache, batch)
        start_time = time.monotonic()
        bench.device.times(step, 1)
        each = (time.monotonic() - start_time) / 2  # a step comes before the one that is timed
        count = bench.repeats if bench.dry else max(FEWEST, min(bench.repeats, int(SECONDS / each)))
        times = bench.device.times(step, count)
    return {
        "graph": name == STATIC and not bench.dry,
        "steps": count,
        "median": statistics.median(times),
        "p95": p95(times),
        "stall": None,
        "peak_bytes": bench.device.peak_bytes(),
        "resident_bytes": 0,
        "kernels": "torch",
        "note": f"{count} steps instead of {bench.repeats}" if count < bench.repeats else "",
    }


def _step(bench: Bench, forward: Callable[..., Any], cache: Any, batch: int) -> Step:
    """A step that feeds the likeliest tokens of the one before."""
    tokens = torch.ones(batch, 1, dtype=torch.long, device=bench.device.at)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        logits = forward(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))

    return step


def _make_cache(bench: Bench, model: Any, name: str, context: int, batch: int) -> tuple[Any, Callable[..., Any]]:
    """A cache that holds `context` random tokens of every sequence in every layer, and what is called with it."""
    from transformers import DynamicCache, StaticCache

    kv, normal, config, forward = bench.model.kv, bench.device.normal, model.config, model.forward
    offloading = name == OFFLOADED and not bench.dry
    cache: Any
    if name == STATIC:
        cache = StaticCache(config=config, max_cache_len=context + bench.repeats + 8)
        forward = forward if bench.dry else torch.compile(forward, dynamic=False, mode="reduce-overhead")
    else:
        cache = DynamicCache(config=config, offloading=offloading)
    for index, layer in enumerate(cache.layers):
        layer.update(*(normal(batch, kv.kv_heads, context, kv.head_dim) for _ in range(2)))
        if index and offloading:
            layer.offload()
            bench.device.wait()
    if name == STATIC:  # what compiles does so before anything is timed
        warm = _step(bench, forward, cache, batch)
        for _ in range(3):
            warm()
    return cache, forward
