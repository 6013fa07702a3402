"""Two tiers of memory under one roof: the only place where KV is written, moved, dropped, counted and refused."""

from __future__ import annotations

import torch

from kvlens.kernels.choice import Backend
from kvlens.kernels.pool_attend import Live
from kvlens.memory.budget import BudgetAccount
from kvlens.memory.cold_tier import ColdTier
from kvlens.memory.counterfactual import Dropped, Held
from kvlens.memory.cuda_link import link_for
from kvlens.memory.evictions import Keeper
from kvlens.memory.hot_tier import FREE, HotTier, PromptStore, Slots
from kvlens.memory.layout import Layout
from kvlens.memory.ledger import EventLog, Ledger
from kvlens.memory.packed_zone import PackedZone
from kvlens.memory.placement import Eviction, Placement, Selection
from kvlens.memory.placer import Placer
from kvlens.memory.reads import Attended, Distance, Turn
from kvlens.memory.recall import Recaller
from kvlens.memory.span_table import WINDOW, SpanTable
from kvlens.memory.told import Told
from kvlens.rows import SpanRow
from kvlens.shape import KVShape


class Memory:
    """One run's KV. Life: `prompt.append` while prefilling; `lay_out` and `place_prompt` when it ends; then per step
    `start_step`, `leave_window` where tokens leave the window, `feed`, and per layer `write`, `land`, `recall`,
    `attends`.
    """

    def __init__(
        self,
        shape: KVShape,
        dtype: torch.dtype,
        device: torch.device,
        prompt_tokens: int,
        held: Held | None = None,
        dropped: Dropped | None = None,
    ) -> None:
        self.held = held or Held((), shape.kv_heads, prompt_tokens, prompt_tokens, device)
        self.dropped = dropped or Dropped((), shape.kv_heads, prompt_tokens, device)
        self.shape, self.dtype, self.device = shape, dtype, device
        self.account, self.ledger = BudgetAccount(), Ledger()
        self.link = link_for(device, self.ledger)
        self.cold = ColdTier(self.link.host)
        self.prompt: PromptStore | None = PromptStore(shape, dtype, device, prompt_tokens)
        self.account.hold("prompt", *self.prompt.tensors())
        self.events = EventLog()
        self.packed: PackedZone | None = None
        """what stays on the device in few bits; None: nothing does"""
        self.distance: Distance | None = None
        """from where keys are seen; None: from where they are"""
        self.step = -1
        self._position = -1
        self._window_start = 0

    # ---------------------------------------------------------------------------------------- prefill and placement
    def lay_out(self, layout: Layout, turn: Turn | None = None) -> None:
        """Take the device's slots. Called once, when prefill has ended. turn: the model's rotary embedding, for a
        layout whose keys are seen from elsewhere."""
        shape = self.shape
        self.layout = layout = self.held.widen(layout, shape.layers)
        self.hot = HotTier(shape, layout, self.dtype, self.device)
        self.spans = SpanTable(layout.span_capacity, self.device)
        self.selectable = torch.zeros(layout.span_capacity, dtype=torch.bool, device=self.device)
        self.is_hot = torch.zeros(
            shape.layers, shape.kv_heads, layout.span_capacity, dtype=torch.bool, device=self.device
        )
        self.cold.lay_out(shape, layout, self.spans, self.dtype, self.held.positions)
        self.recaller = Recaller(
            shape, layout, self.hot, self.cold, self.spans, self.is_hot, self.ledger, self.link, self.events
        )
        self.keeper = Keeper(self.hot, self.spans, self.is_hot, self.events.tell)
        self.placer = Placer(self.recaller, self.ledger, self.link, self.events, self.held, self.selectable)
        if layout.farthest or layout.closed:
            assert turn is not None, "keys that cannot be turned are seen where they are"
            self.distance = Distance(layout, turn)
        if layout.quantised is not None:
            self.packed = PackedZone(shape, layout.quantised, self.dtype, self.device)
            self.account.hold("packed", *self.packed.tensors())
        self.attended = Attended(
            shape,
            layout,
            self.hot,
            self.spans,
            self.selectable,
            self.is_hot,
            self.packed,
            self.distance,
            self.held,
            self.dropped,
        )
        self.told = Told(self.spans, self.keeper, self.placer, self.packed, self.events, self.ledger, self.link)
        self.account.hold("hot", *self.hot.tensors())
        self.account.hold("held", *self.held.tensors())
        self.account.hold("dropped", *self.dropped.tensors())
        self.account.set_apart("held", "hot", self.held.slot_bytes(shape))
        self.account.hold("staging", *(buffer.tensor for buffer in self.recaller.buffers))
        self.account.hold("spans", *self.spans.tensors(), self.selectable, self.is_hot)
        assert self.prompt is not None
        start, end = layout.window_from, self.prompt.tokens
        self.spans.add([SpanRow(WINDOW, "window", start, end, -1, "the newest tokens, always attended")])
        self._window_start, self._position = start, end - 1
        for pool in self.hot.pools if start < end else ():
            assert pool.bag is None, "what a bag holds of the prompt is placed"
            slots = pool.take_window(start, end, WINDOW)
            pool.keys[:, :, slots] = self.prompt.keys[pool.at][:, :, start:end]
            pool.values[:, :, slots] = self.prompt.values[pool.at][:, :, start:end]

    def place_prompt(self, placement: Placement) -> None:
        """Carry out the method's placement of the prompt and give the prompt's KV back. The copies have ended then, on
        the host too."""
        assert self.prompt is not None
        keys, values = self.prompt.keys, self.prompt.values
        ids = self.placer.open_spans(placement, self.step)
        for pool in self.hot.pools:
            self.keeper.keep(pool, placement, keys, values, 0, ids)
        if self.packed is not None:
            self.packed.place(self.hot.pools, self._rows(ids), self.prompt, self._window_start)
        self.placer.place(placement, keys, values, 0, ids, "offload")
        self.keeper.tell_losses(placement, ids, self.step, self.prompt.tokens)
        self.keeper.tell_dense(placement, ids)
        self.held.place(self.hot, self.prompt)
        self.link.quiet()
        self.prompt = None
        self.account.release("prompt")

    def leave_window(self, placement: Placement, start: int, end: int) -> None:
        """The oldest tokens of the window, positions [start, end), go where `placement` says; their slots are free
        afterwards. In dense layers they stay where they are and only change their name."""
        assert start == self._window_start, (start, self._window_start)
        ids = self.placer.open_spans(placement, self.step)
        moving = [pool for pool in self.hot.pools if not pool.dense]
        if self.packed is not None:
            self.packed.leave(moving, self._rows(ids), start, end)
        elif moving:
            keys, values = self.hot.read_window(start, end)
            self.account.hold("leaving", keys, values)
            for pool in moving:
                self.keeper.keep(pool, placement, keys, values, start, ids)
            self.placer.place(placement, keys, values, start, ids, "leave")
            self.account.release("leaving")
        for pool in moving:
            pool.role.index_fill_(2, pool.window_slots(start, end), FREE)
            pool.gaps = True
        for pool in self.hot.pools:
            if pool.dense:
                self.keeper.rename(pool, placement, start, end, ids)
        self.keeper.tell_dense(placement, ids)
        self._window_start = end

    def _rows(self, ids: list[int]) -> list[SpanRow]:
        return [self.spans.rows[span] for span in ids]

    def name(self, placement: Placement) -> None:
        """Tokens of a bag belong to the placement's spans from now on, wherever they lie. Nothing moves."""
        self.keeper.name(self.placer.open_spans(placement, self.step), placement.roles)

    def evict(self, eviction: Eviction) -> None:
        """The next token's place in every bag. Nothing comes back."""
        self.keeper.evict(eviction, self.step)

    # ------------------------------------------------------------------------------------------------------ decoding
    def start_step(self, step: int) -> None:
        """A new step: the ledger, the account's peak and counts begin anew."""
        self.step = self.events.step = step
        self.events.attended = -1
        self.link.resolve(
            step - 2
        )  # the host has seen what the step before this one came to, so it need not wait for these
        self.ledger.start_step(step)
        self.account.start_step()
        self.recaller.start_step()

    def feed(self, position: int) -> None:
        """The step's input token will lie at `position`: its window slot is taken for all layers."""
        self.advance(position)
        if self.packed is not None:
            self.packed.values_to(self.hot.pools, position - self.packed.form.residual)
        if self.layout.bag:
            self.keeper.take(position)
        for pool in self.hot.pools:
            if pool.bag is None:
                pool.take_window(position, position + 1, WINDOW)
        for layer, kv_head, span, tokens in self.held.start_step(self.hot, self.step, position):
            self.events.tell("hold", layer, kv_head, span, tokens)
        for layer, kv_head, span, tokens in self.dropped.start_step(self.step, position):
            self.events.tell("drop", layer, kv_head, span, tokens)

    def advance(self, position: int) -> None:
        """The part of `feed` that is counting: the token at `position` has a slot in every window. Touches no table."""
        assert position == self._position + 1, (position, self._position)
        for pool in self.hot.pools:
            oldest = pool.window_origin if pool.dense else self._window_start
            if not self.layout.bag:
                assert position - oldest < pool.zones.window, "the window is full and nothing left it"
        self._position = position

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The step's token: keys, values [H_kv, D]."""
        for pool in self.hot.pools_of(layer):
            slots, heads = pool.slots(layer), pool.at[1]
            if pool.bag is None:
                at = pool.window_slot(self._position)
                slots.keys[:, at], slots.values[:, at] = keys[heads], values[heads]
            else:
                newest = pool.bag[layer - pool.layers.start, :, None, None].expand(-1, 1, self.shape.head_dim)
                slots.keys.scatter_(1, newest, keys[heads, None])
                slots.values.scatter_(1, newest, values[heads, None])
        self.held.write(self.hot, layer, self._position, keys, values)

    def land(self, layer: int) -> None:
        """Wait for this layer's copies under way and make what they brought attendable."""
        self.recaller.land(layer)

    def settle(self) -> None:
        """Wait until every copy under way has ended, without making it attendable: the run is over, and no step waits
        for them."""
        self.ledger.step += 1
        self.recaller.settle()

    def recall(self, layer: int, selection: Selection, later: bool) -> None:
        """Bring the wishes of the KV heads that are due to the device: before the attention, which waits for them, or
        `later`."""
        self.recaller.recall(layer, selection, later)
        if not later:
            self.land(layer)

    def attends(
        self, layer: int, selection: Selection | None, by: Backend, part: int = 0
    ) -> tuple[torch.Tensor | None, Live | None]:
        """What a step's attention in a part of the layer reads; see Attended.bias."""
        self.events.attended = layer
        return self.attended.bias(layer, selection, by, self._position, part)

    def attended_slots(self, layer: int, bias: torch.Tensor | None, part: int = 0) -> Slots:
        """The slots of a part that a step's attention with this bias goes through."""
        return self.attended.slots(layer, bias, self._position, part)

    def attended_together(self, layers: range, bias: torch.Tensor | None, part: int = 0) -> Slots:
        """As `attended_slots`, of some layers of one pool; see Attended.together."""
        return self.attended.together(layers, bias, self._position, part)

    @property
    def held_bytes(self) -> int:
        """Device bytes of what is held beside what the method asked for."""
        return self.account.by_name().get("held", 0)

    @property
    def beside_bytes(self) -> int:
        """Device bytes of a counterfactual, beside the budget: what is held, and the tables of what is dropped."""
        return self.held_bytes + self.account.by_name().get("dropped", 0)

    @property
    def window_start(self) -> int:
        """Position of the oldest token in the window (of a window that evicts by itself: where it began)."""
        return self._window_start

    def read_window(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of keys, values [L, H_kv, end - start, D] of window positions."""
        return self.hot.read_window(start, end)

    def close(self) -> None:
        """Give back the link and the cold tier's memory."""
        self.link.close()
