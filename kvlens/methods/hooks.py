"""The hooks of a method: three protocols, in the order in which the engine calls them. A class that inherits from them
overrides what it needs; the other hooks do nothing.

Shapes: L layers, Hq query heads, H_kv KV heads, G = Hq / H_kv, D head size, m prompt tokens read so far, C slots.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from kvlens.memory.layout import Layout
    from kvlens.memory.placement import Placement, Selection
    from kvlens.methods.answers import BagChange, Note, WindowLeave
    from kvlens.methods.run_inputs import MemoryView, Prefilled, Reading, StepEnd


class Placing(Protocol):
    """Placement: the hooks that are called while the prompt is read and when it has been read."""

    @property
    def block(self) -> int:
        """Number of prompt tokens that go through the model at once, where their attention depends on it. 0: the run's
        own chunk size."""
        return 0

    def reading(self, layer: int, keys: torch.Tensor, tokens: int) -> Reading | None:
        """Return the attention of the last `tokens` prompt tokens, for a method with `Needs.reading`. keys
        [H_kv, m, D], post-RoPE. Called once per layer and chunk, in order. None: full attention."""
        return None

    @abstractmethod
    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        """Divide the device and place the prompt. Raises BudgetInfeasible with the smallest feasible bytes if the
        method cannot keep to the budget."""


class Selecting(Protocol):
    """Selection: the hooks that are called for every layer of every decode step, in this order."""

    def written(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take note of the step's token, whose key and value [H_kv, D], post-RoPE, the memory has just written."""
        return

    def select(self, layer: int, q: torch.Tensor) -> Selection | None:
        """Return what the query heads of `layer` attend: q [Hq, D], post-RoPE. None: everything on the device.

        A method that is `static_ready` uses tensor operations of fixed shape only: no .item(), no host copies. A number
        that changes from step to step lies in a tensor that `decode_end` writes in place, not in a Python variable: a
        compiled or captured step would not see the variable change.
        """
        return None

    def attended(self, layer: int, heads: range, weights: torch.Tensor, position: torch.Tensor) -> None:
        """Take note of the attention weights of the KV heads `heads`, for a method with `Needs.weights`: float32
        [h, G, C], each row with the sum 1, of slots with tokens at position int32 [h, C] (-1: no token)."""
        return


class Lifecycle(Protocol):
    """Lifecycle: the hooks that are called between steps."""

    def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | BagChange | None:
        """Return the change after a step: a block of the oldest tokens leaves the window, or a bag's token makes
        room."""
        return None

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """Return the tensors that the method keeps on the device for KV purposes, by name. They count in the budget."""
        return {}

    @abstractmethod
    def drain_journal(self) -> list[Note]:
        """Return the notes since the last call."""


class Hooks(Placing, Selecting, Lifecycle, Protocol):
    """The nine hooks that the engine calls, and nothing else of a method."""
