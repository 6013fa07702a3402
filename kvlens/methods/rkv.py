"""R-KV: decoded tokens go that are attended little and resemble others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlens.methods.families.decode_eviction import DecodeEviction, DecodeEvictionParameters
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import MemoryView, Prefilled, StepEnd
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch

    from kvlens.methods.hooks import BagChange

OBSERVED = 64
"""prompt queries a run keeps: the most that `recent` can be"""
ROWS = 256
"""keys that are compared with all others at a time: never n x n"""


@dataclass(frozen=True)
class RKVParameters(DecodeEvictionParameters):
    """Lengths are in tokens."""

    recent: int = param(8, "newest tokens: their queries rank the others; not evicted", symbol="alpha")
    buffer: int = param(128, "steps between two rankings; each ranking names the tokens that go until the next")
    kernel: int = param(7, "neighbouring places of the bag that attention is pooled over, by their maximum")
    weight: float = param(0.1, "weight of attention; the rest weighs redundancy", symbol="lambda")
    alike: float = param(0.5, "cosine above which two keys are alike", symbol="T")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.recent <= OBSERVED or self.buffer < 1:
            raise ValueError(f"recent must lie between 1 and {OBSERVED}, and buffer must be at least 1.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError("kernel must be odd, so that a score stays at its token.")
        if not 0 <= self.weight <= 1:
            raise ValueError("weight must lie between 0 and 1.")


class RKV(DecodeEviction):
    """Ranks the tokens of the bag by weight * attention - (1 - weight) * redundancy (paper sec. 3, eq. 1 to 6).
    Attention: softmax of the newest `recent` queries over the tokens before them, the largest logit of a KV head's
    query heads, averaged over the queries, pooled over neighbours. Redundancy: a key's mean cosine with the others, of
    which each token's newest alike one is left out, softmax over tokens. The lowest go for good.

    Departures: a ranking is made when the bag is full and every `buffer` steps, or as often as half of the bag was
    replaced; the tokens that it puts last leave one
    by one as new ones come, where the authors drop them at once and let the cache grow again. The prompt's tokens
    are ranked as decoded ones, by its last queries when it enters. The method keeps a copy of the bag's keys to compare
    them; it counts in the budget.
    """

    name = "rkv"
    title = "R-KV"
    paper = "Cai et al., R-KV: Redundancy-aware KV Cache Compression for Reasoning Models, NeurIPS 2025"
    summary = (
        "drops, for every token that comes, one that the newest queries attend little and whose key resembles others"
    )
    Parameters = RKVParameters
    presets = {"paper": {}, "demo": {"buffer": 8}}  # noqa: RUF012
    needs = Needs(queries=OBSERVED)
    params: RKVParameters

    @classmethod
    def own_bytes(cls, params: RKVParameters, shape: KVShape, places: int) -> int:
        keys = shape.kv_heads * places * (shape.head_dim * shape.itemsize + 4)
        queries = shape.q_heads * params.recent * shape.head_dim * shape.itemsize
        return shape.layers * (keys + queries + shape.kv_heads * 8)  # a slot int64

    def worth(self, prompt: Prefilled, layer: int) -> torch.Tensor:
        keys = prompt.keys[layer]
        recent = min(self.params.recent, prompt.last_queries.shape[2], keys.shape[1] - 1)
        if recent < 1:
            return keys.float().norm(dim=-1) * 0
        return self._scores(prompt.last_queries[layer, :, -recent:].float(), keys.float(), recent)

    def entered(self, positions: torch.Tensor, prompt: Prefilled) -> None:
        import torch

        size, recent = prompt.keys.shape[-1], self.params.recent
        index = positions.clamp(min=0)[..., None].expand(-1, -1, -1, size)
        self._keys = prompt.keys.gather(2, index).masked_fill(positions[..., None] < 0, 0.0)
        newest = prompt.last_queries[:, :, -recent:]
        empty = newest.new_zeros(*newest.shape[:2], recent - newest.shape[2], size)
        self._queries = torch.cat([empty, newest], 2)
        self._order = torch.zeros(positions.shape, device=positions.device)
        self._slot = torch.full(positions.shape[:2], self.room(positions.shape[-1]), device=positions.device)
        self._ranked = 0

    def written(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        slot = self._slot[layer, :, None, None].expand(-1, 1, keys.shape[-1])
        self._keys[layer].scatter_(1, slot, keys[:, None])

    def select(self, layer: int, q: torch.Tensor) -> None:
        """Remember the newest queries. Everything on the device is attended."""
        self._queries[layer] = self._queries[layer].roll(-1, 1)
        self._queries[layer, :, -1] = q.to(self._queries.dtype)

    def decode_end(self, end: StepEnd, memory: MemoryView) -> BagChange | None:
        change = super().decode_end(end, memory)
        if change is None or change.evicted is None:
            self._slot.fill_(self._used - 1)
        return change

    def priority(self) -> torch.Tensor:
        """Return how much every token of the bag was worth when it was ranked, more for those that came since."""
        places = self._position.shape[-1]
        if self._ranked % min(self.params.buffer, max(places // 2, 1)) == 0:
            self._rank()
        self._ranked += 1
        return self._order

    def _rank(self) -> None:
        """Rank the full bag in the order of its positions."""
        import torch

        recent = min(self.params.recent, self._position.shape[-1] - 1)
        order = self._position.argsort(-1)
        index = order[..., None].expand(-1, -1, -1, self._keys.shape[-1])
        sorted_keys = self._keys.gather(2, index).float()
        for layer, keys in enumerate(sorted_keys):
            scores = self._scores(self._queries[layer, :, -recent:].float(), keys, recent)
            self._order[layer] = torch.zeros_like(scores).scatter_(-1, order[layer], scores)

    def _scores(self, queries: torch.Tensor, keys: torch.Tensor, recent: int) -> torch.Tensor:
        """Return each token's worth: queries [Hq, w, D] of the last `recent` tokens, keys [H_kv, m, D] ->
        [H_kv, m]. The last `recent` tokens get the largest worth."""
        import torch.nn.functional as F

        p = self.params
        older = keys[:, :-recent]
        logits = queries.unflatten(0, (keys.shape[0], -1)) @ older[:, None].mT * keys.shape[-1] ** -0.5
        attention = F.max_pool1d(logits.amax(1).softmax(-1).mean(1)[None], p.kernel, stride=1, padding=p.kernel // 2)[0]
        scores = p.weight * attention - (1 - p.weight) * redundancy(keys, p.alike)[:, :-recent]
        return F.pad(scores, (0, recent), value=float(scores.max()) + 1)

    def replaced(self, places: torch.Tensor) -> None:
        self._slot.copy_(places)
        self._order.scatter_(-1, places[..., None], float(self._order.max()) + 1)

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        return super().held() | (
            {"ranking": (self._keys, self._queries, self._order, self._slot)} if hasattr(self, "_keys") else {}
        )


def redundancy(keys: torch.Tensor, alike: float) -> torch.Tensor:
    """Return how much each key resembles the others: keys float32 [H_kv, m, D] in the order of their positions ->
    softmax over tokens [H_kv, m]. A row's newest token with a cosine above `alike` does not count."""
    import torch
    import torch.nn.functional as F

    unit = F.normalize(keys, dim=-1)
    column = torch.arange(keys.shape[1], device=keys.device)
    sums = torch.zeros(keys.shape[:2], device=keys.device)
    for start in range(0, keys.shape[1], ROWS):
        cosine = unit[:, start : start + ROWS] @ unit.mT
        cosine.diagonal(start, 1, 2).zero_()
        newest = torch.where(cosine > alike, column, -1).amax(-1, keepdim=True)
        kept_out = cosine.gather(-1, newest.clamp(min=0)).where(newest < 0, 0.0)
        cosine.scatter_(-1, newest.clamp(min=0), kept_out)
        sums += cosine.sum(1)
    return (sums / keys.shape[1]).softmax(-1)
