"""CHESS: all KV stays on the device; a hierarchy of key means selects the pages to attend, anew when the model is
unsure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvlens.methods.base import Method
from kvlens.methods.chess.journal import JOURNAL
from kvlens.methods.chess.lent import TRIGGER
from kvlens.methods.chess.params import PRESETS, ChessParameters, Sizes, pages_within
from kvlens.methods.chess.segmenters import SEGMENTERS
from kvlens.methods.chess.trigger import THRESHOLDS, UNCERTAIN, Trigger
from kvlens.methods.hooks import WindowLeave
from kvlens.methods.run_inputs import MemoryView, Prefilled, RunContext, StepEnd
from kvlens.methods.segmenter import PromptFacts
from kvlens.methods.wrappers import Lending
from kvlens.shape import KVShape
from kvlens.spans import Span
from kvlens.tiers.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvlens.memory.placement import Placement, Selection


class Chess(Method):
    """One selection of pages for all layers and heads, made at the end of prefill and again when a page of generated
    tokens was uncertain (sec. 3). Nothing is copied or moved: a selection is a table of page names, pages that leave
    the window are renamed where they lie. Resident bytes are those of full KV plus page vectors and tables; what
    shrinks is what is attended. docs/evidence/chess.md has the choices.
    """

    name = "chess"
    title = "CHESS"
    paper = "Fei et al., CHESS: Context-aware Hierarchical Efficient Semantic Selection for Long-Context LLM Inference"
    summary = (
        "keeps every token on the device, attends sinks, the newest pages and the pages whose keys resemble "
        "theirs, and selects again when "
        "the model becomes uncertain"
    )
    segmenters = SEGMENTERS
    calibrations = (THRESHOLDS,)
    family = "page_retrieval"
    Parameters = ChessParameters
    presets = PRESETS
    static_ready = True
    exact_without_budget = False
    keeps_all = True
    selects_between_steps = True
    untrained = {"trigger": "fixed"}  # noqa: RUF012
    journal_names = JOURNAL
    lends = Lending(trigger=TRIGGER)
    params: ChessParameters

    def __init__(self, params: ChessParameters, context: RunContext) -> None:
        super().__init__(params, context)
        self._trigger = Trigger(params, context.calibration.get("thresholds"))
        if params.keys == "unrotated" and context.rotate is None:
            raise ValueError(f"chess: the keys of '{context.model_name}' cannot be turned back; use keys=rotated.")
        self._sizes = Sizes.count(params, context.prompt_tokens, context.max_new)
        self._selected: set[int] = set()
        self._selection: Selection | None = None

    @classmethod
    def floor_bytes(cls, params: Any, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        return Sizes.count(params, prompt_tokens, max_new).bytes(params, shape, prompt_tokens, max_new)

    @classmethod
    def segments(cls, params: Any, prompt: PromptFacts, surprisal: Sequence[float]) -> list[Span]:
        return [
            _span(params, page) for page in range(Sizes.count(params, prompt.prompt_tokens, prompt.max_new).leaving)
        ]

    # ---- end of prefill
    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        import torch

        from kvlens.memory.placement import Kept, Placement
        from kvlens.methods.chess.tree import Tree

        context, p, sizes, n = self.context, self.params, self._sizes, self.context.prompt_tokens
        self.refuse_below(self.floor_bytes(p, context.shape, n, context.max_new))
        features = context.shape.layers * context.shape.kv_heads * context.shape.head_dim
        first_candidate = p.sink_pages if p.candidates == "older" else 0
        self._tree = Tree(
            sizes.grids,
            sizes.chunks,
            sizes.pages,
            features,
            p.chunk_pages,
            p.grid_chunks,
            first_candidate,
            context.dtype,
            context.device,
            p.centroids == "printed",
        )
        self._mask = torch.zeros(sizes.spans, dtype=torch.bool, device=context.device)
        self._want = torch.full((context.shape.kv_heads, 0), -1, dtype=torch.long, device=context.device)
        complete = n // p.page
        self._tree.put(0, self._vectors(prompt.keys[:, :, : complete * p.page], 0, p.page))
        tail = prompt.keys[:, :, complete * p.page :]
        self._note_thresholds()
        self._advance(complete, sizes.leaving)
        if complete:
            use_tail = p.anchor_tail and tail.shape[2] > 0
            self._reconstruct(complete, n, self._vectors(tail, complete * p.page, tail.shape[2]) if use_tail else None)
        pages = range(sizes.leaving)
        spans = self.segments(p, context, ())
        retained = Kept.everywhere(torch.arange(sizes.leaving * p.page, device=context.device))
        placement = Placement(
            spans,
            ["resident"] * len(spans),
            [self._role(page) for page in pages],
            retained,
            selectable=[page for page in pages if page >= p.sink_pages],
        )
        return sizes.layout(p, context.shape, n, context.max_new), placement

    def _vectors(self, keys: torch.Tensor, start: int, page: int) -> torch.Tensor:
        """keys [L, H_kv, m * page, D] from position `start` on -> page vectors [m, F], float32."""
        import torch

        from kvlens.methods.chess.tree import page_vectors

        if self.params.keys == "unrotated" and keys.shape[2]:
            assert self.context.rotate is not None
            keys = self.context.rotate(keys, torch.arange(start, start + keys.shape[2], device=keys.device), back=True)
        return page_vectors(keys, page, self.params.scale)

    def _role(self, page: int) -> str:
        return "sink" if page < self.params.sink_pages else "resident"

    def _note_thresholds(self) -> None:
        import torch

        for name, value in zip(
            ("entropy_nats", "varentropy_nats2"), self._trigger.thresholds or (float("nan"),) * 2, strict=True
        ):
            self.note(f"threshold_{name}", torch.tensor([value]))

    # ---- the hierarchy
    def _advance(self, complete: int, left: int) -> None:
        """`complete` pages are written, `left` of them have left the window."""
        self._complete, self._left = complete, left
        self._tree.join(complete if self.params.candidates == "all" else left)

    def _reconstruct(
        self,
        complete: int,
        tokens: int,
        tail: torch.Tensor | None = None,
        reason: tuple[float, float] = (float("nan"), float("nan")),
    ) -> None:
        """Select pages by the window as it is now, out of a context of `tokens` tokens (sec. 3.2). reason: entropy of
        the page that called for it and its threshold, nats; NaN: the end of prefill."""
        import torch

        from kvlens.methods.chess.tree import LEVELS

        p, tree = self.params, self._tree
        window = max(0, complete - p.window_pages)
        ratios, count = (p.grid_ratio, p.chunk_ratio, p.page_ratio), None
        if p.keep:
            count = pages_within(p, tokens)
            share = min(1.0, count / max(1, tree.stop - tree.first))
            ratios = (share ** (1 / 3),) * 3
        cascade = tree.select(tree.anchor(window, complete, tail), ratios, p.quantile, count)
        for name, first_unit, scores, is_kept in zip(LEVELS, cascade.first, cascade.scores, cascade.kept, strict=True):
            self.note(f"{name}_score", torch.cat([scores.new_full((first_unit,), torch.nan), scores]))
            self.note(f"{name}_kept", torch.cat([is_kept.new_zeros(first_unit), is_kept]))
        self.note("safe_pages", torch.tensor([min(p.sink_pages, window), window, complete]))
        self._selected = {tree.first + i for i, is_kept in enumerate(cascade.kept[2].tolist()) if is_kept}
        self.decide("reconstruction", tree.stop - tree.first, len(self._selected), *reason)
        self._mask = torch.zeros_like(self._mask)
        spans = [page + 1 for page in sorted(self._selected) if page + 1 < len(self._mask)]
        self._mask[torch.tensor(spans, dtype=torch.long, device=self._mask.device)] = True
        self._trigger.pages_since = 0
        self._renew()

    def _renew(self) -> None:
        """The table that every layer reads; None when all that has left the window is selected, so that attention is
        full attention, as it always is where all tokens are to be attended."""
        from kvlens.memory.placement import Selection

        if self.params.keep == 1 or self._selected.issuperset(range(self.params.sink_pages, self._left)):
            self._selection = None
            return
        shape = self.context.shape
        self._selection = Selection(self._mask.expand(shape.kv_heads, shape.group, -1), self._want)

    # ---- decoding
    def select(self, layer: int, q: torch.Tensor) -> Selection | None:
        return self._selection

    def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
        import torch

        from kvlens.memory.placement import Kept, Placement

        p, trigger = self.params, self._trigger
        trigger.note_step(end.next_entropy, end.next_varentropy)
        if (end.position + 1) % p.page:
            return None
        page = end.position // p.page
        start, stop = page * p.page, (page + 1) * p.page
        keys, _ = memory.read_window(start, stop)
        self._tree.put(page, self._vectors(keys, start, p.page))
        out = page - p.window_pages
        self._advance(page + 1, max(0, out + 1))
        trigger.pages_since += 1
        entropy, varentropy = trigger.judge(start - self.context.prompt_tokens)
        why = trigger.reason(entropy, varentropy)
        noted = {
            "page_completed": page,
            "page_entropy_nats": entropy,
            "page_varentropy_nats2": varentropy,
            "reconstructed": why,
        }
        for name, value in noted.items():
            self.note(name, torch.tensor([value]))
        if why:
            limits = trigger.thresholds
            by_entropy = limits is not None and why == UNCERTAIN and entropy > limits[0]
            cut = limits[0] if by_entropy and limits else float("nan")
            self._reconstruct(page + 1, stop, reason=(entropy if by_entropy else float("nan"), cut))
        else:
            self._renew()
        if out < 0:
            return None
        retained = Kept.everywhere(torch.arange(out * p.page, (out + 1) * p.page, device=self._mask.device))
        placement = Placement(
            [_span(p, out)], ["resident"], [self._role(out)], retained, selectable=[0] if out >= p.sink_pages else []
        )
        return WindowLeave(out * p.page, (out + 1) * p.page, placement)

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        return {"hierarchy": (self._tree.vectors,), "selection": (self._mask, self._want)}


def _span(p: ChessParameters, page: int) -> Span:
    chunk = page // p.chunk_pages
    kind = "sink" if page < p.sink_pages else "page"
    return Span(
        page * p.page, (page + 1) * p.page, kind, f"Page {page}, in chunk {chunk}, in grid {chunk // p.grid_chunks}."
    )
