"""RocketKV: SnapKV's eviction with a wide pooling, then at every step the best tokens of what is left."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.prompt_eviction import kept_layout
from kvlens.methods.fitting import clamp
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.methods.segmenter import PromptFacts
from kvlens.methods.snapkv import SnapKV, SnapKVParameters
from kvlens.shape import KVShape
from kvlens.text.units import counted
from kvlens.tiers.layout import Layout

if TYPE_CHECKING:
    import torch

    from kvlens.memory.placement import Placement, Selection


@dataclass(frozen=True)
class RocketKVParameters(SnapKVParameters):
    """Lengths are in tokens. Defaults are the paper's; of its budgets, 256 to 4,096, the second."""

    kernel: int = param(63, "neighbouring positions a score is pooled over", symbol="kernel_size")
    group: str = param(
        "sum", "how the query heads of a KV head agree on what is evicted", choices=("sum", "mean", "max")
    )
    attended: int = param(
        512,
        "tokens whose reading a step may cost per KV head: half for exact tokens, half for what they are chosen by; 0: "
        "as many as split into what the byte budget keeps",
        symbol="B",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attended < 0:
            raise ValueError("attended must be at least 0.")

    def misfit(self, prompt_tokens: int) -> str | None:
        """Nothing would be left out."""
        if self.attended < prompt_tokens:
            return None
        return f"it is {counted(prompt_tokens + 1, 'token')}, and up to {self.attended:,} may be read"

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """As many tokens are kept as the byte budget holds beside their extremes, and so many read that the paper's
        split (sec. 3.4) comes to that; without a budget an eighth of the prompt is read, the paper's 512 at most. The
        window is as SnapKV's."""
        read = 0 if budget_bytes is not None else clamp((prompt_tokens + 1) / 8, 1, 512)
        return {"attended": read, **super().fit(shape, prompt_tokens, max_new, budget_bytes)}


@dataclass(frozen=True)
class Stages:
    """What both stages come to for one KV head."""

    kept: int
    """prompt tokens that stay, window included"""
    places: int
    """tokens on the device at the end, decoded ones included"""
    read: int
    """B, tokens whose reading a step may cost"""

    @classmethod
    def plan(cls, p: RocketKVParameters, read: int, prompt_tokens: int, max_new: int) -> Stages:
        """By the paper's split (sec. 3.4), the window and one more token at least."""
        whole = prompt_tokens + int(p.peek)
        kept_tokens = p.tokens or max(capacity(read, prompt_tokens + 1 + max_new) - max_new, p.least)
        return cls(min(kept_tokens, whole), min(kept_tokens, whole) - int(p.peek) + max_new, read)

    @property
    def ratio(self) -> float:
        """c_2; 1 or less: everything is read."""
        return self.places / self.read

    @property
    def chunk(self) -> int:
        """e, tokens whose keys' extremes are read together."""
        return max(1, min(int(self.ratio), ceil(self.ratio**0.5)))

    @property
    def chosen_tokens(self) -> int:
        """Tokens attended at a step; the other half of B pays for choosing them."""
        return max(1, round(self.read / 2))

    def components(self, head_dim: int) -> int:
        """r, of the query, by which chunks are ranked."""
        return min(head_dim, max(1, round(head_dim * self.chunk / self.ratio)))


class RocketKV(SnapKV):
    """Two stages (paper sec. 3). First as SnapKV, summed over the group and then pooled over 63 positions: of N tokens,
    the prompt's and the answer's, N / c^alpha stay, c = N / B and alpha = min(.2 + .06 log2 c, .8) (sec. 3.4). Then, at
    every step, with c_2 = kept / B: chunks of e = min(floor c_2, ceil sqrt c_2) neighbours among what is left are
    ranked by the extremes of their keys in the r = D e / c_2 components in which the group's |q| is largest, the
    maximum where the group's q is positive in sum; softmax(q_r . extremes / sqrt(D |q_r|_1 / |q|_1)) over tokens,
    summed over the group, chooses B / 2 tokens. These are attended exactly, and nothing else.

    Departures: where `attended` is 0 the bytes say what is kept, and the split what is read of it. All components of
    the extremes are held and counted; decoded tokens join their chunks as they come."""

    name = "rocketkv"
    title = "RocketKV"
    paper = "Behnam et al., RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression, 2025"
    summary = (
        "drops prompt tokens once, when prefill ends, and reads at every step those of the others that a few "
        "components of the query score highest"
    )
    Parameters = RocketKVParameters
    presets = {"paper": {}, "demo": {"window": 8, "attended": 0}}  # noqa: RUF012
    exact_without_budget = False
    static_ready = False
    journal_names = {  # noqa: RUF012
        "stages": "prompt tokens kept per KV head, tokens of a chunk, components it is ranked by, tokens attended"
    }
    params: RocketKVParameters

    def score(self, prompt: Prefilled, layer: int, end: int) -> torch.Tensor:
        from kvlens.methods.families import window_attention as window

        received = window.received(*self.observed(prompt, layer, end))
        return window.pooled(window.grouped(received, self.context.shape.group, self.params.group), *self.pooling)

    # --------------------------------------------------------------------------------------------------------- how many
    @classmethod
    def stages(
        cls, params: RocketKVParameters, shape: KVShape, prompt_tokens: int, max_new: int, budget: int | None
    ) -> Stages:
        """The most that the budget holds, or what `attended` asks for."""
        sizes, whole = (prompt_tokens, max_new), prompt_tokens + 1 + max_new
        if params.attended:
            return Stages.plan(params, min(params.attended, whole), *sizes)

        def fits(read: int) -> bool:
            if params.tokens:
                return capacity(read, whole) <= params.tokens + max_new
            return budget is None or cls._bytes(params, Stages.plan(params, read, *sizes), shape, *sizes) <= budget

        low, high = 1, whole
        if fits(whole):
            return Stages.plan(params, whole, *sizes)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return Stages.plan(params, low, *sizes)

    @classmethod
    def total(cls, params: RocketKVParameters, prompt: PromptFacts) -> int:
        sizes = prompt.shape, prompt.prompt_tokens, prompt.max_new, prompt.budget_bytes
        return cls.stages(params, *sizes).kept * prompt.shape.layers

    @classmethod
    def floor_bytes(cls, params: RocketKVParameters, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        sizes = prompt_tokens, max_new
        if params.attended or params.tokens:
            return cls._bytes(params, cls.stages(params, shape, *sizes, None), shape, *sizes)
        ends = (Stages.plan(params, read, *sizes) for read in (1, prompt_tokens + 1 + max_new))
        return min(cls._bytes(params, stages, shape, *sizes) for stages in ends)

    @classmethod
    def _bytes(cls, p: RocketKVParameters, made: Stages, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        tokens = [[made.kept]] * shape.layers
        layout = kept_layout(tokens, p.window, prompt_tokens, max_new, p.page, int(p.peek))
        index = index_bytes(shape, made.places, made.chunk) if made.ratio > 1 else 0
        return layout.bytes(shape) + index

    # ------------------------------------------------------------------------------------------------------- the prompt
    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        import torch

        from kvlens.methods.families.kept_index import KeptIndex

        context, shape, n = self.context, self.context.shape, self.context.prompt_tokens
        self._made = stages = self.stages(self.params, shape, n, context.max_new, context.budget_bytes)
        self._masks: list[torch.Tensor] = []
        layout, placement = super().prefill_end(prompt)
        figures = [stages.kept, stages.chunk, stages.components(shape.head_dim), stages.chosen_tokens]
        self.note("stages", torch.tensor(figures, dtype=torch.float32))
        if stages.ratio > 1:
            self._index = KeptIndex(prompt.keys, torch.stack(self._masks), context.max_new, stages.chunk)
            self._window_from, self._ids = layout.window_from, layout.span_capacity
        self._masks.clear()
        return layout, placement

    def placed(self, layer: int, score: torch.Tensor, mask: torch.Tensor) -> None:
        self._masks.append(mask[:, : self.context.prompt_tokens].expand(self.context.shape.kv_heads, -1))

    # --------------------------------------------------------------------------------------------------------- decoding
    def written(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self._made.ratio > 1:
            self._index.add(layer, keys)

    def select(self, layer: int, q: torch.Tensor) -> Selection | None:
        stages, shape = self._made, self.context.shape
        if stages.ratio <= 1 or self._index.tokens(layer) <= stages.chosen_tokens:
            return None
        low, high, lengths = self._index.chunks(layer)
        components = stages.components(shape.head_dim)
        weights = chunk_weights(q.float().unflatten(0, (shape.kv_heads, -1)), low, high, lengths, components)
        read = components * len(lengths) * low.element_size()
        return self._index.selection(
            layer, weights.transpose(1, 2), stages.chosen_tokens, self._spans(q.device), self._ids, read
        )

    def _spans(self, device: torch.device) -> torch.Tensor:
        """The span id of every position, int64 [n + max_new]."""
        import torch

        position = torch.arange(self.context.prompt_tokens + self.context.max_new, device=device)
        return (position // self.params.page + 1).masked_fill(position >= self._window_from, 0)

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        return {"index": self._index.tensors()} if hasattr(self, "_index") else {}


def capacity(read: int, tokens: int) -> int:
    """Tokens of `tokens` that the first stage keeps, decoded ones included, when B = `read` (paper sec. 3.4)."""
    ratio = max(1.0, tokens / read)
    return int(tokens / ratio ** min(0.2 + 0.06 * log2(ratio), 0.8))


def chunk_weights(
    q: torch.Tensor, low: torch.Tensor, high: torch.Tensor, lengths: torch.Tensor, components: int
) -> torch.Tensor:
    """Weight of a token of each chunk by its extremes, in the components in which a group's queries are largest: q
    [H_kv, G, D]; low, high [H_kv, C, D]; lengths [C] -> float32 [H_kv, G, C], which times lengths add up to 1."""
    import torch

    best = q.abs().sum(1).topk(components, -1).indices
    best_query = q.gather(-1, best[:, None].expand(-1, q.shape[1], -1))
    best_index = best[:, None].expand(-1, low.shape[1], -1)
    upward = q.sum(1).gather(-1, best)[:, None] > 0
    bound = torch.where(upward, high.gather(-1, best_index), low.gather(-1, best_index)).float()
    covered = best_query.abs().sum(-1, keepdim=True) / q.abs().sum(-1, keepdim=True).clamp(min=1e-20)
    scores = best_query @ bound.transpose(-1, -2) * (q.shape[-1] * covered).clamp(min=1e-20).rsqrt()
    return (scores + lengths.log()).softmax(-1) / lengths


def index_bytes(shape: KVShape, places: int, chunk: int) -> int:
    """Device bytes of an index (kept_index.py) over `places` tokens of every KV head in chunks of `chunk`: positions
    int32, and two extremes per chunk, or one where it is one token."""
    numbers = -(-places // chunk) * shape.head_dim * (1 + (chunk > 1))
    return shape.layers * shape.kv_heads * (places * 4 + numbers * shape.itemsize)
