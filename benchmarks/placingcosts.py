"""What the k-means of ClusterKV and PQCache costs as a prompt grows: CPU time and distances, on a few heads of one
layer.

Keys are drawn around as many directions as there are pages, so that they have clusters. `before` is the way without
blocks and without a draw of keys: all keys of a prompt against all centroids.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from kvlens import methods
from kvlens.methods.families import kmeans
from kvlens.methods.families.cold_plan import smallest_plan
from kvlens.shape import KVShape

HEADS, DIM, PAGE, SHARE = 2, 64, 16, 0.2
PLAIN = {"clusterkv": {"block": 0}, "pqcache": {"sample": 0}}
"""parameters of each method without the limit on its k-means"""


def drawn_keys(tokens: int) -> torch.Tensor:
    """Return keys [1, H_kv, n, D] around one direction for each 16 tokens."""
    generator = torch.Generator().manual_seed(tokens)
    centers = torch.randn(HEADS, tokens // PAGE, DIM, generator=generator)
    noise = torch.randn(HEADS, tokens, DIM, generator=generator)
    return (centers.repeat_interleave(PAGE, 1) + 0.7 * noise)[None]


def index_prompt(name: str, tokens: int, values: dict[str, Any]) -> tuple[float, int]:
    """Return (CPU seconds, distances) of indexing a prompt by the parameters that `fit` chooses at a fifth of full
    KV."""
    kind, shape = methods.get(name), KVShape(1, HEADS, HEADS, DIM, 4)
    budget = round(SHARE * shape.full_kv_bytes(tokens + 64))
    params = methods.make_parameters(kind, None, kind.Parameters.fit(shape, tokens, 64, budget) | values)  # type: ignore[attr-defined]
    params = methods.make_parameters(kind, None, vars(params) | {"dense_layers": 0})
    plan = smallest_plan(params, shape, tokens, 64, 1)
    assert plan is not None
    method: Any = SimpleNamespace(params=params, context=SimpleNamespace(seed=0))
    method._known, method._pages, method._clusters = False, 0, 0
    if name == "clusterkv":
        from kvlens.methods.clusterkv import clusters

        method._first = clusters(params, plan)[0]
        method._centroids = torch.zeros(1, HEADS, method._first, DIM)
    else:
        from kvlens.methods import pqcache

        method._centroids = torch.zeros(1, HEADS, params.parts, pqcache.centroids(params, plan), DIM // params.parts)
    keys, counted, nearest = drawn_keys(plan.pages_now * params.page), [0], kmeans.nearest

    def count_distances(x: torch.Tensor, centroids: torch.Tensor, cosine: bool) -> torch.Tensor:
        counted[0] += x.shape[0] * x.shape[1] * centroids.shape[1]
        return nearest(x, centroids, cosine)

    kmeans.nearest = count_distances
    try:
        start_s = time.process_time()
        kind.index(method, keys)  # type: ignore[attr-defined]
        return time.process_time() - start_s, counted[0]
    finally:
        kmeans.nearest = nearest


def measure(lengths: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Return a row per method, way and length; all take turns in each round."""
    torch.set_num_threads(1)
    arms = [(name, way, values) for name, plain in PLAIN.items() for way, values in (("before", plain), ("now", {}))]
    rows = []
    for tokens in lengths:
        seconds: dict[tuple[str, str], list[float]] = {}
        distances: dict[tuple[str, str], int] = {}
        for turn in range(rounds + 1):
            for name, way, values in arms:
                cpu, distances[name, way] = index_prompt(name, tokens, values)
                if turn:  # the first turn warms up
                    seconds.setdefault((name, way), []).append(cpu)
        for (name, way), each in seconds.items():
            row = {"model": "kmeans", "arm": f"{name}, {way}", "tokens": tokens, "rounds": rounds}
            rows.append(row | {"place_cpu_s": round(median(each), 5), "distances": distances[name, way]})
    return rows


def growth(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return per arm the factors of CPU time and of distances where the tokens grow fourfold, and the exponents from
    the first length to the last."""
    out = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        ran = {row["tokens"]: row for row in rows if row["arm"] == arm}
        lengths = sorted(ran)
        line: dict[str, Any] = {"model": "kmeans", "arm": arm, "from": lengths[0], "to": lengths[-1]}
        for name in ("place_cpu_s", "distances"):
            short, long = ran[lengths[0]][name], ran[lengths[-1]][name]
            line[name] = round(math.log(long / short) / math.log(lengths[-1] / lengths[0]), 2)
            line[f"{name} x4"] = {
                f"{n}-{4 * n}": round(ran[4 * n][name] / ran[n][name], 2) for n in lengths if 4 * n in ran
            }
        out.append(line)
    return out
