"""SeKV's four losses (sec. 3.3, eq. 11-15) and the targets of the zoom loss.

The paper sums eq. 13-15 over layers, heads and spans. Here they are divided by the number of (layer, head, position,
span), and the reconstruction error is relative to the energy of its span, so that lambda_1..3 and beta mean the same
for every model and length (our decision). Shapes: H query heads, H_kv KV heads, T positions, S spans, R ranks; leading
dimensions [...] are layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlens.kernels import lowrank


def distillation(teacher: Tensor, student: Tensor) -> Tensor:
    """D_KL(p_full || p_SeKV) in nats, mean over positions (eq. 11). teacher: log-probabilities [T, V]; student: logits
    [T, V]."""
    return F.kl_div(student.float().log_softmax(-1), teacher, reduction="batchmean", log_target=True)


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


def zoom(score: Tensor, target: Tensor, values: Tensor, w_plus: float) -> Tensor:
    """Positive-weighted cross-entropy of the gate sigmoid(score) at mined positions (eq. 13), summed there and divided
    by the number of all gates, as the budget term is, so that the two keep the ratio of the paper's sums.

    score [..., H, T, S] before the sigmoid, target bool of the same shape, mine bool [..., H, T].
    """
    weight = torch.tensor(w_plus, device=score.device)
    each = F.binary_cross_entropy_with_logits(score, target.to(score.dtype), pos_weight=weight, reduction="none")
    return (each * values[..., None]).sum() / score.numel()


def reconstruction(gates: tuple[Tensor, Tensor], sigma: tuple[Tensor, Tensor], energy: tuple[Tensor, Tensor]) -> Tensor:
    """Squared error of the gated factors relative to the span's energy, keys plus values, mean over the rest (eq. 14).

    gates, sigma: keys and values [..., H_kv, S, R]; energy [..., H_kv, S].
    """
    parts = [lowrank.gated_error(m, s) / e.clamp_min(1e-12) for m, s, e in zip(gates, sigma, energy, strict=True)]
    return parts[0].mean() + parts[1].mean()


def budget(z: Tensor, gates: tuple[Tensor, Tensor], beta: float) -> Tensor:
    """Expanded share plus beta times the retained rank (eq. 15). z [..., H, T, S]; gates of keys and values [..., H_kv,
    S, R].

    Eq. 15 names the gates of keys only; values cost the same to move, so both count (our decision).
    """
    return z.mean() + beta * sum(m.sum(-1).mean() for m in gates)
