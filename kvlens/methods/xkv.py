"""xKV: groups of neighbouring layers share one low-rank basis of their keys, and one of their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.packed_tokens import PackedTokens
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import MemoryView, RunContext, StepEnd
from kvlens.methods.segmenter import PromptFacts
from kvlens.quantised.form import SHARED, Quantised
from kvlens.shape import KVShape
from kvlens.spans import Span, fixed_chunks
from kvlens.text.units import counted
from kvlens.tiers.layout import Layout, Zones

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class XKVParameters:
    """Defaults are those of the authors' runs on Llama 3.1 8B: 512 and 768 of 4,096 numbers."""

    layers_per_group: int = param(4, "neighbouring layers that share a basis", symbol="G")
    rank_k: int = param(512, "rank of the keys' basis", symbol="r_k")
    rank_v: int = param(768, "rank of the values' basis", symbol="r_v")
    pre_rope: bool = param(True, "keys are decomposed without their rotary embedding, which is added after")
    group: int = param(16, "tokens of a span, which errors are logged for", ours=True)

    def __post_init__(self) -> None:
        for name in ("layers_per_group", "rank_k", "rank_v", "group"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1.")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """Ranks are 2 to 3, as in the authors' runs, and at most their eighth and three sixteenths of the numbers that
        a token has in a group. Below that they are what the budget holds beside decoded tokens: a rank takes a number
        of every prompt token and one of every column (ours)."""
        layers = min(cls.layers_per_group, shape.layers)
        columns = layers * shape.kv_heads * shape.head_dim
        total = columns * 5 / 16
        if budget_bytes is not None:
            whole = shape.full_kv_bytes(prompt_tokens + 1 + max_new)
            decoded = shape.full_kv_bytes(max_new + 1)
            share = max(0.0, 0.9 * budget_bytes - decoded) / whole
            total = min(total, share * 2 * prompt_tokens * columns / (prompt_tokens + columns))
        return {"layers_per_group": layers, "rank_k": max(1, int(0.4 * total)), "rank_v": max(1, int(0.6 * total))}

    def misfit(self, prompt_tokens: int) -> str | None:
        """A basis has more numbers than tokens."""
        if min(self.rank_k, self.rank_v) < prompt_tokens:
            return None
        ranks = f"rank_k={self.rank_k:,} and rank_v={self.rank_v:,}"
        return f"it is {counted(prompt_tokens + 1, 'token')}, fewer than {ranks} keep of them"


class XKV(PackedTokens):
    """The prompt's keys of a group's layers and KV heads, side by side, are a matrix with a row for each token, and so
    are the values. Its first singular vectors are kept: a basis with a row for each token, which all layers of the
    group share, and a matrix of each layer, which makes the layer's keys of the basis. Keys are decomposed before their
    rotary embedding. Decoded tokens stay as they are.

    After the authors' code and abstract; the paper's text was not at hand. Departures: the selective reconstruction of
    its second version is left out. Keys before their rotary embedding are those that the cache holds with the embedding
    taken back. The last group has fewer layers where the groups do not divide them, and the ranks are the same. The
    paper keeps the whole prompt; the last prompt token is step 0's here, and stays as it is. What a step reads of a
    basis is counted once for each layer.
    """

    name = "xkv"
    title = "xKV"
    paper = "Chang et al., xKV: Cross-Layer KV-Cache Compression via Aligned Singular Vector Extraction, ICML 2026"
    summary = (
        "keeps every token; neighbouring layers share a low-rank basis of the prompt's keys, and one of its values"
    )
    Parameters = XKVParameters
    presets = {  # noqa: RUF012
        "paper": {},
        "demo": {"layers_per_group": 2, "rank_k": 8, "rank_v": 12},
    }
    params: XKVParameters

    def __init__(self, params: XKVParameters, context: RunContext) -> None:
        super().__init__(params, context)
        if params.pre_rope:
            context.rotary("pre_rope", ": set pre_rope=false")

    @classmethod
    def form(cls, params: XKVParameters, shape: KVShape, positions: int) -> Quantised:
        """positions: of the prompt."""
        return Quantised(
            0,
            1,
            1,
            positions,
            form=SHARED,
            layers_per_group=params.layers_per_group,
            rank_k=params.rank_k,
            rank_v=params.rank_v,
            turns=params.pre_rope,
        )

    @classmethod
    def segments(cls, params: Any, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span]:
        return fixed_chunks(0, prompt.prompt_tokens, params.group, kind="group")

    @classmethod
    def _layout(cls, params: Any, shape: KVShape, n: int, max_new: int) -> Layout:
        spans = 1 + -(-n // params.group)
        return Layout(Zones(0, 0, 0, max_new), spans, window_from=n, quantised=cls.form(params, shape, n))

    def decode_end(self, end: StepEnd, memory: MemoryView) -> None:
        """Decoded tokens stay in the window."""
