"""What a frozen step is put together from: parts of layers, rankings, shares, and whether slots hold every token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kvlens.memory.memory import Memory
from kvlens.memory.placement import Selection
from kvlens.memory.slots import EXACT, FREE
from kvlens.recording.snapshot import Attended, Ranked


def keeps_all(memory: Memory) -> bool:
    """Return whether every token of the run stays exactly in the slot of its position, alike in all KV heads."""
    pool = memory.hot.pools[0]
    if len(memory.hot.pools) > 1 or pool.dense or pool.bag is not None or memory.layout.shared:
        return False
    if memory.packed is not None or memory.distance is not None or memory.counterfactual is not None:
        return False
    zones, n = pool.zones, memory.hot.newest + 1
    if zones.coarse or zones.recall or pool.gaps or pool.used["kept"] != zones.kept or zones.slots < memory.positions:
        return False
    tables = pool.position[:, :, :n], pool.role[:, :, :n], pool.span[:, :, :n]
    ordered = bool((tables[0] == torch.arange(n, device=tables[0].device)).all())
    exact = torch.isin(tables[1], torch.tensor(EXACT, dtype=torch.uint8, device=tables[1].device))
    return ordered and bool(exact.all()) and all(bool((table == table[:1, :1]).all()) for table in tables)


def stack_shares(selections: Sequence[Selection | None], weights: torch.Tensor, heads: slice) -> torch.Tensor | None:
    """Return the shares by which layers blend their output, of some KV heads of layers with such weights [l, h, G, C];
    None: no layer blends its output."""
    blends = [None if selection is None else selection.blend for selection in selections]
    if all(blend is None for blend in blends):
        return None
    whole = weights.new_ones(weights.shape[1:3])
    return torch.stack([whole if blend is None else blend.share[heads] for blend in blends])


def rank(selection: Selection) -> Ranked | None:
    """Return how a layer ranked spans; None: it ranked nothing."""
    if selection.score is None:
        return None
    brings = selection.requested.shape[1] > 0
    return Ranked(selection.score, selection.requested, None if brings else selection.fine.any(1))


def join(parts: list[Attended]) -> Attended:
    """Join the parts of one layer: KV heads that have fewer slots than others are filled up with slots that hold
    nothing and are not attended."""
    widest = max(part.role.shape[-1] for part in parts)

    def wide(tensor: torch.Tensor, value: float) -> torch.Tensor:
        return F.pad(tensor, (0, widest - tensor.shape[-1]), value=value)

    return Attended(
        torch.cat([wide(part.weights, 0.0) for part in parts], 1),
        torch.cat([wide(_bias(part), float("-inf")) for part in parts], 1),
        torch.cat([wide(part.role, FREE) for part in parts], 1),
        torch.cat([wide(part.span, 0) for part in parts], 1),
        torch.cat([wide(part.position, -1) for part in parts], 1),
        None if parts[0].share is None else torch.cat([part.share for part in parts if part.share is not None], 1),
        None if parts[0].sink is None else torch.cat([part.sink for part in parts if part.sink is not None], 1),
    )


def _bias(part: Attended) -> torch.Tensor:
    return torch.zeros_like(part.weights) if part.bias is None else part.bias
