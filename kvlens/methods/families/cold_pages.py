"""Sinks and newest tokens on the device, all others in the cold tier, page by page, with an index of them on the
device.

What retrieves pages and what retrieves tokens share this: how the prompt is placed, which pages leave the window, what
fits a budget. Shapes: L layers, l of them not dense, H_kv KV heads, D head size, P pages there is room for, p tokens a
page.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from kvlens.methods.base import Method
from kvlens.methods.families.cold_plan import Plan, smallest_plan, whole_layout
from kvlens.methods.hooks import WindowLeave
from kvlens.methods.run_inputs import MemoryView, Prefilled, RunContext, StepEnd
from kvlens.methods.segmenter import PromptFacts
from kvlens.shape import KVShape
from kvlens.spans import Span, fixed_chunks
from kvlens.tiers.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvlens.memory.placement import Placement

COUNT_BYTES = 8
"""the number of pages in the index, int64"""


class ColdPages(Method):
    """`params` is a ColdPagesParameters, or has its fields."""

    streamed: ClassVar[bool] = False
    """recalled pages come through two staging buffers"""
    token_major: ClassVar[bool] = False
    """slots lie in memory as [token, KV head, D]"""
    params: Any

    def __init__(self, params: Any, context: RunContext) -> None:
        super().__init__(params, context)
        self._plan: Plan | None = None
        """None: all tokens stay on the device"""
        self._pages = 0
        """pages that have left the window and are in the index; `_filled` is the same number on the device"""

    @classmethod
    def unit(cls, params: Any) -> int:
        """Tokens that are recalled together."""
        return int(params.page)

    @classmethod
    @abstractmethod
    def index_bytes(cls, params: Any, shape: KVShape) -> int:
        """Device bytes of the index of one page in one layer."""

    @classmethod
    def own_bytes(cls, params: Any, shape: KVShape, plan: Plan) -> int:
        """Device bytes of what the method itself holds for one layer."""
        return 0

    @classmethod
    def most(cls, params: Any, plan: Plan) -> int:
        """Units that can be selected at most."""
        return plan.pages * (params.page // plan.unit)

    @abstractmethod
    def allocate(self, plan: Plan, prompt: Prefilled) -> None:
        """Take the tensors that are held for the whole run."""

    @abstractmethod
    def enter(self, keys: torch.Tensor, first: int) -> None:
        """Put whole pages into the index: keys [l, H_kv, m p, D], post-RoPE, of the pages from `first` on."""

    # ----------------------------------------------------------------------------------------------------- how many
    @classmethod
    def plan_within(
        cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int, budget: int | None
    ) -> Plan | None:
        """The plan for a budget that is at least the floor; None: all tokens stay on the device."""
        plan = smallest_plan(params, shape, prompt_tokens, max_new, cls.unit(params))
        if plan is None or params.tokens:
            return plan
        if budget is None or whole_layout(params, prompt_tokens, max_new).bytes(shape) <= budget:
            return None
        least = cls._bytes(params, shape, plan)
        one_more = cls._bytes(params, shape, replace(plan, recall=plan.recall + 1)) - least
        return replace(plan, recall=min(cls.most(params, plan), plan.recall + (budget - least) // one_more))

    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        plan = smallest_plan(params, shape, prompt_tokens, max_new, cls.unit(params))
        whole = whole_layout(params, prompt_tokens, max_new).bytes(shape)
        if plan is None:
            return whole
        paged = cls._bytes(params, shape, plan)
        return paged if params.tokens else min(paged, whole)

    @classmethod
    def _layout(cls, params: Any, shape: KVShape, plan: Plan) -> Layout:
        return plan.layout(params, shape, cls.streamed, cls.token_major)

    @classmethod
    def _bytes(cls, params: Any, shape: KVShape, plan: Plan) -> int:
        """Device bytes at their peak: slots, tables, staging, index, the method's own, and what is on its way out of
        the window."""
        per_layer = plan.pages * cls.index_bytes(params, shape) + cls.own_bytes(params, shape, plan)
        held = (shape.layers - params.dense_layers) * per_layer + COUNT_BYTES
        leaving = params.leaves * shape.token_bytes if plan.pages > plan.pages_now else 0
        return cls._layout(params, shape, plan).bytes(shape) + held + leaving

    # ---------------------------------------------------------------------------------------------------- the prompt
    @classmethod
    def segments(cls, params: Any, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span]:
        n = prompt.prompt_tokens
        plan = cls.plan_within(params, prompt.shape, n, prompt.max_new, prompt.budget_bytes)
        sinks = min(params.sinks, n)
        spans = [Span(0, sinks, "sink", f"The first {sinks} tokens are always attended.")] if sinks else []
        return spans + fixed_chunks(sinks, n if plan is None else plan.window_from, params.page, kind="page")

    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        import torch

        from kvlens.link.codec import RawCodec
        from kvlens.memory.placement import Kept, Placement

        context, params = self.context, self.params
        n, shape = context.prompt_tokens, context.shape
        self.refuse_below(self.floor_bytes(params, shape, n, context.max_new))
        self._plan = plan = self.plan_within(params, shape, n, context.max_new, context.budget_bytes)
        sinks = min(params.sinks, n)
        spans = self.segments(params, context, ())
        roles = ["sink" if span.kind == "sink" else "resident" for span in spans]
        if plan is None:
            retained = Kept.everywhere(torch.arange(n, device=context.device))
            layout = whole_layout(params, n, context.max_new)
            return layout, Placement(spans, ["resident"] * len(roles), roles, retained)
        self._filled = torch.zeros((), dtype=torch.long, device=context.device)
        self.allocate(plan, prompt)
        offload = [index for index, role in enumerate(roles) if role == "resident"]
        self._enter(prompt.keys[params.dense_layers :, :, sinks : plan.window_from])
        states = ["resident" if role == "sink" else "cold" for role in roles]
        retained = Kept.everywhere(torch.arange(sinks, device=context.device))
        return self._layout(params, shape, plan), Placement(
            spans, states, roles, retained, offload=offload, codec=RawCodec()
        )

    def _enter(self, keys: torch.Tensor) -> None:
        """keys [l, H_kv, m p, D] of the next m pages."""
        self.enter(keys, self._pages)
        self._pages += keys.shape[2] // self.params.page
        self._filled.fill_(self._pages)

    # ------------------------------------------------------------------------------------------------------ decoding
    def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
        import torch

        from kvlens.link.codec import RawCodec
        from kvlens.memory.placement import Kept, Placement

        params, start = self.params, memory.window_start
        if self._plan is None or end.position + 2 - start <= params.ring:
            return None
        stop = start + params.leaves
        keys = memory.read_window(start, stop)[0][params.dense_layers :]
        self._enter(keys)
        held = end.position + 1 - start
        reason = f"A full page, the oldest of the window when it held {held} tokens."
        spans = [
            Span(page_start, page_start + params.page, "page", reason) for page_start in range(start, stop, params.page)
        ]
        nothing = Kept.everywhere(torch.zeros(0, dtype=torch.long, device=keys.device))
        cold, role, every = ["cold"] * len(spans), ["resident"] * len(spans), list(range(len(spans)))
        return WindowLeave(start, stop, Placement(spans, cold, role, nothing, offload=every, codec=RawCodec()))


def best(score: torch.Tensor, count: int, first_id: int = 0) -> torch.Tensor:
    """The `count` highest of each row, best first, the earlier one where two are equal: [H_kv, X] -> int64 [H_kv,
    count], numbered from `first_id` on, -1 where nothing above -inf is left."""
    from kvlens.kernels.best_rows import best_rows

    return best_rows(score, count, first_id=first_id)
