"""The dense part of one decode step: the matrices of every layer on random weights, RMS norms, SiLU, the head and
argmax.

Left out: rotary embedding and the write of the new token's keys and values, both a few KB per layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kvlens.gpu.bench.part import Bench

Attend = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer, q [B, Hq, D]) -> [B, Hq, D]"""


class Dense:
    """Weights as wide as the model's, scaled so that numbers keep their size through the layers."""

    def __init__(self, bench: Bench) -> None:
        model, kv, normal = bench.model, bench.model.kv, bench.device.normal
        heads, wide, inner = kv.q_heads * kv.head_dim, model.hidden, model.inner
        self.kv = kv
        self.layers = [
            (
                normal(heads + 2 * kv.kv_heads * kv.head_dim, wide, scale=wide**-0.5),
                normal(wide, heads, scale=heads**-0.5),
                normal(2 * inner, wide, scale=wide**-0.5),
                normal(wide, inner, scale=inner**-0.5),
            )
            for _ in range(kv.layers)
        ]
        self.head = normal(model.vocabulary, wide, scale=wide**-0.5)

    def step(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [B, hidden] -> the next tokens [B]."""
        kv, batch, size = self.kv, len(x), (x.shape[1],)
        for layer, (qkv, o, gate_up, down) in enumerate(self.layers):
            q = F.linear(F.rms_norm(x, size), qkv)[:, : kv.q_heads * kv.head_dim].unflatten(
                1, (kv.q_heads, kv.head_dim)
            )
            x = x + F.linear(attend(layer, q).reshape(batch, -1), o)
            gate, up = F.linear(F.rms_norm(x, size), gate_up).chunk(2, dim=1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.linear(F.rms_norm(x, size), self.head).argmax(-1)
