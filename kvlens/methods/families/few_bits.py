"""What a prompt eviction keeps of the prompt, in few bits: storage that any such method's tokens can be put into."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvlens.finer import by_head, parse_finer
from kvlens.methods.families.prompt_eviction import PromptEviction, Tokens, equal_shares, lacks_score
from kvlens.methods.segmenter import PromptFacts
from kvlens.quantised.form import KEPT_TABLE_BYTES, Quantised
from kvlens.shape import KVShape
from kvlens.spans import Span
from kvlens.tiers.layout import Layout, Zones

if TYPE_CHECKING:
    from kvlens.memory.placement import Kept, Placement
    from kvlens.methods.run_inputs import RunContext

    Base = PromptEviction
else:
    Base = object


class FewBits(Base):
    """Kept prompt tokens before the window are packed when prefill ends. The window and what is decoded stay exact."""

    static_ready = False
    """a static step restores no packed tokens"""
    exact_without_budget = False
    params: Any

    @classmethod
    @abstractmethod
    def kept_form(cls, params: Any, counts: tuple[tuple[int, ...], ...]) -> Quantised:
        """Return how the kept tokens are packed: so many by layer, of every KV head."""

    @classmethod
    def layout(cls, params: Any, shape: KVShape, tokens: Tokens, prompt_tokens: int, max_new: int) -> Layout:
        plain = super().layout(params, shape, tokens, prompt_tokens, max_new)
        zones = [plain.zones_of(layer) for layer in range(shape.layers)]
        form = cls.kept_form(params, tuple((zone.kept,) for zone in zones))
        packed = replace(form, finer=by_head(parse_finer(params.finer), shape, form.widths))
        window = tuple(Zones(0, 0, 0, zone.window) for zone in zones)
        return replace(plain, zones=window, quantised=packed)

    @classmethod
    def total(cls, params: Any, prompt: PromptFacts) -> int:
        """The most tokens whose codes fit the budget however the layers divide them: each KV head's last group of keys
        may be all but empty."""
        n, layers, budget = prompt.prompt_tokens + int(params.peek), prompt.shape.layers, prompt.budget_bytes
        if params.tokens or budget is None:
            return super().total(params, prompt)
        lowest, highest = layers * min(params.least, n), layers * n
        while lowest < highest:
            middle = (lowest + highest + 1) // 2
            if cls._most_bytes(params, prompt, middle) <= budget:
                lowest = middle
            else:
                highest = middle - 1
        return lowest

    @classmethod
    def raised(cls, params: Any, finer: Any, context: RunContext) -> int:
        """Return by how many bytes the budget has to be raised, so that with parameters `finer` as many tokens stay as
        with `params`."""
        total = cls.total(params, context)
        return cls._most_bytes(finer, context, total) - cls._most_bytes(params, context, total)

    @classmethod
    def _most_bytes(cls, params: Any, prompt: PromptFacts, total: int) -> int:
        """Return the bytes of `total` tokens at most, in whichever way layers divide them."""
        shape = prompt.shape
        layout = cls.layout(params, shape, equal_shares(total, shape.layers), prompt.prompt_tokens, prompt.max_new)
        form = layout.quantised
        assert form is not None
        packed, worst = form.bytes(shape), form.turn_bytes(shape.head_dim)
        for layer in range(shape.layers):
            count = form.kept_counts[layer][0]
            for head in range(shape.kv_heads):
                key, value = form.token_bytes(shape, layer, head)
                worst += round((count + form.group) * key + count * (value + KEPT_TABLE_BYTES))
        return layout.bytes(shape) - packed + max(packed, worst)

    def _place(self, retained: Kept, pages: list[Span]) -> Placement:
        placement = super()._place(retained, pages)
        states = ["quantised" if state == "resident" else state for state in placement.states]
        return replace(placement, states=states, roles=["quantised"] * len(placement.roles))


def refuses_few_bits(method: type[Any]) -> str:
    """Return why a method's kept tokens cannot be packed; '': they can."""
    if lacking := lacks_score(method):
        return lacking
    if issubclass(method, FewBits):
        return "its tokens are packed already"
    if method.heads_alike:
        return ""
    return "its KV heads keep unequally many tokens, and packed keys are stored in groups that all KV heads fill alike"
