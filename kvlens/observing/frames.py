"""From what the layers attended in one pass to frozen steps, as the recorder's measure takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvlens.observing.layers import LayerSeen
from kvlens.observing.matching import EXACT, KINDS, NOTHING, REWRITTEN, ROTATED
from kvlens.observing.pages import Pages
from kvlens.recording.snapshot import Attended, Snapshot
from kvlens.shape import KVShape
from kvlens.tiers.slots import FREE, ROLE


class FrameMaker:
    """Makes a Snapshot of each row of a pass that is a step."""

    def __init__(self, shape: KVShape, pages: Pages) -> None:
        self._shape, self._pages = shape, pages
        self.previous: torch.Tensor | None = None
        """queries of the step before [L, Hq, D]"""

    def frame(
        self,
        layers: Sequence[LayerSeen],
        row: int,
        position: int,
        shadow: torch.Tensor | None,
        sampled: tuple[int, ...],
    ) -> Snapshot:
        """Return one step. row: of the pass; position: of the token that was fed; shadow [L, H_kv, n, D]; sampled:
        layers whose full attention by span is logged."""
        q = torch.stack([layer.query[:, row] for layer in layers])
        shot = Snapshot(
            groups=[self._attended(layer, row) for layer in layers],
            q=q,
            previous_q=self.previous,
            zooms=None,
            ranked=[None] * len(layers),
            head_columns={},
            kv_columns={},
            shadow=None if shadow is None else shadow[:, :, : position + 1],
            scaling=layers[0].scaling,
            spans=self._pages.count,
            entry_bytes=self._shape.head_token_bytes,
            index_bytes=(0,) * len(layers),
        )
        if shot.shadow is not None and sampled:
            shot.owner = self._pages.owner(position + 1, q.device)
            shot.sampled = sampled
        self.previous = q
        return shot

    def _attended(self, layer: LayerSeen, row: int) -> Attended:
        """What one layer attended: entries without a position take a share of the output that belongs to no span."""
        heads = len(layer.match.position)
        attended, match = layer.attended[:, row], layer.match
        weights = layer.weights[:, row].unflatten(0, (heads, -1))
        weights = weights * attended[:, None]
        share = weights.sum(-1)
        weights = weights / share.clamp(min=1e-12)[..., None]
        window = match.position >= self._pages.prompt
        role = torch.full(match.kind.shape, ROLE["resident"], dtype=torch.uint8, device=weights.device)
        role[window] = ROLE["window"]
        role[match.kind == REWRITTEN] = ROLE["rewritten"]
        role[~attended] = FREE
        position = torch.where(attended, match.position, -1)
        span = self._pages.spans_of(position)
        return Attended(
            weights[None], None, role[None], span[None].int(), position[None].int(), share.clamp(max=1.0)[None]
        )


def present(layers: Sequence[LayerSeen], row: int, tokens: int) -> torch.Tensor:
    """Return which prompt positions each KV head attends: bool [L, H_kv, tokens]."""
    heads = len(layers[0].match.position)
    out = torch.zeros(len(layers), heads, tokens + 1, dtype=torch.bool)
    for index, layer in enumerate(layers):
        position = torch.where(layer.attended[:, row], layer.match.position, tokens).clamp(max=tokens)
        out[index].scatter_(1, position.cpu(), True)
    return out[:, :, :tokens]


def rewritten_errors(layers: Sequence[LayerSeen], row: int, tokens: int) -> torch.Tensor:
    """Return by how much each KV head attends prompt positions as other keys or values than the written ones: float32
    [L, H_kv, tokens], the largest relative error of the position's entries; -1: none is rewritten."""
    heads = len(layers[0].match.position)
    out = torch.full((len(layers), heads, tokens + 1), -1.0)
    for index, layer in enumerate(layers):
        match = layer.match
        is_rewritten = layer.attended[:, row] & (match.kind == REWRITTEN)
        position = torch.where(is_rewritten, match.position, tokens).clamp(max=tokens)
        out[index].scatter_reduce_(1, position.cpu(), match.error.float().cpu(), "amax")
    return out[:, :, :tokens]


def count_kinds(layers: Sequence[LayerSeen], row: int) -> dict[str, float]:
    """Return entries by kind over layers and KV heads, of these the ambiguous ones, the largest error and the mass on
    entries without a position (mean over layers and query heads)."""
    counts: dict[str, float] = dict.fromkeys((*KINDS, "ambiguous", "error", "unmatched"), 0.0)
    for layer in layers:
        seen = layer.attended[:, row]
        for code in (EXACT, ROTATED, REWRITTEN):
            counts[KINDS[code]] += int((seen & (layer.match.kind == code)).sum())
        counts["ambiguous"] += int((seen & layer.match.ambiguous).sum())
        weights = layer.weights[:, row].unflatten(0, (len(seen), -1))
        free = (layer.match.kind == NOTHING)[:, None] & (weights > 0)
        counts[KINDS[NOTHING]] += int(free.any(1).sum())
        counts["unmatched"] += float((weights * free).sum(-1).mean()) / len(layers)
        if bool(seen.any()):
            counts["error"] = max(counts["error"], float(layer.match.error[seen].max()))
    return counts
