"""What a prompt eviction has kept, indexed in chunks of neighbours by the extremes of their keys, so that a step can
choose single tokens of it.

Shapes: L layers, H_kv KV heads, G query heads of each, D head size, M places for tokens, C chunks, S span ids.
"""

from __future__ import annotations

import torch

from kvlens.memory.placement import Selection
from kvlens.methods.families.token_choice import take


class KeptIndex:
    """Owns, per KV head, the positions of kept tokens in their order, decoded ones behind them, and least and largest
    key of every `chunk` of them by element; where a chunk is one token both are one table."""

    def __init__(self, keys: torch.Tensor, mask: torch.Tensor, coming: int, chunk: int) -> None:
        """keys [L, H_kv, n, D] of the prompt; mask bool [L, H_kv, n], equally many true in every row: kept; coming:
        tokens that will be decoded at most."""
        n, head_dim = keys.shape[2:]
        retained = mask.nonzero()[:, -1].view(*mask.shape[:2], -1)
        later = torch.arange(n, n + coming, device=keys.device).expand(*retained.shape[:2], -1)
        self.positions = torch.cat((retained, later), -1).int()
        """int32 [L, H_kv, M]"""
        self.chunk, self._width = chunk, n + coming
        self._tokens = [retained.shape[-1]] * len(keys)
        size = (*retained.shape[:2], -(-self.positions.shape[-1] // chunk), head_dim)
        self.low = torch.zeros(size, dtype=keys.dtype, device=keys.device)
        self.high = self.low if chunk == 1 else torch.zeros_like(self.low)
        for layer, layer_keys in enumerate(keys):
            retained_keys = layer_keys.gather(1, retained[layer, ..., None].expand(-1, -1, head_dim))
            for number, part in enumerate(retained_keys.split(chunk, 1)):
                self.low[layer, :, number], self.high[layer, :, number] = part.amin(1), part.amax(1)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.positions, self.low) if self.high is self.low else (self.positions, self.low, self.high)

    def tokens(self, layer: int) -> int:
        """Tokens there by now."""
        return self._tokens[layer]

    def add(self, layer: int, keys: torch.Tensor) -> None:
        """The step's token: keys [H_kv, D]."""
        number, inside = divmod(self._tokens[layer], self.chunk)
        for table, extreme in ((self.low, keys.minimum), (self.high, keys.maximum)):
            table[layer, :, number] = extreme(table[layer, :, number]) if inside else keys
        self._tokens[layer] += 1

    def chunks(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Least and largest keys [H_kv, C, D] of the chunks that hold tokens, and how many each holds, int64 [C]."""
        n = self._tokens[layer]
        count = -(-n // self.chunk)
        lengths = torch.full((count,), self.chunk, device=self.low.device)
        lengths[-1] = n - (count - 1) * self.chunk
        return self.low[layer, :, :count], self.high[layer, :, :count], lengths

    def selection(
        self, layer: int, weights: torch.Tensor, read: int, span_of: torch.Tensor, spans: int, index_bytes: int
    ) -> Selection:
        """The `read` best tokens of each KV head, every token ranked as its chunk, weights float32 [H_kv, C, G], summed
        over the group; one chunk may be cut. span_of int64 [positions]: span of each position, of `spans` ids."""
        group, together = weights.shape[-1], weights.sum(-1)
        n, device = self._tokens[layer], weights.device
        many = take(together[:, None], self.chunks(layer)[2], read)[:, 0]
        token = torch.arange(n, device=device)
        selected, weight = token % self.chunk < many[:, token // self.chunk], together[:, token // self.chunk]
        position = self.positions[layer, :, :n].long()
        shown = torch.zeros(len(selected), self._width, dtype=torch.bool, device=device).scatter_(1, position, selected)
        none = torch.full((len(selected), spans), -torch.inf, device=device)
        ranked = none.scatter_reduce(1, span_of[position], weight, "amax")
        best = none.scatter_reduce(1, span_of[position], weight.masked_fill(~selected, -torch.inf), "amax")
        return Selection(
            (best > -torch.inf)[:, None].expand(-1, group, -1),
            torch.full((len(selected), 0), -1, dtype=torch.long, device=device),
            positions=shown[:, None].expand(-1, group, -1),
            score=ranked.masked_fill(ranked.isinf(), torch.nan),
            index_bytes=index_bytes,
        )
