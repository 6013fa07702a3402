"""A run's memory: the only place where KV is written, moved, dropped, counted and refused."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from kvlens.budget import BudgetAccount
from kvlens.link.host_link import HostLink, Link
from kvlens.link.transfers import TransferLog
from kvlens.memory.allocator import Allocator, HostSide
from kvlens.memory.arrivals import Arrival, Arrivals
from kvlens.memory.counterfactual import Counterfactual
from kvlens.memory.evictions import Evictions
from kvlens.memory.log import MemoryLog, no_recalls
from kvlens.memory.packed import PackedKept, PackedZone
from kvlens.memory.placement import Placement
from kvlens.memory.reads import Distance, Reads, Turn
from kvlens.memory.recall import Recaller
from kvlens.rows import SpanRow, TransferRow
from kvlens.shape import KVShape
from kvlens.tiers.cold import ColdTier
from kvlens.tiers.hot import HotTier
from kvlens.tiers.layout import Layout
from kvlens.tiers.slots import FREE, WINDOW, PromptStore, SharedSlots, SpanTable


class Memory:
    """One run's KV, from the end of prefill on. Life: `place_prompt`; then per step `start_step`, `leave_window` where
    tokens leave the window, `feed`, and per layer `write`, `host.recaller.recall`, `reads.part`.
    """

    def __init__(
        self,
        shape: KVShape,
        layout: Layout,
        prompt: PromptStore,
        positions: int,
        account: BudgetAccount,
        transfers: TransferLog,
        turn: Turn | None = None,
        counterfactual: Counterfactual | None = None,
    ) -> None:
        """Take the device's slots. positions: of the whole run; turn: the model's rotary embedding, for a layout whose
        keys are seen from elsewhere or packed without it; counterfactual None: nothing is held or dropped."""
        dtype, self.device = prompt.keys.dtype, prompt.keys.device
        self.shape, self.account, self.transfers, self.counterfactual = shape, account, transfers, counterfactual
        self.positions = positions
        self.layout = layout = layout if counterfactual is None else counterfactual.widen(layout, shape.layers)
        self.log = MemoryLog()
        self.hot = HotTier(shape, layout, prompt.tokens, dtype, self.device)
        self.spans = SpanTable(layout.span_capacity, self.device, shape.layers, shape.kv_heads)
        self.packed: PackedZone | PackedKept | None = None
        """tokens that stay on the device in few bits; None: none do"""
        if layout.quantised is not None:
            zone = PackedKept if layout.quantised.kept_counts else PackedZone
            self.packed = zone(shape, layout.quantised, prompt, self.log, turn)
            account.hold("packed", *self.packed.tensors())
        self.distance: Distance | None = None
        """where keys are seen; None: where they are"""
        if layout.farthest or layout.closed:
            assert turn is not None, "keys that cannot be turned are seen where they are"
            self.distance = Distance(layout, turn)
        self.shared = [SharedSlots(size, shape.kv_heads, shape.head_dim, dtype, self.device) for size in layout.shared]
        """slots for recalled spans that KV heads share, a set for each shared zone"""
        self.under_way: dict[int, list[Arrival]] = {}
        """of the layers whose attention has to wait for copies"""
        self.evictions = Evictions(self.hot, self.spans, self.log) if layout.bag else None
        self._allocator = Allocator(self.hot, self.spans, self.evictions, counterfactual, transfers, self.log)
        self.reads = Reads(
            layout, self.hot, self.shared, self.spans, self.packed, self.distance, counterfactual, self.log
        )
        account.hold("hot", *self.hot.tensors())
        if self.shared:
            account.hold("shared", *(tensor for slots in self.shared for tensor in slots.tensors()))
        if counterfactual is not None:
            for name, tensors in counterfactual.tensors().items():
                account.hold(name, *tensors)
            if (size := counterfactual.slot_bytes(shape)) > 0:
                account.set_apart("held", "hot", size)
        if layout.staging_bytes:
            account.hold("staging", *(buffer.tensor for buffer in self.host.arrivals.buffers))
        account.hold("spans", *self.spans.tensors())
        start, end = layout.window_from, prompt.tokens
        self.spans.add([SpanRow(WINDOW, "window", start, end, -1, "the newest tokens, always attended")])

    def place_prompt(self, placement: Placement, prompt: PromptStore) -> None:
        """Carry out the method's placement of the prompt. The copies have ended then, on the host too."""
        keys, values, start, end = prompt.keys, prompt.values, self.hot.oldest, prompt.tokens
        for pool in self.hot.pools if start < end else ():
            assert pool.bag is None, "the placement covers what a bag holds of the prompt"
            slots = pool.take_window(start, end, WINDOW)
            pool.keys[:, :, slots] = keys[pool.index][:, :, start:end]
            pool.values[:, :, slots] = values[pool.index][:, :, start:end]
        ids = self._allocator.open_spans(placement)
        for pool in self.hot.pools if not isinstance(self.packed, PackedKept) else ():
            self._allocator.keep(pool, placement, keys, values, 0, ids)
        if isinstance(self.packed, PackedKept):
            self.packed.place(placement, prompt, ids)
        elif self.packed is not None:
            self.packed.place(self.hot.pools, self._rows(ids), prompt, start)
        self._allocator.summarise(placement, ids)
        if placement.offload:
            self._allocator.offload(placement, keys, values, 0, ids, "offload", self.host)
        self._allocator.log_losses(placement, ids, end)
        self._allocator.log_dense(placement, ids)
        if self.counterfactual is not None:
            self.counterfactual.place(self.hot, prompt)
        if self._has_host:
            self.host.link.quiet()

    def leave_window(self, placement: Placement, start: int, end: int) -> None:
        """Move the oldest tokens of the window, positions [start, end), where `placement` says; their slots are free
        afterwards. In dense layers they stay in their slots and only change their name."""
        assert start == self.hot.oldest, (start, self.hot.oldest)
        ids = self._allocator.open_spans(placement)
        moving = [pool for pool in self.hot.pools if not pool.dense]
        if isinstance(self.packed, PackedZone):
            self.packed.leave(moving, self._rows(ids), start, end)
        elif moving:
            keys, values = self.hot.read_window(start, end)
            self.account.hold("leaving", keys, values)
            for pool in moving:
                self._allocator.keep(pool, placement, keys, values, start, ids)
            self._allocator.summarise(placement, ids)
            if placement.offload:
                self._allocator.offload(placement, keys, values, start, ids, "leave", self.host)
            self.account.release("leaving")
        for pool in moving:
            pool.role.index_fill_(2, pool.window_slots(start, end), FREE)
            pool.gaps = True
        for pool in self.hot.pools:
            if pool.dense:
                self._allocator.rename(pool, placement, start, end, ids)
        self._allocator.log_dense(placement, ids)
        self.hot.oldest = end

    def _rows(self, ids: list[int]) -> list[SpanRow]:
        return [self.spans.rows[span] for span in ids]

    def name(self, placement: Placement) -> None:
        """Give tokens of a bag to the placement's spans from now on, in whatever slots they are. Nothing moves."""
        assert self.evictions is not None, "the window is no bag"
        self.evictions.name(self._allocator.open_spans(placement), placement.roles)

    # ------------------------------------------------------------------------------------------------------ decoding
    def start_step(self, step: int) -> None:
        """Begin a step: the transfer log, the account's peak and counts begin anew."""
        self.log.step, self.log.attended = step, -1
        if self._has_host:
            # the host has seen the result of the step before the last one, so it need not wait for these copies
            self.host.link.resolve(step - 2)
            self.host.recaller.start_step()
        self.transfers.start_step(step)
        self.account.start_step()

    def feed(self, position: int) -> None:
        """Take the slots of the step's input token, at `position`, in all layers."""
        self.advance(position)
        if self.packed is not None:
            self.packed.values_to(self.hot.pools, position - self.packed.form.residual)
        if self.evictions is not None:
            self.evictions.take(position)
        for pool in self.hot.pools if self.evictions is None else ():
            pool.take_window(position, position + 1, WINDOW)
        if self.counterfactual is not None:
            for kind, layer, kv_head, span, tokens in self.counterfactual.start_step(self.hot, self.log.step, position):
                self.log.event(kind, layer, kv_head, span, tokens)

    def advance(self, position: int) -> None:
        """Count the token at `position` as the newest in every window: the part of `feed` that touches no table."""
        assert position == self.hot.newest + 1, (position, self.hot.newest)
        for pool in self.hot.pools:
            oldest = pool.window_origin if pool.dense else self.hot.oldest
            if not self.layout.bag:
                assert position - oldest < pool.zones.window, "the window is full and nothing left it"
        self.hot.newest = position

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's token: keys, values [H_kv, D]."""
        for pool in self.hot.parts[layer]:
            pool.write(layer, self.hot.newest, keys, values)
        if self.counterfactual is not None:
            self.counterfactual.write(self.hot, layer, self.hot.newest, keys, values)

    # ------------------------------------------------------------------ the host's side, and what methods and runs read
    @cached_property
    def host(self) -> HostSide:
        """The host's side, made when it is first used: a run whose tokens stay on the device has none."""
        link, hot, spans, layout = link_for(self.device, self.transfers), self.hot, self.spans, self.layout
        cold = ColdTier(self.shape, layout, spans, hot.example.dtype, self.positions, link.host)
        arrivals = Arrivals(layout, hot, self.shared, cold, spans, self.transfers, link, self.log, self.under_way)
        return HostSide(link, cold, arrivals, Recaller(layout, hot, self.shared, cold, spans, arrivals, self.log))

    @property
    def _has_host(self) -> bool:
        return "host" in vars(self)

    @property
    def cold_bytes(self) -> int:
        """Bytes of the units in host memory."""
        return self.host.cold.bytes if self._has_host else 0

    @property
    def host_wait_ns(self) -> int:
        """How long the host waited for copies without the model's work having to."""
        return self.host.link.host_wait_ns if self._has_host else 0

    def recall_counts(self) -> dict[str, np.ndarray]:
        """Return this step's counts of recalls, per (layer, KV head); see Recaller."""
        return self.host.recaller.counts if self._has_host else no_recalls(self.shape)

    def settle(self) -> None:
        """Wait until every copy under way has ended: the run is over."""
        if self._has_host:
            self.host.arrivals.settle()

    def close(self) -> None:
        """Give back the link and the cold tier's memory, where they were taken."""
        if self._has_host:
            self.host.link.close()

    @property
    def counterfactual_bytes(self) -> int:
        """Device bytes beside the budget: the held slots, and the tables of held and dropped tokens."""
        by_name = self.account.by_name()
        return by_name.get("held", 0) + by_name.get("dropped", 0)

    def take_transfers(self, step: int | None = None) -> list[TransferRow]:
        """Return the finished copies (of one step that is over), with their measured times; see TransferLog.drain."""
        if self._has_host:
            self.host.link.resolve(step)
        return self.transfers.drain(step)

    def discard(self) -> None:
        """Discard what the log, the transfer log and the span table keep for a recorder: there is none."""
        self.log.discard()
        self.transfers.discard()
        self.spans.take_new()


def link_for(device: torch.device, transfers: TransferLog) -> Link:
    """Return the link between `device` and the cold tier. A run on the CPU imports nothing of CUDA's link."""
    if device.type != "cuda":
        return HostLink(transfers)
    from kvlens.link.cuda_link import cuda_link

    return cuda_link(device, transfers)
