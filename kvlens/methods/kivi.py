"""KIVI: every token stays, in two or four bits; keys are packed per channel, values per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.memory.layout import Layout, Quantised, Zones
from kvlens.methods.answers import WindowLeave
from kvlens.methods.base import Method
from kvlens.methods.fitting import clamp
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import MemoryView, Prefilled, StepEnd
from kvlens.methods.segmenter import PromptFacts
from kvlens.shape import KVShape
from kvlens.spans import Span, fixed_chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlens.memory.placement import Placement


@dataclass(frozen=True)
class KIVIParameters:
    """Lengths are in tokens. Defaults are those of the paper's main results."""

    bits: int = param(2, "bits of a number", symbol="b", choices=(2, 4))
    group: int = param(32, "tokens (of keys) or channels (of values) that share scale and zero", symbol="G")
    residual: int = param(128, "newest tokens in full precision, a multiple of the group", symbol="R")

    def __post_init__(self) -> None:
        if self.group < 4 or self.group % 4:
            raise ValueError("group must be a multiple of 4, so that its codes fill whole bytes.")
        if self.residual < 1 or self.residual % self.group:
            raise ValueError(f"residual must be a multiple of the group, {self.group}.")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """The residual is one eighth of the prompt in whole groups of 32, 128 at most (the paper's, for 4,096 tokens
        and more), and one group at least; one group where the budget is below a quarter of full KV. Two bits: fewer
        bytes than these cannot be had, whatever the budget. Ours."""
        share = 1.0 if budget_bytes is None else budget_bytes / shape.full_kv_bytes(prompt_tokens + 1 + max_new)
        groups = (prompt_tokens + 1) // 256 if share >= 0.25 else 1
        return {"residual": 32 * clamp(groups, 1, 4)}


class KIVI(Method):
    """Quantises asymmetrically (paper sec. 3.2): keys per channel over groups of G consecutive tokens, values per token
    over groups of G channels, scale and zero in float16. Keys stay exact until R of them are there and are packed
    together; of the values the newest R stay exact (Algorithm 1). Prefill attends exactly; every token is attended at
    every step, packed ones as the bits hold them. At b bits a number takes b + 32 / G: 3 bits at 2 and G = 32, 18.75 %
    of 16 and not 12.5 %.

    Departures: packed tokens are restored before the attention, not inside its kernel. A head size that G does not
    divide has a shorter last group. The prompt's last token, which step 0 feeds, is not yet there
    when the prompt is packed.
    """

    name = "kivi"
    title = "KIVI"
    paper = "Liu et al., KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache, ICML 2024"
    summary = "keeps every token in two or four bits, keys packed per channel and values per token, the newest exactly"
    family = "quantisation"
    Parameters = KIVIParameters
    presets = {"paper": {}, "4 bits": {"bits": 4}, "demo": {"residual": 32}}  # noqa: RUF012
    exact_without_budget = False
    params: KIVIParameters

    @classmethod
    def floor_bytes(cls, params: KIVIParameters, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        return _layout(params, prompt_tokens, max_new).bytes(shape)

    @classmethod
    def segments(cls, params: KIVIParameters, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span]:
        n = prompt.prompt_tokens
        return fixed_chunks(0, n - n % params.residual, params.group, kind="group")

    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        context, n = self.context, self.context.prompt_tokens
        layout = _layout(self.params, n, context.max_new)
        self.refuse_below(layout.bytes(context.shape))
        self._packed = layout.window_from
        return layout, self._place(self.segments(self.params, context, ()))

    def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
        start, until, p = self._packed, end.position + 1, self.params
        if until - start < p.residual:
            return None
        self._packed = until
        return WindowLeave(start, until, self._place(fixed_chunks(start, until, p.group, kind="group")))

    def _place(self, spans: list[Span]) -> Placement:
        import torch

        from kvlens.memory.placement import Kept, Placement

        packed = ["quantised"] * len(spans)
        nothing = Kept.everywhere(torch.empty(0, dtype=torch.long, device=self.context.device))
        return Placement(spans, packed, packed, nothing)


def _layout(p: KIVIParameters, n: int, max_new: int) -> Layout:
    """A ring for the residual and the step's own token; all else is packed."""
    form = Quantised(p.bits, p.group, p.residual, n + max_new)
    return Layout(
        Zones(0, 0, 0, p.residual + 1), 1 + -(-(n + max_new) // p.group), window_from=n - n % p.residual, quantised=form
    )
