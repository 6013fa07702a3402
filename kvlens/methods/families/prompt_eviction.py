"""Prompt eviction: when prefill ends, the prompt's tokens are ranked once, the best stay and the rest is gone for good.

Decoding is plain attention over what is left; decoded tokens are appended and stay. A method of this family says its
`score`; where it divides the budget unequally, `tokens`; where it does not take the best one by one, `choose`.
Shapes: L layers, Hq query heads, H_kv KV heads, n prompt tokens that prefill covered, m of them before the window.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvlens.methods.base import Method
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.methods.segmenter import PromptFacts
from kvlens.shape import KVShape
from kvlens.spans import Span, fixed_chunks
from kvlens.tiers.layout import SLOT_TABLE_BYTES, Layout, Zones

if TYPE_CHECKING:
    import torch

    from kvlens.memory.placement import Kept, Placement

Tokens = Sequence[Sequence[int]]
"""by layer and KV head: prompt tokens that it keeps; a layer with one entry keeps as many for all its KV heads"""


@dataclass(frozen=True)
class PromptEvictionParameters:
    """Lengths are in tokens. A method of the family gives its own defaults."""

    window: int = param(32, "last prompt tokens, kept without a comparison")
    peek: bool = param(
        True,
        "the very last prompt token, which step 0 feeds, is the last of the window; off: the window ends with the "
        "token before it",
        ours=True,
    )
    tokens: int = param(
        0, "prompt tokens kept per layer on average, window included; 0: as many as the byte budget holds", ours=True
    )
    page: int = param(16, "tokens per page: pages are the spans that masses and evictions are logged for", ours=True)

    def __post_init__(self) -> None:
        if self.window < 0 or self.page < 1:
            raise ValueError("window must be at least 0 and page at least 1.")
        if self.tokens and self.tokens < self.least:
            raise ValueError(f"tokens must be 0 or at least {self.least}.")

    @property
    def least(self) -> int:
        """Fewest prompt tokens a KV head keeps, window included."""
        return self.window + 1

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """As many prompt tokens as the byte budget holds beside the decoded ones (ours: papers give tokens)."""
        return {"tokens": 0}


class PromptEviction(Method):
    """Base of the family. `params` is a PromptEvictionParameters, or has its fields."""

    family = "prompt_eviction"
    needs = Needs(peek=True)
    static_ready = True
    partial_ranking: bool = False
    """NaN in a score marks a token that no comparison decides; `choose` sorts NaN first, or as a method says"""
    heads_alike: ClassVar[bool] = True
    """all KV heads of a layer keep equally many tokens"""
    one_set: ClassVar[bool] = False
    """all KV heads of a layer keep the same tokens: `score` has one row"""
    keeps_ends: ClassVar[bool] = False
    """layers keep first and newest tokens, so that the score orders positions"""
    ranks_parts: ClassVar[bool] = False
    """`score` has places within parts of the prompt: the same numbers for all KV heads of a layer"""
    apart: ClassVar[bool] = False
    """the window has a zone of its own even where every token stays"""
    params: Any
    granted: Tokens  # what `tokens` came to

    @abstractmethod
    def score(self, prompt: Prefilled, layer: int, before: int) -> torch.Tensor:
        """By which the positions [0, before) of the prompt are ranked, the highest kept: float32 [H_kv, before], or
        [1, before] where all KV heads keep the same tokens. Only asked where something has to go."""

    def comparable(self, prompt: Prefilled, layer: int, end: int) -> torch.Tensor:
        """Return the scores that divide a layer's budget over its KV heads, shaped as those of `score`."""
        return self.score(prompt, layer, end)

    def tokens(self, prompt: Prefilled | None, total: int) -> Tokens:
        """Prompt tokens each layer keeps, or each of its KV heads, window included; adds up to `total`, tokens of all
        layers together where KV heads keep as many. prompt None: before anything was read."""
        return equal_shares(total, self.context.shape.layers)

    def choose(self, score: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Which of [0, m) stay: score [h, m], counts[head] each -> bool [h, m]. The earlier one first among equals."""
        import torch

        order = score.argsort(dim=-1, descending=True, stable=True)
        most = torch.tensor(counts, device=score.device)[:, None]
        is_first = torch.arange(score.shape[-1], device=score.device) < most
        return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, order, is_first.expand(score.shape))

    def placed(self, layer: int, score: torch.Tensor, mask: torch.Tensor) -> None:
        """A layer's tokens have been chosen: score float32 and mask bool [h, n + peeked], NaN and True in the window.
        For the journal."""

    @property
    def last(self) -> int:
        """Prompt tokens that prefill does not cover and that count as the prompt's: the one that step 0 feeds, or
        none."""
        return int(self.params.peek)

    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        least = [[min(params.tokens or params.least, prompt_tokens + int(params.peek))]] * shape.layers
        return cls.layout(params, shape, least, prompt_tokens, max_new).bytes(shape)

    @classmethod
    def layout(cls, params: Any, shape: KVShape, tokens: Tokens, prompt_tokens: int, max_new: int) -> Layout:
        """Return how the device is divided where layers keep `tokens`."""
        sizes = params.window, prompt_tokens, max_new, params.page, int(params.peek)
        return kept_layout(tokens, *sizes, apart=cls.apart)

    @classmethod
    def segments(cls, params: Any, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span]:
        n, last, layers = prompt.prompt_tokens, int(params.peek), prompt.shape.layers
        # No KV head can keep more than everything: all do exactly when their sum says so, however it is divided.
        whole = cls.total(params, prompt) >= layers * (n + last) and not cls.apart
        counts = [[n + last if whole else 0]] * layers
        until = kept_layout(counts, params.window, n, prompt.max_new, params.page, last).window_from
        return fixed_chunks(0, until, params.page, kind="page")

    @classmethod
    def total(cls, params: Any, prompt: PromptFacts) -> int:
        """Prompt tokens that all layers keep together, where all KV heads of a layer keep as many."""
        last = int(params.peek)
        n, layers = prompt.prompt_tokens + last, prompt.shape.layers
        if params.tokens:
            return layers * min(params.tokens, n)
        if prompt.budget_bytes is None:
            return layers * n
        least = min(params.least, n)
        sizes = prompt.budget_bytes, prompt.shape, least, prompt.prompt_tokens, prompt.max_new, params.page, last
        return affordable(*sizes)

    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        context, p = self.context, self.params
        n, shape = context.prompt_tokens, context.shape
        self.refuse_below(self.floor_bytes(p, shape, n, context.max_new))
        self.granted = self.tokens(prompt, self.total(p, context))
        layout = self.layout(p, shape, self.granted, n, context.max_new)
        self.refuse_below(layout.bytes(shape))
        return layout, self._place(self._choose_kept(prompt, layout.window_from), self.segments(p, context, ()))

    def _choose_kept(self, prompt: Prefilled, window_from: int) -> Kept:
        import torch

        from kvlens.memory.placement import Kept

        n, whole = self.context.prompt_tokens, self.context.prompt_tokens + self.last
        device, is_partial = prompt.keys.device, self.apart or min(map(min, self.granted)) < whole
        masks, scores = [], []
        for layer, counts in enumerate(self.granted):
            mask = torch.ones(len(counts), whole, dtype=torch.bool, device=device)
            score = torch.full((len(counts), whole), torch.nan, device=device)
            if is_partial:
                ranked = self._checked(prompt, layer, window_from)
                head_counts = [*counts] * (len(ranked) // len(counts)) if len(ranked) > len(counts) else counts
                mask, score = (t.expand(len(ranked), -1).clone() for t in (mask[:1], score[:1]))
                score[:, :window_from] = ranked
                selected = self.choose(ranked, [c - (whole - window_from) for c in head_counts])
                mask[:, :window_from] = self.checks.tensor("choose", selected, (tuple(ranked.shape),), "bool", layer)
            self.placed(layer, score, mask)
            masks.append(mask[:, : window_from if is_partial else n])
            scores.append(score[:, :n])
        return Kept.masked(torch.stack(masks), torch.stack(scores) if is_partial else None)

    def _checked(self, prompt: Prefilled, layer: int, before: int) -> torch.Tensor:
        """Return the layer's score, checked: float32 [H_kv, before], or [1, before] where `one_set` is True."""
        score, rows = self.score(prompt, layer, before), 1 if self.one_set else self.context.shape.kv_heads
        score = self.checks.tensor("score", score, ((rows, before),), "float or int", layer)
        if not self.partial_ranking:
            self.checks.rankable("score", score, layer)
        return score.float()

    def _place(self, kept: Kept, pages: list[Span]) -> Placement:
        """Pages as spans, each with what became of it."""
        from kvlens.memory.placement import Placement

        mask = kept.mask(pages[-1].tok_end if pages else 0)
        owners = "KV heads" if mask.shape[1] > 1 else "Layers"
        rows = mask.flatten(0, 1).cpu()
        spans, states = [], []
        for page in pages:
            counts = rows[:, page.tok_start : page.tok_end].sum(1)
            nonempty, whole = int((counts > 0).sum()), bool((counts == len(page)).all())
            states.append("resident" if whole else "partial" if nonempty else "evicted")
            why = (
                f"{owners} kept {int(counts.min())} to {int(counts.max())} of its {len(page)} tokens; "
                f"{len(counts) - nonempty} of {len(counts)} kept none."
            )
            spans.append(Span(page.tok_start, page.tok_end, page.kind, page.reason if whole else why))
        return Placement(spans, states, ["resident"] * len(spans), kept)


def lacks_score(method: type[Any]) -> str:
    """Return why a method has no score that a part of another method can use, in a few words; '': it has one."""
    if not issubclass(method, PromptEviction):
        return "it is no prompt eviction, which scores the prompt once"
    return "" if method.select is Method.select else "it selects among its kept tokens at every step as well"


def equal_shares(total: int, layers: int) -> Tokens:
    """`total` tokens of all layers in equal parts, what is left over one by one to the first layers."""
    return [[total // layers + (layer < total % layers)] for layer in range(layers)]


def kept_layout(
    tokens: Tokens, window: int, prompt_tokens: int, max_new: int, page: int, last: int, apart: bool = False
) -> Layout:
    """Layout of KV heads that keep `tokens` of the prompt, the last `window` in the window zone with decoded tokens.

    prompt_tokens: those that prefill covered. last: 1 when the token after them, which step 0 feeds, is counted in
    `tokens` and `window`, else 0; its slot is in either case the first of the `max_new`. When every KV head keeps the
    whole prompt the layout is FullKV's, all that prefill covered in the kept zone, unless the window stays apart.
    """
    whole = prompt_tokens + last
    is_whole = min(map(min, tokens)) >= whole and not apart
    inside = 0 if is_whole else max(min(window, whole) - last, 0)
    zones = [tuple(Zones(count - last - inside, 0, 0, inside + max_new) for count in layer) for layer in tokens]
    return Layout(
        tuple(heads if len(set(heads)) > 1 else heads[0] for heads in zones),
        -(-prompt_tokens // page) + 1,
        window_from=prompt_tokens - inside,
    )


def affordable(budget: int, shape: KVShape, floor: int, prompt_tokens: int, max_new: int, page: int, last: int) -> int:
    """Prompt tokens of all layers together that `budget` bytes hold when all KV heads of a layer keep as many, at least
    `floor` per layer; `last` as in `kept_layout`."""
    least = kept_layout([[floor]] * shape.layers, 0, prompt_tokens, max_new, page, last).bytes(shape)
    token = shape.kv_heads * (shape.head_token_bytes + SLOT_TABLE_BYTES)
    return min(shape.layers * floor + (budget - least) // token, shape.layers * (prompt_tokens + last))
