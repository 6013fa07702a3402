"""Attention of one softmax over memory in two resolutions, with the gradient of the choice between them.

Shapes: B documents, H_kv KV heads, G query heads of each, T positions, D head size, E exact tokens, S spans of
F tokens, N = E + S + F + T entries of memory: exact tokens, coarse entries, tokens of spans, the suffix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Entries:
    """Where the entries of memory are, along N."""

    exact: int
    """E"""
    spans: int
    """S"""
    owner: Tensor
    """span of each token of spans [B, F]; any for padding, whose logits are -inf"""

    @property
    def coarse(self) -> slice:
        return slice(self.exact, self.exact + self.spans)

    @property
    def fine(self) -> slice:
        start = self.exact + self.spans
        return slice(start, start + self.owner.shape[1])

    @property
    def suffix(self) -> slice:
        return slice(self.fine.stop, None)

    def spread(self, x: Tensor) -> Tensor:
        """Return the numbers of spans x [B, H_kv, G, T, S] for each of their tokens [B, H_kv, G, T, F]."""
        return x.gather(-1, self.owner[:, None, None, None].expand(*x.shape[:-1], -1))

    def gather(self, x: Tensor) -> Tensor:
        """Return sums over the tokens of each span of x [B, H_kv, G, T, F]: [B, H_kv, G, T, S]."""
        member = x.new_zeros(*self.owner.shape, self.spans).scatter_(-1, self.owner[..., None], 1)
        return (x.flatten(1, 3) @ member).unflatten(1, x.shape[1:4])


class MixedAttention(torch.autograd.Function):
    """softmax over the entries in use, times their values. z = 1 uses a span's tokens, z = 0 its coarse entry.

    The gradient of z is that of weights use * exp(logit) / sum of the same with use = z for tokens and 1 - z for coarse
    entries. A resolution that is not in use may exceed the largest logit in use by `exponent` nats at most. One
    function with its own gradient: autograd would keep five times the memory and pass over it twice as often.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        z: Tensor,
        bias: Tensor,
        entries: Entries,
        exponent: float,
    ) -> Tensor:
        """Scaled query [B, H_kv, G, T, D], keys and values [B, H_kv, N, D], z [B, H_kv, G, T, S], bias [B, 1, 1, T, N]
        of logits -> [B, H_kv, G, T, D]."""
        fine = z > 0.5
        logits = _by_keys(query, keys.mT).add_(bias)
        used = entries.spread(fine)
        lifted = _peak(logits, fine, used, entries)
        scaled = logits.sub_(lifted).clamp_max_(exponent).exp_()
        weight = scaled.clone()
        weight[..., entries.coarse].mul_(~fine)
        weight[..., entries.fine].mul_(used)
        total = weight.sum(-1, keepdim=True)
        out = _by_keys(weight, values) / total
        ctx.save_for_backward(query, keys, values, scaled, weight, total, out)
        ctx.entries = entries
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, scaled, weight, total, out = ctx.saved_tensors
        share = gradients[0] / total
        slope = _by_keys(share, values.mT).sub_((share * out).sum(-1, keepdim=True))
        entries = ctx.entries
        of_fine = entries.gather(slope[..., entries.fine] * scaled[..., entries.fine])
        z = of_fine - slope[..., entries.coarse] * scaled[..., entries.coarse]
        of_logits = slope.mul_(weight)
        of_query = _by_keys(of_logits, keys)
        of_keys = of_logits.flatten(2, 3).mT @ query.flatten(2, 3)
        of_values = weight.flatten(2, 3).mT @ share.flatten(2, 3)
        return of_query, of_keys, of_values, z, None, None, None


def _by_keys(rows: Tensor, table: Tensor) -> Tensor:
    """Multiply rows [B, H_kv, G, T, x] with a table [B, H_kv, x, y] that the group shares."""
    return (rows.flatten(2, 3) @ table).unflatten(2, rows.shape[2:4])


def _peak(logits: Tensor, fine: Tensor, used: Tensor, entries: Entries) -> Tensor:
    """Return the largest logit in use [..., 1]."""
    largest = logits[..., entries.suffix].amax(-1, keepdim=True)
    if entries.exact:
        largest = largest.maximum(logits[..., : entries.exact].amax(-1, keepdim=True))
    for part, in_use in ((entries.coarse, ~fine), (entries.fine, used)):
        largest = largest.maximum(logits[..., part].masked_fill(~in_use, -torch.inf).amax(-1, keepdim=True))
    return largest
