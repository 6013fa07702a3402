"""What a method and the engine exchange: the extra inputs that a method needs, declared once on its class; the hooks,
three protocols in the order in which the engine calls them; and what hooks return besides a placement and a selection
(kvlens/memory/placement.py). A class that inherits from the protocols overrides the hooks that it needs; the other
hooks do nothing.

Shapes: L layers, Hq query heads, H_kv KV heads, G = Hq / H_kv, D head size, m prompt tokens read so far, C slots.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from kvlens.memory.memory import Memory
    from kvlens.memory.placement import Eviction, Placement, Selection
    from kvlens.methods.run_inputs import MemoryView, Prefilled, Reading, Rotate, StepEnd
    from kvlens.tiers.layout import Layout


@dataclass(frozen=True)
class SecondReading:
    """The prompt goes through the model once more, chunk by chunk over its full cache, each chunk behind an instruction
    to repeat it."""

    opening: str
    """the instruction before the first chunk"""
    following: str
    """the instruction before a later one, which the end of the chunk before it completes"""
    chunk: int
    """tokens of a chunk"""
    lead: int
    """tokens of the chunk before that complete the instruction"""
    sinks: int = 0
    """first tokens of the prompt that take part in the softmax beside the chunk and what repeats it"""
    queries: int = 0
    """queries of the repeated tokens in `Prefilled.repeated_queries`, evenly over the prompt"""


@dataclass(frozen=True)
class Needs:
    """The extra inputs of a method. Every field is off by default, since each costs time or memory."""

    queries: int = 0
    """number of last prompt queries in `Prefilled.last_queries`"""
    peek: bool = False
    """the last prompt token's query, key and value under full attention, in `Prefilled.peeked`; step 0 feeds that
    token"""
    received: bool = False
    """the attention that every prompt token received, in `Prefilled.received`"""
    inputs: bool = False
    """the input and the module of each layer's attention, in `Prefilled.inputs`; the run then reads its own prompt"""
    surprisal: bool = False
    """every prompt token's surprisal, in `Prefilled.surprisal`; without this need a recorded run computes the
    surprisals after its last step, and an unrecorded run never does"""
    weights: bool = False
    """the attention weights of every step, passed to the hook `attended`"""
    reading: bool = False
    """the prompt is read under the attention that the hook `reading` defines; the run then reads its own prompt"""
    ahead: bool = False
    """for every layer but the first, `select` is called while the previous layer runs, with a query estimated from that
    layer's input (kvlens/engine/ahead.py); the memory moves the requested spans meanwhile"""
    second: SecondReading | None = None
    """the most attention that every prompt token receives while the prompt is repeated, in `Prefilled.repeated`"""

    @property
    def own_prompt(self) -> bool:
        """True if a prompt that another run has read cannot serve."""
        return self.inputs or self.reading


@dataclass(frozen=True)
class FactorForm:
    """How spans lie in the cold tier as low-rank factors, packed as kvlens/kernels/lowrank.py says."""

    max_rank: int
    """no unit has more components"""
    turn: Rotate | None
    """what reconstructed keys still need: the model's rotary embedding, where they were decomposed without it"""


@dataclass(frozen=True)
class Note:
    """A line of a method's journal; see kvlens.rows.JournalRow."""

    name: str
    values: torch.Tensor
    layer: int | None
    kv_head: int | None


@dataclass
class WindowLeave:
    """Positions [start, end) leave the window and go where `placement` says."""

    start: int
    end: int
    placement: Placement

    def apply(self, memory: Memory) -> None:
        """Let the memory carry it out."""
        memory.leave_window(self.placement, self.start, self.end)


@dataclass
class BagChange:
    """What changes in a bag (Layout.bag) because a step has ended."""

    evicted: Eviction | None = None
    """what gives way to the next step's token; None: a place is free"""
    opened: Placement | None = None
    """spans that decoded tokens belong to from now on, with no kept tokens of their own: nothing moves"""

    def apply(self, memory: Memory) -> None:
        """Let the memory carry it out."""
        if self.opened is not None:
            memory.name(self.opened)
        if self.evicted is not None:
            assert memory.evictions is not None, "the window is no bag"
            memory.evictions.evict(self.evicted)


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
