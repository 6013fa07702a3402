"""CompressKV: a few heads per layer that find evidence choose one set of tokens for all heads; layers get tokens by
their error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlens.memory.layout import Layout
from kvlens.methods.base import Method, Prefilled, PromptFacts, RunContext
from kvlens.methods.compresskv import budget
from kvlens.methods.compresskv.heads import chosen, load
from kvlens.methods.compresskv.params import OBSERVED, PRESETS, CompressKVParameters
from kvlens.shape import KVShape
from kvlens.spans import Span, fixed_chunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvlens.memory.placement import Placement


class CompressKV(Method):
    """When prefill ends, each layer keeps the tokens that its semantic retrieval heads attend from the last `window`
    prompt positions, the same for all its KV heads, and drops the rest for good. Decoding is plain attention over what
    is left; decoded tokens are appended and stay. Departures from the paper: docs/fidelity.md.
    """

    name = "compresskv"
    title = "CompressKV"
    paper = (
        "Lin et al., CompressKV: Semantic-Retrieval-Guided KV-Cache Compression for Resource-Efficient "
        "Long-Context LLM Inference, 2026"
    )
    summary = (
        "drops prompt tokens once, when prefill ends: four calibrated heads per layer choose one set of tokens "
        "for all heads, and "
        "layers in which dropping does more harm keep more"
    )
    Parameters = CompressKVParameters
    presets = PRESETS
    untrained = {"heads": "all", "layers": "equal"}  # noqa: RUF012
    observed_queries = OBSERVED
    peeks = True
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
        self._calibration = load(params, context.shape, context.model_name)
        self._last = int(params.peek)
        """prompt tokens that prefill does not cover and that count as the prompt's: the one that step 0 feeds, or
        none"""

    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        last = int(params.peek)
        least = min(params.tokens or params.floor, prompt_tokens + last)
        return budget.layout([least] * shape.layers, params.window, prompt_tokens, max_new, params.page, last).bytes(
            shape
        )

    @classmethod
    def segments(cls, params: Any, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span]:
        n, last, layers = prompt.prompt_tokens, int(params.peek), prompt.shape.layers
        # No layer can keep more than everything: all do exactly when their sum says so, whatever the calibration.
        whole = _total(params, prompt) >= layers * (n + last)
        some = [n + last if whole else 0] * layers
        until = budget.layout(some, params.window, n, prompt.max_new, params.page, last).window_from
        return fixed_chunks(0, until, params.page, kind="page")

    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        context, p = self.context, self.params
        n, page = context.prompt_tokens, p.page
        self.refuse_below(self.floor_bytes(p, context.shape, n, context.max_new))
        tokens = self._layer_tokens()
        layout = budget.layout(tokens, p.window, n, context.max_new, page, self._last)
        self._note_calibration(tokens)
        kept, scores = self._select(prompt, tokens, layout.window_from)
        return layout, self._place(kept, scores, self.segments(p, context, ()))

    # ------------------------------------------------------------------------------------------------------------------
    # how many
    def _layer_tokens(self) -> list[int]:
        """Prompt tokens every layer keeps, window included."""
        context, p, shape = self.context, self.params, self.context.shape
        n, layers = context.prompt_tokens + self._last, shape.layers
        floor, total = min(p.floor, n), _total(p, context)
        if p.layers == "equal" or self._calibration is None:
            return [total // layers + (layer < total % layers) for layer in range(layers)]
        most = max(budget.ceiling_of(total, layers, p.ceiling, n), floor)
        return budget.allocate(self._calibration.errors, total, floor, most)

    # ------------------------------------------------------------------------------------------------------------------
    # which
    def _select(
        self, prompt: Prefilled, tokens: list[int], window_from: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Kept positions before `window_from`, per layer, ascending, and the scores that chose them, NaN where nothing
        was compared. tokens: as `_layer_tokens`."""
        import torch

        from kvlens.methods.compresskv import select as compresskv_select

        context, p, group = self.context, self.params, self.context.shape.group
        n, whole, device = context.prompt_tokens, context.prompt_tokens + self._last, prompt.keys.device
        peeked = prompt.peeked if p.peek else None
        kept, ranked = [], []
        for layer in range(context.shape.layers):
            if min(tokens) < whole:
                heads = self._selectors(layer)
                scores = compresskv_select.prompt_scores(prompt, layer, heads, group, n - window_from, peeked, p.kernel)
                here = compresskv_select.best(scores, tokens[layer] - (whole - window_from))
                scored = torch.cat([scores, scores.new_full((whole - window_from,), torch.nan)])
                self.note("token_score", scored, layer)
            else:
                here, scored = torch.arange(n, device=device), torch.full((whole,), torch.nan, device=device)
            kept.append(here)
            ranked.append(scored)
            mask = torch.zeros(whole, device=device)
            mask[here] = 1.0
            mask[window_from:] = 1.0
            self.note("kept_tokens", mask, layer)
        return kept, ranked

    def _selectors(self, layer: int) -> list[int]:
        p, found = self.params, self._calibration
        scores = None if found is None or p.heads == "all" else found.scores[p.heads][layer]
        return chosen(scores, self.context.shape.q_heads, p.top_heads, p.unscored)

    def _place(self, kept: list[torch.Tensor], scores: list[torch.Tensor], pages: list[Span]) -> Placement:
        import torch

        from kvlens.memory.kept import Kept
        from kvlens.memory.placement import Placement

        on_device = torch.zeros(len(kept), pages[-1].tok_end if pages else 0, dtype=torch.bool)
        for layer, positions in enumerate(kept):
            on_device[layer, positions.cpu()] = True
        spans, states = [], []
        for span in pages:
            counts = on_device[:, span.tok_start : span.tok_end].sum(1)
            some, all_of_it = int((counts > 0).sum()), bool((counts == len(span)).all())
            states.append("resident" if all_of_it else "partial" if some else "evicted")
            why = (
                f"{int(counts.min())} to {int(counts.max())} of its {len(span)} tokens are kept, by layer; none in "
                f"{len(kept) - some}."
            )
            spans.append(Span(span.tok_start, span.tok_end, span.kind, span.reason if all_of_it else why))
        stays = Kept.ragged([[positions] for positions in kept], torch.stack(scores)[:, None])
        return Placement(spans, states, ["resident"] * len(spans), stays)

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


def _total(p: CompressKVParameters, prompt: PromptFacts) -> int:
    """Prompt tokens that all layers keep together."""
    n, layers = prompt.prompt_tokens + int(p.peek), prompt.shape.layers
    if p.tokens:
        return layers * min(p.tokens, n)
    if prompt.budget_bytes is None:
        return layers * n
    return budget.affordable(
        prompt.budget_bytes, prompt.shape, min(p.floor, n), prompt.prompt_tokens, prompt.max_new, p.page, int(p.peek)
    )
