"""HeadKV: KV heads that look back to what they read keep more, over the whole model."""

from __future__ import annotations

from dataclasses import dataclass

from kvlens.methods.families.prompt_eviction import Tokens
from kvlens.methods.families.retrieval_heads import HeadMap, head_map
from kvlens.methods.families.token_shares import allocate
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.methods.snapkv import SnapKV, SnapKVParameters


@dataclass(frozen=True)
class HeadKVParameters(SnapKVParameters):
    """Lengths are in tokens. Defaults are those of the authors' run scripts."""

    window: int = param(8, "last prompt tokens: their queries rank the others; kept themselves", symbol="alpha")
    beta: float = param(
        1.2,
        "the shared pool is 1/beta of the budget besides the window; what is left is divided equally",
        symbol="beta",
        ours=True,
    )
    heads: str = param(
        "calibrated",
        "how the pool is shared: by the scores of the calibration, or alike (needs no calibration)",
        choices=("calibrated", "alike"),
        ours=True,
    )
    score: str = param(
        "induction",
        "which scores: induction, on drawn text, or needle, as the paper has it without its reasoning: on the answer "
        "of needle prompts while it is copied",
        choices=("induction", "needle"),
        ours=True,
    )
    agree: str = param(
        "max", "how a KV head's query heads make one score", choices=("max", "mean"), symbol="", ours=True
    )
    calibration: str = param(
        "", "file made by `kvlens calibrate heads`; empty: the one shipped for the model", ours=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1:
            raise ValueError("beta must be at least 1.")

    @property
    def calibrated(self) -> bool:
        """A calibration file is used."""
        return self.heads == "calibrated"


class HeadKV(SnapKV):
    """Ranks tokens as SnapKV; divides the budget over all KV heads of the model by how much each of them retrieves: C -
    C / beta tokens each, and of the pool that the shares C / beta make, as much as its score is of the sum of scores
    (paper sec. 3.2, eq. 3). No head keeps more than there is; what it cannot take goes to the others.

    Departures: scores are the induction scores of `kvlens calibrate heads` (attention to what came after an earlier
    copy of a token, on drawn text), or its needle scores (`score`), where the paper counts needle runs with retrieval
    and reasoning. One set per KV head, by the best or the mean of its query heads (`agree`); the paper stores one per
    query head.
    """

    name = "headkv"
    title = "HeadKV"
    paper = "Fu et al., Not All Heads Matter: A Head-Level KV Cache Compression Method, ICLR 2025"
    summary = "drops prompt tokens once, when prefill ends: KV heads that retrieve keep more of them than others do"
    calibrations = (
        head_map(
            lambda params: params.calibrated,
            "set heads=alike, which needs none",
            needle=lambda params: params.score == "needle",
        ),
    )
    untrained = {"heads": "alike"}  # noqa: RUF012
    Parameters = HeadKVParameters
    presets = {"paper": {}}  # noqa: RUF012
    journal_names = {"head_budget_tokens": "prompt tokens kept, window included, by KV head; per layer"}  # noqa: RUF012
    static_ready = False
    """a static step lays the KV heads of a layer out alike"""
    heads_alike = False
    params: HeadKVParameters

    def tokens(self, prompt: Prefilled | None, total: int) -> Tokens:
        import torch

        p, shape = self.params, self.context.shape
        equal = super().tokens(prompt, total)
        n = self.context.prompt_tokens + self.last
        if total >= n * shape.layers or not p.calibrated:
            return equal
        window, heads = min(p.window, n), shape.kv_heads
        each = total / shape.layers - window
        floor = window + int(each - each / p.beta)
        counts = allocate(self._scores(), total * heads, floor, n)
        layer_counts = [counts[layer * heads : (layer + 1) * heads] for layer in range(shape.layers)]
        for layer, row in enumerate(layer_counts):
            self.note("head_budget_tokens", torch.tensor(row, dtype=torch.float32), layer)
        return layer_counts

    def _scores(self) -> list[float]:
        """Of every KV head of the model, layer by layer."""
        head_map: HeadMap = self.context.calibration["retrieval heads"]
        group = self.context.shape.group
        rows: list[list[float]] = getattr(head_map, self.params.score)
        groups = [row[start : start + group] for row in rows for start in range(0, len(row), group)]
        return [max(scores) if self.params.agree == "max" else sum(scores) / group for scores in groups]
