"""How SeKV's spans lie in host memory: gated low-rank factors, or exact where factors would be larger (SeKV sec. 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlens.kernels import lowrank
from kvlens.kernels.lowrank_bytes import smaller_form
from kvlens.memory import Unit
from kvlens.methods.sekv_params import SeKVParameters
from kvlens.methods.sekv_router import GateMLP


class SpanCodec:
    """Packs spans of m tokens for all layers L and KV heads H_kv. Gates come from g_phi (eq. 7) or, without one, from the energy."""

    def __init__(self, params: SeKVParameters, gates: GateMLP | None, summary: dict[int, Tensor]) -> None:
        """summary: span id -> its summary averaged over the group [L, H_kv, d'], an input of g_phi; gone once the span is packed."""
        self.params, self.gates, self.summary = params, gates, summary

    def pack(self, keys: Tensor, values: Tensor, span: int) -> list[list[Unit]]:
        """keys, values [L, H_kv, m, D] -> units [layer][KV head]."""
        if self.params.form == "raw":
            return [[self._raw(k, v) for k, v in zip(*pair, strict=True)] for pair in zip(keys, values, strict=True)]
        summary = self.summary.pop(span).float()
        decomposed = (self._decompose(keys, summary, is_value=False), self._decompose(values, summary, is_value=True))
        return [
            [self._unit(keys[layer, head], values[layer, head], *(tuple(t[layer, head] for t in d) for d in decomposed))
             for head in range(keys.shape[1])]
            for layer in range(keys.shape[0])
        ]  # fmt: skip

    def unpack(self, unit: Unit, payload: Tensor) -> tuple[Tensor, Tensor]:
        """The factors after they came to the device -> keys, values [m, D] (eq. 8)."""
        assert unit.rank_k is not None
        assert unit.rank_v is not None
        dim = (payload.numel() - (unit.rank_k + unit.rank_v) * (unit.tokens + 1)) // (unit.rank_k + unit.rank_v)
        key, value = lowrank.unpack(payload, unit.tokens, unit.rank_k, unit.rank_v, dim)
        return key.dense(), value.dense()

    def _decompose(self, x: Tensor, summary: Tensor, is_value: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [L, H_kv, m, D] -> U [L, H_kv, m, R], sigma, gates [L, H_kv, R], V [L, H_kv, R, D]."""
        u, sigma, v = lowrank.truncated_svd(x, self.params.max_rank)
        if self.gates is None:
            gates = lowrank.energy_gates(sigma, x.float().square().sum((-1, -2)), self.params.energy)
        else:
            length = torch.full(sigma.shape[:-1], float(x.shape[2]), device=x.device)
            gates = self.gates(sigma, summary, length, is_value).sigmoid()
        return u, sigma, gates, v

    def _unit(self, keys: Tensor, values: Tensor, key_parts: tuple[Tensor, ...], value_parts: tuple[Tensor, ...]) -> Unit:
        m, dim = keys.shape
        key, value = (lowrank.compress(sigma, gates, u, v, self.params.gate_drop) for u, sigma, gates, v in (key_parts, value_parts))
        if self.params.form == "smaller" and smaller_form(m, key.rank, value.rank, dim) == "raw":
            return self._raw(keys, values)
        payload = lowrank.pack(key, value).to(keys.dtype)
        stored = lowrank.unpack(payload, m, key.rank, value.rank, dim)
        errors = [
            float(lowrank.relative_error(exact.float(), packed.dense().float()))
            for exact, packed in zip((keys, values), stored, strict=True)
        ]
        return Unit("factors", payload, m, key.rank, value.rank, *errors)

    @staticmethod
    def _raw(keys: Tensor, values: Tensor) -> Unit:
        return Unit("raw", torch.stack((keys, values)), keys.shape[0])
