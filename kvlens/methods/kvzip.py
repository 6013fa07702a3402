"""KVzip: what the model attends to when it repeats the context is what any question may need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlens.methods.families.prompt_eviction import PromptEviction, PromptEvictionParameters, Tokens
from kvlens.methods.hooks import Needs, SecondReading
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.methods.segmenter import RunSizes

if TYPE_CHECKING:
    import torch

OPENING, FOLLOWING = (
    "\n\nRepeat the previous context exactly.",
    "\n\nRepeat the part of the previous context exactly, starting with",
)
INSTRUCTION = 64
"""tokens of an instruction at most, with the end of a user's turn: an estimate for the model's longest text"""


@dataclass(frozen=True)
class KVzipParameters(PromptEvictionParameters):
    """Lengths are in tokens."""

    window: int = param(0, "last prompt tokens, kept without a comparison", ours=True)
    peek: bool = param(False, "count the token that step 0 feeds as the last of the prompt", ours=True)
    sinks: int = param(4, "first tokens: always kept (kvpress)", ours=True)
    chunk: int = param(2048, "tokens that are repeated at once (kvpress)", symbol="m", ours=True)
    lead: int = param(8, "last tokens of the chunk before, which the instruction for a later chunk names")
    share: str = param(
        "model",
        "KV heads of which one budget is shared: of the model, of a layer, or none (every KV head has as much)",
        choices=("model", "layer", "head"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks < 1 or self.lead < 0 or self.chunk < 1:
            raise ValueError("sinks and chunk must be at least 1 and lead at least 0.")

    @property
    def least(self) -> int:
        return self.window + self.sinks


class KVzip(PromptEviction):
    """Reads the prompt a second time: the model is told to repeat it, chunk by chunk over the full cache, and is fed
    the chunk itself. A token's score is the most attention that it receives then, over all tokens fed and over the
    query heads of its KV head; the softmax goes over the first tokens, the chunk and what repeats it (as in the
    authors' code). The best pairs of (KV head, token) of the whole model stay, so that KV heads keep unequally many.
    The question is not looked at where it is asked after the context.

    Departures: the whole prompt is repeated, the chat form's words and a question in it too; the instructions are in
    English whatever the text is. The end of a user's turn stands between instruction and chunk, as in the authors'
    code. Equal scores keep the earlier token. What the second reading costs is in the run's prefill and peak.
    """

    name = "kvzip"
    title = "KVzip"
    paper = "Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, NeurIPS 2025"
    summary = (
        "drops prompt tokens once, when prefill ends: the model repeats the prompt, and what it attends to then stays"
    )
    Parameters = KVzipParameters
    presets = {"paper": {}, "demo": {"chunk": 256}}  # noqa: RUF012
    needs = Needs(second=SecondReading(OPENING, FOLLOWING, 2048, 8, 4))
    journal_names = {"head_budget_tokens": "prompt tokens kept, window included, by KV head; per layer"}  # noqa: RUF012
    static_ready = False
    """a static step lays the KV heads of a layer out alike"""
    heads_alike = False
    partial_ranking = True
    params: KVzipParameters

    @classmethod
    def needs_with(cls, params: KVzipParameters) -> Needs:
        return Needs(second=SecondReading(OPENING, FOLLOWING, params.chunk, params.lead, params.sinks))

    @classmethod
    def reach(cls, params: KVzipParameters, run: RunSizes) -> int:
        repeated = min(params.chunk, run.prompt_tokens) + params.lead + INSTRUCTION
        return run.prompt_tokens + 1 + max(run.max_new, repeated)

    def score(self, prompt: Prefilled, layer: int, end: int) -> torch.Tensor:
        import torch

        assert prompt.repeated is not None
        scores = prompt.repeated[layer, :, :end].unflatten(0, (self.context.shape.kv_heads, -1)).amax(1)
        scores[:, : self.params.sinks] = torch.nan
        return scores

    def tokens(self, prompt: Prefilled | None, total: int) -> Tokens:
        import torch

        equal = super().tokens(prompt, total)
        p, shape, n = self.params, self.context.shape, self.context.prompt_tokens + self.last
        if prompt is None or p.share == "head" or total >= n * shape.layers:
            return equal
        window = max(min(p.window, n), self.last)
        end = n - window
        scores = torch.stack([self.score(prompt, layer, end) for layer in range(shape.layers)])
        groups = scores.flatten().unsqueeze(0) if p.share == "model" else scores.flatten(1)
        heads = shape.layers * shape.kv_heads // len(groups)
        counts = []
        for row, shared in zip(groups, [total] if p.share == "model" else [count for (count,) in equal], strict=True):
            most = (shared - window * heads // shape.kv_heads) * shape.kv_heads
            order = row.nan_to_num(nan=torch.inf).argsort(descending=True, stable=True)[:most]
            counts += (order // end).bincount(minlength=heads).tolist()
        rows = [
            [window + count for count in counts[start : start + shape.kv_heads]]
            for start in range(0, len(counts), shape.kv_heads)
        ]
        for layer, row in enumerate(rows):
            self.note("head_budget_tokens", torch.tensor(row, dtype=torch.float32), layer)
        return rows
