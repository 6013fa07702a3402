"""Page retrieval: tokens in pages, a summary of each on the device, and at every step the best pages are attended.

A method of this family says how it summarises pages (`summarise`) and by what it ranks them (`rank`). Pages, window,
selection, bytes and the record of score, rank and cut are the family's. Here every page stays on the device, so that
reading shrinks and memory does not; a page is selectable from the moment it is full, the open one is always attended.
host_pages.py is the family with its pages in host memory.
Shapes: L layers, Hq query heads, H_kv KV heads, G = Hq / H_kv, D head size, P pages, F numbers of a summary.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.base import Method
from kvlens.methods.hooks import WindowLeave
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import MemoryView, Prefilled, StepEnd
from kvlens.methods.segmenter import PromptFacts
from kvlens.shape import KVShape
from kvlens.spans import Span, fixed_chunks
from kvlens.text.units import counted
from kvlens.tiers.layout import Layout, Zones

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvlens.memory.placement import Placement, Selection


@dataclass(frozen=True)
class PageRetrievalParameters:
    """Lengths are in tokens. A method of the family gives its own defaults."""

    page: int = param(16, "tokens per page")
    tokens: int = param(1024, "tokens attended per query head, the open page included, in whole pages")
    keep: float = param(0.0, "share of the context attended, instead of `tokens`; 0: as `tokens` says", ours=True)
    least_pages: int = param(1, "fewest pages attended")
    dense_layers: int = param(0, "first layers that attend everything")
    group: str = param(
        "native",
        "how the query heads of a KV head choose: each its own pages, or the same ones by the mean or max of scores",
        choices=("native", "mean", "max"),
        ours=True,
    )

    def __post_init__(self) -> None:
        for name in ("page", "tokens", "least_pages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1.")
        if not 0 <= self.keep <= 1 or self.dense_layers < 0:
            raise ValueError("keep must lie between 0 and 1 and dense_layers be at least 0.")

    def misfit(self, prompt_tokens: int) -> str | None:
        """Nothing would be left out."""
        if self.keep or self.tokens <= prompt_tokens:
            return None
        return f"it is {counted(prompt_tokens + 1, 'token')}, all attended, since up to {self.tokens:,} are"


class PageSummaries(Method):
    """What a method of the family says, wherever its pages lie."""

    @classmethod
    @abstractmethod
    def summary_numbers(cls, head_dim: int) -> int:
        """F, numbers of the model's dtype in the summary of one page of one KV head."""

    @abstractmethod
    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        """keys [L, H_kv, P, page, D], post-RoPE -> summaries [L, H_kv, P, F]."""

    @abstractmethod
    def rank(self, q: torch.Tensor, summary: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        """q [H_kv, G, D], summary [H_kv, P, F], both float32, there bool [P]: rows that hold a page -> float32 [H_kv,
        G, P], or [H_kv, 1, P] where a group ranks together; the highest are attended."""


class PageRetrieval(PageSummaries):
    """Base of the family whose pages stay on the device. `params` is a PageRetrievalParameters, or has its fields."""

    family = "page_retrieval"
    keeps_all = True
    exact_without_budget = False
    params: Any

    # --------------------------------------------------------------------------------------------------------- how many
    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        pages = (prompt_tokens + max_new) // params.page
        numbers = shape.layers * shape.kv_heads * pages * cls.summary_numbers(shape.head_dim)
        return _layout(params, shape, prompt_tokens, max_new).bytes(shape) + numbers * shape.itemsize + 8

    @classmethod
    def segments(cls, params: Any, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span]:
        n = prompt.prompt_tokens
        return fixed_chunks(0, n - n % params.page, params.page, kind="page")

    def count(self, context_tokens: int) -> int:
        """Pages attended besides the open one, when the context has that many tokens."""
        p = self.params
        tokens = p.keep * context_tokens if p.keep else p.tokens
        return max(p.least_pages, int(tokens) // p.page) - 1

    # ---- the prompt
    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        import torch

        from kvlens.memory.placement import Kept, Placement

        context, p, shape, n = self.context, self.params, self.context.shape, self.context.prompt_tokens
        self.refuse_below(self.floor_bytes(p, shape, n, context.max_new))
        spans = self.segments(p, context, ())
        rows, width = (n + context.max_new) // p.page, self.summary_numbers(shape.head_dim)
        size = (shape.layers, shape.kv_heads, rows, width)
        self._summary = torch.zeros(size, dtype=context.dtype, device=context.device)
        self._pages = torch.zeros((), dtype=torch.long, device=context.device)
        self._none = torch.full((shape.kv_heads, 0), -1, dtype=torch.long, device=context.device)
        self._add(prompt.keys[:, :, : len(spans) * p.page], 0)
        retained = Kept.everywhere(torch.arange(len(spans) * p.page, device=context.device))
        resident = ["resident"] * len(spans)
        selectable = list(range(len(spans)))
        return _layout(p, shape, n, context.max_new), Placement(
            spans, resident, resident, retained, selectable=selectable
        )

    def _add(self, keys: torch.Tensor, first_page: int) -> None:
        """Summarise whole pages: keys [L, H_kv, m * page, D] of the pages from `first_page` on."""
        if keys.shape[2]:
            paged = keys.unflatten(2, (-1, self.params.page))
            size = (*paged.shape[:3], self._summary.shape[3])
            summaries = self.checks.finite("summarise", self.summarise_from(paged, first_page), size)
            self._summary[:, :, first_page : first_page + summaries.shape[2]] = summaries.to(self._summary.dtype)
        self._complete = first_page + keys.shape[2] // self.params.page
        self._pages.fill_(self._complete)

    def summarise_from(self, keys: torch.Tensor, first_page: int) -> torch.Tensor:
        """Return `summarise` of pages from `first_page` on, for a method whose summaries depend on positions."""
        return self.summarise(keys)

    # ---- decoding
    def rank_in(self, layer: int, q: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """Return `rank` of the layer's pages, for a method that ranks by the layer."""
        return self.rank(q, self._summary[layer].float(), present)

    def pool_group(self, score: torch.Tensor) -> torch.Tensor:
        """Return scores [H_kv, G, P] as the query heads of a KV head choose by: each its own, or [H_kv, 1, P]."""
        if self.params.group == "native":
            return score
        return score.mean(1, keepdim=True) if self.params.group == "mean" else score.amax(1, keepdim=True)

    def choose(self, score: torch.Tensor, room: int) -> torch.Tensor:
        """Return the attended pages, bool as score [H_kv, G|1, P], where -inf is a row without a page: the best `room`
        pages."""
        import torch

        best = score.topk(room, -1).indices
        return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, best, True)

    def select(self, layer: int, q: torch.Tensor) -> Selection | None:
        import torch

        from kvlens.memory.placement import Selection

        p, shape, room = self.params, self.context.shape, self.count(self._complete * self.params.page)
        if layer < p.dense_layers or room >= self._complete:
            return None
        grouped = q.float().unflatten(0, (shape.kv_heads, -1))
        present = torch.arange(self._summary.shape[2], device=q.device) < self._pages
        sizes = ((*grouped.shape[:2], len(present)), (shape.kv_heads, 1, len(present)))
        score = self.checks.tensor("rank", self.rank_in(layer, grouped, present), sizes, layer=layer)
        score = score.masked_fill(~present, float("-inf"))
        self.checks.rankable("rank", score, layer)
        score = self.pool_group(score)
        selected = self.choose(score, room)
        fine = torch.nn.functional.pad(selected, (1, 0)).expand(-1, shape.group, -1)  # span ids: page + 1
        logged = score.amax(1).masked_fill(~present, torch.nan)
        index = self._complete * self._summary.shape[-1] * self._summary.element_size()
        scores = torch.nn.functional.pad(logged, (1, 0), value=torch.nan)
        return Selection(fine, self._none, score=scores, index_bytes=index)

    def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
        import torch

        from kvlens.memory.placement import Kept, Placement

        page = self.params.page
        if (end.position + 1) % page:
            return None
        start = end.position + 1 - page
        self._add(memory.read_window(start, start + page)[0], start // page)
        retained = Kept.everywhere(torch.arange(start, start + page, device=self._summary.device))
        span = Span(start, start + page, "page", "A full page.")
        return WindowLeave(start, start + page, Placement([span], ["resident"], ["resident"], retained, selectable=[0]))

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        return {"summaries": (self._summary, self._pages)} if hasattr(self, "_summary") else {}


def _layout(p: Any, shape: KVShape, n: int, max_new: int) -> Layout:
    whole = n - n % p.page
    spans = (n + max_new) // p.page + 1
    return Layout(Zones(whole, 0, 0, n - whole + max_new), spans, window_from=whole, dense=tuple(range(shape.layers)))
