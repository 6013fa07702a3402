"""The memory of this machine that a run takes beside the weights, by arithmetic, before anything is loaded. No torch.

Measured peaks are in docs/evidence/benchmarks.md, Peak memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvlens import methods
from kvlens.methods.fitting import Sizes
from kvlens.models.device import expected, host_bytes
from kvlens.models.errors import UnsupportedModel
from kvlens.models.find import find_model, ready
from kvlens.models.sizes import NUMBER_BYTES, weights_in
from kvlens.recording.sampling import resolve
from kvlens.runs.request import RunRequest
from kvlens.text.units import si_bytes

RETRIEVING = ("page_retrieval", "token_retrieval", "span_retrieval")
"""families of methods that keep every token in the cold tier"""
MASS_TABLES = 3
"""tables of one number per query head and position, float32, that measuring a step takes"""
WORTH_SAYING = 1 << 30
"""bytes from which a run's memory is worth a sentence"""


class RunBeyondMemory(UnsupportedModel):
    """The run needs more memory than this machine has free."""

    code = "run_beyond_memory"

    def __init__(self, name: str, needed: int, free: int, tokens: int, lanes: int = 1) -> None:
        """lanes: runs that a race holds at once."""
        self.needed, self.free, self.tokens, self.lanes = needed, free, tokens, lanes
        subject, remedy = ("a run", "") if lanes == 1 else (f"a race of {lanes} methods", "race fewer methods, ")
        super().__init__(
            f"{subject} of {tokens:,} tokens on '{name}' takes by estimate {si_bytes(needed)} of memory, and "
            f"{si_bytes(free)} are free: {remedy}shorten the prompt, lower --max-new or take a smaller model."
        )


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a run takes on the host at its peak, beside the weights."""

    full_kv: int
    """of the run's tokens"""
    total: int
    tokens: int
    lane_bytes: int
    """of the method's slots, its cold tier and the keys that are kept to measure coverage"""
    masses: int
    """of a step that is measured"""

    @property
    def sentence(self) -> str:
        """What is said of it; '' where it is little."""
        if self.total < WORTH_SAYING:
            return ""
        return (
            f"The run takes by estimate {si_bytes(self.total)} of memory beside the weights, "
            f"{self.total / self.full_kv:.1f} times its full KV."
        )


def memory_need(request: RunRequest, sizes: Sizes) -> MemoryNeed:
    """Estimate the host memory of a run on a CPU. A run holds the prompt's KV until its method has placed it, the slots
    and the cold tier of the method, and, where coverage is recorded, all keys once more. A compared run holds one
    reading of the prompt all the time, and full KV's slots before the method's."""
    shape, full, kind = sizes.shape, sizes.full_kv_bytes, methods.get(request.method)
    tokens = sizes.prompt_tokens + 1 + sizes.max_new
    slots = full if sizes.budget_bytes is None else min(full, sizes.budget_bytes)
    placed = slots + full * (kind.family in RETRIEVING)
    keys = full // 2 if request.coverage and kind.family != "reference" else 0
    lane_bytes = placed + keys
    if request.against or request.forced_reference:
        kv = full + max(full, lane_bytes)
    else:
        kv = placed + max(full, keys)
    sampled = request.coverage and resolve(request.oracle, shape.layers, shape.q_heads, tokens) is not None
    masses = 4 * shape.layers * shape.q_heads * tokens * (MASS_TABLES if sampled else 1)
    return MemoryNeed(full, kv + masses, tokens, lane_bytes, masses)


def race_need(needs: Sequence[MemoryNeed]) -> MemoryNeed:
    """Estimate the host memory of a race from its lanes' runs: one reading of the prompt, what every lane holds, and
    one measured step, since lanes decode in turns."""
    full, masses = max(need.full_kv for need in needs), max(need.masses for need in needs)
    lane_bytes = sum(need.lane_bytes for need in needs)
    return MemoryNeed(
        full, full + max(full, lane_bytes) + masses, max(need.tokens for need in needs), lane_bytes, masses
    )


def check_run_memory(request: RunRequest, sizes: Sizes) -> MemoryNeed | None:
    """Return what a run takes; None on another device than a CPU. Raises RunBeyondMemory where it and the weights still
    to be loaded take more than this machine has free."""
    return _check_free(request, memory_need(request, sizes)) if expected(request.device) == "cpu" else None


def check_race_memory(request: RunRequest, needs: Sequence[MemoryNeed | None]) -> None:
    """Raise RunBeyondMemory where the lanes of a race take more together than this machine has free. request: of any
    lane. needs: what `check_run_memory` returned of each lane."""
    cpu_needs = [need for need in needs if need is not None]
    if cpu_needs:
        _check_free(request, race_need(cpu_needs), len(cpu_needs))


def _check_free(request: RunRequest, need: MemoryNeed, lanes: int = 1) -> MemoryNeed:
    free, folder = host_bytes(), ready(request.model)
    if free is None or folder is None:
        return need
    weights = None if is_kept(request) else weights_in(folder)
    dtype = request.dtype if request.dtype in NUMBER_BYTES else "float32"
    total = need.total + (0 if weights is None else weights.bytes_in(dtype))
    if total > free:
        raise RunBeyondMemory(request.model, total, free, need.tokens, lanes)
    return need


def is_kept(request: RunRequest) -> bool:
    """Return True if this process has the model in memory already (kvlens.models.find)."""
    return (expected(request.device), request.dtype) == ("cpu", "float32") and find_model(request.model) is not None
