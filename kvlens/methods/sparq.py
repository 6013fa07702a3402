"""SparQ: approximate scores from the largest query components, exact attention over the best tokens, a mean for the
rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.read_on_device import ReadOnDevice
from kvlens.methods.fitting import clamp
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.shape import KVShape
from kvlens.text.units import counted

if TYPE_CHECKING:
    import torch

    from kvlens.memory.placement import Selection


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


class SparQ(ReadOnDevice):
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
    Parameters = SparQParameters
    presets = {"paper": {}, "demo": {"components": 16}}  # noqa: RUF012
    params: SparQParameters

    @classmethod
    def own_bytes(cls, params: SparQParameters, shape: KVShape, tokens: int) -> int:
        numbers = shape.layers * shape.kv_heads * shape.head_dim
        return numbers * tokens * shape.itemsize + (numbers * 4 if params.blends(shape) else 0)

    def begin(self, prompt: Prefilled) -> None:
        import torch

        context, shape, n = self.context, self.context.shape, self.context.prompt_tokens
        size = (shape.layers, shape.kv_heads, shape.head_dim, self._places)
        self._rows = torch.zeros(*size, dtype=context.dtype, device=context.device)
        self._rows[..., :n] = prompt.keys.transpose(-1, -2)
        self._values = prompt.values.sum(2, dtype=torch.float32) if self.params.blends(shape) else None
        self._tokens = [n] * shape.layers

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
            self.by_span(is_chosen, False).any(-1)[:, None].expand(-1, shape.group, -1),
            self._none,
            positions=positions[:, None].expand(-1, shape.group, -1),
            blend=blend,
            score=self.by_span(together, torch.nan).amax(-1),
            index_bytes=index,
        )

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
