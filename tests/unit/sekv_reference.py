"""SeKV's decode step written from the paper and evidence/sekv.md in float64 NumPy, slowly; imports nothing of kvlens.

One layer at a time. K, V [H_kv, n, D] of the prompt, Q [H, w, D] of its last queries, nats [n] with NaN at 0; k, v
[H_kv, D] of the decoded token, q [H, D] its query.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass
class Settings:
    alpha: float
    l_min: int
    l_max: int
    window: int
    dim: int
    max_rank: int
    sinks: int
    zoom_rate: float
    energy: float
    form: str
    anchor_cap: int
    recall: int
    pre_rope: bool = False
    theta: float = 10000.0


@dataclass
class Step:
    spans: list[tuple[int, int]]
    anchors: list[int]
    z: Array
    """bool [H, S]"""
    order: list[list[int]]
    """per KV head, spans in the order in which they are fetched"""
    hot: list[set[int]]
    coarse: Array
    """mass of coarse entries [H, S]"""
    fine: Array
    """mass of the tokens of expanded spans [H, S]"""
    out: Array
    """[H, D]"""


def cut(nats: Array, s: Settings, prefilled: int | None = None) -> tuple[list[tuple[int, int]], list[int]]:
    """Spans and anchors of the prompt before the window (feasible rule)."""
    known = nats[1:prefilled]
    threshold = known.mean() + s.alpha * known.std()
    end = len(nats) - s.window
    if end - s.sinks < s.l_min:
        return [], list(range(s.sinks, end))
    anchors: list[int] = []
    for t in sorted(range(s.sinks, end), key=lambda t: (-nats[t], t)):
        if nats[t] > threshold and len(anchors) < s.anchor_cap and all(abs(t - a) > s.l_min for a in anchors):
            anchors.append(t)
    anchors.sort()
    if anchors and 0 < anchors[0] - s.sinks < s.l_min:
        anchors = anchors[1:]
    if anchors and 0 < end - 1 - anchors[-1] < s.l_min:
        anchors = anchors[:-1]
    spans: list[tuple[int, int]] = []

    def split(a: int, b: int) -> None:
        if b - a <= s.l_max:
            if a < b:
                spans.append((a, b))
            return
        margin = max(s.l_min, (b - a) // 3)
        middle = max(range(a + margin, b - margin + 1), key=lambda t: (nats[t], -t))
        split(a, middle)
        split(middle, b)

    left = s.sinks
    for anchor in [*anchors, end]:
        split(left, anchor)
        left = anchor + 1
    return spans, anchors


def low_rank(x: Array, s: Settings) -> tuple[Array, int]:
    """The span's matrix after truncation, and its rank."""
    u, sigma, vt = np.linalg.svd(x, full_matrices=False)
    rank = 0
    while rank < min(len(sigma), s.max_rank) and (sigma[:rank] ** 2).sum() < s.energy * (sigma**2).sum():
        rank += 1
    return u[:, :rank] * sigma[:rank] @ vt[:rank], rank


def turn(x: Array, start: int, theta: float, back: bool = False) -> Array:
    """Rotary embedding of keys [m, D] at positions start.., in halves; back: by the opposite angle."""
    m, d = x.shape
    angle = np.arange(start, start + m)[:, None] / theta ** (np.arange(0, d, 2) / d) * (-1 if back else 1)
    a, b = x[:, : d // 2], x[:, d // 2 :]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=1)


def stored(keys: Array, values: Array, s: Settings, start: int = 0) -> tuple[Array, Array]:
    """Keys and values of a span that begins at `start` as they come back from host memory."""
    flat = turn(keys, start, s.theta, back=True) if s.pre_rope else keys
    (k_hat, r_k), (v_hat, r_v) = low_rank(flat, s), low_rank(values, s)
    k_hat = turn(k_hat, start, s.theta) if s.pre_rope else k_hat
    n, d = keys.shape
    if s.form == "raw" or (s.form == "smaller" and (r_k + r_v) * (n + d + 1) >= 2 * n * d):
        return keys, values
    return k_hat, v_hat


Grant = Callable[[Array, list[int]], list[list[int]]]
"""gates of the spans that KV heads ask for [KV head, span], -inf: not asked for, and tokens of the spans -> the spans
that each KV head gets, in their order"""


def own_rooms(room: int) -> Grant:
    """Each KV head has a room of its own."""

    def grant(gates: Array, tokens: list[int]) -> list[list[int]]:
        return [[span for _, span in fitting(ranked(gates[g : g + 1]), tokens, room)] for g in range(len(gates))]

    return grant


def ranked(gates: Array) -> list[tuple[int, int]]:
    """(KV head, span) that are asked for, the largest gate first."""
    places = [(g, i) for g, i in np.ndindex(*gates.shape) if gates[g, i] > -math.inf]
    return sorted(places, key=lambda place: -gates[place])


def fitting(places: list[tuple[int, int]], tokens: list[int], room: int) -> list[tuple[int, int]]:
    """Those that fit one after the other; one that does not is skipped."""
    out = []
    for g, i in places:
        if tokens[i] <= room:
            room -= tokens[i]
            out.append((g, i))
    return out


def decode_step(
    K: Array,
    V: Array,
    Q: Array,
    nats: Array,
    k: Array,
    v: Array,
    q: Array,
    s: Settings,
    grant: Grant | None = None,
    prefilled: int | None = None,
) -> Step:
    """grant: which spans each KV head gets, None: greedily in a room of its own; prefilled: tokens of the prompt, whose
    keys the router was fitted to and whose last queries Q are; the rest of K and V was decoded."""
    heads, kv_heads, n, d = len(q), K.shape[0], K.shape[1], K.shape[2]
    fitted = n if prefilled is None else prefilled
    group = heads // kv_heads
    spans, anchors = cut(nats, s, prefilled)
    size = len(spans)
    scale = 1 / math.sqrt(d)
    score, tau = np.zeros((heads, size)), np.zeros(heads)
    mean_k, mean_v = np.zeros((kv_heads, size, d)), np.zeros((kv_heads, size, d))
    for g in range(kv_heads):
        for i, (a, b) in enumerate(spans):
            w = nats[a:b] / nats[a:b].sum()
            mean_k[g, i], mean_v[g, i] = w @ K[g, a:b], w @ V[g, a:b]
    for h in range(heads):
        g = h // group
        centred = K[g, :fitted] - K[g, :fitted].mean(0)
        W = np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, : s.dim].T
        summary = mean_k[g] @ W.T
        summary /= np.linalg.norm(summary, axis=1, keepdims=True)
        prior = np.log([b - a for a, b in spans])
        score[h] = (W @ q[h]) @ summary.T / math.sqrt(s.dim) + prior
        prompt = []
        for j, query in enumerate(Q[h]):
            position = fitted - len(Q[h]) + j
            values = (W @ query) @ summary.T / math.sqrt(s.dim) + prior
            prompt += [x for x, (_, b) in zip(values, spans, strict=True) if b <= position]
        prompt.sort(reverse=True)
        tau[h] = prompt[math.floor(s.zoom_rate * len(prompt))]
    z = score > tau[:, None]

    gates = np.where(z, score, -math.inf).reshape(kv_heads, group, size).max(1)
    order = (grant or own_rooms(s.recall))(gates, [b - a for a, b in spans])
    hot = [set(of_head) for of_head in order]

    exact = [*range(s.sinks), *anchors, *range(n - s.window, n)]
    coarse, fine, out = np.zeros((heads, size)), np.zeros((heads, size)), np.zeros((heads, d))
    for h in range(heads):
        g = h // group
        logits = [K[g, t] @ q[h] * scale for t in exact] + [k[g] @ q[h] * scale]
        rows = [V[g, t] for t in exact] + [v[g]]
        owner: list[tuple[str, int]] = [("exact", 0)] * len(rows)
        for i, (a, b) in enumerate(spans):
            if z[h, i] and i in hot[g]:
                span_k, span_v = stored(K[g, a:b], V[g, a:b], s, a)
                logits += list(span_k @ q[h] * scale)
                rows += list(span_v)
                owner += [("fine", i)] * (b - a)
            else:
                logits.append(mean_k[g, i] @ q[h] * scale + math.log(b - a))
                rows.append(mean_v[g, i])
                owner.append(("coarse", i))
        p = np.exp(np.array(logits) - max(logits))
        p /= p.sum()
        out[h] = p @ np.array(rows)
        for weight, (what, i) in zip(p, owner, strict=True):
            if what == "coarse":
                coarse[h, i] += weight
            elif what == "fine":
                fine[h, i] += weight
    return Step(spans, anchors, z, order, hot, coarse, fine, out)
