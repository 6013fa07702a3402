"""A recall zone that several KV heads share: which spans of which of them it holds, in which slots, and what has to go.

The spans with the highest gates stay, in decreasing order until the zone is full. The layers of a model decide one
after the other, so the gates of layers that are still to come in a step are those of the step before.

Host bookkeeping only. A unit is a span of one KV head. Shapes: H_kv KV heads, S span ids, W wishes, U units.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvlens.kernels.zone_tables import Wishes, ZoneTables
from kvlens.kernels.zone_torch import decide


@dataclass(frozen=True)
class SharedPlan:
    """What one recall of a layer does, as kvlens.memory.recall_zone.Plan; the slots are the shared zone's, and spans of
    other layers may give way.

    missing int64 [4, n], slots int64 [tokens], refused int64 [2, r], counts: of the layer. freed bool [M]: slots whose
    content is given up. departed int64 [3, m]: layer, KV head and span of which nothing is left.
    """

    missing: np.ndarray
    slots: np.ndarray
    freed: torch.Tensor
    departed: np.ndarray
    refused: np.ndarray
    counts: dict[str, np.ndarray]


@dataclass(frozen=True)
class _Request:
    """Units that a layer asked for when it decided last, and their gates."""

    units: torch.Tensor
    gates: torch.Tensor


class SharedZone:
    """Owns which units the zone holds, and what each layer asked for last. Spans are whole: all tokens or none."""

    def __init__(self, layers: range, kv_heads: int, spans: int, size: int) -> None:
        """layers: whose KV heads share the zone; size: slots."""
        self._first, self._kv_heads, self._spans = layers.start, kv_heads, spans
        self.tables = ZoneTables.empty(1, len(layers) * kv_heads * spans, size)
        self._requests: dict[int, _Request] = {}
        self._stamped = 0
        """no unit has a larger stamp"""

    @property
    def used(self) -> int:
        """Slots that hold something."""
        return int(self.tables.live.sum())

    def plan(self, layer: int, requested: torch.Tensor, score: torch.Tensor, lengths: torch.Tensor) -> SharedPlan:
        """Fit what a layer requests beside what the other layers asked for last, the highest gates first, write that
        down and return it. requested int64 [H_kv, W] span ids, -1: none; score [H_kv, S]: gates before their sigmoid;
        lengths int64 [S]: tokens of spans. All on the host."""
        heads, columns = (requested >= 0).nonzero(as_tuple=True)
        spans = requested[heads, columns]
        codes = (layer - self._first) * self._kv_heads + heads
        request = _Request(codes * self._spans + spans, score[heads, spans].double())
        assert not request.gates.isnan().any(), "a span without a gate was requested"
        requests = [request, *(self._requests[number] for number in self._requests if number != layer)]
        units, gates = (torch.cat([getattr(part, name) for part in requests]) for name in ("units", "gates"))
        order = gates.argsort(descending=True, stable=True)
        wished, gates, is_own = units[order], gates[order], order < len(request.units)
        if not len(wished):  # `decide` needs a column
            wished, gates, is_own = torch.full((1,), -1), gates.new_zeros(1), torch.zeros(1, dtype=torch.bool)
        return self._decided(layer, wished, is_own, gates, lengths)

    def _decided(
        self, layer: int, wished: torch.Tensor, is_own: torch.Tensor, gates: torch.Tensor, lengths: torch.Tensor
    ) -> SharedPlan:
        """Units [U] in decreasing order of their gates, and which of them are the layer's own."""
        clock = -(-self._stamped // len(wished))
        self._stamped = (clock + 1) * len(wished)
        all_lengths = lengths.repeat(self.tables.held.shape[1] // self._spans)
        fire = torch.ones(1, dtype=torch.bool)
        wishes = Wishes(wished[None], None, fire, torch.tensor(clock), None, reuse=True, equal_reuse=False)
        plan = decide(self.tables, wishes, all_lengths, 1)
        count, accepted, stay = (x[0] for x in (plan.count, plan.accepted, plan.stay))
        assert not ((count - stay)[accepted & ~is_own] > 0).any(), (
            "another layer's span is here whole, or not wished for"
        )
        self._keep(layer, wished, gates, accepted, is_own)
        missing = torch.where(accepted, count - stay, 0)
        short, over = (missing > 0).nonzero()[:, 0], ((count > 0) & ~accepted & is_own).nonzero()[:, 0]
        _, short_heads, short_spans = self._parts(wished[short])
        _, over_heads, over_spans = self._parts(wished[over])
        departed = plan.gone[0].nonzero()[:, 0]
        departed = departed[self.tables.stamp[0, departed].argsort(stable=True)]
        return SharedPlan(
            np.stack((short_heads, short_spans, stay[short].numpy(), missing[short].numpy())),
            plan.fill[0].nonzero()[:, 0].numpy(),
            plan.freed[0],
            np.stack(self._parts(departed)),
            np.stack((over_heads, over_spans)),
            self._counts(wished, accepted & is_own, count, missing),
        )

    def _keep(
        self, layer: int, wished: torch.Tensor, gates: torch.Tensor, accepted: torch.Tensor, is_own: torch.Tensor
    ) -> None:
        """Remember what every layer asked for and still has."""
        layers = wished // (self._kv_heads * self._spans) + self._first
        for number in {layer, *self._requests}:
            granted = accepted & (is_own if number == layer else ~is_own & (layers == number))
            self._requests[number] = _Request(wished[granted], gates[granted])

    def _counts(
        self, wished: torch.Tensor, granted: torch.Tensor, count: torch.Tensor, missing: torch.Tensor
    ) -> dict[str, np.ndarray]:
        """Return the counts of kvlens.memory.recall_zone.Plan for the layer's granted units."""
        heads = self._parts(wished[granted])[1]
        tokens, brought = count[granted].numpy(), missing[granted].numpy()
        figures = {
            "n_recalled": brought > 0,
            "n_reused": brought == 0,
            "recalled_tokens": brought,
            "reused_tokens": tokens - brought,
            "ideal_tokens": brought,
        }
        return {name: np.bincount(heads, values, self._kv_heads).astype(np.int64) for name, values in figures.items()}

    def _parts(self, units: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return layer, KV head and span of units."""
        codes, spans = np.divmod(units.numpy(), self._spans)
        layers, heads = np.divmod(codes, self._kv_heads)
        return layers + self._first, heads, spans
