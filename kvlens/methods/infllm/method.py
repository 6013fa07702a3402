"""InfLLM: blocks in host memory, found by the few tokens of each that received most attention, seen from afar."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.cold_pages import best
from kvlens.methods.families.cold_plan import ColdPagesParameters, Plan
from kvlens.methods.families.host_pages import HostPageRetrieval
from kvlens.methods.fitting import tokens_within
from kvlens.methods.hooks import Needs, WindowLeave
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import MemoryView, Prefilled, RunContext, StepEnd
from kvlens.shape import KVShape
from kvlens.tiers.layout import Layout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class InfLLMParameters(ColdPagesParameters):
    """Lengths are in tokens."""

    tokens: int = param(
        0,
        "tokens per KV head on the device: first, newest and cached blocks (8,320 in the authors' settings); 0: as "
        "many blocks as the byte budget holds",
    )
    sinks: int = param(128, "first tokens always attended")
    window: int = param(4096, "newest tokens always attended", symbol="l_L")
    page: int = param(128, "tokens per block", symbol="l_bs")
    window_rule: str = param(
        "at_least",
        "the oldest block leaves so that the window holds W tokens on average (W + p/2 at most), at least W, or at "
        "most W",
        choices=("average", "at_least", "at_most"),
    )
    representatives: int = param(4, "tokens of a block whose mean key stands for it", symbol="r_k")
    share: float = param(0.5, "share of the blocks on the device that a step attends (16 of 32 in the paper)")
    positions: str = param(
        "far",
        "where tokens farther than the window are seen: all at the window's length (as published), or where they are",
        choices=("far", "true"),
    )
    group: str = param(
        "native",
        "representatives of each query head, as published, or the same ones for a KV head: those with most attention "
        "over its group",
        choices=("native", "sum"),
        ours=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.representatives <= self.page or not 0 < self.share <= 1 or self.window < 1:
            raise ValueError(
                "representatives must lie between 1 and page, share above 0 and at most at 1; window is at least 1."
            )

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """One in 32 tokens of a block represents it, as in the paper. Ours, since it bounds no bytes: blocks are the
        largest of 128 (the paper's), 64, 32 and 16 tokens of which four find room, else those of which most do; of what
        their representatives leave, a quarter is the window and a 32nd the first tokens (in the paper first
        tokens are a 32nd of the window); all blocks on the device are attended."""
        room, whole = tokens_within(shape, budget_bytes, prompt_tokens + max_new), prompt_tokens + max_new

        def beside(page: int) -> float:
            """Room beside representatives, the block that is filled and the one that leaves."""
            return room - whole / page * (shape.group / 2 + 1) - 2 * page

        page = max((128, 64, 32, 16), key=lambda p: min(4, int(beside(p) * 0.7 // p)))
        spare_bytes = max(0.0, beside(page))
        return {
            "tokens": 0,
            "sinks": max(4, int(spare_bytes / 32)),
            "window": max(4, int(spare_bytes / 4)),
            "page": page,
            "representatives": max(1, page // 32),
            "share": 1.0,
        }


class InfLLM(HostPageRetrieval):
    """First and newest tokens stay; blocks between them lie in host memory, with a vector per query head on the device:
    the mean key, without its position, of the block's tokens that received most attention. At every step one choice for
    a whole layer: blocks with the largest sum over query heads of q . vector, q turned as if the block began the window
    (sec. 3.2). As many blocks again as are attended stay on the device, the least lately used gives way. Tokens farther
    than the window are attended as if they lay exactly a window away, all of them at one distance (sec. 3.1).

    Departures: the prompt itself is read under full attention; the attention a prompt token received is that of all
    later queries, not of a window of them; what a decoded token received is counted until its block leaves.
    """

    name = "infllm"
    title = "InfLLM"
    paper = (
        "Xiao et al., InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient Context Memory, "
        "NeurIPS 2024"
    )
    summary = (
        "keeps first and newest tokens and the mean key of each block's most attended tokens on the device; recalls, "
        "for all heads of a layer alike, the blocks whose keys the queries are nearest to"
    )
    Parameters = InfLLMParameters
    presets = {  # noqa: RUF012
        "paper": {"tokens": 128 + 4096 + 32 * 128},
        "demo": {"sinks": 4, "window": 32, "page": 16, "representatives": 1, "share": 1.0, "group": "sum"},
    }
    needs = Needs(received=True, weights=True)
    params: InfLLMParameters

    def __init__(self, params: InfLLMParameters, context: RunContext) -> None:
        super().__init__(params, context)
        self._turn, self._position = context.rotary(self.name), context.prompt_tokens

    @classmethod
    def turns_keys(cls, params: InfLLMParameters) -> bool:
        return params.positions == "far"

    @classmethod
    def _layout(cls, params: Any, shape: KVShape, plan: Plan) -> Layout:
        return replace(super()._layout(params, shape, plan), farthest=params.window if params.positions == "far" else 0)

    # ------------------------------------------------------------------------------------------------- representatives
    @classmethod
    def summary_numbers(cls, head_dim: int) -> int:
        return head_dim

    @classmethod
    def numbers(cls, params: Any, shape: KVShape) -> int:
        return readers(params, shape) * shape.head_dim

    @classmethod
    def own_bytes(cls, params: Any, shape: KVShape, plan: Plan) -> int:
        return shape.kv_heads * readers(params, shape) * params.ring * 4

    def allocate(self, plan: Plan, prompt: Prefilled) -> None:
        import torch

        super().allocate(plan, prompt)
        assert prompt.received is not None
        sums = prompt.received[self.params.dense_layers :].unflatten(1, (self.context.shape.kv_heads, -1))
        sums = sums if self.params.group == "native" else sums.sum(2, keepdim=True)
        self._prompt: torch.Tensor | None = sums[..., plan.sinks : plan.window_from]
        self._received = torch.zeros(*sums.shape[:3], self.params.ring, device=sums.device)
        self._window = plan.window_from
        newest = torch.arange(plan.window_from, plan.prompt_tokens, device=sums.device)
        self._received[..., newest % self.params.ring] = sums[..., plan.window_from :]

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        held = super().held()
        return held and {**held, "received": (self._received,)}

    def attended(self, layer: int, heads: range, weights: torch.Tensor, position: torch.Tensor) -> None:
        sparse_layer = layer - self.params.dense_layers
        if self._plan is None or sparse_layer < 0:
            return
        block_weights = weights.masked_fill((position < self._window)[:, None], 0.0)
        block_weights = block_weights if self.params.group == "native" else block_weights.sum(1, keepdim=True)
        where = (position.long().clamp(min=0) % self.params.ring)[:, None].expand_as(block_weights)
        self._received[sparse_layer].scatter_add_(2, where, block_weights)

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        import torch

        assert self._plan is not None
        p, count = self.params, keys.shape[2] * self.params.page
        start = self._plan.sinks + self._pages * p.page
        positions = torch.arange(start, start + count, device=keys.device)
        sums, self._prompt = self._prompt, None
        if sums is None:
            sums = self._received[..., positions % p.ring]
            self._received[..., positions % p.ring] = 0.0
            self._window = start + count
        flat = keys.flatten(2, 3)
        plain = torch.stack(
            [self._turn(k, positions, sparse_layer + p.dense_layers, back=True) for sparse_layer, k in enumerate(flat)]
        )
        paged = sums.unflatten(3, (-1, p.page))
        mean_weights = torch.zeros_like(paged).scatter(
            4, paged.topk(p.representatives, -1).indices, 1 / p.representatives
        )
        means = torch.einsum("lhrpm,lhpmd->lhprd", mean_weights, plain.unflatten(2, (-1, p.page)))
        return means.flatten(3)

    # ------------------------------------------------------------------------------------------------------ decoding
    def scores(self, at: int, q: torch.Tensor) -> torch.Tensor:
        import torch

        layer, here = at + self.params.dense_layers, torch.tensor([self._position], device=q.device)
        plain = self._turn(q[:, None], here, layer, back=True)
        return super().scores(at, self._turn(plain, torch.full_like(here, self.params.window), layer)[:, 0])

    def rank(self, q: torch.Tensor, summary: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        import torch

        vectors = summary.unflatten(-1, (-1, q.shape[-1])).expand(-1, -1, q.shape[1], -1)
        score = torch.einsum("hpgd,hgd->hgp", vectors, q).mean((0, 1))
        return score.expand(q.shape[0], 1, -1)

    def wished(self, at: int, score: torch.Tensor) -> torch.Tensor:
        assert self._plan is not None
        return best(score, max(1, int(self.params.share * self._plan.recall)), self._plan.first_id)

    def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
        self._position = end.position + 1
        return super().decode_end(end, memory)


def readers(params: Any, shape: KVShape) -> int:
    """Query heads per KV head that have representatives of their own."""
    return shape.group if params.group == "native" else 1
