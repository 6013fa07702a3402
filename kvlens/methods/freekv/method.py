"""FreeKV: pages in host memory, recalled one step ahead by the last query, corrected where the query has turned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlens.methods.families.cold_plan import Plan
from kvlens.methods.families.host_pages import HostPageRetrieval
from kvlens.methods.freekv.params import PRESETS, FreeKVParameters
from kvlens.methods.hooks import WindowLeave
from kvlens.methods.run_inputs import MemoryView, Prefilled, RunContext, StepEnd
from kvlens.methods.segmenter import Segmenter
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch

    from kvlens.memory.placement import Selection

INDEX_BYTES = 8
"""one entry of the table of selected pages, int64"""


class FreeKV(HostPageRetrieval):
    """Speculative retrieval (sec. 3.2): at step i a KV head attends sinks, window and the pages it selected with the
    query of step i - 1, which were recalled behind that step's back; with its own query it selects for step i + 1.
    Fine-grained correction (sec. 3.3): a KV head whose queries turned since the last step selects and recalls before
    its attention instead. The first decode step has nothing to speculate on and blocks for all heads.

    On the device slots lie as [token, KV head, D], and recalled pages come through two buffers (sec. 4.2). Pages that
    leave the window between two steps are candidates from the next selection on. Departures: docs/evidence/freekv.md.
    """

    name = "freekv"
    title = "FreeKV"
    paper = "Liu et al., FreeKV: Boosting KV Cache Retrieval for Efficient LLM Inference"
    summary = (
        "keeps sinks, window and min-max summaries of all pages on the device, recalls the pages the last "
        "step's query asks for in "
        "the background, and waits only for heads whose query has changed"
    )
    segmenters = (Segmenter("pages (FreeKV)", ("page", "sinks", "window")),)
    Parameters = FreeKVParameters
    presets = PRESETS
    static_ready = True
    streamed = token_major = True
    ranks_stored = True
    params: FreeKVParameters

    def __init__(self, params: FreeKVParameters, context: RunContext) -> None:
        super().__init__(params, context)
        self._speculates = False
        """a step has ended, so there is a last query and a last selection"""

    # --------------------------------------------------------------------------------------------- summaries and ranks
    @classmethod
    def summary_numbers(cls, head_dim: int) -> int:
        return 2 * head_dim

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        from kvlens.methods.freekv.score import summarise

        return summarise(keys)

    def rank(self, q: torch.Tensor, summary: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        from kvlens.methods.freekv.score import page_scores

        scale = q.shape[-1] ** -0.5 if self.params.score_scale == "sqrt_d" else 1.0
        return page_scores(q, summary, pages, self.params.pooling, scale)[:, None]

    def shown(self, score: torch.Tensor) -> torch.Tensor:
        from kvlens.methods.freekv.score import published

        return published(score, self.params.pooling)

    # ---------------------------------------------------------------------------------------------- of the last step
    @classmethod
    def own_bytes(cls, params: Any, shape: KVShape, plan: Plan) -> int:
        return shape.q_heads * shape.head_dim * shape.itemsize + shape.kv_heads * plan.recall * INDEX_BYTES

    def allocate(self, plan: Plan, prompt: Prefilled) -> None:
        import torch

        super().allocate(plan, prompt)
        shape, dtype, device = self.context.shape, self.context.dtype, self.context.device
        layers = shape.layers - self.params.dense_layers
        self._queries = torch.zeros(layers, shape.q_heads, shape.head_dim, dtype=dtype, device=device)
        self._selected = torch.full((layers, shape.kv_heads, plan.recall), -1, dtype=torch.long, device=device)

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        held = super().held()
        return held and {**held, "last_queries": (self._queries,), "last_selection": (self._selected,)}

    # ------------------------------------------------------------------------------------------------------ decoding
    def chosen(self, at: int, q: torch.Tensor, wishes: torch.Tensor, score: torch.Tensor | None) -> Selection:
        from kvlens.kernels.turned_reads import turned_reads
        from kvlens.memory.placement import Gate, Selection

        params, shape, plan = self.params, self.context.shape, self._plan
        assert plan is not None
        now, gate, heads, kv_heads = None, None, {}, {}
        if self._speculates:
            tables = self._queries[at], self._selected[at]
            spans = plan.first_id + plan.pages
            alike, now, read = turned_reads(q, wishes, *tables, spans, params.tau, params.correction_pooling)
            fine, gate = read[:, None].expand(-1, shape.group, -1), Gate(alike, params.tau)
            if self.keeps_journal:
                heads, kv_heads = {"corrected": now.float().repeat_interleave(shape.group)}, {"similarity": alike}
        else:
            fine = self.reads(wishes)
            self._queries[at].copy_(q)
            self._selected[at].copy_(wishes)
        return Selection(
            fine,
            wishes,
            now=now,
            cause="recall" if now is None else "correction",
            fits=True,
            reuse=params.recall == "misses",
            score=score,
            gate=gate,
            head_columns=heads,
            kv_columns=kv_heads,
        )

    def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
        self._speculates = True
        return super().decode_end(end, memory)
