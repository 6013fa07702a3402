"""CompressKV: a few heads per layer that find evidence choose one set of tokens for all heads; layers get tokens by
their error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlens.methods.compresskv import budget
from kvlens.methods.compresskv.heads import FIGURES, HeadFigures, choose_heads
from kvlens.methods.compresskv.params import OBSERVED, PRESETS, CompressKVParameters
from kvlens.methods.families.prompt_eviction import PromptEviction, Tokens
from kvlens.methods.families.token_shares import allocate
from kvlens.methods.hooks import Needs
from kvlens.methods.run_inputs import Prefilled, RunContext

if TYPE_CHECKING:
    import torch


class CompressKV(PromptEviction):
    """When prefill ends, each layer keeps the tokens that its semantic retrieval heads attend from the last `window`
    prompt positions, the same for all its KV heads, and drops the rest for good. Decoding is plain attention over what
    is left; decoded tokens are appended and stay. Departures from the paper: docs/evidence/compresskv.md.
    """

    name = "compresskv"
    title = "CompressKV"
    benchmark = "LongBench"
    paper = (
        "Lin et al., CompressKV: Semantic-Retrieval-Guided KV-Cache Compression for Resource-Efficient "
        "Long-Context LLM Inference, 2026"
    )
    summary = (
        "drops prompt tokens once, when prefill ends: four calibrated heads per layer choose one set of tokens "
        "for all heads, and "
        "layers in which dropping does more harm keep more"
    )
    calibrations = (FIGURES,)
    loses_at = ("list", "10%")
    Parameters = CompressKVParameters
    presets = PRESETS
    untrained = {"heads": "all", "layers": "equal"}  # noqa: RUF012
    needs = Needs(queries=OBSERVED, peek=True)
    one_set = True
    journal_names = {  # noqa: RUF012
        "srh_score": (
            "semantic retrieval score (eq. 1, attention mass summed over answer steps, mean over trials) by "
            "query head; per layer"
        ),
        "srh_chance": (
            "semantic retrieval score of a head that would attend all tokens alike, mean over trials; one number"
        ),
        "trh_score": (
            "traditional retrieval score (top-1 rule, share of the answer copied, mean over trials) by query "
            "head; per layer"
        ),
        "selector": "1 for the query heads whose attention chose the tokens, else 0; per layer",
        "layer_error": "calibrated share of the compression error (eq. 4, shares add up to 1) by layer",
        "layer_budget_tokens": "prompt tokens kept, window included, by layer",
        "token_score": "pooled attention of the window, mean over the choosing heads (no unit) by prompt "
        "position; none "
        "in the window; "
        "per layer",
        "kept_tokens": "1 for prompt tokens that are kept, else 0, by prompt position; per layer",
    }
    params: CompressKVParameters

    def __init__(self, params: CompressKVParameters, context: RunContext) -> None:
        super().__init__(params, context)
        self._calibration: HeadFigures | None = context.calibration.get("head scores")

    def tokens(self, prompt: Prefilled | None, total: int) -> Tokens:
        """By the calibrated layer errors (sec. 3.4), or in equal parts."""
        context, p, layers = self.context, self.params, self.context.shape.layers
        n = context.prompt_tokens + self.last
        if p.layers == "equal" or self._calibration is None:
            tokens = super().tokens(prompt, total)
        else:
            floor = min(p.floor, n)
            most = max(budget.ceiling_of(total, layers, p.ceiling, n), floor)
            tokens = [[count] for count in allocate(self._calibration.errors, total, floor, most)]
        self._note_calibration([count for (count,) in tokens])
        return tokens

    def score(self, prompt: Prefilled, layer: int, before: int) -> torch.Tensor:
        """The window's attention to each token, averaged over neighbours and over the choosing heads (sec. 3.3)."""
        from kvlens.methods.families import window_attention as window

        p, group = self.params, self.context.shape.group
        peeked = prompt.peeked if p.peek else None
        inside = self.context.prompt_tokens - before
        queries, keys = window.observed(prompt, layer, self._selectors(layer), group, inside, peeked)
        return window.pooled(window.received(queries, keys), p.kernel, "avg").mean(0, keepdim=True)

    def placed(self, layer: int, score: torch.Tensor, mask: torch.Tensor) -> None:
        if not score.isnan().all():
            self.note("token_score", score[0], layer)
        self.note("kept_tokens", mask[0].float(), layer)

    def _selectors(self, layer: int) -> list[int]:
        p, calibration = self.params, self._calibration
        scores = None if calibration is None or p.heads == "all" else calibration.scores[p.heads][layer]
        return choose_heads(scores, self.context.shape.q_heads, p.top_heads, p.unscored)

    def _note_calibration(self, tokens: list[int]) -> None:
        """Journal: what the calibration said, and what was made of it."""
        import torch

        self.note("layer_budget_tokens", torch.tensor(tokens, dtype=torch.float32))
        heads = self.context.shape.q_heads
        for layer in range(self.context.shape.layers):
            mask = torch.zeros(heads)
            mask[self._selectors(layer)] = 1.0
            self.note("selector", mask, layer)
        if self._calibration is None:
            return
        self.note("layer_error", torch.tensor(self._calibration.errors))
        if self._calibration.chance is not None:
            self.note("srh_chance", torch.tensor([self._calibration.chance]))
        for name, kind in (("srh_score", "srh"), ("trh_score", "trh")):
            for layer, row in enumerate(self._calibration.scores[kind]):
                self.note(name, torch.tensor(row), layer)
