"""What a run hands to a method: its sizes before it begins, the prompt when it has been read, every step when it has
ended.

Shapes: L layers, Hq query heads, H_kv KV heads, D head size, n prompt tokens that prefill covered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvlens.refusal import Refusal
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch

    from kvlens.kernels.attend import LayerForm
    from kvlens.tiers.slots import SpanTable


class Rotate(Protocol):
    """A model's rotary embedding on keys, as kvlens.engine.rotary.Rotary does it."""

    def __call__(
        self, keys: torch.Tensor, positions: torch.Tensor, layer: int | None = None, back: bool = False
    ) -> torch.Tensor:
        """keys [..., m, D] at positions [m] -> turned as `layer` does, or turned back; `layer` None: keys [L, ..., m,
        D]. float32."""


def torch_seed(number: int) -> int:
    """Return a number that was made of a run's seed as a seed that torch takes: the number itself if it has 64 bits,
    else its lowest 63."""
    return number if -(1 << 63) <= number < 1 << 64 else number % (1 << 63)


@dataclass(frozen=True)
class RunContext:
    """What a method may know of the run before it begins."""

    shape: KVShape
    prompt_tokens: int
    """tokens that prefill covers: the prompt without its last token, which step 0 feeds"""
    max_new: int
    """decode steps at most"""
    budget_bytes: int | None
    """None: no limit"""
    full_kv_bytes: int
    seed: int
    model_name: str
    dtype: torch.dtype
    device: torch.device
    tokens: tuple[str, ...] = ()
    """text of each prompt token, for methods that split at punctuation"""
    rotate: Rotate | None = None
    """the model's rotary embedding; None: it has none that could be taken back"""
    calibration: Mapping[str, Any] = field(default_factory=dict)
    """what `Method.calibrations` asked for with these parameters, by kind, read and checked"""
    forms: tuple[LayerForm, ...] = ()
    """what each layer's attention has besides scaled scores; (): nothing"""
    question_from: int | None = None
    """position of the first token of the question that the prompt holds; None: it holds none that is known"""
    segments: tuple[tuple[str, int, int], ...] = ()
    """(name, first, end) of the prompt's named parts, in positions; (): it names none"""

    def rotary(self, user: str, remedy: str = "") -> Rotate:
        """Return the model's rotary embedding, which `user` needs. Raises Refusal where the model has none that could
        be taken back. remedy: how to do without."""
        if self.rotate is None:
            raise Refusal(
                f"{user} needs rotary positions that depend on nothing but the position, and '{self.model_name}' has "
                f"none{remedy}.",
                code="no_rotary_positions",
                model=self.model_name,
            )
        return self.rotate


@dataclass(frozen=True)
class Peeked:
    """The last prompt token under full attention over the prompt and itself, seen once before step 0 feeds it.
    Post-RoPE."""

    queries: torch.Tensor
    """[L, Hq, 1, D]"""
    keys: torch.Tensor
    """[L, H_kv, 1, D]"""
    values: torch.Tensor


@dataclass(frozen=True)
class Inputs:
    """What the attention of each layer was given for the prompt, and that attention itself."""

    hidden: torch.Tensor
    """[L, n, hidden size], after the layer's norm"""
    modules: tuple[Any, ...]
    """transformers' attention module of each layer: the model's own, nothing of it may be changed"""
    rotary: Any | None
    """the model's rotary embedding: (tensor, positions int64 [1, m]) -> cos, sin [1, m, d]; None: it has none"""


@dataclass
class Prefilled:
    """The prompt when prefill has ended."""

    surprisal: torch.Tensor | None
    """float32 [n], nats; NaN at position 0, which nothing predicts; None: the method does not need it"""
    keys: torch.Tensor
    """[L, H_kv, n, D], post-RoPE"""
    values: torch.Tensor
    last_queries: torch.Tensor
    """[L, Hq, w, D]: post-RoPE queries of the last w <= Needs.queries prompt positions that prefill
    covered"""
    peeked: Peeked | None = None
    """None: the method does not peek"""
    received: torch.Tensor | None = None
    """float32 [L, Hq, n]: attention each token received, summed over the queries that prefill covered; None: the method
    does not need it"""
    inputs: Inputs | None = None
    """None: the method does not need them"""
    repeated: torch.Tensor | None = None
    """float32 [L, Hq, n]: the most attention each token received from a token of the second reading; None: the method
    does not need it"""
    repeated_queries: torch.Tensor | None = None
    """[L, Hq, w, D]: post-RoPE queries of the second reading; None: the method does not need them"""


@dataclass(frozen=True)
class Reading:
    """What the r tokens of a prompt's chunk attend of the m tokens read so far, themselves included."""

    seen: torch.Tensor
    """bool [H_kv|1, r, m]"""
    first: int = 0
    """so many first tokens are seen from nearer than they are; the others where they are"""
    nearer: torch.Tensor | None = None
    """by so many positions, int64 [r]; None: none is"""


@dataclass(frozen=True)
class StepEnd:
    """A decode step that has ended."""

    step: int
    position: int
    """of the token this step fed; tokens up to here are in memory"""
    surprisal: float
    """nats, of the token this step fed under the logits that produced it"""
    next_entropy: float
    """nats, of the distribution this step produced"""
    next_varentropy: float = 0.0
    """nats squared, variance of -log p under that distribution"""
    text: str = ""
    """of the token this step fed, decoded by itself: for methods that split at punctuation"""


class MemoryView(Protocol):
    """What a method may read of the memory."""

    spans: SpanTable

    @property
    def window_start(self) -> int:
        """Position of the oldest token in the window."""

    def read_window(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, values [L, H_kv, end - start, D] of window positions."""
