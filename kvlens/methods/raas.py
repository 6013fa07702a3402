"""RaaS: pages that no query has wanted for longest go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.decode_eviction import DecodeEviction, DecodeEvictionParameters
from kvlens.methods.hooks import BagChange, Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import MemoryView, Prefilled, StepEnd
from kvlens.methods.segmenter import RunSizes
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch

    from kvlens.memory.placement import Eviction


@dataclass(frozen=True)
class RaaSParameters(DecodeEvictionParameters):
    """Lengths are in tokens."""

    sinks: int = param(
        0, "first tokens, never evicted; up to a page more, so that whole pages follow to the prompt's end"
    )
    recent: int = param(16, "newest tokens, in whole pages: not evicted", ours=True)
    page: int = param(16, "tokens per page: pages have timestamps, and go whole")
    alpha: float = param(1e-4, "estimated share of attention above which a page is wanted", symbol="alpha")
    keep_prompt: bool = param(True, "the prompt stays whole; off: its pages go as decoded ones do")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha < 1:
            raise ValueError("alpha must lie between 0 and 1.")

    @property
    def pages(self) -> int:
        """Fewest pages besides those of the prompt: recent ones, the open one, and one that can go."""
        return -(-self.recent // self.page) + 2

    @property
    def least(self) -> int:
        return self.sinks + (self.pages + 1) * self.page

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """The prompt stays whole where it takes at most three quarters of the budget, so that a quarter is left for
        what is decoded; else its pages go as decoded ones do, and the last query chooses those that decoding begins
        with (ours: the paper's prompts are short)."""
        held = budget_bytes is None or prompt_tokens * shape.token_bytes <= 0.75 * budget_bytes
        return {"keep_prompt": held, "tokens": 0}


class RaaS(DecodeEviction):
    """Every page has a timestamp: the last step at which its estimated share of attention was above alpha. When the bag
    is full and a new page begins, the page with the oldest timestamp goes for good, of equal ones the first (paper sec.
    3.2). A page's share is the softmax over pages of the bound sum_d max(q_d min_d, q_d max_d) / sqrt(D), the mean over
    the query heads of a KV head, each of which has timestamps of its own. The prompt stays whole. All that is there is
    attended.

    Departures: a page that goes gives its places up one by one as new tokens need them, and its other tokens are
    attended until then. Without `keep_prompt` a prompt larger than the bag is cut to the pages of which its last
    query's share is largest.
    """

    name = "raas"
    title = "RaaS"
    paper = "Hu et al., RaaS: Reasoning-Aware Attention Sparsity for Efficient LLM Reasoning, Findings of ACL 2025"
    summary = "drops, while decoding, the page that no query has wanted for longest; the prompt stays"
    Parameters = RaaSParameters
    presets = {"paper": {}, "demo": {"keep_prompt": False}}  # noqa: RUF012
    needs = Needs(queries=1)
    journal_names = {"unwanted_steps": "steps since the page that goes was wanted, by KV head; per layer"}  # noqa: RUF012
    params: RaaSParameters

    # --------------------------------------------------------------------------------------------------------- how many
    @classmethod
    def sinks(cls, params: RaaSParameters, prompt_tokens: int) -> int:
        sinks = min(params.sinks, prompt_tokens)
        return sinks + (prompt_tokens - sinks) % params.page

    @classmethod
    def own_bytes(cls, params: RaaSParameters, shape: KVShape, places: int) -> int:
        page = 2 * shape.head_dim * shape.itemsize + 4  # extremes, timestamp int32
        return (
            shape.layers * shape.kv_heads * (places // params.page * page + 16)
        )  # a slot int64, two figures of the log

    @classmethod
    def places(cls, params: RaaSParameters, run: RunSizes) -> int:
        n, new, page, budget = run.prompt_tokens, run.max_new, params.page, run.budget_bytes
        sinks = cls.sinks(params, n)
        most = -(-(n + new - sinks) // page)
        if params.tokens:
            pages = (params.tokens - sinks) // page
        elif budget is None:
            pages = most
        else:
            one_place, two = (cls._bytes(params, run.shape, n, new, sinks + many * page) for many in (1, 2))
            pages = 1 + (budget - one_place) // (two - one_place)
        return sinks + page * min(most, max(pages, cls._fewest(params, n)))

    @classmethod
    def floor_bytes(cls, params: RaaSParameters, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        sinks, page = cls.sinks(params, prompt_tokens), params.page
        pages = max((params.tokens - sinks) // page, cls._fewest(params, prompt_tokens))
        pages = min(pages, -(-(prompt_tokens + max_new - sinks) // page))
        return cls._bytes(params, shape, prompt_tokens, max_new, sinks + pages * page)

    @classmethod
    def _fewest(cls, params: RaaSParameters, prompt_tokens: int) -> int:
        """Pages that a bag can do with."""
        return params.pages + (prompt_tokens // params.page if params.keep_prompt else 0)

    def room(self, places: int) -> int:
        n, page = self.context.prompt_tokens, self.params.page
        sinks = self.sinks(self.params, n)
        return min(n, places - (places - sinks) % page - page)

    def _recent(self, places: int) -> int:
        return -(-self.params.recent // self.params.page) * self.params.page + 1

    # ------------------------------------------------------------------------------------------------------- the prompt
    def worth(self, prompt: Prefilled, layer: int) -> torch.Tensor:
        import torch

        sinks, page = self.sinks(self.params, prompt.keys.shape[2]), self.params.page
        paged = prompt.keys[layer, :, sinks:].float().unflatten(1, (-1, page))
        share = shares(prompt.last_queries[layer, :, -1], paged.amin(2), paged.amax(2))
        return torch.nn.functional.pad(share.repeat_interleave(page, -1), (sinks, 0))

    def entered(self, kept: torch.Tensor, prompt: Prefilled) -> None:
        import torch

        p, shape, n = self.params, self.context.shape, self.context.prompt_tokens
        sinks, places = self.sinks(p, n), kept.shape[-1]
        size = (shape.layers, shape.kv_heads, (places - sinks) // p.page)
        self._low = torch.zeros(*size, shape.head_dim, dtype=prompt.keys.dtype, device=kept.device)
        self._high = torch.zeros_like(self._low)
        self._stamp = torch.full(size, -1, dtype=torch.int32, device=kept.device)
        self._filled = (self.room(places) - sinks) // p.page
        for layer, positions in enumerate(kept[..., sinks : sinks + self._filled * p.page]):
            index = positions[..., None].expand(-1, -1, shape.head_dim)
            paged = prompt.keys[layer].gather(1, index).unflatten(1, (-1, p.page))
            self._low[layer, :, : self._filled], self._high[layer, :, : self._filled] = paged.amin(2), paged.amax(2)
        self._slot = torch.full(size[:2], self._filled, device=kept.device)
        self._told = torch.zeros(2, *size[:2], device=kept.device)
        self._begin(0)

    def _begin(self, step: int) -> None:
        """A new page begins in its slot: it has been wanted by being written."""
        self._step, self._inside = step, 0
        self._filled = min(self._filled + 1, self._stamp.shape[-1])
        self._stamp.scatter_(-1, self._slot[..., None], step)

    # --------------------------------------------------------------------------------------------------------- decoding
    def written(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        slot_index = self._slot[layer, :, None, None].expand(-1, 1, keys.shape[-1])
        for table, extreme in ((self._low[layer], keys.minimum), (self._high[layer], keys.maximum)):
            new = extreme(table.gather(1, slot_index)[:, 0]) if self._inside else keys
            table.scatter_(1, slot_index, new[:, None])

    def select(self, layer: int, q: torch.Tensor) -> None:
        """Stamp the pages that the queries attend. Everything on the device is attended."""
        filled = slice(self._filled)
        share = shares(q, self._low[layer, :, filled].float(), self._high[layer, :, filled].float())
        self._stamp[layer, :, filled].masked_fill_(share > self.params.alpha, self._step)

    def priority(self) -> torch.Tensor:
        """Timestamps by page: [L, H_kv, P]."""
        return self._stamp.float()

    def decode_end(self, end: StepEnd, memory: MemoryView) -> BagChange | None:
        change = super().decode_end(end, memory)
        n, page = self.context.prompt_tokens, self.params.page
        self._step, self._inside = end.step + 1, (end.position + 1 - n) % page
        if self._inside == 0:
            if change is None or change.evicted is None:
                self._slot.fill_((self._used - 1 - self.sinks(self.params, n)) // page)
            self._begin(end.step + 1)
        return change

    def _evict(self, end: StepEnd) -> Eviction:
        from kvlens.memory.placement import Eviction

        p, n, coming = self.params, self.context.prompt_tokens, end.position + 1
        sinks, inside = self.sinks(p, n), (coming - n) % p.page
        start = self._position[..., sinks :: p.page]
        spared = start >= coming - self._recent(0) + 1
        spared |= (start < n) if p.keep_prompt else (start < 0)
        if inside == 0:
            age = self._stamp.long() * (coming + 1) + start
            age = age.masked_fill(spared, age.max() + 1)
            self._slot = age.argmin(-1)
            two = self.priority().masked_fill(spared, float("inf")).topk(2, -1, largest=False).values
            self._told = two.movedim(-1, 0).clone()
            for layer, stamp in enumerate(two[..., 0]):
                self.note("unwanted_steps", end.step - stamp, layer)
        candidates = int((~spared[0, 0]).sum()) * p.page if inside == 0 else p.page - inside
        return Eviction(sinks + self._slot * p.page + inside, candidates, self._told[0], self._told[1])

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        if not hasattr(self, "_low"):
            return {}
        return super().held() | {"pages": (self._low, self._high, self._stamp, self._slot, self._told)}


def shares(q: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Estimated share of attention of each page, mean over a group: q [Hq, D]; low, high [H_kv, P, D] float32 ->
    [H_kv, P]."""
    from kvlens.kernels.page_scores import bound

    scores = bound(q.float().unflatten(0, (low.shape[0], -1)), low, high) * q.shape[-1] ** -0.5
    return scores.softmax(-1).mean(1)
