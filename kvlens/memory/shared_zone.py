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
    content is given up. gone int64 [3, m]: layer, KV head and span of which nothing is left.
    """

    missing: np.ndarray
    slots: np.ndarray
    freed: torch.Tensor
    gone: np.ndarray
    refused: np.ndarray
    counts: dict[str, np.ndarray]


@dataclass(frozen=True)
class _Asked:
    """Units that a layer asked for when it decided last, and their gates."""

    units: torch.Tensor
    gates: torch.Tensor


class SharedZone:
    """Owns which units the zone holds, and what each layer asked for last. Spans are whole: all tokens or none."""

    def __init__(self, layers: range, kv_heads: int, spans: int, size: int) -> None:
        """layers: whose KV heads share the zone; size: slots."""
        self._first, self._kv_heads, self._spans = layers.start, kv_heads, spans
        self.tables = ZoneTables.empty(1, len(layers) * kv_heads * spans, size)
        self._asked: dict[int, _Asked] = {}
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
        own = _Asked(codes * self._spans + spans, score[heads, spans].double())
        assert not own.gates.isnan().any(), "a span without a gate was requested"
        rest = [asked for other, asked in self._asked.items() if other != layer]
        units, gates = (torch.cat(parts) for parts in zip(*((a.units, a.gates) for a in (own, *rest)), strict=True))
        order = gates.argsort(descending=True, stable=True)
        wished, gates, mine = units[order], gates[order], order < len(own.units)
        if not len(wished):  # `decide` needs a column
            wished, gates, mine = torch.full((1,), -1), gates.new_zeros(1), torch.zeros(1, dtype=torch.bool)
        return self._decided(layer, wished, mine, gates, lengths)

    def _decided(
        self, layer: int, wished: torch.Tensor, mine: torch.Tensor, gates: torch.Tensor, lengths: torch.Tensor
    ) -> SharedPlan:
        """Units [U] in decreasing order of their gates, and which of them are the layer's own."""
        clock = -(-self._stamped // len(wished))
        self._stamped = (clock + 1) * len(wished)
        all_lengths = lengths.repeat(self.tables.held.shape[1] // self._spans)
        fire = torch.ones(1, dtype=torch.bool)
        wishes = Wishes(wished[None], None, fire, torch.tensor(clock), None, reuse=True, equal_reuse=False)
        plan = decide(self.tables, wishes, all_lengths, 1)
        count, accepted, stay = (x[0] for x in (plan.count, plan.accepted, plan.stay))
        assert not ((count - stay)[accepted & ~mine] > 0).any(), "another layer's span is here whole, or not wished for"
        self._keep(layer, wished, gates, accepted, mine)
        missing = torch.where(accepted, count - stay, 0)
        short, over = (missing > 0).nonzero()[:, 0], ((count > 0) & ~accepted & mine).nonzero()[:, 0]
        _, short_heads, short_spans = self._parts(wished[short])
        _, over_heads, over_spans = self._parts(wished[over])
        gone = plan.gone[0].nonzero()[:, 0]
        gone = gone[self.tables.stamp[0, gone].argsort(stable=True)]
        return SharedPlan(
            np.stack((short_heads, short_spans, stay[short].numpy(), missing[short].numpy())),
            plan.fill[0].nonzero()[:, 0].numpy(),
            plan.freed[0],
            np.stack(self._parts(gone)),
            np.stack((over_heads, over_spans)),
            self._counts(wished, accepted & mine, count, missing),
        )

    def _keep(
        self, layer: int, wished: torch.Tensor, gates: torch.Tensor, accepted: torch.Tensor, mine: torch.Tensor
    ) -> None:
        """Remember what every layer asked for and still has."""
        layers = wished // (self._kv_heads * self._spans) + self._first
        for other in {layer, *self._asked}:
            chosen = accepted & (mine if other == layer else ~mine & (layers == other))
            self._asked[other] = _Asked(wished[chosen], gates[chosen])

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
