"""One sequence in flight: the model's layers write and attend here, the method decides, the memory moves, the observer
looks on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvlens.budget import BudgetAccount
from kvlens.engine.border import WALKED_STEPS, Border, make_method
from kvlens.engine.observed import LayerObserver, Observed, method_context, method_prompt, with_windows
from kvlens.engine.reading import reading_attention
from kvlens.holds import Drop, Hold
from kvlens.instruments import NoClock
from kvlens.kernels.attend import LayerForm, attention_weights, decode_attention, form_at
from kvlens.link.transfers import TransferLog
from kvlens.memory.memory import Memory
from kvlens.memory.placement import Selection
from kvlens.memory.windowed import WindowedLayers
from kvlens.methods.base import Method
from kvlens.methods.calibration import calibrated
from kvlens.methods.hooks import Needs
from kvlens.methods.run_inputs import RunContext, StepEnd
from kvlens.tiers.slots import PromptStore


class Session:
    """Owns the memory and the method of a run. Phases: prefill, `observed.peek` where the method needs a peek, then
    decode after `finish_prefill`. The method's hooks are called through `border` alone. Layers that keep a sliding
    window are in `windowed`; method and memory number the other layers.

    During decode exactly one token goes through the model per `begin_step`.
    """

    def __init__(
        self,
        method: type[Method],
        params: object,
        context: RunContext,
        needs: Needs | None = None,
        holds: Sequence[Hold] = (),
        drops: Sequence[Drop] = (),
    ) -> None:
        """needs: what to keep of the prompt; None: what the method needs. holds, drops: what is kept exactly, and what
        is not attended, whatever the method does."""
        self.context, self.shape = context, context.shape
        self.reference = method.family == "reference"
        method_run = method_context(context, self.reference)
        with with_windows(context, self.reference):
            run = calibrated(method, params, method_run) if method.calibrations else method_run
            self.method = make_method(method, params, run)
        self.border = Border(self.method)
        self.needs = method.needs_with(params) if needs is None else needs
        n = context.prompt_tokens
        self.windowed = WindowedLayers(context.shape, self.reference, n, drops, context.dtype, context.device)
        self.counterfactual = self.windowed.counterfactual(holds, drops, method_run.shape, context.max_new)
        """None: nothing is held, dropped or older than a window that hides it"""
        self.account, self.transfers = BudgetAccount(), TransferLog()
        self.prompt: PromptStore | None = PromptStore(context.shape, context.dtype, context.device, n)
        """None: the prompt has been placed"""
        self.account.hold("prompt", self.prompt.keys, self.prompt.values)
        self.account.hold("windows", *self.windowed.rings.values())
        self._memory: Memory | None = None
        self.observer: LayerObserver | None = None
        self.clock = NoClock()
        """times the phases of steps"""
        self.decoding = False
        self.prefill_peak = 0
        """largest device-resident KV bytes before decoding began: the whole prompt and the slots it moved to"""
        self.kernels: set[str] = set()
        """what decode steps have attended through so far"""
        self.observed = Observed(method.name, self.needs, context, self.account, self.prompt)
        self._position = context.prompt_tokens - 1
        self._ahead: dict[int, Selection | None] = {}
        """what was selected for layers that have not attended yet"""

    @property
    def memory(self) -> Memory:
        """The run's memory, from the end of prefill on."""
        assert self._memory is not None, "prefill has not finished"
        return self._memory

    # ---- called by the seam
    def tokens_seen(self, layer: int) -> int:
        """Tokens the model has put through before the current one: drives position ids."""
        return self._position if self.prompt is None else self.prompt.seen[layer]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """New tokens of one layer: keys, values [H_kv, m, D], post-RoPE."""
        if not self.decoding:
            self.observed.write(layer, keys, values)
        elif (number := self.windowed.own.get(layer)) is None:
            self.windowed.write(layer, keys[:, 0], values[:, 0])
        else:
            self.memory.write(number, keys[:, 0], values[:, 0])
            if "written" in self.border.layer_hooks:
                phase = self.clock.enter("score")
                self.border.written(number, keys[:, 0], values[:, 0])
                self.clock.enter(phase)

    def attend(self, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [1, Hq, m, D] -> attention output of the same shape."""
        form, number = self.form(layer), self.windowed.own.get(layer)
        if not self.decoding:
            if not self.needs.own_prompt or number is None or self.observed.peeking:
                return self.observed.attend(layer, q, scaling, form)
            keys, values = self.observed.chunk(layer, q, scaling, form)
            turn = self.method.context.rotate
            return reading_attention(self.border, turn, number, q, keys[0], values[0], scaling, form)
        if number is None:
            out, bias = self.windowed.attend(layer, q, scaling, form)
            if self.observer is not None:
                self.observer.layer(layer, q[0, :, 0], (bias,), scaling, None, ())
            return out
        return self._decode(layer, number, q, scaling, form)

    def _decode(self, model_layer: int, layer: int, q: torch.Tensor, scaling: float, form: LayerForm) -> torch.Tensor:
        """One step's attention in a layer on which the method acts: its number in the model and in the method."""
        memory, clock = self.memory, self.clock
        if layer in memory.under_way:
            memory.host.arrivals.land(layer)
        selects = layer in self._ahead or "select" in self.border.layer_hooks
        phase = clock.enter("score" if selects else "attend")
        selection = self._select(layer, q, scaling) if selects else None
        if selects:
            clock.enter("attend")
        outs, biases, attended = [], [], []
        for part, pool in enumerate(memory.hot.parts[layer]):
            part_queries = q if len(pool.heads) == self.shape.kv_heads else q[:, pool.query_heads]
            slots, bias, pages = memory.reads.part(layer, selection, part)
            part_form = form.take(pool.query_heads)
            self.kernels.add("torch" if bias is None else memory.reads.by)
            outs.append(decode_attention(part_queries, slots.keys, slots.values, bias, scaling, pages, part_form))
            biases.append(bias)
            attended.append(slots)
            if self.needs.weights:
                weights = attention_weights(part_queries[0, :, 0], slots.keys, bias, scaling, part_form)
                self.border.attended(layer, pool.heads, weights, slots.position)
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
        if selection is not None and selection.blend is not None:
            out = selection.blend.mixed(out)
        if self.observer is not None:
            clock.enter("record")
            self.observer.layer(model_layer, q[0, :, 0], biases, scaling, selection, attended)
        if selection is not None and selection.now is not None:
            memory.host.recaller.recall(layer, selection, later=True)
        clock.enter(phase)
        return out

    def _select(self, layer: int, q: torch.Tensor, scaling: float) -> Selection | None:
        """Return what the method selects for a layer by q [1, Hq, 1, D], or selected before. Recalls have begun."""
        if layer in self._ahead:
            selection = self._ahead.pop(layer)
        else:
            memory = self.memory
            selection = self.border.select(layer, q[0, :, 0], memory.spans.capacity, self._position, scaling)
            if selection is not None:
                memory.host.recaller.recall(layer, selection, later=False)
        if selection is None or self.counterfactual is None:
            return selection
        return self.counterfactual.counted(layer, selection)

    def form(self, layer: int) -> LayerForm:
        """Return what a layer of the model has besides scaled scores."""
        return form_at(self.context.forms, layer)

    def look_ahead(self, model_layer: int, q: torch.Tensor) -> None:
        """The method selects for a layer before its query is known: q [Hq, D] is an estimate, as `scored`. What it asks
        for is on its way while the layers before run; the layer's attention waits for what has not come by then."""
        if (layer := self.windowed.own.get(model_layer)) is None:
            return
        phase = self.clock.enter("score")
        selection = self._ahead[layer] = self.border.select(layer, q, self.memory.spans.capacity, self._position)
        if selection is not None:
            none = torch.zeros(self.shape.kv_heads, dtype=torch.bool, device=q.device)
            self.memory.host.recaller.recall(layer, replace(selection, now=none), later=True)
        self.clock.enter(phase)

    # ---- called by the engine
    def finish_prefill(self, surprisal: torch.Tensor | None) -> None:
        """The prompt is in: the method divides the device and places it. surprisal float32 [n], nats, NaN at position
        0; None: the method does not need it.

        Raises BudgetInfeasible; nothing has been decoded then.
        """
        context, account, store = self.context, self.account, self.prompt
        assert store is not None
        assert not self.needs.peek or self.observed.peeked is not None, (
            f"{self.method.name} needs a peek, and the last prompt token was not put through"
        )
        nats, windowed = surprisal if self.needs.surprisal else None, self.windowed
        with with_windows(context, self.reference):
            layout, placement = self.border.prefill_end(method_prompt(self.observed.hand_over(nats), windowed))
        self.observed.release()
        store = windowed.place(store)
        self._memory = memory = Memory(
            self.method.context.shape,
            layout,
            store,
            context.prompt_tokens + context.max_new,
            account,
            self.transfers,
            self.method.context.rotate,
            self.counterfactual,
        )
        self.border.count_held(account)
        memory.place_prompt(placement, store)
        windowed.open_spans(memory.spans.rows, -1)
        self.border.placed()
        self.prompt = None
        account.release("prompt")
        self.prefill_peak = account.peak
        if context.budget_bytes is not None:
            account.limit = context.budget_bytes + memory.counterfactual_bytes
        self.border.count_held(account)
        account.start_step()
        self.decoding = True

    def begin_step(self, step: int, previous: StepEnd | None) -> None:
        """The next token to go through the model is decode step `step`'s input. `previous` is the step before it: what
        the method moves because that step ended is moved now, and counts in this step's bytes and peak."""
        self._position = self.context.prompt_tokens + step
        self.between_steps(step, previous)
        self.memory.feed(self._position)

    def between_steps(self, step: int, previous: StepEnd | None) -> None:
        """What `begin_step` does before the new token gets its slots."""
        memory, phase = self.memory, self.clock.enter("plan")
        self.border.begin_step(step)
        if self.observer is None:
            self.method.drain_journal()
            memory.log.forget_cuts()
            self.method.drain_decided()
        memory.start_step(step)
        span_count = len(memory.spans)
        change = None if previous is None else self.border.decode_end(previous, memory)
        if change is not None:
            change.apply(memory)
        self.windowed.begin_step(step, memory.spans, span_count)
        if change is not None or step % WALKED_STEPS == 0:
            self.border.count_held(self.account, step)
        self.clock.enter(phase)

    def close(self) -> None:
        """Give back the link and the cold tier's memory, where they were taken."""
        if self._memory is not None:
            self._memory.close()
