"""ArkVale: pages evicted to host memory by the query of the moment, and recalled when another query wants them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.cold_pages import best
from kvlens.methods.families.cold_plan import ColdPagesParameters, Plan
from kvlens.methods.families.host_pages import HostPageRetrieval
from kvlens.methods.fitting import tokens_within
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.shape import KVShape
from kvlens.tiers.layout import Layout

if TYPE_CHECKING:
    import torch

    from kvlens.memory.placement import Placement


@dataclass(frozen=True)
class ArkValeParameters(ColdPagesParameters):
    """Lengths are in tokens."""

    tokens: int = param(
        0,
        "tokens per KV head on the device, all of them attended: sinks, window and pages (4,096 in the paper); 0: as "
        "many pages as the byte budget holds",
        symbol="c",
    )
    top: float = param(0.5, "share of the tokens on the device that must be the best ones: these are recalled")
    most_best: int = param(1280, "tokens of best pages at most; 0: no bound", symbol="C")
    sinks: int = param(64, "first tokens always attended (the authors' two pages)")
    window: int = param(64, "newest tokens always attended (the authors' two pages)")
    page: int = param(32, "tokens per page")
    dense_layers: int = param(2, "first layers that keep every token (the authors' code)")
    window_rule: str = param(
        "at_most",
        "the oldest page leaves so that the window holds W tokens on average (W + p/2 at most), at least W, or at "
        "most W",
        choices=("average", "at_least", "at_most"),
        ours=True,
    )
    volume: str = param(
        "mean",
        "what bounds a page's keys in each dimension: the mean distance from the middle of their range, or the range",
        choices=("mean", "range"),
    )
    group: str = param(
        "layer",
        "who agrees on pages, by the mean of the bounds: all query heads of a layer, or those of a KV head",
        choices=("layer", "kv_head"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.top <= 1:
            raise ValueError("top must lie above 0 and at most at 1.")
        if self.most_best < 0:
            raise ValueError("most_best must be at least 0.")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """Pages are the largest of 32 (the paper's), 16 and 8 tokens with room for four beside sinks and window, else
        those with room for most; sinks and window are two pages each, as the authors have them, where that takes at
        most a quarter of the budget, else one. Ours: as many of the authors' two dense layers as a quarter of the
        budget holds."""
        whole = prompt_tokens + max_new
        room = tokens_within(shape, budget_bytes, whole)
        dense = min(2, int(room / 4 * shape.layers / max(1, whole)))
        beside = room - dense * whole / shape.layers
        page = max((32, 16, 8), key=lambda p: min(4, (beside - 3 * p - whole / p) // p))
        ends = page * (2 if 4 * page <= room / 4 else 1)
        return {"tokens": 0, "sinks": ends, "window": ends, "page": page, "dense_layers": dense}


class ArkVale(HostPageRetrieval):
    """Every page goes to host memory when it is full, and leaves a digest on the device: the middle c of its keys'
    range in each dimension and their mean distance w from it. A page's score is the mean over query heads of
    q . c + |q| . w, the largest q . k in that box. At every step the best pages must be on the device; what is missing
    of them is recalled, and each takes the place of the page there with the lowest score. All that is on the device is
    attended, so that a step attends the whole budget and not the best pages alone.

    Departures: nothing is recalled ahead of the layer that needs it; the pages that stay when the prompt has been read
    cross the link once before they are attended, where the authors leave them on the device; so does one that leaves
    the window, which the authors' code drops unless it is one of the best.
    """

    name = "arkvale"
    title = "ArkVale"
    paper = "Chen et al., ArkVale: Efficient Generative LLM Inference with Recallable Key-Value Eviction, NeurIPS 2024"
    summary = (
        "keeps a box around the keys of each page on the device and the pages in host memory; recalls the best pages "
        "at every step, gives up the worst ones for them, and attends all that is on the device"
    )
    Parameters = ArkValeParameters
    presets = {  # noqa: RUF012
        "paper": {"tokens": 4096},
        "demo": {"sinks": 4, "window": 16, "page": 16, "dense_layers": 0},
    }
    needs = Needs(queries=1)
    params: ArkValeParameters

    # ----------------------------------------------------------------------------------------------------- the index
    @classmethod
    def summary_numbers(cls, head_dim: int) -> int:
        return 2 * head_dim

    @classmethod
    def index_bytes(cls, params: Any, shape: KVShape) -> int:
        return super().index_bytes(params, shape) + shape.kv_heads  # a byte says whether the page is on the device

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        import torch

        low, high = keys.float().amin(-2), keys.float().amax(-2)
        if self.params.volume == "mean":
            middle = (low + high) / 2
            half = (keys.float() - middle.unsqueeze(-2)).abs().mean(-2)
            low, high = middle - half, middle + half
        return torch.cat((low, high), -1)

    def rank(self, q: torch.Tensor, summary: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        from kvlens.kernels.page_scores import bound

        score = bound(q, *summary.chunk(2, -1)).mean(1, keepdim=True)
        return score.mean(0, keepdim=True).expand_as(score) if self.params.group == "layer" else score

    def allocate(self, plan: Plan, prompt: Prefilled) -> None:
        import torch

        super().allocate(plan, prompt)
        self._resident = torch.zeros(self._summaries.shape[:3], dtype=torch.bool, device=self.context.device)

    def enter(self, keys: torch.Tensor, first: int) -> None:
        super().enter(keys, first)
        self._resident[:, :, first : first + keys.shape[2] // self.params.page] = True

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        held = super().held()
        return held and {**held, "resident": (self._resident,)}

    # ------------------------------------------------------------------------------------------------ which pages stay
    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        placed = super().prefill_end(prompt)
        for row in range(0 if self._plan is None else self.context.shape.layers - self.params.dense_layers):
            self.wished(row, self.scores(row, prompt.last_queries[self.params.dense_layers + row, :, -1]))
        return placed

    def wished(self, at: int, score: torch.Tensor) -> torch.Tensor:
        import torch

        assert self._plan is not None
        params, room, resident = self.params, self._plan.recall, self._resident[at]
        always = (params.sinks + params.window) / params.page
        most = params.most_best / params.page if params.most_best else float("inf")
        top = best(score, min(room, max(1, int(min(params.top * (room + always), most) - always))))
        residents = best(score.masked_fill(~resident | marked(top, resident), float("-inf")), room - top.shape[1])
        pages = torch.cat((top, residents), 1)
        self._resident[at] = marked(pages, resident)
        return (pages + self._plan.first_id).masked_fill(pages < 0, -1)


def marked(pages: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Pages int64 [H_kv, W], -1: none, as a table bool [H_kv, P] of those named."""
    import torch

    table = torch.zeros(like.shape[0], like.shape[1] + 1, dtype=torch.bool, device=like.device)
    return table.scatter(1, torch.where(pages < 0, like.shape[1], pages), True)[:, :-1]
