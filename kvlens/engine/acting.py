"""What a method knows of a model in which it does not act on every layer: a run of the other layers alone, under
numbers of their own, with the budget that the windows leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from kvlens.budget import BudgetInfeasible
from kvlens.holds import Drop, Hold
from kvlens.memory.counterfactual import Counterfactual
from kvlens.memory.windowed import WindowedLayers
from kvlens.methods.run_inputs import Inputs, Peeked, Prefilled, Rotate, RunContext


def method_context(context: RunContext, reference: bool) -> RunContext:
    """Return the run as a method knows it. reference: the method is full KV."""
    shape = context.shape.acting(reference)
    if shape.layers == context.shape.layers:
        return context
    windows = context.shape.window_bytes(context.prompt_tokens + context.max_new, reference)
    budget = None if context.budget_bytes is None else max(0, context.budget_bytes - windows)
    numbers = context.shape.global_layers
    turn = None if context.rotate is None else _Turn(context.rotate, numbers)
    return replace(context, shape=shape, budget_bytes=budget, rotate=turn)


@contextmanager
def with_windows(context: RunContext, reference: bool) -> Iterator[None]:
    """Inside, a refusal of the budget counts the windows' bytes too. context: of the model."""
    try:
        yield
    except BudgetInfeasible as refused:
        windows = context.shape.window_bytes(context.prompt_tokens + context.max_new, reference)
        if not windows:
            raise
        likely = None if refused.likely is None else refused.likely + windows
        smallest, limit = refused.smallest + windows, context.budget_bytes or 0
        raise BudgetInfeasible(refused.method, limit, smallest, context.full_kv_bytes, likely=likely) from None


def method_prompt(prompt: Prefilled, windowed: WindowedLayers) -> Prefilled:
    """Return the prompt of the method's layers."""
    if not windowed.rings:
        return prompt
    layers, peeked, inputs = list(windowed.numbers), prompt.peeked, prompt.inputs
    return replace(
        prompt,
        keys=prompt.keys[layers],
        values=prompt.values[layers],
        last_queries=prompt.last_queries[layers] if prompt.last_queries.numel() else prompt.last_queries,
        peeked=None if peeked is None else Peeked(peeked.queries[layers], peeked.keys[layers], peeked.values[layers]),
        received=None if prompt.received is None else prompt.received[layers],
        repeated=None if prompt.repeated is None else prompt.repeated[layers],
        repeated_queries=None if prompt.repeated_queries is None else prompt.repeated_queries[layers],
        inputs=None
        if inputs is None
        else Inputs(inputs.hidden[layers], tuple(inputs.modules[layer] for layer in layers), inputs.rotary),
    )


def counterfactual_of(
    holds: Sequence[Hold], drops: Sequence[Drop], windowed: WindowedLayers, context: RunContext
) -> Counterfactual | None:
    """Return what a run holds and drops, in the method's numbers of layers, and what the windows of `context`, the run
    as the method knows it, hide; None: nothing. A window holds its tokens anyway, and nothing else: a hold there is
    left out."""

    def own(heads: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        pairs = ((windowed.own.get(layer), head) for layer, head in heads)
        return tuple((layer, head) for layer, head in pairs if layer is not None)

    held = [replace(hold, heads=own(hold.heads)) for hold in holds]
    dropped = [replace(drop, heads=own(drop.heads)) for drop in drops]
    holds, drops = [hold for hold in held if hold.heads], [drop for drop in dropped if drop.heads]
    shape, n = context.shape, context.prompt_tokens
    if not (holds or drops or shape.windows):
        return None
    return Counterfactual(holds, drops, shape.kv_heads, n, n + context.max_new, context.device, shape.windows)


@dataclass(frozen=True)
class _Turn:
    """The model's rotary embedding under the method's numbers of layers."""

    turn: Rotate
    numbers: tuple[int, ...]

    def __call__(
        self, keys: torch.Tensor, positions: torch.Tensor, layer: int | None = None, back: bool = False
    ) -> torch.Tensor:
        if layer is not None:
            return self.turn(keys, positions, self.numbers[layer], back)
        turned = [self.turn(part, positions, number, back) for number, part in zip(self.numbers, keys, strict=True)]
        return torch.stack(turned) if turned else keys.float()
