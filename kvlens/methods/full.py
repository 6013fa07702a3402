"""FullKV: the reference. Every token at full resolution on the device, exact attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.base import Method
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.methods.segmenter import PromptFacts
from kvlens.shape import KVShape
from kvlens.spans import Span, fixed_chunks
from kvlens.tiers.layout import Layout, Zones

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlens.memory.placement import Placement


@dataclass(frozen=True)
class FullParameters:
    """Parameters of full KV, which selects nothing."""

    page: int = param(
        16,
        "tokens per page: pages are the spans that masses are logged for; attention does not depend on it",
        ours=True,
    )

    def __post_init__(self) -> None:
        if self.page < 1:
            raise ValueError("page must be at least 1 token.")


class FullKV(Method):
    """Stock attention over all tokens so far. Needs a budget of 100 % or none."""

    name = "full"
    title = "FullKV"
    paper = "reference: the uncompressed cache"
    summary = "keeps every token exactly on the device; nothing is dropped, summarised or moved"
    family = "reference"
    Parameters = FullParameters
    static_ready = True
    keeps_all = True

    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        return _layout(params, prompt_tokens, max_new).bytes(shape)

    @classmethod
    def segments(cls, params: Any, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span]:
        return fixed_chunks(0, prompt.prompt_tokens, params.page, kind="page")

    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        import torch

        from kvlens.memory.placement import Kept, Placement

        context, n = self.context, self.context.prompt_tokens
        self.refuse_below(self.floor_bytes(self.params, context.shape, n, context.max_new))
        spans = self.segments(self.params, context, ())
        positions = torch.arange(n, device=context.device)
        return _layout(self.params, n, context.max_new), Placement(
            spans, ["resident"] * len(spans), ["resident"] * len(spans), Kept.everywhere(positions)
        )


def _layout(p: FullParameters, n: int, max_new: int) -> Layout:
    return Layout(Zones(n, 0, 0, max_new), span_capacity=-(-n // p.page) + 1, window_from=n)
