"""What a step's query heads did not read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvlens.engine.models import LoadedModel
from kvlens.instruments import Oracle
from kvlens.rows import SpanRow


@dataclass
class Unread:
    """Which share of full attention's mass on each span a method left unread."""

    owner: torch.Tensor
    """int64 [steps, n]: the span of each position at each step; `count` where none has it"""
    count: int
    """one more than the highest span id"""
    share: torch.Tensor
    """float64 [steps, L, Hq, count + 1]"""

    def read_layer(self, layer: int) -> torch.Tensor:
        """float64 [Hq, steps, n]: of each position."""
        share = self.share[:, layer]
        return share.gather(2, self.owner[:, None].expand(-1, share.shape[1], -1)).transpose(0, 1)


@dataclass(frozen=True)
class Query:
    """What a layer was asked: q [H_kv, G, m, D], and the factor of its scores."""

    q: torch.Tensor
    scaling: float


def unread_of(
    oracles: Sequence[Oracle | None], begin: int, spans: Sequence[SpanRow], n: int, loaded: LoadedModel
) -> Unread:
    """Of the first n positions, in the steps from `begin` on. What no span covers is the window's; nothing is unread of
    a span that was not listed, and where full attention was not recorded."""
    count = 1 + max((row.span for row in spans), default=0)
    window = next((row.span for row in spans if row.kind == "window"), count)
    owner = np.full((len(oracles), n), window, np.int64)
    for row in spans:
        if row.kind != "window":
            owner[max(0, row.born_step - begin) :, row.tok_start : row.tok_end] = row.span
    share = np.zeros((len(oracles), loaded.shape.layers, loaded.shape.q_heads, count + 1))
    for unread, oracle in zip(share, oracles, strict=True):
        if oracle is None:
            continue
        lost = oracle.unread_share
        layer, head, place = np.nonzero((oracle.span >= 0) & (oracle.span < count))
        unread[layer, head, oracle.span[layer, head, place]] = lost[layer, head, place]
    device = loaded.model.device
    return Unread(torch.from_numpy(owner).to(device), count, torch.from_numpy(share).to(device))
