"""SeerAttention-R: a small trained gate foresees which blocks full attention would attend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.page_retrieval import PageRetrieval
from kvlens.methods.fitting import clamp
from kvlens.methods.modelfigures import Calibration, Content, shipped
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import MemoryView, Prefilled, RunContext, StepEnd
from kvlens.refusal import Refusal
from kvlens.shape import KVShape
from kvlens.text.units import counted

if TYPE_CHECKING:
    import torch

    from kvlens.memory.placement import Placement
    from kvlens.methods.hooks import WindowLeave
    from kvlens.tiers.layout import Layout

LONG = 8192
"""prompt tokens from which the preset `fit` has the paper's blocks"""


@dataclass(frozen=True)
class SeerParameters:
    """Lengths are in tokens."""

    page: int = param(64, "tokens of a block; a trained gate serves the size that it was trained for (sec. 4.1)")
    tokens: int = param(4096, "tokens attended per KV head, the open block included, in whole blocks (sec. 4.2)")
    keep: float = param(0.0, "share of the context attended, instead of `tokens`; 0: as `tokens` says", ours=True)
    threshold: float = param(
        0.0, "attend the blocks to which the gate gives a larger share than this, in place of a count; 0: by the count"
    )
    dense_layers: int = param(0, "first layers that attend everything; the paper has none", ours=True)
    gate: str = param(
        "trained",
        "trained: the weights of a file (the paper's method); drawn: random weights, as before any training (a control "
        "that needs no file)",
        choices=("trained", "drawn"),
        ours=True,
    )
    gate_file: str = param("", "safetensors of the trained gate; empty: the one shipped for the model", ours=True)

    def __post_init__(self) -> None:
        for name in ("page", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1.")
        if not 0 <= self.keep <= 1 or not 0 <= self.threshold < 1 or self.dense_layers < 0:
            raise ValueError(
                "keep must lie between 0 and 1, threshold be at least 0 and below 1, and dense_layers be at least 0."
            )

    @property
    def least_pages(self) -> int:
        """The open block, which is always attended."""
        return 1

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """An eighth of the prompt is attended, as 4,096 of 32K tokens are in the paper (sec. 4.2), four blocks at
        least. Blocks have 16 tokens up to a prompt of 8,192 (ours), the paper's 64 beyond."""
        page = 16 if prompt_tokens <= LONG else 64
        return {"page": page, "tokens": clamp((prompt_tokens + 1) / 8 // page * page, 4 * page, 4096)}

    def misfit(self, prompt_tokens: int) -> str | None:
        """Nothing would be left out."""
        if self.keep or self.threshold or self.tokens <= prompt_tokens:
            return None
        return f"it is {counted(prompt_tokens + 1, 'token')}, all attended, since up to {self.tokens:,} are"


def read_gate(content: Content, params: SeerParameters, shape: KVShape) -> Any:
    """Return the gate of a file. Raises Refusal where it was trained for a model of other sizes (`other_model`) or for
    other blocks (`other_block`)."""
    from kvlens.methods.seer.gate import gate_from

    gate = gate_from(content.figures, content.name, shape)
    page = int(content.provenance["page"])
    if page != params.page:
        raise Refusal(
            f"'{content.name}' was trained for blocks of {page} tokens, the parameter page is {params.page}: set "
            f"page={page}.",
            code="other_block",
            trained=page,
            page=params.page,
        )
    return gate


class SeerAttention(PageRetrieval):
    """Keeps every token on the device. Of each block of tokens it holds one gate key: the largest, smallest and mean
    numbers of the block's keys before their rotary embedding, projected (sec. 2.2). At every step the queries of a
    group give one gate query; its products with the gate keys choose the blocks that all query heads of the KV head
    attend, by a token budget or by a threshold (sec. 2.3). Gate queries and keys are turned by a rotary embedding of
    the gate. The gate learns from the model's own attention: the largest weight in each block and group, as shares.

    Departures: the gate is a quarter as wide as a head, and its rotary embedding has the base 10,000. A block is placed
    at its first token. The open block is attended and not ranked. The shipped gate
    of SmolLM2 learned from 47,104 tokens (5,888 queries); the paper's from 0.4 billion.
    """

    name = "seer"
    title = "SeerAttention-R"
    paper = "Gao et al., SeerAttention-R: Sparse Attention Adaptation for Long Reasoning, 2025 (arXiv 2506.08889)"
    summary = (
        "keeps every token on the device; a trained gate chooses, per KV head and step, the blocks that are attended"
    )
    Parameters = SeerParameters
    presets = {  # noqa: RUF012
        "paper": {},
        "demo": {"page": 16, "keep": 0.25},
        "smollm2": {"page": 16, "keep": 0.125},
    }
    calibrations = (
        Calibration(
            "trained gate",
            "gate_file",
            shipped(Path(__file__).parent, ".safetensors"),
            "kvlens train seer --model {model} TEXTS",
            "use gate=drawn, which is not trained",
            lambda params: params.gate == "trained",
            read_gate,
        ),
    )
    untrained = {"gate": "drawn"}  # noqa: RUF012
    stand_ins = {"gate": "untrained gate"}  # noqa: RUF012
    params: SeerParameters

    def __init__(self, params: SeerParameters, context: RunContext) -> None:
        super().__init__(params, context)
        self._rotary = context.rotary(self.name)

    @classmethod
    def summary_numbers(cls, head_dim: int) -> int:
        from kvlens.methods.seer.gate import gate_dim

        return gate_dim(head_dim)

    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        from kvlens.methods.seer.gate import gate_numbers

        return super().floor_bytes(params, shape, prompt_tokens, max_new) + gate_numbers(shape) * shape.itemsize + 8

    def count(self, context_tokens: int) -> int:
        return 0 if self.params.threshold else super().count(context_tokens)

    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        import torch

        from kvlens.methods.seer.gate import draw_gate

        context = self.context
        gate = context.calibration.get("trained gate")
        self._gate = (draw_gate(context.shape, context.seed) if gate is None else gate).to(
            context.device, context.dtype
        )
        self._position = torch.full((1,), context.prompt_tokens, dtype=torch.long, device=context.device)
        return super().prefill_end(prompt)

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        from kvlens.methods.seer.gate import pool_blocks

        return pool_blocks(keys)

    def summarise_from(self, keys: torch.Tensor, first_page: int) -> torch.Tensor:
        import torch

        from kvlens.methods.seer.gate import gate_keys

        page, start = self.params.page, first_page * self.params.page
        positions = torch.arange(start, start + keys.shape[2] * page, device=keys.device)
        plain = self._rotary(keys.flatten(2, 3), positions, back=True).unflatten(2, (-1, page))
        return gate_keys(self._gate.key.float(), self.summarise(plain), positions[::page])

    def rank(self, q: torch.Tensor, summary: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        from kvlens.methods.seer.gate import gate_scores

        return gate_scores(q, summary)

    def rank_in(self, layer: int, q: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        from kvlens.methods.seer.gate import gate_queries

        plain = self._rotary(q[:, :, None], self._position, layer, back=True)
        query = gate_queries(self._gate.query[layer].float(), plain, self._position)
        return self.rank(query, self._summary[layer].float(), present)

    def pool_group(self, score: torch.Tensor) -> torch.Tensor:
        return score

    def choose(self, score: torch.Tensor, room: int) -> torch.Tensor:
        return score.softmax(-1) > self.params.threshold if self.params.threshold else super().choose(score, room)

    def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
        self._position.fill_(end.position + 1)
        return super().decode_end(end, memory)

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        held = super().held()
        return held and {**held, "gate": (self._gate.query, self._gate.key, self._position)}
