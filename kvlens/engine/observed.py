"""What a method knows of its run. Of the prompt, beside its KV and until it has been placed: the last queries, the
attention that its tokens received, what was seen of its last token, and what layers were given.

In a model in which the method does not act on every layer, it knows a run of the other layers alone, under numbers of
their own, with the budget that the windows leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch

from kvlens.budget import BudgetAccount, BudgetInfeasible
from kvlens.engine.border import scored
from kvlens.engine.rotary import LayersRotary
from kvlens.kernels.attend import LayerForm, add_received, decode_attention, prefill_attention
from kvlens.memory.placement import Selection
from kvlens.memory.windowed import WindowedLayers
from kvlens.methods.hooks import Needs
from kvlens.methods.run_inputs import Inputs, Peeked, Prefilled, RunContext
from kvlens.tiers.slots import PromptStore, Slots


class Observed:
    """Counted on the device while it is there."""

    def __init__(
        self, method: str, needs: Needs, context: RunContext, account: BudgetAccount, prompt: PromptStore
    ) -> None:
        """method: its name, for sentences; needs: what to keep."""
        self._method, self._account, self._layers = method, account, context.shape.layers
        self._prompt: PromptStore | None = prompt
        self._wanted, self._peeks = needs.queries, needs.peek
        self._queries: list[torch.Tensor] = [torch.empty(0)] * self._layers
        self._received: torch.Tensor | None = None
        if needs.received:
            size = (self._layers, context.shape.q_heads, context.prompt_tokens)
            self._received = torch.zeros(size, device=context.device)
            account.hold("received", self._received)
        self._peek: list[list[torch.Tensor]] | None = None
        self.peeked: Peeked | None = None
        """what was seen of the last prompt token"""
        self._inputs: Inputs | None = None
        self._repeated: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """New prompt tokens of one layer: keys, values [H_kv, m, D]."""
        if self._peek is not None:
            self._peek[layer] = [keys.clone(), values.clone()]
        else:
            assert self._prompt is not None
            self._prompt.append(layer, keys, values)

    def attend(self, layer: int, q: torch.Tensor, scaling: float, form: LayerForm) -> torch.Tensor:
        """Prompt tokens of one layer attend under full attention: q [1, Hq, m, D] -> the same shape."""
        if self._peek is not None:
            return self._peek_attend(layer, q, scaling, form)
        return prefill_attention(q, *self.chunk(layer, q, scaling, form), scaling, form)

    def chunk(self, layer: int, q: torch.Tensor, scaling: float, form: LayerForm) -> tuple[torch.Tensor, torch.Tensor]:
        """Note what methods need of prompt tokens that attend in a layer: q [1, Hq, m, D] of the last m of the n read
        so far. Return the layer's keys, values [1, H_kv, n, D]."""
        assert self._prompt is not None
        keys, values = self._prompt.view(layer)
        if self._received is not None:
            add_received(self._received[layer], q[0], keys[0], scaling, form=form)
        if self._wanted:
            queries, earlier = scored(q[0, :, -self._wanted :], scaling), self._queries[layer]
            self._queries[layer] = (
                torch.cat([earlier, queries], 1)[:, -self._wanted :] if earlier.numel() else queries.clone()
            )
        return keys, values

    def inputs(self, inputs: Inputs) -> None:
        """What each layer's attention was given."""
        self._inputs = inputs
        self._account.hold("inputs", inputs.hidden)

    def repeated(self, most: torch.Tensor, queries: torch.Tensor | None) -> None:
        """Keep the most attention [L, Hq, n] that each token received in the second reading, and queries of it
        [L, Hq, w, D]."""
        self._repeated = most, queries
        self._account.hold("repeated", most, *(() if queries is None else (queries,)))

    # ---- its last token, before it is fed
    @property
    def peeking(self) -> bool:
        """The last prompt token goes through the model now."""
        return self._peek is not None

    @contextmanager
    def peek(self) -> Iterator[None]:
        """Inside, the last prompt token goes through the model once, after the rest of the prompt. It attends the
        prompt and itself; its query, key and value are kept, and nothing else changes."""
        self._peek = [[] for _ in range(self._layers)]
        try:
            yield
            keys, values, queries = (torch.stack(parts) for parts in zip(*self._peek, strict=True))
            self._hold(Peeked(queries, keys, values))
        finally:
            self._peek = None

    def _peek_attend(self, layer: int, q: torch.Tensor, scaling: float, form: LayerForm) -> torch.Tensor:
        """The attention that step 0 of FullKV computes, over a passing copy of one layer's prompt."""
        assert self._peek is not None
        assert self._prompt is not None
        peeked = self._peek[layer]
        keys, values = (torch.cat([old[0], new], 1) for old, new in zip(self._prompt.view(layer), peeked, strict=True))
        if form.window:
            keys, values = keys[:, -form.window :], values[:, -form.window :]
        peeked.append(scored(q[0], scaling).clone())
        return decode_attention(q, keys, values, None, scaling, form=form)

    def _hold(self, peeked: Peeked) -> None:
        self.peeked = peeked
        self._account.hold("peeked", peeked.queries, peeked.keys, peeked.values)

    # ---- from one session to another, and to the method
    def read(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Peeked, torch.Tensor | None]:
        """Return keys, values [L, H_kv, n, D] of the prompt that has been put through, last queries [L, Hq, w, D], what
        was seen of the last token, and the attention received [L, Hq, n]. They are the session's own, which puts
        nothing through any more."""
        assert self.peeked is not None
        assert self._prompt is not None
        prompt = self._prompt
        return prompt.keys, prompt.values, torch.stack(self._queries), self.peeked, self._received

    def adopt(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        queries: torch.Tensor,
        peeked: Peeked | None,
        received: torch.Tensor | None,
        share: bool = False,
    ) -> None:
        """Take a prompt that another session has read, as `read` returns it, instead of prefilling. share: hold its
        keys and values themselves, not copies. Raises ValueError when the method needs what was not read."""
        assert self._prompt is not None
        if self._received is not None:
            if received is None:
                raise ValueError(
                    f"{self._method} needs the attention that prompt tokens received, and it was not read."
                )
            self._received.copy_(received)
        if queries.shape[2] < min(self._wanted, keys.shape[2]):
            raise ValueError(f"{self._method} looks at more prompt queries than were read.")
        for layer in range(self._layers if self._wanted else 0):
            self._queries[layer] = queries[layer, :, -self._wanted :]
        if peeked is not None and self._peeks:
            self._hold(peeked)
        if share and all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in (keys, values)):
            self._prompt.share(keys, values)
            self._account.hold("prompt", keys, values)
            return
        for layer in range(self._layers):
            self._prompt.append(layer, keys[layer], values[layer])

    def hand_over(self, surprisal: torch.Tensor | None) -> Prefilled:
        """Everything as the method is given it; nothing of it stays here. surprisal float32 [n], nats."""
        store = self._prompt
        assert store is not None
        queries = torch.stack(self._queries) if self._wanted else torch.empty(0)
        prefilled = Prefilled(surprisal, store.keys, store.values, queries, self.peeked, self._received, self._inputs)
        prefilled.repeated, prefilled.repeated_queries = self._repeated
        self._prompt, self._queries, self.peeked, self._received, self._inputs = None, [], None, None, None
        self._repeated = (None, None)
        return prefilled

    def release(self) -> None:
        """The method has what was handed over no longer."""
        for name in ("received", "peeked", "inputs", "repeated"):
            self._account.release(name)


def method_context(context: RunContext, reference: bool) -> RunContext:
    """Return the run as a method knows it. reference: the method is full KV."""
    shape = context.shape.acting(reference)
    if shape.layers == context.shape.layers:
        return context
    windows = context.shape.window_bytes(context.prompt_tokens + context.max_new, reference)
    budget = None if context.budget_bytes is None else max(0, context.budget_bytes - windows)
    numbers = context.shape.global_layers
    turn = None if context.rotate is None else LayersRotary(context.rotate, numbers)
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


class LayerObserver(Protocol):
    """Sees each layer's decision after the attention has been computed; must change nothing."""

    def layer(
        self,
        layer: int,
        q: torch.Tensor,
        biases: Sequence[torch.Tensor | None],
        scaling: float,
        selection: Selection | None,
        slots: Sequence[Slots],
    ) -> None:
        """biases: of each part of the layer, [h, G, C]; one part where all its KV heads have equal zones. slots: what
        each part attended, which may change once this returns; none of a layer that keeps its window."""
