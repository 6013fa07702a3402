"""SeKV's student one document and one layer at a time, by autograd alone: what the batched one must equal."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from kvlens.engine.hf_attention import attending
from kvlens.lab.training.sekv.examples import Example, draw, prepare
from kvlens.lab.training.sekv.losses import coverage_set, mined
from kvlens.lab.training.sekv.settings import SeKVTraining
from kvlens.lab.training.sekv.student import RouterModule
from kvlens.methods.sekv.params import SeKVParameters

ATTENTION = "kvlens_sekv_training_reference"


class Trip:
    """One document through the model."""

    def __init__(self, example: Example, router: RouterModule, exponent: float) -> None:
        self.prefix, self.router, self.exponent = example.prefix, router, exponent
        self.scores: list[Tensor] = []
        self.zooms: list[Tensor] = []
        self.gates: list[tuple[Tensor, Tensor]] = []

    def rebuild(self, layer: int, factors: tuple[Tensor, Tensor, Tensor], summary: Tensor, is_value: bool) -> Tensor:
        u, sigma, v = (part[layer].float() for part in factors)
        gates = self.router.gates(sigma, summary, self.prefix.length.expand(sigma.shape[:-1]), is_value).sigmoid()
        self.built.append(gates)
        return torch.einsum("hsmr,hsr,hsrd->hsmd", u, gates * sigma, v)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        prefix, group = self.prefix, query.shape[0] // key.shape[0]
        self.built: list[Tensor] = []
        means = prefix.mean_keys[layer].float()
        projected = torch.einsum("hed,hsd->hse", self.router.weight[layer], means.repeat_interleave(group, 0))
        summary = projected / projected.norm(dim=-1, keepdim=True)
        routed = torch.einsum("hed,htd->hte", self.router.weight[layer], query)
        score = torch.einsum("hte,hse->hts", routed, summary) / math.sqrt(routed.shape[-1]) + prefix.length.log()
        margin = score.sigmoid() - self.router.tau[layer][:, None, None]
        z = (margin > 0).float() + margin - margin.detach()
        shared = summary.unflatten(0, (-1, group)).mean(1)
        keys = self.rebuild(layer, prefix.key_factors, shared, False)
        values = self.rebuild(layer, prefix.value_factors, shared, True)
        self.scores.append(score)
        self.zooms.append(z)
        self.gates.append((self.built[0], self.built[1]))
        positions = query.shape[1]
        later = torch.ones(positions, positions, dtype=torch.bool).triu(1)
        parts = [
            (prefix.exact_keys[layer].float(), prefix.exact_values[layer].float(), None, torch.zeros(())),
            (key, value, None, torch.zeros(positions, positions).masked_fill(later, -math.inf)),
            (means, prefix.mean_values[layer].float(), 1 - z, prefix.length.log()),
            (
                keys.flatten(1, 2),
                values.flatten(1, 2),
                z.repeat_interleave(keys.shape[2], -1),
                torch.zeros(prefix.in_span.numel()).masked_fill(~prefix.in_span.flatten(), -math.inf),
            ),
        ]
        logits, use, rows = [], [], []
        for k, v, share, bias in parts:
            each = query @ k.repeat_interleave(group, 0).transpose(-1, -2) * scale + bias
            logits.append(each)
            use.append(torch.ones_like(each) if share is None else share)
            rows.append(v.repeat_interleave(group, 0))
        weight = mixed_softmax(torch.cat(logits, -1), torch.cat(use, -1), self.exponent)
        return weight @ torch.cat(rows, 1)


def mixed_softmax(logits: Tensor, use: Tensor, exponent: float) -> Tensor:
    """Weights use * exp(logit) / sum of the same, over the last dimension."""
    largest = logits.detach().masked_fill(use.detach() < 0.5, float("-inf")).amax(-1, keepdim=True)
    weight = (logits - largest).clamp_max(exponent).exp() * use
    return weight / weight.sum(-1, keepdim=True)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float, sekv: Trip, **_: Any
) -> tuple[Tensor, None]:
    out = sekv.attend(module.layer_idx, query[0], key[0], value[0], scaling)[None]  # type: ignore[arg-type]
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


def loss(model: Any, example: Example, router: RouterModule, s: SeKVTraining, budget_weight: float) -> Tensor:
    """Eq. 10 of one document."""
    trip = Trip(example, router, s.exponent)
    with attending(model, ATTENTION):
        logits = model(
            input_ids=example.suffix_ids, position_ids=example.position_ids, use_cache=False, sekv=trip
        ).logits[0]
    score, z, mass = torch.stack(trip.scores), torch.stack(trip.zooms), example.mass.float()
    target, rows = coverage_set(mass, s.rho), mined(mass, s.concentration, s.strongest)
    bce = F.binary_cross_entropy_with_logits(score, target.float(), pos_weight=torch.tensor(s.w_plus), reduction="none")
    gates = [torch.stack([pair[i] for pair in trip.gates]) for i in range(2)]
    factors = (example.prefix.key_factors, example.prefix.value_factors)
    errors = [
        (((1 - m) * sigma) ** 2).sum(-1) / energy.clamp_min(1e-12)
        for m, (_, sigma, _), energy in zip(gates, factors, example.prefix.energy, strict=True)
    ]
    distilled = F.kl_div(logits.log_softmax(-1), example.teacher.float(), reduction="batchmean", log_target=True)
    return (
        distilled
        + s.lambda_zoom * (bce * rows[..., None]).sum() / score.numel()
        + s.lambda_recon * (errors[0].mean() + errors[1].mean())
        + budget_weight * (z.mean() + s.beta * (gates[0].sum(-1).mean() + gates[1].sum(-1).mean()))
    )


def curve(
    model: Any, documents: list[list[int]], params: SeKVParameters, s: SeKVTraining, steps: int, start: Tensor
) -> list[float]:
    """The mean loss of every step, of one document after the other."""
    torch.manual_seed(s.seed)
    router = RouterModule(start, params.max_rank, s.tau, s.open_gates)
    optimizer = torch.optim.AdamW(
        [
            {"params": [router.weight, router.tau], "share": 1.0},
            {"params": list(router.gates.parameters()), "share": s.gate_rate},
        ],
        lr=s.learning_rate,
        weight_decay=s.weight_decay,
    )
    losses = []
    for step in range(steps):
        rng = random.Random(s.seed * 1_000_003 + step)
        length = s.lengths[step * len(s.lengths) // steps]
        optimizer.zero_grad()
        each = []
        for _ in range(s.batch):
            example = prepare(model, draw(documents, length, rng), s.suffix, params, _cap(params, s, length))
            assert example is not None
            value = loss(model, example, router, s, s.lambda_budget * min(1.0, 2 * step / steps))
            (value / s.batch).backward()
            each.append(float(value.detach()))
        torch.nn.utils.clip_grad_norm_(router.parameters(), s.clip)
        warm = max(1, round(s.warmup * steps))
        cosine = 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
        for group in optimizer.param_groups:
            group["lr"] = s.learning_rate * ((step + 1) / warm if step < warm else cosine) * group["share"]
        optimizer.step()
        with torch.no_grad():
            router.tau.clamp_(1e-4, 1 - 1e-4)
        losses.append(sum(each) / len(each))
    return losses


def _cap(params: SeKVParameters, s: SeKVTraining, length: int) -> int:
    return int(params.anchor_share * s.budget * length)
