"""SeKV's router: where a span is summarised, scored against the query and expanded (SeKV sec. 3.2-3.3, eq. 2-5, 7, 9).

Shapes: L layers, H query heads, H_kv KV heads, G = H / H_kv, D head size, d' routing dimension (`dim`), S spans, R
largest rank. Query heads of a group are neighbours: head h reads KV head h // G. Scores are kept before the sigmoid:
the log|S| inside it pushes nearly all probabilities of long spans towards 1, where float32 cannot tell them apart,
while sigmoid(s) > tau is s > logit(tau).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from kvlens.shape import KVShape

HIDDEN = (128, 64)
"""Widths of g_phi: our choice, 18.9 thousand parameters at R = d' = 32 (the paper: fewer than 0.1 million)."""


class GateMLP(nn.Module):
    """g_phi of eq. 7, one for all layers, heads, keys and values. The paper does not give its form; ours: the spectrum
    as log1p(sigma_i) / log1p(sigma_1), the summary averaged over the group, log|S| / 10 and a flag for values, to R
    logits.
    """

    def __init__(self, max_rank: int, dim: int) -> None:
        super().__init__()
        self.max_rank, self.dim = max_rank, dim
        sizes = (max_rank + dim + 2, *HIDDEN, max_rank)
        layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        self.net = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])

    def forward(self, sigma: Tensor, summary: Tensor, length: Tensor, is_value: bool) -> Tensor:
        """sigma [..., r] with r <= R, summary [..., d'], length [...] in tokens -> gate logits [..., r]."""
        rank = sigma.shape[-1]
        spectrum = sigma.log1p() / sigma[..., :1].log1p().clamp_min(1e-6)
        spectrum = nn.functional.pad(spectrum, (0, self.max_rank - rank))
        size = length.log().unsqueeze(-1) / 10
        flag = torch.full_like(size, float(is_value))
        logits: Tensor = self.net(torch.cat((spectrum, summary, size, flag), dim=-1))
        return logits[..., :rank]


@dataclass(frozen=True)
class Router:
    """What SeKV learns, for one model."""

    kind: str
    """pca (fitted on the prompt, nothing learned) | trained"""
    weight: Tensor
    """W, float32 [L, H, d', D]"""
    threshold: Tensor
    """logit(tau), float32 [L, H]"""
    gates: GateMLP | None = None
    """g_phi; None: components are kept by their energy"""
    provenance: dict[str, Any] = field(default_factory=dict)


def logit(tau: Tensor) -> Tensor:
    """logit of thresholds, which training may push to the ends of (0, 1)."""
    return torch.logit(tau, eps=1e-6)


def surprisal_weights(nats: Tensor) -> Tensor:
    """Surprisals [..., m] of a span's tokens (0 for padding) -> weights that add up to 1 (eq. 2); uniform if all are
    0."""
    total = nats.sum(-1, keepdim=True)
    return torch.where(total > 0, nats / total.clamp_min(1e-30), torch.full_like(nats, 1 / nats.shape[-1]))


def summaries(weight: Tensor, mean_key: Tensor) -> Tensor:
    """W [..., H, d', D], surprisal-weighted mean keys [..., H_kv, S, D] -> unit summaries [..., H, S, d'] (eq. 3).

    sum_t w_t W K_t = W sum_t w_t K_t, so the mean key is all that is needed.
    """
    group = weight.shape[-3] // mean_key.shape[-3]
    projected = mean_key.repeat_interleave(group, dim=-3) @ weight.transpose(-1, -2)
    return projected / torch.linalg.vector_norm(projected, dim=-1, keepdim=True).clamp_min(1e-12)


def route(weight: Tensor, query: Tensor) -> Tensor:
    """W [..., H, d', D], queries [..., H, T, D] -> [..., H, T, d'] (eq. 4)."""
    return query @ weight.transpose(-1, -2)


def scores(routed: Tensor, summary: Tensor, length: Tensor, alive: Tensor) -> Tensor:
    """Eq. 5 before its sigmoid: q' . K_S / sqrt(d') + log|S|.

    routed [..., H, T, d'], summary [..., H, S, d'], length, alive [S] -> [..., H, T, S]; -inf for places of the table
    not in use.
    """
    value = routed @ summary.transpose(-1, -2) / math.sqrt(routed.shape[-1]) + length.log()
    return value.masked_fill(~alive, -math.inf)


def piece_scores(query: Tensor, pieces: Tensor, scale: Tensor, length: Tensor, owner: Tensor, spans: int) -> Tensor:
    """In place of eq. 5, ours: what attention would give a coarse entry of the best of a span's pieces, the largest of
    q . k_bar / sqrt(D) + log|piece|.

    query [H, T, D]; pieces [H_kv, P, D] times scale [H_kv, P, 1]: surprisal-weighted mean keys; length, owner [P]:
    tokens of a piece and the place of its span, -1: not in use -> [H, T, spans]; -inf for spans without a piece.
    """
    group = query.shape[0] // pieces.shape[0]
    per_head = (pieces.to(query.dtype) * scale).repeat_interleave(group, dim=0)
    value = query @ per_head.transpose(-1, -2) / math.sqrt(query.shape[-1]) + length.log()
    return _best(value, owner, spans)


def bound_scores(query: Tensor, pieces: Tensor, scale: Tensor, owner: Tensor, spans: int) -> Tensor:
    """In place of eq. 5, ours: the largest that a span's logits q . k / sqrt(D) can be by the ranges of its keys (the
    bound of Quest), which a single token is enough for.

    query [H, T, D]; pieces [H_kv, 2 P, D] times scale [H_kv, 2 P, 1]: largest and smallest entries of a piece's keys,
    one behind the other; owner [P] as above -> [H, T, spans].
    """
    group = query.shape[0] // pieces.shape[0]
    per_head = (pieces.to(query.dtype) * scale).repeat_interleave(group, dim=0)
    largest, smallest = per_head[:, 0::2].transpose(-1, -2), per_head[:, 1::2].transpose(-1, -2)
    value = (query.clamp_min(0) @ largest + query.clamp_max(0) @ smallest) / math.sqrt(query.shape[-1])
    return _best(value, owner, spans)


def _best(value: Tensor, owner: Tensor, spans: int) -> Tensor:
    """Of pieces [H, T, P] -> of their spans, the largest [H, T, spans]."""
    value = value.masked_fill(owner < 0, -math.inf)
    best = torch.full((*value.shape[:-1], spans), -math.inf, dtype=value.dtype, device=value.device)
    return best.scatter_reduce(-1, owner.clamp_min(0).expand_as(value), value, "amax")


def to_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors [..., D] -> int8 [..., D] and scale float32 [..., 1] with x ~ int8 * scale; half a step is the error."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-30) / 127
    return (x.float() / scale).round().to(torch.int8), scale


def ranges_of_keys(keys: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """keys [L, H_kv, m, D] -> largest and smallest entries of each range, one behind the other [L, H_kv, 2 P, D]."""
    ends = [x for a, b in ranges for x in (keys[:, :, a:b].amax(2), keys[:, :, a:b].amin(2))]
    return torch.stack(ends, 2) if ends else keys[:, :, :0]


def span_means(x: Tensor, nats: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """x [L, H_kv, m, D] of m tokens with surprisals nats [m] -> weighted means [L, H_kv, len(ranges), D] (eq. 2), in
    x's dtype."""
    out = x.new_zeros(*x.shape[:2], len(ranges), x.shape[3])
    for i, (start, end) in enumerate(ranges):
        rows = x[:, :, start:end].float()
        out[:, :, i] = (rows * surprisal_weights(nats[start:end])[:, None]).sum(2).to(x.dtype)
    return out


def pooled(pool: str, score: Tensor, requests: Tensor) -> Tensor:
    """Return a span's priority for its KV head [..., S] from the scores of the group's query heads [..., G, S]: over
    those that ask for it (`requests` bool [..., G, S], z of eq. 9), or over all of them where none does.

    pool: max or mean of the scores, or share: the mean of the shares that each query head's scores give the span of all
    spans.
    """
    counts = requests | ~requests.any(-2, keepdim=True)
    if pool == "max":
        return score.masked_fill(~counts, -math.inf).amax(-2)
    value = score.softmax(-1) if pool == "share" else score
    return torch.where(counts, value, 0).sum(-2) / counts.sum(-2)


def expand(score: Tensor, threshold: Tensor) -> Tensor:
    """z of eq. 9: score [..., H, T, S] against logit(tau) [..., H] -> bool."""
    return score > threshold[..., None, None]


def fit_pca(keys: Tensor, group: int, dim: int) -> Tensor:
    """Routing projection without training (our stand-in): keys [..., H_kv, N, D] -> W [..., H, d', D].

    Rows are the leading d' principal directions of that KV head's keys on the prompt, orthonormal, equal for a group.
    Layers are taken one by one: in float32, and centred, a long prompt's keys are four times what they are in bfloat16.
    """
    if keys.dim() > 3:
        return torch.stack([fit_pca(layer, group, dim) for layer in keys])
    wide = keys.float()
    centred = wide - wide.mean(-2, keepdim=True)
    _, directions = torch.linalg.eigh(centred.transpose(-1, -2) @ centred)
    return directions.flip(-1)[..., :dim].transpose(-1, -2).repeat_interleave(group, dim=-3).contiguous()


def fit_threshold(score: Tensor, rate: float) -> Tensor:
    """logit(tau) at which a share `rate` of the (query, span) pairs would be expanded.

    score [..., H, T, S] of prompt queries, -inf where the span is not yet complete for that query -> [..., H]. +inf
    (nothing is expanded) where no pair counts, -inf (everything is asked for) at a rate of 1.
    """
    flat = score.flatten(-2)
    count = torch.isfinite(flat).sum(-1, keepdim=True)
    if rate >= 1:
        return torch.where(count.squeeze(-1) > 0, -math.inf, math.inf)
    # The k-th largest with k = floor(rate * count) + 1: exactly floor(rate * count) pairs lie strictly above it, ties
    # aside. Only that many are put in order: a prompt's pairs are many, and the rate is small.
    above = (rate * count).floor().long().clamp_max(flat.shape[-1] - 1)
    value = flat.topk(int(above.max()) + 1).values.gather(-1, above).squeeze(-1)
    return torch.where(count.squeeze(-1) > 0, value, torch.full_like(value, math.inf))


def router_of(tensors: dict[str, Tensor], provenance: dict[str, Any], name: str, shape: KVShape) -> Router:
    """A trained router from the tensors of the file `name`. Raises ValueError when it was trained for a model of
    another shape."""
    weight = tensors["weight"].float()
    if (weight.shape[0], weight.shape[1], weight.shape[3]) != (shape.layers, shape.q_heads, shape.head_dim):
        raise ValueError(
            f"{name} is for {weight.shape[0]} layers, {weight.shape[1]} query heads of size {weight.shape[3]}; "
            f"this model has {shape.layers}, {shape.q_heads} and {shape.head_dim}"
        )
    state = {part.removeprefix("gates."): value for part, value in tensors.items() if part.startswith("gates.")}
    gates = None
    if state:
        gates = GateMLP(state["net.4.weight"].shape[0], weight.shape[2])
        gates.load_state_dict(state)
        gates.requires_grad_(False)
    return Router("trained", weight, tensors["threshold"].float(), gates, provenance)
