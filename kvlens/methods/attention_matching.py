"""Attention Matching: few keys, with weights and values made so that attention over them gives what the prompt gave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.merged_entries import MergedEntries
from kvlens.methods.hooks import Needs, SecondReading
from kvlens.methods.kvzip import FOLLOWING, INSTRUCTION, OPENING
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.methods.segmenter import PromptFacts, RunSizes
from kvlens.shape import KVShape
from kvlens.spans import Span, fixed_chunks

if TYPE_CHECKING:
    import torch

ROUNDS = 300
"""steps of the projected gradient that fits the weights"""
RIDGE = 1e-3
"""of the mean of the diagonal, added to the diagonal of the values' normal equations"""
LIGHTEST, HEAVIEST = 1e-3, 1e4
"""tokens that an entry can stand for"""
CHUNK, LEAD, SINKS = 2048, 8, 4
"""of the second reading, as KVzip's"""
OBSERVED = 256
"""last prompt queries that a run keeps: the most references of reading=prompt"""


@dataclass(frozen=True)
class AttentionMatchingParameters:
    """Lengths are in tokens."""

    entries: int = param(0, "entries per KV head; 0: as many as the byte budget holds", symbol="t")
    sinks: int = param(4, "first tokens, kept as they are", ours=True)
    window: int = param(16, "last prompt tokens, kept as they are", ours=True)
    references: int = param(256, "queries of every query head that the entries are fitted to", ours=True)
    reading: str = param(
        "repeat",
        "where these come from: a second reading, in which the model repeats the prompt, or the prompt's last queries",
        choices=("repeat", "prompt"),
        ours=True,
    )
    fitted: str = param(
        "both",
        "what is fitted of the chosen tokens: their weights and values, weights alone, or nothing (an eviction)",
        choices=("both", "weights", "nothing"),
        ours=True,
    )
    page: int = param(16, "tokens per page: pages are the spans that masses are logged for", ours=True)

    def __post_init__(self) -> None:
        if min(self.entries, self.sinks, self.window) < 0 or self.page < 1 or self.references < 1:
            raise ValueError("entries, sinks and window must be at least 0, references and page at least 1.")
        if self.reading == "prompt" and self.references > OBSERVED:
            raise ValueError(f"references must be at most {OBSERVED} where reading is prompt.")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """The window is a tenth of the tokens that the budget holds, 16 at most, and the sinks a quarter of the window,
        4 at most (ours)."""
        share = 1.0 if budget_bytes is None else budget_bytes / shape.full_kv_bytes(prompt_tokens + 1 + max_new)
        window = max(1, min(16, int(share * prompt_tokens / 10)))
        return {"entries": 0, "window": window, "sinks": min(4, window // 4)}


class AttentionMatching(MergedEntries):
    """When prefill ends, each KV head keeps the keys of the tokens with the largest attention (root mean square over
    reference queries). Each gets a weight, by nonnegative least squares, so that the entries have the attention mass
    that all tokens had for every reference query; and a new value, by least squares, so that they give the output that
    all tokens gave (paper: highest-attention keys, then beta, then values). The reference queries are those with which
    the model repeats the prompt. Sinks and window stay as they are and are no part of the fit.

    Departures: reference queries of all layers come from one reading of the full cache; the paper makes them layer by
    layer over compact ones. A ridge keeps values near those of the chosen tokens where there are fewer queries than
    entries. Every KV head has equally many entries; the paper gives heads budgets of their own. The orthogonal matching
    pursuit that can choose the keys is left out.
    """

    name = "attention_matching"
    title = "Attention Matching"
    paper = "Zweiger et al., Fast KV Compaction via Attention Matching, 2026"
    summary = (
        "replaces prompt tokens, when prefill ends, by few entries whose weights and values are fitted so that "
        "attention gives what it gave over all of them"
    )
    Parameters = AttentionMatchingParameters
    presets = {"paper": {}, "demo": {"references": 64}}  # noqa: RUF012
    needs = Needs(queries=OBSERVED, second=SecondReading(OPENING, FOLLOWING, CHUNK, LEAD, SINKS, 256))
    journal_names = {  # noqa: RUF012
        "mass_error": "relative error of the entries' attention mass, root mean square over queries, by KV head",
        "output_error": "the same of their output, against the output's own size",
    }
    params: AttentionMatchingParameters

    @classmethod
    def needs_with(cls, params: AttentionMatchingParameters) -> Needs:
        if params.reading == "prompt":
            return Needs(queries=params.references)
        return Needs(second=SecondReading(OPENING, FOLLOWING, CHUNK, LEAD, SINKS, params.references))

    @classmethod
    def reach(cls, params: AttentionMatchingParameters, run: RunSizes) -> int:
        repeated = min(CHUNK, run.prompt_tokens) + LEAD + INSTRUCTION if params.reading == "repeat" else 0
        return run.prompt_tokens + 1 + max(run.max_new, repeated)

    @classmethod
    def span_room(cls, params: AttentionMatchingParameters, prompt_tokens: int, entries: int) -> int:
        return -(-prompt_tokens // params.page)

    @classmethod
    def cut(
        cls, params: AttentionMatchingParameters, prompt: PromptFacts, start: int, end: int, entries: int
    ) -> list[Span]:
        return [
            Span(page.tok_start, page.tok_end, "chunk", page.reason)
            for page in fixed_chunks(start, end, params.page, kind="page")
        ]

    def merge(
        self, prompt: Prefilled, layer: int, chunks: list[Span], entries: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        import torch

        start, end = chunks[0].tok_start, chunks[-1].tok_end
        queries = prompt.last_queries if prompt.repeated_queries is None else prompt.repeated_queries
        grouped = queries[layer].unflatten(0, (self.context.shape.kv_heads, -1)).flatten(1, 2).double()
        parts, errors = [], []
        for head, references in enumerate(grouped):
            keys, values = (tensor[layer, head, start:end].double() for tensor in (prompt.keys, prompt.values))
            place, weights, fitted, error = compacted(references, keys, values, entries, self.params.fitted)
            parts.append((keys[place], fitted, weights, place))
            errors.append(error)
        keys, values, weights, places = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
        for name, column in zip(("mass_error", "output_error"), zip(*errors, strict=True), strict=True):
            self.note(name, torch.stack(column).float(), layer)
        dtype = prompt.keys.dtype
        return keys.to(dtype), values.to(dtype), weights.float(), places // self.params.page


def compacted(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, entries: int, fitted: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return the chosen tokens int64 [E], ascending, their weights [E] and values [E, D], and the errors of mass and
    output. queries [m, D], keys and values [n, D], all float64; fitted: as the parameter has it."""
    import torch

    logits = queries @ keys.mT * keys.shape[-1] ** -0.5
    attention = logits.softmax(-1)
    place = attention.square().mean(0).argsort(descending=True, stable=True)[:entries].sort().values
    # both sides of the mass are divided by the mass itself, so that every query counts alike
    shares = attention[:, place]
    weights = shares.new_ones(len(place))
    if fitted != "nothing":
        weights = nonnegative(shares, shares.new_ones(len(shares)))
    compact = shares * weights
    mass = compact.sum(-1, keepdim=True).clamp(min=1e-30)
    compact, output = compact / mass, attention @ values
    chosen_values = values[place]
    if fitted == "both":
        square = compact.mT @ compact
        ridge = RIDGE * square.diagonal().mean() + 1e-12
        square = square + ridge * torch.eye(len(place), dtype=square.dtype, device=square.device)
        chosen_values = chosen_values + torch.linalg.solve(square, compact.mT @ (output - compact @ chosen_values))
    missing = (compact @ chosen_values - output).square().sum().sqrt() / output.square().sum().sqrt().clamp(min=1e-30)
    return place, weights, chosen_values, ((mass[:, 0] - 1).square().mean().sqrt(), missing)


def nonnegative(rows: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return weights [E] between LIGHTEST and HEAVIEST that make rows [m, E] @ weights come nearest to target [m], by
    projected gradient with momentum."""
    import torch

    square, product = rows.mT @ rows, rows.mT @ target
    smaller = square if len(square) <= len(rows) else rows @ rows.mT  # both have the same largest eigenvalue
    step = 1 / torch.linalg.eigvalsh(smaller)[-1].clamp(min=1e-30)
    weights = ahead = torch.ones_like(product)
    pace = 1.0
    for _ in range(ROUNDS):
        following = (ahead - step * (square @ ahead - product)).clamp(LIGHTEST, HEAVIEST)
        faster = (1 + (1 + 4 * pace * pace) ** 0.5) / 2
        ahead = following + (pace - 1) / faster * (following - weights)
        weights, pace = following, faster
    return weights
