"""RazorAttention: retrieval heads keep everything, other heads their ends and one entry for all that they drop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.base import Method
from kvlens.methods.families.retrieval_heads import HeadMap, head_count, head_map
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.methods.segmenter import PromptFacts
from kvlens.shape import KVShape
from kvlens.spans import Span, fixed_chunks
from kvlens.tiers.layout import SLOT_TABLE_BYTES, Layout, Zones

if TYPE_CHECKING:
    from kvlens.memory.placement import Placement


@dataclass(frozen=True)
class RazorAttentionParameters:
    """Lengths are in tokens."""

    sinks: int = param(4, "first tokens, kept by every head", symbol="N0")
    least_window: int = param(4000, "newest prompt tokens that every head keeps at least", symbol="S0")
    window_share: float = param(0.2, "share of the prompt that every head keeps as its newest tokens", symbol="1/C")
    shrink: bool = param(False, "the window shrinks to what the byte budget holds", ours=True)
    echo: float = param(0.01, "share of KV heads that keep everything since they look back to equal tokens")
    induction: float = param(0.14, "share of KV heads that keep everything since they look to what came after those")
    compensate: bool = param(True, "one entry with mean key and value stands for what a head drops, weighted by log N")
    heads: str = param(
        "calibrated",
        "who keeps everything: the heads of the calibration, or none (needs no calibration)",
        choices=("calibrated", "none"),
        ours=True,
    )
    calibration: str = param(
        "", "file made by `kvlens calibrate heads`; empty: the one shipped for the model", ours=True
    )
    page: int = param(16, "tokens per page: pages are the spans that masses and evictions are logged for", ours=True)

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.least_window < 0 or self.page < 1:
            raise ValueError("sinks and least_window must be at least 0 and page at least 1.")
        for name in ("window_share", "echo", "induction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1.")

    @property
    def calibrated(self) -> bool:
        """A calibration file is used."""
        return self.heads == "calibrated"

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """The window shrinks to what the budget holds. Retrieval heads by induction: 14 % of all KV heads as in the
        paper, or as many as take at most seven tenths of the budget, since they keep everything; none by echo where
        they are fewer than the paper's. Ours: the paper's windows are made for prompts of more than 20,000 tokens."""
        values: dict[str, Any] = {"least_window": 0, "shrink": True}
        if budget_bytes is None:
            return values
        heads, share = shape.layers * shape.kv_heads, budget_bytes / shape.full_kv_bytes(prompt_tokens + 1 + max_new)
        most = int(0.7 * share * heads)
        if most < head_count(0.14, heads) + head_count(0.01, heads):
            values |= {"echo": 0.0, "induction": most / heads}
        return values


class RazorAttention(Method):
    """When prefill ends (paper sec. 3), KV heads that echo (their queries attend earlier copies of their own token, the
    best 1 %) or induce (the token after those, the best 14 %) keep every token. All others keep the first N0, the
    newest max(S0, N/5), and one compensation entry: mean key and mean value of the N tokens they drop, whose score
    log N is added to (eq. 3-5), so that it weighs as much as they did if they were alike.

    Departures: a group of query heads is a retrieval head when its best one is. Nothing is dropped while decoding, as
    in the authors' code. A prompt that the window covers is not compressed at all.
    """

    name = "razorattention"
    title = "RazorAttention"
    paper = "Tang et al., RazorAttention: Efficient KV Cache Compression Through Retrieval Heads, ICLR 2025"
    summary = "retrieval heads keep every token, the others first and newest ones and the mean of what they drop"
    family = "prompt_eviction"
    Parameters = RazorAttentionParameters
    presets = {  # noqa: RUF012
        "paper": {},
        "demo": {"least_window": 0, "shrink": True, "echo": 0.0, "induction": 0.08},
    }
    exact_without_budget = False
    floor_is_exact = False
    calibrations = (head_map(lambda params: params.calibrated, "set heads=none, which needs none"),)
    untrained = {"heads": "none"}  # noqa: RUF012
    params: RazorAttentionParameters

    @classmethod
    def window(cls, params: RazorAttentionParameters, prompt: PromptFacts, whole: int) -> int:
        """Newest prompt tokens that every head keeps, where `whole` KV heads keep all; the prompt when nothing is
        dropped."""
        n, shape = prompt.prompt_tokens, prompt.shape
        window = max(params.least_window, int(params.window_share * n))
        if params.shrink and prompt.budget_bytes is not None:
            heads = _spread(whole, shape)
            none = _layout(params, shape, heads, 0, n, prompt.max_new).bytes(shape)
            token = (shape.layers * shape.kv_heads - whole) * (shape.head_token_bytes + SLOT_TABLE_BYTES)
            window = min(window, max(1, (prompt.budget_bytes - none) // token)) if token else window
        return window if params.sinks + window < n else n

    @classmethod
    def floor_bytes(cls, params: RazorAttentionParameters, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        whole = 0
        if params.calibrated:
            whole = max(head_count(share, shape.layers * shape.kv_heads) for share in (params.echo, params.induction))
        window = 1 if params.shrink else max(params.least_window, int(params.window_share * prompt_tokens))
        window = window if params.sinks + window < prompt_tokens else prompt_tokens
        return _layout(params, shape, _spread(whole, shape), window, prompt_tokens, max_new).bytes(shape)

    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        import torch

        from kvlens.memory.placement import Kept, Placement

        context, p, shape, n = self.context, self.params, self.context.shape, self.context.prompt_tokens
        heads = self._retrieving()
        window = self.window(p, context, len(heads))
        if p.shrink:
            self.refuse_below(_layout(p, shape, heads, 1, n, context.max_new).bytes(shape))
        layout = _layout(p, shape, heads, window, n, context.max_new)
        self.refuse_below(layout.bytes(shape))
        until = layout.window_from
        sinks = min(p.sinks, until)
        spans = [Span(0, sinks, "sink", f"The first {sinks} tokens are kept by every head.")] if sinks else []
        device = prompt.keys.device
        if window >= n or until == sinks:
            kept_tokens = Kept.everywhere(torch.arange(until, device=device))
            return layout, Placement(spans, ["resident"] * len(spans), ["sink"] * len(spans), kept_tokens)
        every = torch.arange(until, device=device)
        kept_tokens = Kept.ragged(
            [
                [every if (layer, head) in heads else every[:sinks] for head in range(shape.kv_heads)]
                for layer in range(shape.layers if heads else 1)
            ],
            newest=True,
        )
        retrieve = f"kept by the {len(heads)} retrieval heads alone" if heads else "kept by no head"
        mean = [Span(sinks, sinks, "compensation", f"The mean of {until - sinks} tokens.")] if p.compensate else []
        pages = [
            Span(page.tok_start, page.tok_end, "page", f"Between first and newest tokens: {retrieve}.")
            for page in fixed_chunks(sinks, until, p.page, kind="page")
        ]
        middle_state = "resident" if len(heads) == shape.layers * shape.kv_heads else "partial" if heads else "evicted"
        states = ["resident"] * len(spans) + ["coarse"] * len(mean) + [middle_state] * len(pages)
        roles = ["sink"] * len(spans) + ["resident"] * (len(mean) + len(pages))
        placement = Placement([*spans, *mean, *pages], states, roles, kept_tokens)
        if p.compensate:
            counts = torch.full((shape.layers, shape.kv_heads, 1), until - sinks, device=device)
            for layer, head in heads:
                counts[layer, head] = 0
            placement.coarse, placement.coarse_counts = [len(spans)], counts
            placement.coarse_keys, placement.coarse_values = (
                tensor[:, :, sinks:until].mean(2, keepdim=True, dtype=torch.float32).to(tensor.dtype)
                for tensor in (prompt.keys, prompt.values)
            )
        return layout, placement

    def _retrieving(self) -> set[tuple[int, int]]:
        """(layer, KV head) that keep everything."""
        if not self.params.calibrated:
            return set()
        head_map: HeadMap = self.context.calibration["retrieval heads"]
        group = self.context.shape.group
        return {
            *head_map.best("echo", self.params.echo, group),
            *head_map.best("induction", self.params.induction, group),
        }


def _spread(count: int, shape: KVShape) -> set[tuple[int, int]]:
    """Any `count` KV heads of a model: which ones does not matter for bytes."""
    return {divmod(head, shape.kv_heads) for head in range(count)}


def _layout(
    p: RazorAttentionParameters, shape: KVShape, whole: set[tuple[int, int]], window: int, n: int, max_new: int
) -> Layout:
    """Of heads that keep `window` of n tokens besides the sinks, and of some that keep the `whole`."""
    until = max(n - window, 0)
    everything = Zones(until, 0, 0, n - until + max_new)
    ends = Zones(min(p.sinks, until), int(p.compensate and until > p.sinks), 0, n - until + max_new)
    zones = tuple(
        tuple(everything if (layer, head) in whole else ends for head in range(shape.kv_heads))
        for layer in range(shape.layers)
    )
    return Layout(
        tuple(heads if len(set(heads)) > 1 else heads[0] for heads in zones),
        -(-max(until - p.sinks, 0) // p.page) + 3,
        window_from=until,
        weighted=p.compensate,
    )
