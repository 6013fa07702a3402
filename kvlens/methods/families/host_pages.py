"""Page retrieval from host memory: the device holds sinks, window and a summary of every page; at every step each KV
head wishes for the pages that rank best, and those it lacks are recalled.

A method of this family says how it summarises pages and by what it ranks them (kvlens/methods/families/
page_retrieval.py); one that reads other pages than it wishes for also says that (`chosen`). Pages, window, recall zone,
budgets and the record of scores are the family's. Shapes: Hq query heads, H_kv KV heads, G = Hq / H_kv, D head size, P
pages there is room for, F numbers of a summary, W pages recalled, S span ids.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.cold_pages import ColdPages, best
from kvlens.methods.families.cold_plan import Plan
from kvlens.methods.families.page_retrieval import PageSummaries
from kvlens.methods.run_inputs import Prefilled
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch

    from kvlens.memory.placement import Selection


class HostPageRetrieval(PageSummaries, ColdPages):
    """Base of the family whose pages lie in host memory. `params` is a ColdPagesParameters, or has its fields."""

    family = "page_retrieval"
    ranks_stored = False
    """`rank` takes q and summaries in the types that they are stored in, not in float32, the number of pages int64 0-d
    in place of what is there, and gives one score a page, -inf where there is none"""

    def shown(self, score: torch.Tensor) -> torch.Tensor:
        """What `rank` found [H_kv, P], as the record is to have it."""
        return score

    def chosen(self, at: int, q: torch.Tensor, wishes: torch.Tensor, score: torch.Tensor | None) -> Selection:
        """What the query heads attend. at: which of the layers that are not dense; q [Hq, D]; wishes int64 [H_kv, W]:
        span ids of the best pages, -1 where there is none; score [H_kv, S], for the record, None: nothing is recorded.
        """
        from kvlens.memory.placement import Selection

        return Selection(self.reads(wishes), wishes, fits=True, score=score)

    # ----------------------------------------------------------------------------------------------------- the index
    @classmethod
    def numbers(cls, params: Any, shape: KVShape) -> int:
        """Numbers of the model's dtype in the summary of one page of one KV head, where parameters or groups of query
        heads decide it."""
        return cls.summary_numbers(shape.head_dim)

    @classmethod
    def index_bytes(cls, params: Any, shape: KVShape) -> int:
        return shape.kv_heads * cls.numbers(params, shape) * shape.itemsize

    def allocate(self, plan: Plan, prompt: Prefilled) -> None:
        import torch

        context, shape = self.context, self.context.shape
        size = (shape.layers - self.params.dense_layers, shape.kv_heads, plan.pages)
        width = self.numbers(self.params, shape)
        self._summaries = torch.zeros(*size, width, dtype=context.dtype, device=context.device)

    def enter(self, keys: torch.Tensor, first: int) -> None:
        paged = keys.unflatten(2, (-1, self.params.page))
        summaries = self.checks.finite("summarise", self.summarise(paged), (*paged.shape[:3], self._summaries.shape[3]))
        self._summaries[:, :, first : first + summaries.shape[2]] = summaries

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        return {} if self._plan is None else {"summaries": (self._summaries, self._filled)}

    # ------------------------------------------------------------------------------------------------------ decoding
    def select(self, layer: int, q: torch.Tensor) -> Selection | None:
        from kvlens.memory.placement import index_read

        plan, shape, row = self._plan, self.context.shape, layer - self.params.dense_layers
        if plan is None or row < 0:
            return None
        score = self.scores(row, q)
        wishes = self.wished(row, score)
        logged = self._log(score) if self.keeps_journal else None
        read = index_read(lambda: self._pages * self.index_bytes(self.params, shape) // shape.kv_heads)
        return replace(self.chosen(row, q, wishes, logged), index_bytes=read)

    def _log(self, score: torch.Tensor) -> torch.Tensor:
        """Return scores of pages [H_kv, P] as the record has them, by span id [H_kv, S], NaN where there is none."""
        import torch

        plan = self._plan
        assert plan is not None
        logged = torch.full((len(score), plan.first_id + plan.pages), float("nan"), device=score.device)
        logged[:, plan.first_id :] = self.shown(score).masked_fill(score == float("-inf"), float("nan"))
        return logged

    def scores(self, at: int, q: torch.Tensor) -> torch.Tensor:
        """What pages rank by, float32 [H_kv, P], -inf where there is none. at: which of the layers that are not dense;
        q [Hq, D]."""
        import torch

        plan, grouped = self._plan, q.unflatten(0, (self.context.shape.kv_heads, -1))
        assert plan is not None
        grouped = grouped if self.ranks_stored else grouped.float()
        present = self._filled
        if not self.ranks_stored:
            present = torch.arange(plan.pages, device=q.device) < present
        sizes = ((*grouped.shape[:2], plan.pages), (len(grouped), 1, plan.pages))
        stored = self._summaries[at]
        ranked = self.rank(grouped, stored if self.ranks_stored else stored.float(), present)
        score: torch.Tensor = self.checks.tensor("rank", ranked, sizes, layer=at + self.params.dense_layers)
        score = score[:, 0] if self.ranks_stored else score.amax(1).masked_fill(~present, float("-inf"))
        self.checks.rankable("rank", score, at + self.params.dense_layers)
        return score

    def wished(self, at: int, score: torch.Tensor) -> torch.Tensor:
        """Span ids int64 [H_kv, W] of the pages that each KV head is to have on the device, the most wanted first, -1:
        none: as many of the best as there is room for. score as `scores` says; page 0 is the plan's first span."""
        assert self._plan is not None
        return best(score, self._plan.recall, self._plan.first_id)

    def reads(self, pages: torch.Tensor) -> torch.Tensor:
        """Span ids [H_kv, W], -1: none, as a table [H_kv, G, S] of what is read, the same for all query heads of a
        group."""
        from kvlens.kernels.turned_reads import mark_spans

        plan, shape = self._plan, self.context.shape
        assert plan is not None
        return mark_spans(pages, plan.first_id + plan.pages)[:, None].expand(-1, shape.group, -1)
