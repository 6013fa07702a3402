"""SeKV's four losses (sec. 3.3, eq. 11-15) and the targets of the zoom loss, for B documents each.

The paper sums eq. 13-15 over layers, heads and spans. Here they are divided by the number of (layer, head, position,
span) of the document, and the reconstruction error is relative to the energy of its span, so that lambda_1..3 and beta
mean the same for every model and length (our decision). Shapes: L layers, B documents, H query heads, H_kv KV heads, T
positions, S spans, R ranks, V vocabulary. Spans and ranks that are padding are in no mask and count for nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlens.kernels import lowrank


def distillation(teacher: Tensor, student: Tensor) -> Tensor:
    """D_KL(p_full || p_SeKV) in nats, mean over positions (eq. 11). teacher: log-probabilities [B, T, V]; student:
    logits [B, T, V] -> [B]."""
    divergence = F.kl_div(student.float().log_softmax(-1), teacher, reduction="none", log_target=True)
    return divergence.sum(-1).mean(-1)


def coverage_set(mass: Tensor, rho: float) -> Tensor:
    """y of eq. 12: the smallest set of spans that holds a share rho of the teacher's mass on spans. mass [..., S] ->
    bool [..., S].

    The paper does not say of what rho is a share; ours: of the mass on spans, since anchors and window are attended in
    any case.
    """
    largest, order = mass.sort(dim=-1, descending=True)
    previous = largest.cumsum(-1) - largest
    choice = previous < rho * mass.sum(-1, keepdim=True)
    return torch.zeros_like(choice).scatter(-1, order, choice)


def mined(mass: Tensor, concentration: float, strongest: int) -> Tensor:
    """Query positions, per layer and head, whose teacher attention is concentrated beyond the window: the `strongest`
    spans hold at least `concentration` of all of it (the paper gives no rule; far but diffuse attention would ask for
    half of all spans).

    mass [..., S] -> bool [...].
    """
    return mass.topk(min(strongest, mass.shape[-1]), dim=-1).values.sum(-1) >= concentration


def zoom(score: Tensor, target: Tensor, own_rows: Tensor, is_span: Tensor, w_plus: float) -> Tensor:
    """Positive-weighted cross-entropy of the gate sigmoid(score) at mined positions (eq. 13), summed there and divided
    by the number of all gates, as the budget term is, so that the two keep the ratio of the paper's sums.

    score [L, B, H, T, S] before the sigmoid, target bool of the same shape, own_rows bool [L, B, H, T], is_span bool
    [B, S] -> [B].
    """
    counts = own_rows[..., None] & is_span[:, None, None]
    weight = torch.tensor(w_plus, device=score.device)
    each = F.binary_cross_entropy_with_logits(
        score.masked_fill(~is_span[:, None, None], 0), target.to(score.dtype), pos_weight=weight, reduction="none"
    )
    return (each * counts).sum((0, 2, 3, 4)) / _gates(score, is_span)


def reconstruction(
    gates: tuple[Tensor, Tensor], sigma: tuple[Tensor, Tensor], energy: tuple[Tensor, Tensor], is_span: Tensor
) -> Tensor:
    """Squared error of the gated factors relative to the span's energy, keys plus values, mean over the rest (eq. 14).

    gates, sigma: keys and values [L, B, H_kv, S, R]; energy [L, B, H_kv, S]; is_span bool [B, S] -> [B].
    """
    parts = [lowrank.gated_error(m, s) / e.clamp_min(1e-12) for m, s, e in zip(gates, sigma, energy, strict=True)]
    return _mean_over_spans(parts[0] + parts[1], is_span)


def budget(z: Tensor, gates: tuple[Tensor, Tensor], beta: float, is_span: Tensor, has_rank: Tensor) -> Tensor:
    """Expanded share plus beta times the retained rank (eq. 15). z [L, B, H, T, S]; gates of keys and values [L, B,
    H_kv, S, R]; is_span bool [B, S]; has_rank bool [B, R] -> [B].

    Eq. 15 names the gates of keys only; values cost the same to move, so both count (our decision).
    """
    expanded = (z * is_span[:, None, None]).sum((0, 2, 3, 4)) / _gates(z, is_span)
    return expanded + beta * sum(mean_rank(m, is_span, has_rank) for m in gates)


def mean_rank(gates: Tensor, is_span: Tensor, has_rank: Tensor) -> Tensor:
    """Return the retained rank of a span, mean over layers, KV heads and spans: gates [L, B, H_kv, S, R] -> [B]."""
    return _mean_over_spans((gates * has_rank[:, None, None]).sum(-1), is_span)


def _gates(score: Tensor, is_span: Tensor) -> Tensor:
    """Return the number of (layer, query head, position, span) of each document [B]."""
    layers, _, heads, positions, _ = score.shape
    return layers * heads * positions * is_span.sum(-1)


def _mean_over_spans(values: Tensor, is_span: Tensor) -> Tensor:
    """Return the mean over layers, KV heads and spans of values [L, B, H_kv, S] -> [B]."""
    layers, _, heads, _ = values.shape
    return (values * is_span[:, None]).sum((0, 2, 3)) / (layers * heads * is_span.sum(-1))
