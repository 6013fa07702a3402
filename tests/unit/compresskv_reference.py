"""CompressKV written from the paper and evidence/compresskv.md in float64 NumPy, slowly; imports nothing of kvlens.

K, V [L, H_kv, n, D] of the prompt, its last token included, Q [L, H, w, D] of its last w
queries; k, v [L, H_kv, D] and q [L, H, D] of a decoded token.
"""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray


def softmax(x: Array) -> Array:
    p = np.exp(x - x.max())
    return p / p.sum()


# ---- calibration
def head_scores(steps: list[tuple[int, Array]], prompt: list[int], span: list[int], top: int) -> dict[str, Array]:
    """steps: (generated token, attention weights [L, H, C] of the step that made it)."""
    _, first = steps[0]
    out = {kind: np.zeros(first.shape[:2]) for kind in ("srh", "srh_code", "trh", "trh_topk")}
    for token, weights in steps:
        for layer in range(weights.shape[0]):
            for head in range(weights.shape[1]):
                a = weights[layer, head]
                mass = sum(a[j] for j in span)
                if token in [prompt[j] for j in span]:
                    out["srh"][layer, head] += mass
                for j in span:
                    if prompt[j] == token:
                        out["srh_code"][layer, head] += mass
                ranked = sorted(range(len(a)), key=lambda j: -a[j])
                if ranked[0] in span and prompt[ranked[0]] == token:
                    out["trh"][layer, head] += 1 / len(span)
                if any(j in span and prompt[j] == token for j in ranked[:top]):
                    out["trh_topk"][layer, head] += 1 / len(span)
    return out


def layer_error(W: Array, q: Array, K: Array, V: Array, kept: list[int], epsilon: float) -> float:
    """Eq. 2-4 at one step of one layer. W [hidden, H * D], q [H, D], K and V [H_kv, C, D]; kept: positions in the
    compressed cache."""
    full, compressed = (W @ np.concatenate(attend(q, K, V, use)) for use in (list(range(K.shape[1])), kept))
    return float(np.sqrt(((compressed - full) ** 2).sum()) / (np.sqrt((full**2).sum()) + epsilon))


# ---- selection
def layer_tokens(errors: list[float], average: int, floor: int, ceiling: float, n: int) -> list[int]:
    """Prompt tokens per layer when they keep `average` on average."""
    layers = len(errors)
    average, floor = min(average, n), min(floor, n)
    total, most = average * layers, min(math.ceil(ceiling * average), n)
    tokens = []
    for e in errors:
        wish = floor + round(e / sum(errors) * (total - layers * floor))
        tokens.append(min(max(wish, floor), most))
    important = sorted(range(layers), key=lambda i: (-errors[i], i))
    while sum(tokens) < total:
        for i in important:
            if sum(tokens) < total and tokens[i] < most:
                tokens[i] += 1
    while sum(tokens) > total:
        for i in reversed(important):
            if sum(tokens) > total and tokens[i] > floor:
                tokens[i] -= 1
    return tokens


def keep(K: Array, Q: Array, heads: list[int], tokens: int, window: int, kernel: int) -> list[int]:
    """Positions one layer keeps. K [H_kv, n, D], Q [H, w, D]; heads: the ones that choose."""
    n, d, group = K.shape[1], K.shape[2], Q.shape[0] // K.shape[0]
    window = min(window, n)
    if tokens >= n:
        return list(range(n))
    before = n - window
    mean = np.zeros(before)
    for h in heads:
        received = np.zeros(before)
        for i in range(window):
            last = before + i
            logits = np.array(
                [K[h // group, j] @ Q[h, Q.shape[1] - window + i] / math.sqrt(d) for j in range(last + 1)]
            )
            received += softmax(logits)[:before]
        half = kernel // 2
        pooled = [
            sum(received[j] for j in range(c - half, c + half + 1) if 0 <= j < before) / kernel for c in range(before)
        ]
        mean += np.array(pooled) / len(heads)
    ranked = sorted(range(before), key=lambda j: (-mean[j], j))
    return sorted(ranked[: tokens - window]) + list(range(before, n))


def attend(q: Array, K: Array, V: Array, use: list[int]) -> Array:
    """Attention of every query head over the positions `use`: q [H, D] -> [H, D]."""
    group, d = q.shape[0] // K.shape[0], q.shape[1]
    out = []
    for h, query in enumerate(q):
        g = h // group
        p = softmax(np.array([K[g, j] @ query / math.sqrt(d) for j in use]))
        out.append(sum(weight * V[g, j] for weight, j in zip(p, use, strict=True)))
    return np.array(out)
