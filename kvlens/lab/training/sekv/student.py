"""SeKV's forward pass with gradients: a frozen model over mixed-resolution memory (SeKV sec. 3.3).

Shapes: L layers, H query heads, H_kv KV heads, D head size, P prefix tokens, T suffix tokens, E exact tokens, S spans
of at most m tokens, R ranks, d' routing dimension. Batch is 1.

The prefix goes through the model once, with full attention (the teacher). Its keys and values are constants. Then the
suffix alone goes through the same model again; each of its positions attends in one softmax to the exact tokens (sinks,
anchors, raw spans, the window at the end of the prefix), to the suffix before it, and to every span in one of two
resolutions. z in {0, 1} decides which; its gradient is that of the sigmoid gate it comes from (straight-through), so
attention is written as a ratio linear in z.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from kvlens.engine.hf_attention import refuse_unsupported
from kvlens.kernels import lowrank
from kvlens.lab.training.sekv.settings import SeKVTraining
from kvlens.methods.sekv import router as sekv_router

ATTENTION = "kvlens_sekv_training"


@dataclass
class Prefix:
    """The constants of one document: how its prefix lies in memory, for all layers."""

    exact_keys: Tensor
    """[L, H_kv, E, D]"""
    exact_values: Tensor
    mean_keys: Tensor
    """[L, H_kv, S, D], weighted by surprisal (eq. 2)"""
    mean_values: Tensor
    key_factors: tuple[Tensor, Tensor, Tensor]
    """U [L, H_kv, S, m, R], sigma [L, H_kv, S, R], V [L, H_kv, S, R, D]"""
    value_factors: tuple[Tensor, Tensor, Tensor]
    energy: tuple[Tensor, Tensor]
    """squared norm of each span's keys and values, [L, H_kv, S]"""
    in_span: Tensor
    """bool [S, m]: False for padding"""
    length: Tensor
    """float [S], tokens"""


class RouterModule(nn.Module):
    """What is learned: W, tau and g_phi."""

    def __init__(self, weight: Tensor, max_rank: int, tau: float, open_gates: float) -> None:
        """weight, tau, open_gates: start of W [L, H, d', D], of all thresholds, and of the gates' last bias. Gates that
        start open and thresholds that start low expand everything at first."""
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.tau = nn.Parameter(torch.full(weight.shape[:2], tau))
        self.gates = sekv_router.GateMLP(max_rank, weight.shape[2])
        last = self.gates.net[-1]
        assert isinstance(last, nn.Linear)
        nn.init.constant_(last.bias, open_gates)


@dataclass
class Pass:
    """One trip through the model: 'capture' collects queries, keys and values; 'student' attends to `prefix` with
    `router`."""

    suffix: int
    prefix: Prefix | None = None
    router: RouterModule | None = None
    exponent: float = SeKVTraining.exponent
    """as the setting of that name"""
    scaling: float = 0.0
    """of the model's attention logits, set by the first layer"""
    captured: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    """layer -> queries of the suffix [H, T, D], keys and values [H_kv, P + T, D]"""
    scores: list[Tensor] = field(default_factory=list)
    """per layer [H, T, S], before the sigmoid"""
    zooms: list[Tensor] = field(default_factory=list)
    """per layer z [H, T, S], with straight-through gradient"""
    gates: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """per layer m of keys and values [H_kv, S, R]"""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sekv: Pass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls: query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D]."""
    refuse_unsupported(module, kwargs)
    assert sekv is not None, "the model attends by this function inside a pass alone"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sekv.scaling = scale
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if sekv.prefix is None:
        sekv.captured[layer] = (query[0, :, -sekv.suffix :], key[0], value[0])
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    else:
        out = _student(sekv, layer, query[0], key[0], value[0], scale)[None]
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attention)


def straight_through(probability: Tensor, tau: Tensor) -> Tensor:
    """z = 1[a > tau] with the gradient of a - tau. probability [H, T, S], tau [H]."""
    margin = probability - tau[:, None, None]
    return (margin > 0).to(margin.dtype) + margin - margin.detach()


def _student(sekv: Pass, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """query [H, T, D], key and value of the suffix [H_kv, T, D] -> [H, T, D]."""
    prefix, router = sekv.prefix, sekv.router
    assert prefix is not None
    assert router is not None
    group = query.shape[0] // key.shape[0]
    weight, mean_keys = router.weight[layer], prefix.mean_keys[layer]
    summary = sekv_router.summaries(weight, mean_keys)
    alive = torch.ones(prefix.length.shape, dtype=torch.bool, device=query.device)
    score = sekv_router.scores(sekv_router.route(weight, query), summary, prefix.length, alive)
    z = straight_through(score.sigmoid(), router.tau[layer])
    shared = summary.unflatten(0, (-1, group)).mean(1)
    span_keys, key_gates = _rebuild(router, prefix.key_factors, layer, shared, prefix.length, is_value=False)
    span_values, value_gates = _rebuild(router, prefix.value_factors, layer, shared, prefix.length, is_value=True)
    sekv.scores.append(score)
    sekv.zooms.append(z)
    sekv.gates.append((key_gates, value_gates))

    def per_query_head(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, dim=0)

    causal = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool, device=query.device).tril()
    logits = (
        query @ per_query_head(prefix.exact_keys[layer]).transpose(-1, -2) * scale,
        (query @ per_query_head(key).transpose(-1, -2) * scale).masked_fill(~causal, float("-inf")),
        query @ per_query_head(mean_keys).transpose(-1, -2) * scale + prefix.length.log(),
        (query @ per_query_head(span_keys.flatten(1, 2)).transpose(-1, -2) * scale).masked_fill(
            ~prefix.in_span.flatten(), float("-inf")
        ),
    )
    fine = z.repeat_interleave(prefix.in_span.shape[1], dim=-1)
    ones = tuple(torch.ones_like(part) for part in logits[:2])
    use = torch.cat((*ones, 1 - z, fine), dim=-1)
    values = (prefix.exact_values[layer], value, prefix.mean_values[layer], span_values.flatten(1, 2))
    return mixed_softmax(torch.cat(logits, dim=-1), use, sekv.exponent) @ per_query_head(torch.cat(values, dim=1))


def mixed_softmax(logits: Tensor, use: Tensor, exponent: float) -> Tensor:
    """Weights use * exp(logit) / sum of the same, over the last dimension; `use` is 0 or 1 and carries gradients, which
    `exponent` nats above the largest logit in use bound where it is 0."""
    largest = logits.detach().masked_fill(use.detach() < 0.5, float("-inf")).amax(-1, keepdim=True)
    weight = (logits - largest).clamp_max(exponent).exp() * use
    return weight / weight.sum(-1, keepdim=True)


def _rebuild(
    router: RouterModule,
    factors: tuple[Tensor, Tensor, Tensor],
    layer: int,
    summary: Tensor,
    length: Tensor,
    is_value: bool,
) -> tuple[Tensor, Tensor]:
    """Gated reconstruction (eq. 7-8) of one layer: [H_kv, S, m, D] and the gates [H_kv, S, R]. summary [H_kv, S,
    d']."""
    u, sigma, v = (part[layer] for part in factors)
    lengths = length.expand(sigma.shape[:-1])
    gates = router.gates(sigma, summary, lengths, is_value).sigmoid()
    return lowrank.reconstruct(u, gates * sigma, v), gates
