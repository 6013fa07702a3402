"""Two tiers of memory under one roof: the only place where KV is written, moved, dropped, counted and refused."""

from __future__ import annotations

import torch

from kvlens.layout import Layout
from kvlens.memory.account import BudgetAccount
from kvlens.memory.cold import Codec, ColdTier, RawCodec, Unit
from kvlens.memory.hot import FREE, ROLE, HotTier
from kvlens.memory.ledger import Ledger
from kvlens.memory.link import HostLink, Move, Ticket
from kvlens.memory.placement import Placement, Selection
from kvlens.memory.prompt import PromptStore
from kvlens.memory.recall import RecallZone
from kvlens.memory.spantable import WINDOW, SpanTable
from kvlens.rows import EventRow, SpanHeadRow, SpanRow
from kvlens.shape import KVShape

ARRIVAL = {"zoom": "zoom_in", "prefetch": "prefetch", "correction": "correction"}
"""Event that tells of a span's arrival, by the cause of its transfer; 'recall' for the others."""
DEPARTURE = {"zoom": "zoom_out"}


class Memory:
    """One run's KV. Life: `prompt.append` while prefilling; `lay_out` and `place_prompt` when it ends; then per step `start_step`,
    `leave_window` where tokens leave the window, `feed`, and per layer `write`, `land`, `recall`, `bias`.
    """

    def __init__(self, shape: KVShape, dtype: torch.dtype, device: torch.device, prompt_tokens: int) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.account, self.ledger, self.link, self.cold = BudgetAccount(), Ledger(), HostLink(), ColdTier()
        self.prompt: PromptStore | None = PromptStore(shape, dtype, device, prompt_tokens)
        self.account.hold("prompt", *self.prompt.tensors())
        self.events: list[EventRow] = []
        self.span_heads: list[SpanHeadRow] = []
        self.step = -1
        self.waited_ns = 0
        self._position = -1
        self._window_start = 0
        self._codec: Codec = RawCodec()
        self._pending: list[list[tuple[int, int, Unit, torch.Tensor, Ticket]]] = []

    # ------------------------------------------------------------------------------------------------ prefill and placement
    def lay_out(self, layout: Layout) -> None:
        """Take the device's slots. Called once, when prefill has ended."""
        shape, self.layout = self.shape, layout
        self.hot = HotTier(shape, layout.zones, self.dtype, self.device)
        self.spans = SpanTable(layout.span_capacity, self.device)
        self.log_lengths = torch.zeros(layout.span_capacity, device=self.device)
        self.is_hot = torch.zeros(shape.layers, shape.kv_heads, layout.span_capacity, dtype=torch.bool, device=self.device)
        self.staging = torch.zeros(layout.staging_bytes // self.dtype.itemsize, dtype=self.dtype, device=self.device)
        first = self.hot.start["recall"]
        self.zones = [[RecallZone(first, layout.zones.recall) for _ in range(shape.kv_heads)] for _ in range(shape.layers)]
        self._pending = [[] for _ in range(shape.layers)]
        self.account.hold("hot", *self.hot.tensors())
        self.account.hold("staging", self.staging)
        self.account.hold("spans", self.spans.lengths, self.log_lengths, self.is_hot)
        assert self.prompt is not None
        window = SpanRow(WINDOW, "window", layout.window_from, self.prompt.tokens, -1, "the newest tokens, always attended")
        self.spans.add([window])
        self.hot.window_origin = self._window_start = layout.window_from
        self._position = layout.window_from - 1
        for position in range(layout.window_from, self.prompt.tokens):
            slot = self._take_window_slot(position)
            self.hot.keys[:, :, slot] = self.prompt.keys[:, :, position]
            self.hot.values[:, :, slot] = self.prompt.values[:, :, position]

    def place_prompt(self, placement: Placement) -> None:
        """Carry out the method's placement of the prompt and give the prompt's KV back."""
        assert self.prompt is not None
        self._place(placement, self.prompt.keys, self.prompt.values, 0, "offload")
        self.prompt = None
        self.account.release("prompt")

    def leave_window(self, placement: Placement, start: int, end: int) -> None:
        """The oldest tokens of the window, positions [start, end), go where `placement` says. Their slots are free afterwards."""
        assert start == self._window_start, (start, self._window_start)
        keys, values = self.read_window(start, end)
        self.account.hold("leaving", keys, values)
        self._place(placement, keys, values, start, "leave")
        self.hot.role.index_fill_(2, self._window_slots(start, end), FREE)
        self._window_start = end
        self.account.release("leaving")

    def _place(self, placement: Placement, keys: torch.Tensor, values: torch.Tensor, first: int, cause: str) -> None:
        rows = [
            SpanRow(0, span.kind, span.tok_start, span.tok_end, self.step, span.reason, span.mean_surprisal, state)
            for span, state in zip(placement.spans, placement.states, strict=True)
        ]
        ids = self.spans.add(rows)
        for span in ids:
            self.log_lengths[span] = self.spans.lengths[span].log()
            self._event("span_open", span=span)
        self._keep(placement, keys, values, first, ids)
        if placement.coarse:
            assert placement.coarse_keys is not None
            assert placement.coarse_values is not None
            spans = torch.tensor([ids[i] for i in placement.coarse], device=self.device)
            starts = torch.tensor([placement.spans[i].tok_start for i in placement.coarse], device=self.device)
            role = torch.full_like(spans, ROLE["coarse"])
            self.hot.append("coarse", placement.coarse_keys, placement.coarse_values, starts, spans, role)
        self._offload(placement, keys, values, first, ids, cause)
        for span, row in zip(ids, rows, strict=True):
            if row.state == "evicted":
                self._event("evict", span=span, value=float(row.tok_end - row.tok_start))

    def _keep(self, placement: Placement, keys: torch.Tensor, values: torch.Tensor, first: int, ids: list[int]) -> None:
        if placement.kept.numel() == 0:
            return
        at = placement.kept - first
        if at.dim() == 1:
            kept_keys, kept_values = keys.index_select(2, at), values.index_select(2, at)
        else:
            index = at.unsqueeze(-1).expand(*at.shape, keys.shape[-1])
            kept_keys, kept_values = keys.gather(2, index), values.gather(2, index)
        starts = torch.tensor([row.tok_start for row in placement.spans], device=self.device)
        row_of = placement.span_of_kept
        if row_of is None:
            row_of = torch.searchsorted(starts, placement.kept, right=True) - 1
        spans = torch.tensor(ids, device=self.device)[row_of]
        role = placement.kept_role
        if isinstance(role, str):
            role = torch.full_like(placement.kept, ROLE[role])
        self.hot.append("kept", kept_keys, kept_values, placement.kept, spans, role)

    def _offload(self, placement: Placement, keys: torch.Tensor, values: torch.Tensor, first: int, ids: list[int],
                 cause: str) -> None:  # fmt: skip
        if not placement.offload:
            return
        assert placement.codec is not None
        self._codec = placement.codec
        tickets = []
        for i in placement.offload:
            row, span = placement.spans[i], ids[i]
            at = slice(row.tok_start - first, row.tok_end - first)
            for layer, heads in enumerate(placement.codec.pack(keys[:, :, at], values[:, :, at], span)):
                for kv_head, unit in enumerate(heads):
                    entry = self.ledger.open(layer, kv_head, span, "d2h", cause, unit.bytes, blocking=True)
                    source, unit.payload = unit.payload, torch.empty_like(unit.payload, device="cpu")
                    tickets.append(self.link.submit(entry, [Move(unit.payload, source)]))
                    self.cold.put(layer, span, kv_head, unit)
                    self.span_heads.append(
                        SpanHeadRow(
                            span,
                            layer,
                            kv_head,
                            unit.form,
                            unit.rank_k,
                            unit.rank_v,
                            unit.bytes,
                            unit.err_k,
                            unit.err_v,
                        )
                    )
            self._event("offload", span=span, value=float(row.tok_end - row.tok_start))
        self._wait(tickets)

    # ------------------------------------------------------------------------------------------------------------- decoding
    def start_step(self, step: int) -> None:
        """A new step: the ledger, the account's peak and the waiting time begin anew."""
        self.step, self.waited_ns = step, 0
        self.ledger.start_step(step)
        self.account.start_step()

    def feed(self, position: int) -> None:
        """The step's input token will lie at `position`: its window slot is taken for all layers."""
        assert position == self._position + 1, (position, self._position)
        if not self.layout.window_evicts:
            assert position - self._window_start < self.layout.zones.window, "the window is full and nothing left it"
        self._take_window_slot(position)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The step's token: keys, values [H_kv, D]."""
        slot = self.hot.window_slot(self._position)
        self.hot.keys[layer, :, slot], self.hot.values[layer, :, slot] = keys, values

    def land(self, layer: int) -> None:
        """Wait for this layer's copies under way and make what they brought attendable."""
        self._wait([ticket for *_, ticket in self._pending[layer]])
        for kv_head, span, unit, slots, ticket in self._pending[layer]:
            start = self.spans.rows[span].tok_start
            positions = torch.arange(start, start + len(slots), dtype=torch.int32, device=self.device)
            self.hot.position[layer, kv_head].index_copy_(0, slots, positions)
            self.hot.span[layer, kv_head].index_fill_(0, slots, span)
            role = "resident" if unit.form == "raw" else "reconstructed"
            self.hot.role[layer, kv_head].index_fill_(0, slots, ROLE[role])
            self.is_hot[layer, kv_head, span] = True
            self._event(ARRIVAL.get(ticket.entry.cause, "recall"), layer, kv_head, span, float(unit.bytes))
        self._pending[layer].clear()

    def settle(self) -> None:
        """Wait until every copy under way has ended, without making it attendable: the run is over."""
        for pending in self._pending:
            self._wait([ticket for *_, ticket in pending])

    def recall(self, layer: int, selection: Selection) -> tuple[list[int], list[int]]:
        """Bring the wanted spans of every KV head to the device, as far as they fit; returns (fetched, reused) counts per KV head.

        Blocking unless `selection.later`. A span in the cold tier stays there; the device's copy is dropped without a transfer.
        """
        fetched, reused = [], []
        for kv_head, wanted in enumerate(selection.want.tolist()):
            plan = self.zones[layer][kv_head].plan([s for s in wanted if s >= 0], self.spans.tokens)
            fetched.append(len(plan.misses))
            reused.append(len(plan.hits))
            for span, slots in plan.evicted:
                self.hot.role[layer, kv_head].index_fill_(0, torch.tensor(slots, device=self.device), FREE)
                self.is_hot[layer, kv_head, span] = False
                self._event(DEPARTURE.get(selection.cause, "evict"), layer, kv_head, span)
            for span in plan.refused:
                self._event("refused", layer, kv_head, span, float(self.spans.tokens(span)))
            for span, slots in plan.misses:
                self._fetch(layer, kv_head, span, slots, selection)
        if not selection.later:
            self.land(layer)
        return fetched, reused

    def _fetch(self, layer: int, kv_head: int, span: int, slots: list[int], selection: Selection) -> None:
        unit = self.cold.get(layer, span, kv_head)
        entry = self.ledger.open(layer, kv_head, span, "h2d", selection.cause, unit.bytes, blocking=not selection.later)
        index = torch.tensor(slots, device=self.device)
        keys, values = self.hot.keys[layer, kv_head], self.hot.values[layer, kv_head]
        if unit.form == "raw":
            ticket = self.link.submit(entry, [Move(keys, unit.payload[0], index), Move(values, unit.payload[1], index)])
        else:
            staged = self.staging[: unit.payload.numel()]  # one buffer is enough: the link runs its jobs in order
            codec = self._codec

            def unpack() -> None:
                span_keys, span_values = codec.unpack(unit, staged)
                keys.index_copy_(0, index, span_keys)
                values.index_copy_(0, index, span_values)

            ticket = self.link.submit(entry, [Move(staged, unit.payload)], unpack)
        self._pending[layer].append((kv_head, span, unit, index, ticket))

    def bias(self, layer: int, fine: torch.Tensor | None) -> torch.Tensor | None:
        """Additive bias [H_kv, G, C] over the layer's slots: log|S| on coarse entries, -inf on what a query head does not attend.

        None when every slot written so far is attended as it is (then the live slots are a prefix of the pool).
        """
        if fine is None and self.live_prefix() is not None:
            return None
        role, span = self.hot.role[layer], self.hot.span[layer].long()
        out = torch.where(role == ROLE["coarse"], self.log_lengths[span], torch.zeros((), device=self.device))
        out = out.masked_fill(role == FREE, float("-inf"))[:, None].repeat(1, self.shape.group, 1)
        if fine is None:
            return out
        reads = (fine & self.is_hot[layer][:, None]).gather(2, span[:, None].expand(-1, self.shape.group, -1))
        in_recall = ((role == ROLE["resident"]) | (role == ROLE["reconstructed"]))[:, None] & self.in_recall_zone
        hidden = ((role == ROLE["coarse"])[:, None] & reads) | (in_recall & ~reads)
        return out.masked_fill(hidden, float("-inf"))

    @property
    def in_recall_zone(self) -> torch.Tensor:
        """[C] bool: slots of the recall zone."""
        slot = torch.arange(self.hot.zones.slots, device=self.device)
        first = self.hot.start["recall"]
        return (slot >= first) & (slot < first + self.hot.zones.recall)

    def live_prefix(self) -> int | None:
        """Number of live slots if they are exactly the first ones of the pool, else None."""
        zones = self.hot.zones
        if zones.coarse or zones.recall or self.hot.used["kept"] != zones.kept or self._window_start != self.hot.window_origin:
            return None
        return zones.kept + min(zones.window, self._position - self._window_start + 1)

    @property
    def window_start(self) -> int:
        """Position of the oldest token in the window (of a window that evicts by itself: where it began)."""
        return self._window_start

    def read_window(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of keys, values [L, H_kv, end - start, D] of window positions."""
        slots = self._window_slots(start, end)
        return self.hot.keys.index_select(2, slots), self.hot.values.index_select(2, slots)

    def close(self) -> None:
        self.link.close()

    def drain_events(self) -> list[EventRow]:
        events, self.events = self.events, []
        return events

    def drain_span_heads(self) -> list[SpanHeadRow]:
        rows, self.span_heads = self.span_heads, []
        return rows

    # ------------------------------------------------------------------------------------------------------------- internal
    def _wait(self, tickets: list[Ticket]) -> None:
        """Stand still until all are done. The link works in order, so the last is waited for first, and carries the waiting time."""
        for ticket in reversed(tickets):
            self.waited_ns += ticket.wait()

    def _window_slots(self, start: int, end: int) -> torch.Tensor:
        return torch.tensor([self.hot.window_slot(p) for p in range(start, end)], device=self.device)

    def _take_window_slot(self, position: int) -> int:
        slot = self.hot.window_slot(position)
        self.hot.position[:, :, slot] = position
        self.hot.span[:, :, slot] = WINDOW
        self.hot.role[:, :, slot] = ROLE["window"]
        self._position = position
        return slot

    def _event(self, kind: str, layer: int | None = None, kv_head: int | None = None, span: int | None = None,
               value: float | None = None) -> None:  # fmt: skip
        self.events.append(EventRow(self.step, layer, kv_head, None, kind, span, value))
