"""The memory of a run, by arithmetic, before anything is loaded. No torch.

On the device: the usual share of full KV, or the least that the method can hold, where the request names no budget; and
the share of attended tokens for a method that keeps all KV on the device. Runs, races, studies, the API and the form
use these rules alike. On the host: what a run takes beside the weights. Measured peaks are in
docs/evidence/benchmarks.md, Peak memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

from kvlens import methods
from kvlens.budget import NO_LIMIT, WHOLE, Budget, BudgetInfeasible, in_words, percent_up
from kvlens.instruments import MOST_EFFECT_STEPS
from kvlens.methods.advice import refusal
from kvlens.methods.fitting import Sizes
from kvlens.models.device import expected, host_bytes
from kvlens.models.errors import UnsupportedModel
from kvlens.models.find import find_model, ready
from kvlens.models.sizes import NUMBER_BYTES, dtype_sentence, weights_in
from kvlens.recording.sampling import resolve, table_numbers
from kvlens.runs.preparing import choose_parameters
from kvlens.runs.request import DEFAULT_SHARE, RunRequest, default_preset
from kvlens.shape import KVShape
from kvlens.text.units import si_bytes

SHARE, COUNT = "keep", "tokens"
"""parameters that say what such a method attends: a share of the tokens, and their number"""


def attended_share(method: str, budget: str | None, overrides: Mapping[str, Any]) -> float | None:
    """Return the share of the tokens that a budget lets a method attend; None where the rule is not for it: a method
    that has a memory budget, no parameter for the share, a budget in bytes or tokens, none, or parameters that say what
    is attended."""
    kind = methods.get(method)
    if not kind.keeps_all or budget is None or SHARE in overrides or COUNT in overrides:
        return None
    limit = Budget.parse(budget)
    if limit.unit != "share" or all(field.name != SHARE for field in dataclasses.fields(kind.Parameters)):
        return None
    return min(limit.amount, 1.0)


def attending(request: RunRequest) -> RunRequest:
    """Return the request with its budget as the share of attended tokens, where the rule is for its method."""
    share = attended_share(request.method, request.budget, request.overrides)
    if share is None:
        return request
    return request.model_copy(update={"budget": None, "overrides": {**request.overrides, SHARE: share}})


def attending_sentence(method: str, share: float) -> str:
    """Return the sentence that says what a budget means for a method that keeps all KV."""
    return f"{methods.get(method).title} keeps all KV on the device and attends {share * 100:.3g} % of it."


def with_room(request: RunRequest, sizes: Sizes) -> RunRequest:
    """Return the request with a budget that its method can hold by arithmetic. A request that names a budget, and one
    that the usual share may suffice for, stay as they are."""
    method = methods.get(request.method)
    if request.budget is not None or method.keeps_all:
        return request
    usual = replace(sizes, budget_bytes=Budget.parse(DEFAULT_SHARE).bytes(sizes.shape, _tokens(sizes)))
    preset, choice = default_preset(request.method, request.model), choose_parameters(request, usual)
    if usual.may_hold(method, choice.params):
        return request
    return wider(request, refusal(method, request.preset, preset, choice, request.overrides, usual))


def wider(request: RunRequest, refused: BudgetInfeasible) -> RunRequest:
    """Return the request with the budget that a refusal names; without a limit where that budget is not larger than
    the one refused."""
    share = percent_up(max(refused.smallest, refused.likely or 0) / refused.full)
    larger = float(share) * refused.full > refused.budget
    return request.model_copy(update={"budget": share if larger and float(share) < 1 else WHOLE})


def resized(request: RunRequest, sizes: Sizes) -> Sizes:
    """Return the sizes under the request's budget."""
    budget = Budget.parse(request.budget) if request.budget else None
    return sizes if budget is None else replace(sizes, budget_bytes=budget.bytes(sizes.shape, _tokens(sizes)))


def room_made(request: RunRequest) -> str:
    """Return the sentence that names the budget of a request that was given room."""
    title, usual, budget = methods.get(request.method).title, in_words(DEFAULT_SHARE), in_words(request.budget)
    held = "The run has no limit" if budget == NO_LIMIT else f"The budget is {budget} of full KV"
    return f"{held}: {title} cannot hold this prompt in the usual {usual}."


def _tokens(sizes: Sizes) -> int:
    """Return the number of tokens of the prompt and the output together."""
    return sizes.prompt_tokens + 1 + sizes.max_new


RETRIEVING = ("page_retrieval", "token_retrieval", "span_retrieval")
"""families of methods that keep every token in the cold tier"""
MASS_TABLES = 20
"""tables of one number per step, query head and position, float32, that measuring steps together takes, with what the C
library keeps of freed ones: 16 and 23 were measured (docs/evidence/benchmarks.md, Peak memory)"""
EFFECT_BYTES = 128
"""bytes that effects take for each attention weight of one layer in the steps they follow (kvlens.engine.effect)"""
WORTH_SAYING = 1 << 30
"""bytes from which a run's memory is worth a sentence"""


class RunBeyondMemory(UnsupportedModel):
    """The run needs more memory than this machine has free."""

    code = "run_beyond_memory"

    def __init__(self, name: str, needed: int, free: int, tokens: int, lanes: int = 1, prompts: int = 1) -> None:
        """lanes: runs that a race holds at once. prompts: that a batch holds at once."""
        self.needed, self.free, self.tokens, self.lanes, self.prompts = needed, free, tokens, lanes, prompts
        subject, remedy = ("a run", "") if lanes == 1 else (f"a race of {lanes} methods", "race fewer methods, ")
        if prompts > 1:
            subject, remedy = f"a batch of {prompts} prompts, each", "set a smaller batch, "
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
    """of the method's slots, its cold tier, and the keys of a prompt that it reads itself, for coverage"""
    masses: int
    """of the steps that are measured"""
    effects: int = 0
    """of the effects, when the slots are free again"""

    def __add__(self, need: MemoryNeed) -> MemoryNeed:
        """Return what two runs take at once, if each holds all that it holds alone; tokens of the longer one."""
        return MemoryNeed(
            self.full_kv + need.full_kv,
            self.total + need.total,
            max(self.tokens, need.tokens),
            self.lane_bytes + need.lane_bytes,
            self.masses + need.masses,
            self.effects + need.effects,
        )

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
    """Estimate the host memory of a run on a CPU. A run holds the prompt's KV until its method has placed it, and the
    slots and the cold tier of the method. A compared run holds one reading of the prompt all the time, beside it full
    KV's slots before the method's, and later effects. A method that reads the prompt itself holds a reading more."""
    shape, full, kind = sizes.shape, sizes.full_kv_bytes, methods.get(request.method)
    tokens = sizes.prompt_tokens + 1 + sizes.max_new
    slots = full if kind.keeps_all or sizes.budget_bytes is None else min(full, sizes.budget_bytes)
    placed = slots + full * (kind.family in RETRIEVING and not kind.keeps_all)
    reads_itself, masses, effects = kind.needs.own_prompt, _masses(request, shape, tokens), 0
    lane_bytes = placed + (full // 2 if request.coverage and reads_itself else 0)
    if not (request.against or request.forced_reference):
        return MemoryNeed(full, placed + full + masses, tokens, lane_bytes, masses)
    kv = full + max(full, placed + full * reads_itself)
    if _has_full_attention(request, shape, tokens):
        effects = EFFECT_BYTES * shape.q_heads * tokens * min(MOST_EFFECT_STEPS, sizes.max_new)
    return MemoryNeed(full, max(kv + masses, full + effects), tokens, lane_bytes, masses, effects)


def _has_full_attention(request: RunRequest, shape: KVShape, tokens: int) -> bool:
    """Return whether full attention by span is recorded."""
    return request.coverage and resolve(request.oracle, shape.layers, shape.q_heads, tokens) is not None


def _masses(request: RunRequest, shape: KVShape, tokens: int) -> int:
    """Return the bytes that measuring takes at most."""
    step = shape.layers * shape.q_heads * tokens
    return 4 * (MASS_TABLES * table_numbers(step) if _has_full_attention(request, shape, tokens) else step)


def race_need(needs: Sequence[MemoryNeed]) -> MemoryNeed:
    """Estimate the host memory of a race from its lanes' runs: one reading of the prompt, what every lane holds, and
    what measuring takes once, since lanes decode in turns."""
    full, whole = max(need.full_kv for need in needs), reduce(add, needs)
    masses, effects = max(need.masses for need in needs), max(need.effects for need in needs)
    total = full + max(full, whole.lane_bytes) + max(masses, effects)
    return replace(whole, full_kv=full, total=total, masses=masses, effects=effects)


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


def check_batch_memory(request: RunRequest, needs: Sequence[MemoryNeed]) -> None:
    """Raise RunBeyondMemory where runs that share steps take more together than this machine has free: each holds what
    it holds alone. request: of any of them."""
    if len(needs) > 1:
        _check_free(request, reduce(add, needs), prompts=len(needs))


def _check_free(request: RunRequest, need: MemoryNeed, lanes: int = 1, prompts: int = 1) -> MemoryNeed:
    free, folder = host_bytes(), ready(request.model)
    if free is None or folder is None:
        return need
    weights = None if is_kept(request) else weights_in(folder)
    dtype = request.dtype if request.dtype in NUMBER_BYTES else "float32"
    total = need.total + (0 if weights is None else weights.bytes_in(dtype))
    if total > free:
        raise RunBeyondMemory(request.model, total, free, need.tokens, lanes, prompts)
    return need


def is_kept(request: RunRequest) -> bool:
    """Return True if this process has the model in memory already (kvlens.models.find)."""
    return (expected(request.device), request.dtype) == ("cpu", "float32") and find_model(request.model) is not None


def weights_sentence(model: str, dtype: str) -> str:
    """Return what the number format of a large model's weights costs; '' where nothing is to be said."""
    try:
        folder = ready(model)
    except UnsupportedModel:
        return ""
    return "" if folder is None else dtype_sentence(folder, dtype)
