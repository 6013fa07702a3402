"""Decode eviction: a bag of tokens of fixed size per KV head; when it is full, one goes for every one that comes.

A method of this family says with what priority the prompt's tokens come in (`worth`), and at every step which token of
the bag is worth least (`priority`). Places in the bag, budgets, events and the log of what was ranked are the family's.
Shapes: L layers, Hq query heads, H_kv KV heads, n prompt tokens that prefill covered, W places of the bag.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.bag import Bag
from kvlens.methods.hooks import BagChange
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import MemoryView, Prefilled, StepEnd
from kvlens.methods.segmenter import RunSizes
from kvlens.shape import KVShape
from kvlens.tiers.layout import Layout, Zones

if TYPE_CHECKING:
    import torch

    from kvlens.memory.placement import Eviction, Placement


@dataclass(frozen=True)
class DecodeEvictionParameters:
    """Lengths are in tokens. A method of the family gives its own defaults."""

    sinks: int = param(0, "first tokens, never evicted")
    recent: int = param(0, "newest tokens, not evicted; 0: half of the bag", ours=True)
    tokens: int = param(0, "places of the bag per KV head; 0: as many as the byte budget holds", ours=True)
    page: int = param(16, "tokens per page: pages are the spans that masses and evictions are logged for", ours=True)

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.recent < 0 or self.page < 1:
            raise ValueError("sinks and recent must be at least 0 and page at least 1.")
        if self.tokens and self.tokens < self.least:
            raise ValueError(f"tokens must be 0 or at least {self.least}.")

    @property
    def least(self) -> int:
        """Fewest places a bag can do with: what is protected, and one that can be evicted."""
        return self.sinks + max(self.recent, 1) + 1

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """A bag of as many places as the byte budget holds (ours: papers give tokens). What is protected stays as the
        parameters say."""
        return {"tokens": 0}


class DecodeEviction(Bag):
    """Base of the family. `params` is a DecodeEvictionParameters, or has its fields."""

    params: Any
    ranks = True
    """False: what is evicted follows from positions alone, and no scores are logged"""

    @abstractmethod
    def worth(self, prompt: Prefilled, layer: int) -> torch.Tensor:
        """By which the prompt's tokens come into the bag, the highest first: float32 [H_kv, n]."""

    @abstractmethod
    def priority(self) -> torch.Tensor:
        """How much every token of the bag is worth now, the lowest is evicted: float32 [L, H_kv, W]."""

    def entered(self, kept: torch.Tensor, prompt: Prefilled) -> None:
        """The bag holds positions kept int64 [L, H_kv, W], -1 where nothing lies yet: prepare what `priority` needs."""

    def replaced(self, places: torch.Tensor) -> None:
        """The tokens at `places` int64 [L, H_kv] of the bag are gone, new ones come there."""

    # ----------------------------------------------------------------------------------------------------- how many
    @classmethod
    def places(cls, params: Any, run: RunSizes) -> int:
        """Places of each KV head's bag."""
        n, most = run.prompt_tokens, run.prompt_tokens + run.max_new
        if params.tokens:
            return min(params.tokens, most)
        if run.budget_bytes is None:
            return most
        shape, new = run.shape, run.max_new
        floor = cls._bytes(params, shape, n, new, 1)
        token = cls._bytes(params, shape, n, new, 2) - floor
        return max(min(params.least, most), min(most, 1 + (run.budget_bytes - floor) // token))

    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        least = min(params.tokens or params.least, prompt_tokens + max_new)
        return cls._bytes(params, shape, prompt_tokens, max_new, least)

    @classmethod
    def own_bytes(cls, params: Any, shape: KVShape, places: int) -> int:
        """Device bytes of what the method itself holds for bags of that size, besides their positions."""
        return 0

    def room(self, places: int) -> int:
        """Prompt tokens that come into the bag: one place is free for the token that step 0 feeds."""
        return min(self.context.prompt_tokens, places - 1)

    @classmethod
    def _bytes(cls, params: Any, shape: KVShape, n: int, max_new: int, places: int) -> int:
        tables = shape.layers * shape.kv_heads * places * 8  # the positions in the bag, int64
        return _layout(params, n, max_new, places).bytes(shape) + tables + cls.own_bytes(params, shape, places)

    # ------------------------------------------------------------------------------------------------------- the prompt
    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        import torch

        from kvlens.memory.placement import Kept

        context, p = self.context, self.params
        n, shape = context.prompt_tokens, context.shape
        self.refuse_below(self.floor_bytes(p, shape, n, context.max_new))
        places = self.places(p, context)
        room = self.room(places)
        recent = self._recent(places)
        size = (shape.kv_heads, n)
        worth = torch.stack(
            [
                self.checks.scores("worth", self.worth(prompt, layer), size, layer=layer).float()
                for layer in range(shape.layers)
            ]
        )
        protected = torch.zeros(n, dtype=torch.bool, device=worth.device)
        protected[: self.sinks(p, n)] = True
        protected[max(n - recent + 1, 0) :] = True
        order = worth.masked_fill(protected, float("inf")).argsort(dim=-1, descending=True, stable=True)
        mask = torch.zeros_like(worth, dtype=torch.bool).scatter_(-1, order[..., :room], True)
        score = worth.masked_fill(protected, torch.nan) if self.ranks and room < n else None
        retained = Kept.masked(mask, score)
        self._position = torch.full((shape.layers, shape.kv_heads, places), -1, device=worth.device)
        self._position[..., :room] = retained.positions
        self._used, self._named = room, n
        self.entered(self._position, prompt)
        return _layout(p, n, context.max_new, places), self._place(mask, retained)

    def usual_recent(self, places: int) -> int:
        """Return the newest tokens that a bag of so many places protects where `recent` is 0."""
        return places // 2

    def _recent(self, places: int) -> int:
        p = self.params
        return min(p.recent or self.usual_recent(places), places - min(p.sinks, places) - 1)

    # --------------------------------------------------------------------------------------------------------- decoding
    def decode_end(self, end: StepEnd, memory: MemoryView) -> BagChange | None:
        if end.step == 0:
            self._took(None, end.position)
        evicted = self._evict(end) if self._used == self._position.shape[-1] else None
        opened = self._open(end.position)
        self._took(None if evicted is None else evicted.places, end.position + 1)
        return BagChange(evicted, opened)

    def _evict(self, end: StepEnd) -> Eviction:
        from kvlens.memory.placement import Eviction

        recent = self._recent(self._position.shape[-1])
        protected = (self._position < self.params.sinks) | (self._position > end.position + 1 - recent)
        priority = self.checks.scores("priority", self.priority(), tuple(protected.shape))
        worth = priority.masked_fill(protected, float("inf"))
        lowest, places = worth.topk(2, -1, largest=False)
        candidates = int((~protected[0, 0]).sum())
        score, cut = (lowest[..., 0], lowest[..., 1]) if self.ranks else (None, None)
        return Eviction(places[..., 0], candidates, score, cut)

    def _took(self, places: torch.Tensor | None, position: int) -> None:
        """The token at `position` lies at these places; None: at the first one that was never used."""
        if places is None:
            self._position[..., self._used] = position
            self._used += 1
        else:
            self.replaced(places)
            self._position.scatter_(-1, places[..., None], position)

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        return {"places": (self._position,)} if hasattr(self, "_position") else {}


def _layout(p: Any, n: int, max_new: int, places: int) -> Layout:
    spans = -(-(n + max_new) // p.page) + 3
    return Layout(Zones(0, 0, 0, places), spans, window_from=n, bag=True)
