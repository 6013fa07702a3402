"""DuoAttention: heads that retrieve keep every token, heads that stream the first and the newest ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.bag import Bag
from kvlens.methods.fitting import clamp
from kvlens.methods.hooks import BagChange
from kvlens.methods.modelfigures import Calibration, Content, shipped
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import MemoryView, Prefilled, RunContext, StepEnd
from kvlens.shape import KVShape
from kvlens.tiers.layout import SLOT_TABLE_BYTES, Layout, Zones

if TYPE_CHECKING:
    import torch

    from kvlens.memory.placement import Placement

SHIPPED = shipped(Path(__file__).parent)
Head = tuple[int, int]
"""layer, KV head"""


@dataclass(frozen=True)
class DuoAttentionParameters:
    """Lengths are in tokens. Defaults are those of the paper's deployed models with grouped queries."""

    sparsity: float = param(0.5, "share of all KV heads that stream: those with the smallest gates")
    sinks: int = param(64, "first tokens, kept by every head")
    recent: int = param(256, "newest tokens that a streaming head keeps, the step's own included")
    gates: str = param(
        "calibrated",
        "who streams: the heads of the smallest gates of the calibration, or all of them (needs no calibration)",
        choices=("calibrated", "none"),
        ours=True,
    )
    calibration: str = param(
        "", "file made by `kvlens calibrate duoattention`; empty: the one shipped for the model", ours=True
    )
    page: int = param(16, "tokens per page: pages are the spans that masses and evictions are logged for", ours=True)

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity <= 1:
            raise ValueError("sparsity must lie between 0 and 1.")
        if self.sinks < 0 or self.recent < 2 or self.page < 1:
            raise ValueError("sinks must be at least 0, recent at least 2 and page at least 1.")

    def whole(self, shape: KVShape) -> int:
        """KV heads of the model that keep everything."""
        return round((1 - self.sparsity) * shape.layers * shape.kv_heads) if self.gates == "calibrated" else 0

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """Half of the heads retrieve as in the paper, or as many as take at most seven tenths of the budget. Streaming
        heads divide what is left, a fifth of it first tokens, as 64 beside 256, the paper's numbers at most (ours: its
        prompts are longer and its budgets follow from the heads)."""
        heads, tokens = shape.layers * shape.kv_heads, prompt_tokens + max_new
        share = 1.0 if budget_bytes is None else budget_bytes / shape.full_kv_bytes(tokens + 1)
        whole = min(heads // 2, int(0.7 * share * heads))
        sparsity = 1 - whole / heads
        if budget_bytes is None:
            return {"sparsity": sparsity}
        least = cls(sparsity, 0, 2)
        remaining_bytes = (
            budget_bytes - heads - layout(least, shape, spread(whole, shape), prompt_tokens, max_new).bytes(shape)
        )
        room = 2 + remaining_bytes // ((heads - whole) * (shape.head_token_bytes + SLOT_TABLE_BYTES))
        return {"sparsity": sparsity, "sinks": clamp(room / 5, 1, 64), "recent": clamp(room - room // 5, 2, 256)}


def gates_of(found: Content, params: Any, shape: KVShape) -> list[list[float]]:
    """The gates of a calibration. Raises ValueError with one sentence where one is missing."""
    gates = [[float(gate) for gate in layer] for layer in found.figures["gates"]]
    if [len(layer) for layer in gates] != [shape.kv_heads] * shape.layers:
        raise ValueError(f"'{found.name}' does not have a gate for every KV head of every layer.")
    return gates


class DuoAttention(Bag):
    """KV heads whose gate is among the largest 1 - sparsity of the model keep every token; the others the first `sinks`
    and the newest `recent` tokens, and drop the oldest of these for every one that comes (paper sec. 2.3). Gates are
    learned once per model: outputs of full and streaming attention are mixed by them, the last hidden state on what is
    recited is to stay as it was, and the sum of all gates is to be small (sec. 2.2; `kvlens calibrate duoattention`).

    Departures: prefill attends exactly; the paper's streaming heads do not see the middle of a long prompt even then.
    Gates of equal size are ranked by layer and head, where the authors add noise. Lengths in training are scaled to the
    machine, and stored with the gates.
    """

    name = "duoattention"
    title = "DuoAttention"
    paper = (
        "Xiao et al., DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads, ICLR 2025"
    )
    summary = (
        "retrieval heads keep every token, streaming heads the first and newest ones, by gates trained for the model"
    )
    Parameters = DuoAttentionParameters
    presets = {"paper": {}, "demo": {"sparsity": 0.9, "sinks": 4, "recent": 60}}  # noqa: RUF012
    exact_without_budget = False
    calibrations = (
        Calibration(
            "gates",
            "calibration",
            SHIPPED,
            "kvlens calibrate duoattention --model {model} --out FILE",
            "set gates=none, with which all heads stream",
            lambda params: params.gates == "calibrated",
            gates_of,
        ),
    )
    untrained = {"gates": "none"}  # noqa: RUF012
    stand_ins = {"gates": "untrained gates"}  # noqa: RUF012
    params: DuoAttentionParameters

    def __init__(self, params: DuoAttentionParameters, context: RunContext) -> None:
        super().__init__(params, context)
        self.whole = self._retrieving()

    def _retrieving(self) -> set[Head]:
        """(layer, KV head) that keep everything."""
        if self.params.gates != "calibrated":
            return set()
        rows: list[list[float]] = self.context.calibration["gates"]
        ranked = sorted((-gate, layer, head) for layer, row in enumerate(rows) for head, gate in enumerate(row))
        return {(layer, head) for _, layer, head in ranked[: self.params.whole(self.context.shape)]}

    @classmethod
    def floor_bytes(cls, params: DuoAttentionParameters, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        divided = layout(params, shape, spread(params.whole(shape), shape), prompt_tokens, max_new)
        return divided.bytes(shape) + shape.layers * shape.kv_heads

    # ------------------------------------------------------------------------------------------------------- the prompt
    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        import torch

        from kvlens.memory.placement import Kept

        context, p, shape, n = self.context, self.params, self.context.shape, self.context.prompt_tokens
        self.refuse_below(self.floor_bytes(p, shape, n, context.max_new))
        divided = layout(p, shape, self.whole, n, context.max_new)
        self._named, device = n, prompt.keys.device
        heads = torch.zeros(shape.layers, shape.kv_heads, 1, dtype=torch.bool, device=device)
        for layer, head in self.whole:
            heads[layer, head] = True
        self._streams = ~heads[..., 0]
        every = torch.arange(n, device=device)
        newest = n - (p.recent - 1)  # one place is free for the token that step 0 feeds
        mask = heads | (every < p.sinks) | (every >= newest)
        return divided, self._place(mask, replace(Kept.masked(mask), newest=True))

    # --------------------------------------------------------------------------------------------------------- decoding
    def decode_end(self, end: StepEnd, memory: MemoryView) -> BagChange | None:
        import torch

        from kvlens.memory.placement import Eviction

        p, n, coming = self.params, self.context.prompt_tokens, end.position + 1
        evicted = None
        if coming >= p.sinks + p.recent and bool(self._streams.any()):
            # a ring behind the sinks, which the prompt's newest tokens began to fill
            place = p.sinks + (coming - max(n - p.recent + 1, p.sinks)) % p.recent
            evicted = Eviction(torch.where(self._streams, place, -1), p.recent)
        return BagChange(evicted, self._open(end.position))

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        return {"streaming heads": (self._streams,)} if hasattr(self, "_streams") else {}


def spread(count: int, shape: KVShape) -> set[Head]:
    """Any `count` KV heads of a model: which ones does not matter for bytes."""
    return {divmod(head, shape.kv_heads) for head in range(count)}


def layout(p: DuoAttentionParameters, shape: KVShape, whole: set[Head], n: int, max_new: int) -> Layout:
    """Bags of two sizes."""
    everything = n + max_new
    near = min(p.sinks + p.recent, everything)
    zones = tuple(
        tuple(Zones(0, 0, 0, everything if (layer, head) in whole else near) for head in range(shape.kv_heads))
        for layer in range(shape.layers)
    )
    return Layout(
        tuple(heads if len(set(heads)) > 1 else heads[0] for heads in zones),
        -(-everything // p.page) + 3,
        window_from=n,
        bag=True,
    )
