"""CAKE: layers whose attention is spread and shifting keep more tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlens.methods.families.prompt_eviction import PromptEviction, PromptEvictionParameters, Tokens
from kvlens.methods.families.token_shares import allocate
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.methods.snapkv import OBSERVED

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CakeParameters(PromptEvictionParameters):
    """Lengths are in tokens. The paper sets the temperatures per model; 1 where it says none."""

    window: int = param(32, "last prompt tokens: their queries rank the others; kept themselves", symbol="S_w")
    kernel: int = param(5, "neighbouring positions a score is averaged over", symbol="kernel_size")
    spread: float = param(1.0, "temperature of a layer's spread of attention", symbol="tau_1")
    shift: float = param(1.0, "temperature of how much a layer's attention shifts", symbol="tau_2")
    gamma: float = param(200.0, "weight of the shift of attention in a token's score", symbol="gamma")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.window <= OBSERVED:
            raise ValueError(f"window must lie between 2 and {OBSERVED}.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError("kernel must be odd, so that a score stays at its token.")
        if self.spread <= 0 or self.shift <= 0:
            raise ValueError("spread and shift must be above 0.")


class Cake(PromptEviction):
    """Divides the budget over the layers by preference P = H^(1/spread) * V^(1/shift): H the entropy of the window's
    attention to the tokens before it, V its variance over the window's queries, both summed over heads (paper sec. 4.1,
    eq. 5 to 7). A token's score is the mean over the window plus gamma times the variance over it, averaged over
    neighbours and over the query heads of a KV head (eq. 10).

    Departures: layers are decided together when prefill has ended; the paper decides while it goes through the layers,
    which ends with the same sets, since the best of fewer tokens are among the best of more. Nothing is evicted while
    decoding. A KV head's group agrees on one set. All layers together keep what the budget holds, rounding included.
    """

    name = "cake"
    title = "CAKE"
    paper = "Qin et al., CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences, ICLR 2025"
    summary = (
        "drops prompt tokens once, when prefill ends: layers whose attention is spread and shifting keep more of what "
        "the last prompt tokens attend to"
    )
    Parameters = CakeParameters
    presets = {"paper": {}, "demo": {"window": 8}}  # noqa: RUF012
    needs = Needs(queries=OBSERVED, peek=True)
    journal_names = {  # noqa: RUF012
        "layer_preference": "preference P of each layer (no unit), by layer",
        "layer_budget_tokens": "prompt tokens kept, window included, by layer",
    }
    params: CakeParameters

    def tokens(self, prompt: Prefilled | None, total: int) -> Tokens:
        import torch

        p, layers = self.params, self.context.shape.layers
        n = self.context.prompt_tokens + self.last
        if prompt is None or total >= n * layers:
            return super().tokens(prompt, total)
        ranked = self.context.prompt_tokens - max(min(p.window, n) - self.last, 0)
        preference = [self._preference(self._paid(prompt, layer, ranked)) for layer in range(layers)]
        counts = allocate(preference, total, min(p.window, n), n)
        self.note("layer_preference", torch.tensor(preference))
        self.note("layer_budget_tokens", torch.tensor(counts, dtype=torch.float32))
        return [[count] for count in counts]

    def score(self, prompt: Prefilled, layer: int, before: int) -> torch.Tensor:
        from kvlens.methods.families import window_attention as window

        paid = self._paid(prompt, layer, before)
        each = paid.mean(1) + self.params.gamma * paid.var(1)
        return window.grouped(window.pooled(each, self.params.kernel, "avg"), self.context.shape.group, "mean")

    def _preference(self, paid: torch.Tensor) -> float:
        entropy = -(paid * (paid + 1e-10).log()).sum().item()
        return max(entropy, 0.0) ** (1 / self.params.spread) * paid.var(1).sum().item() ** (1 / self.params.shift)

    def _paid(self, prompt: Prefilled, layer: int, before: int) -> torch.Tensor:
        """Attention of the window's queries to the tokens before it: float32 [Hq, w, before]."""
        from kvlens.methods.families import window_attention as window

        shape, peeked = self.context.shape, prompt.peeked if self.params.peek else None
        inside = self.context.prompt_tokens - before
        window_queries = window.observed(prompt, layer, range(shape.q_heads), shape.group, inside, peeked)
        return window.paid(*window_queries)[:, :, :before]
