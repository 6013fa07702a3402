"""How SeKV's spans lie in host memory: gated low-rank factors, or exact where factors would be larger (SeKV sec.
3.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlens.kernels import lowrank
from kvlens.kernels.lowrank_bytes import smaller_form
from kvlens.memory.cold import RawCodec, Unit
from kvlens.methods.base import Rotate
from kvlens.methods.sekv.params import SeKVParameters
from kvlens.methods.sekv.router import GateMLP

Tell = Callable[[list[int], dict[str, Tensor]], None]
"""ids of the spans that were packed together, and figures [S, L, H_kv] of them by their name in the journal"""


@dataclass(frozen=True)
class Pending:
    """What the codec has to know of a span that it will pack."""

    start: int
    """position of its first token"""
    summary: Tensor
    """its summary averaged over the group [L, H_kv, d'], an input of g_phi"""


@dataclass
class PreRopeUnit(Unit):
    """Factors whose keys have no positions yet."""

    layer: int = 0
    start: int = 0
    """position of the span's first token"""


@dataclass(frozen=True)
class Parts:
    """A decomposed [m, D] matrix of every (layer, KV head): U [L, H_kv, m, R], sigma, gates [L, H_kv, R], V [L, H_kv,
    R, D]."""

    u: Tensor
    sigma: Tensor
    gates: Tensor
    v: Tensor
    energy: Tensor
    """squared Frobenius norm of the whole matrix [L, H_kv]"""

    def rank(self, drop: float) -> Tensor:
        """Components that stay, [L, H_kv]: those whose gate is above `drop`, one at least."""
        return (self.gates > drop).sum(-1).clamp_min(1)

    def best_error(self, rank: Tensor) -> Tensor:
        """Relative Frobenius error of the `rank` [L, H_kv] strongest components, ungated."""
        kept = torch.arange(self.sigma.shape[-1], device=rank.device) < rank[..., None]
        left = 1 - (self.sigma.square() * kept).sum(-1) / self.energy.clamp_min(1e-30)
        return left.clamp_min(0).sqrt()


class SpanCodec:
    """Packs spans of m tokens for all layers L and KV heads H_kv. Gates come from g_phi (eq. 7) or, without one, from
    the energy. With pre_rope the keys are decomposed without their rotary embedding, and turned again in `unpack`.
    """

    def __init__(
        self,
        params: SeKVParameters,
        gates: GateMLP | None,
        pending: dict[int, Pending],
        rotate: Rotate | None,
        tell: Tell,
    ) -> None:
        """pending: the spans to be packed by id, each gone once it is packed; tell: called when the last one is."""
        self.params, self.gates, self.pending, self.rotate, self._tell = params, gates, pending, rotate, tell
        self._ids: list[int] = []
        self._figures: dict[str, list[Tensor]] = {}

    def pack(self, keys: Tensor, values: Tensor, span: int) -> list[list[Unit]]:
        """keys, values [L, H_kv, m, D] -> units [layer][KV head]."""
        if self.params.form == "raw":
            return RawCodec().pack(keys, values, span)
        known = self.pending.pop(span)
        flat = self._turn_back(keys, known.start)
        summary = known.summary.float()
        of_keys, of_values = (
            self._decompose(flat, summary, is_value=False),
            self._decompose(values, summary, is_value=True),
        )
        figures = {"rank_k": of_keys.rank(self.params.gate_drop), "rank_v": of_values.rank(self.params.gate_drop)}
        if self.params.pre_rope:
            turned = self._decompose(keys, summary, is_value=False)
            figures["rank_k_post_rope"] = turned.rank(self.params.gate_drop)
            figures |= {
                f"err_k_{where}_rope": p.best_error(figures["rank_k"])
                for where, p in (("pre", of_keys), ("post", turned))
            }
        self._report(span, figures)
        return [
            [
                self._unit(keys, values, flat, of_keys, of_values, (layer, head), known.start)
                for head in range(keys.shape[1])
            ]
            for layer in range(keys.shape[0])
        ]

    def unpack(self, unit: Unit, payload: Tensor) -> tuple[Tensor, Tensor]:
        """The factors after they came to the device -> keys, values [m, D] as attention uses them (eq. 8)."""
        assert unit.rank_k is not None
        assert unit.rank_v is not None
        dim = (payload.numel() - (unit.rank_k + unit.rank_v) * (unit.tokens + 1)) // (unit.rank_k + unit.rank_v)
        key, value = lowrank.unpack(payload, unit.tokens, unit.rank_k, unit.rank_v, dim)
        if not isinstance(unit, PreRopeUnit):
            return key.dense(), value.dense()
        assert self.rotate is not None
        flat = lowrank.reconstruct(key.u.float(), key.g.float(), key.v.float())
        positions = torch.arange(unit.start, unit.start + unit.tokens, device=payload.device)
        return self.rotate(flat, positions, unit.layer).to(payload.dtype), value.dense()

    def _turn_back(self, keys: Tensor, start: int) -> Tensor:
        """keys [L, H_kv, m, D] as they are decomposed."""
        if not self.params.pre_rope:
            return keys
        assert self.rotate is not None
        return self.rotate(keys, torch.arange(start, start + keys.shape[2], device=keys.device), back=True)

    def _report(self, span: int, figures: dict[str, Tensor]) -> None:
        self._ids.append(span)
        for name, values in figures.items():
            self._figures.setdefault(name, []).append(values.float())
        if not self.pending:
            self._tell(self._ids, {name: torch.stack(values) for name, values in self._figures.items()})

    def _decompose(self, x: Tensor, summary: Tensor, is_value: bool) -> Parts:
        """x [L, H_kv, m, D], summary [L, H_kv, d']."""
        u, sigma, v = lowrank.truncated_svd(x, self.params.max_rank)
        energy = x.float().square().sum((-1, -2))
        if self.gates is None:
            gates = lowrank.energy_gates(sigma, energy, self.params.energy)
        else:
            length = torch.full(sigma.shape[:-1], float(x.shape[2]), device=x.device)
            gates = self.gates(sigma, summary, length, is_value).sigmoid()
        return Parts(u, sigma, gates, v, energy)

    def _unit(
        self,
        keys: Tensor,
        values: Tensor,
        flat: Tensor,
        of_keys: Parts,
        of_values: Parts,
        at: tuple[int, int],
        start: int,
    ) -> Unit:
        m, dim = keys.shape[2:]
        key, value = (
            lowrank.compress(parts.sigma[at], parts.gates[at], parts.u[at], parts.v[at], self.params.gate_drop)
            for parts in (of_keys, of_values)
        )
        if self.params.form == "smaller" and smaller_form(m, key.rank, value.rank, dim) == "raw":
            return self._raw(keys[at], values[at])
        payload = lowrank.pack(key, value).to(keys.dtype)
        stored = lowrank.unpack(payload, m, key.rank, value.rank, dim)
        (
            err_k,
            err_v,
        ) = (  # of the keys as they were decomposed: turning both sides alike keeps the norm of their difference
            float(lowrank.relative_error(exact[at].float(), packed.dense().float()))
            for exact, packed in zip((flat, values), stored, strict=True)
        )
        if self.params.pre_rope:
            return PreRopeUnit("factors", payload, m, key.rank, value.rank, err_k, err_v, layer=at[0], start=start)
        return Unit("factors", payload, m, key.rank, value.rank, err_k, err_v)

    @staticmethod
    def _raw(keys: Tensor, values: Tensor) -> Unit:
        return Unit("raw", torch.stack((keys, values)), keys.shape[0])
