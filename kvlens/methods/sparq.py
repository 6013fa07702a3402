"""SparQ: approximate scores from the largest query components, exact attention over the best tokens, a mean for the
rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.memory.layout import Layout, Zones
from kvlens.methods.answers import WindowLeave
from kvlens.methods.base import Method
from kvlens.methods.fitting import clamp
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import MemoryView, Prefilled, StepEnd
from kvlens.methods.segmenter import PromptFacts
from kvlens.shape import KVShape
from kvlens.spans import Span, fixed_chunks
from kvlens.text.units import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvlens.memory.placement import Placement, Selection


@dataclass(frozen=True)
class SparQParameters:
    """Lengths are in tokens. Defaults are those of the paper's Llama runs."""

    components: int = param(32, "query components by which scores are approximated; at most the head size", symbol="r")
    tokens: int = param(128, "tokens attended per KV head, the newest ones included, this step's besides", symbol="k")
    keep: float = param(0.0, "share of the context attended, instead of `tokens`; 0: as `tokens` says", ours=True)
    local: int = param(32, "newest tokens, always attended", symbol="l")
    mean_value: str = param(
        "auto",
        "the mean value of all tokens stands in for those that are not attended; auto: where no query heads share keys "
        "(the paper leaves it out where they do, end of sec. 4)",
        choices=("auto", "true", "false"),
    )
    page: int = param(16, "tokens per page: pages are the spans that masses and rankings are logged for", ours=True)

    def __post_init__(self) -> None:
        for name in ("components", "tokens", "page"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1.")
        if not 0 <= self.keep <= 1:
            raise ValueError("keep must lie between 0 and 1.")
        if not 0 <= self.local <= self.tokens:
            raise ValueError("local must lie between 0 and tokens, which count the newest ones too.")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """A quarter of the head size in components, as 32 of 128 in the paper's Llama runs, and a quarter of the
        attended tokens are the newest ones, as 32 of 128 there. Attended is an eighth of the prompt (ours), 16 tokens
        at least and the paper's 128 at most."""
        tokens = clamp((prompt_tokens + 1) / 8, 16, 128)
        return {"components": clamp(shape.head_dim / 4, 1, 32), "tokens": tokens, "local": tokens // 4}

    def blends(self, shape: KVShape) -> bool:
        """Whether the mean value stands in for what is not attended."""
        return self.mean_value == "true" or (self.mean_value == "auto" and shape.group == 1)

    def misfit(self, prompt_tokens: int) -> str | None:
        """Nothing would be left out."""
        if self.keep or self.tokens < prompt_tokens:
            return None
        sentence = f"it is {counted(prompt_tokens + 1, 'token')}, all attended"
        return f"{sentence}, since up to {self.tokens:,} are besides a step's own"


class SparQ(Method):
    """Per step and KV head (paper sec. 4, Algorithm 1): the r components in which the group's queries are largest, by
    the sum of |q|; approximate weights s = softmax(q_r . k_r / sqrt(D |q_r|_1 / |q|_1)) over all tokens; the k tokens
    with the largest sum of s over the group, the newest l first among them; exact attention over those; and per query
    head a * that + (1 - a) * mean of all values, a the sum of s over the attended tokens. Reads shrink, memory grows by
    half: keys lie a second time with components first, so that r of them are read in whole rows. Where query heads
    share keys the paper leaves the mean of all values out, and so does `mean_value=auto`.

    Departures: none known; that a step's own token is attended beside the k, and where the sums over a group lie (of
    weights, before the choice), follow the paper's text, whose code sums raw scores.
    """

    name = "sparq"
    title = "SparQ"
    paper = "Ribar et al., SparQ Attention: Bandwidth-Efficient LLM Inference, ICML 2024"
    summary = "keeps every token on the device and reads those that a few components of the query score highest"
    family = "token_retrieval"
    Parameters = SparQParameters
    presets = {"paper": {}, "demo": {"components": 16}}  # noqa: RUF012
    keeps_all = True
    exact_without_budget = False
    params: SparQParameters

    @classmethod
    def floor_bytes(cls, params: SparQParameters, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        numbers = shape.layers * shape.kv_heads * shape.head_dim
        copies = numbers * (prompt_tokens + max_new) * shape.itemsize
        sums = numbers * 4 if params.blends(shape) else 0
        return _layout(params, shape, prompt_tokens, max_new).bytes(shape) + copies + sums

    @classmethod
    def segments(cls, params: SparQParameters, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span]:
        n = prompt.prompt_tokens
        return fixed_chunks(0, n - n % params.page, params.page, kind="page")

    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        import torch

        from kvlens.memory.placement import Kept, Placement

        context, p, shape, n = self.context, self.params, self.context.shape, self.context.prompt_tokens
        self.refuse_below(self.floor_bytes(p, shape, n, context.max_new))
        size = (shape.layers, shape.kv_heads, shape.head_dim)
        self._rows = torch.zeros(*size, n + context.max_new, dtype=context.dtype, device=context.device)
        self._rows[..., :n] = prompt.keys.transpose(-1, -2)
        self._values = prompt.values.sum(2, dtype=torch.float32) if p.blends(shape) else None
        self._tokens = [n] * shape.layers
        self._pages = n // p.page
        self._none = torch.full((shape.kv_heads, 0), -1, dtype=torch.long, device=context.device)
        spans = self.segments(p, context, ())
        resident = ["resident"] * len(spans)
        placement = Kept.everywhere(torch.arange(len(spans) * p.page, device=context.device))
        return _layout(p, shape, n, context.max_new), Placement(spans, resident, resident, placement)

    # --------------------------------------------------------------------------------------------------------- decoding
    def count(self, context_tokens: int) -> int:
        """Tokens attended besides this step's own, when the context has that many; the newest ones always."""
        p = self.params
        return max(p.local, int(p.keep * context_tokens)) if p.keep else p.tokens

    def written(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._rows[layer, :, :, self._tokens[layer]] = keys
        if self._values is not None:
            self._values[layer] += values
        self._tokens[layer] += 1

    def select(self, layer: int, q: torch.Tensor) -> Selection | None:
        import torch

        from kvlens.memory.placement import Blend, Selection

        p, shape, n = self.params, self.context.shape, self._tokens[layer]
        later, tokens = self._rows.shape[-1] - n, self.count(n)
        if tokens >= n - 1:
            return None
        weights = approximate(q.unflatten(0, (shape.kv_heads, -1)), self._rows[layer, :, :, :n], p.components)
        together = weights.sum(1)
        forced = together.clone()
        forced[:, n - 1 - p.local :] = torch.inf
        is_chosen = torch.zeros_like(together, dtype=torch.bool)
        is_chosen.scatter_(-1, forced.topk(tokens + 1, -1).indices, True)
        blend = None
        if self._values is not None:
            share = (weights * is_chosen[:, None]).sum(-1).clamp(max=1)
            blend = Blend(share, self._values[layer] / n, torch.nn.functional.pad(weights, (0, later)))
        positions = torch.nn.functional.pad(is_chosen, (0, later))
        index = min(p.components, shape.head_dim) * n * self._rows.element_size()
        if self._values is not None:
            index += shape.head_dim * self._values.element_size()
        return Selection(
            self._spans(is_chosen, False).any(-1)[:, None].expand(-1, shape.group, -1),
            self._none,
            positions=positions[:, None].expand(-1, shape.group, -1),
            blend=blend,
            score=self._spans(together, torch.nan).amax(-1),
            index_bytes=index,
        )

    def _spans(self, of_tokens: torch.Tensor, nothing: float) -> torch.Tensor:
        """[H_kv, n] of tokens -> [H_kv, S, page] of span ids: the window's and those not yet in use hold `nothing`."""
        import torch

        page, most = self.params.page, self._rows.shape[-1] // self.params.page
        paged = of_tokens[:, : self._pages * page].unflatten(-1, (self._pages, page))
        return torch.nn.functional.pad(paged, (0, 0, 1, most - self._pages), value=nothing)

    def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
        import torch

        from kvlens.memory.placement import Kept, Placement

        page = self.params.page
        if (end.position + 1) % page:
            return None
        start = end.position + 1 - page
        self._pages += 1
        placement = Kept.everywhere(torch.arange(start, start + page, device=self._rows.device))
        span = Span(start, start + page, "page", "A full page.")
        return WindowLeave(start, start + page, Placement([span], ["resident"], ["resident"], placement))

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        if not hasattr(self, "_rows"):
            return {}
        sums = {} if self._values is None else {"sum of values": (self._values,)}
        return {"key rows": (self._rows,), **sums}


def approximate(q: torch.Tensor, rows: torch.Tensor, components: int) -> torch.Tensor:
    """Weights of all tokens from the `components` in which a group's queries are largest: q [H_kv, G, D], rows [H_kv,
    D, n] -> float32 [H_kv, G, n], rows add up to 1."""
    q = q.float()
    best = q.abs().sum(1).topk(min(components, q.shape[-1]), -1).indices
    best_query = q.gather(-1, best[:, None].expand(-1, q.shape[1], -1))
    best_rows = rows.gather(1, best[..., None].expand(-1, -1, rows.shape[-1])).float()
    covered = best_query.abs().sum(-1, keepdim=True) / q.abs().sum(-1, keepdim=True).clamp(min=1e-20)
    scale = (q.shape[-1] * covered).clamp(min=1e-20).rsqrt()
    return (best_query @ best_rows * scale).softmax(-1)


def _layout(p: SparQParameters, shape: KVShape, n: int, max_new: int) -> Layout:
    whole = n - n % p.page
    spans = (n + max_new) // p.page + 1
    return Layout(Zones(whole, 0, 0, n - whole + max_new), spans, window_from=whole, dense=tuple(range(shape.layers)))
