"""A session whose decode step has fixed shapes and keeps its state in device tensors, so that it can be compiled or
captured whole.

Prefill, placement and what happens between steps are the ordinary session's; inside a step nothing is decided on the
host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvlens.engine.border import scored
from kvlens.engine.hf_attention import SessionCache
from kvlens.engine.session import Session
from kvlens.kernels.choice import Backend, backend
from kvlens.kernels.pool_attend import fits
from kvlens.lab.gpu.kernels.rotary_write import rotary_write
from kvlens.lab.gpu.static import cuda
from kvlens.lab.gpu.static.attend import SlotAttention
from kvlens.lab.gpu.static.recall import StaticRecall
from kvlens.lab.gpu.static.ring import Record, Ring
from kvlens.memory.placement import Selection
from kvlens.methods.run_inputs import StepEnd
from kvlens.tiers.cold import Pools
from kvlens.tiers.hot import Pool
from kvlens.tiers.slots import ROLE, WINDOW


@dataclass
class Window:
    """The ring of one pool, and where in it this step's token lies: slot int64 [1], part of a batch's where there is
    one."""

    pool: Pool
    slot: torch.Tensor

    def take(self, position: torch.Tensor) -> None:
        """Name the slot of `position` [1] as the window's, in all layers and KV heads of the pool."""
        pool, slot = self.pool, self.slot
        slot.copy_(pool.start["window"] + (position - pool.window_origin) % pool.zones.window)
        pool.position.index_copy_(2, slot, position.int().expand(*pool.position.shape[:2], 1))
        pool.span.index_fill_(2, slot, WINDOW)
        pool.role.index_fill_(2, slot, ROLE["window"])


class StaticSession:
    """Takes over a session whose prefill has finished; the session must not decode any more, and its recall bookkeeping
    on the host is not used. Per step: `between_steps` on the host, then on the device `begin`, the model, `end`.
    """

    def __init__(
        self,
        session: Session,
        model: Any,
        ring: int = 0,
        record: Record = "heads",
        host: Pools | None = None,
        kernels: Backend | None = None,
    ) -> None:
        """ring: steps that a ring of instruments holds, 0: no instruments; record: what it holds; host: gives host
        memory for a cold tier in which nothing lies yet, None: the link's; kernels: what attends and plans recalls,
        None: the kernels on CUDA (k1 where heads are as wide as a power of two), PyTorch elsewhere."""
        assert session.decoding, "prefill has not finished"
        assert session.observer is None, "a recorder follows the ordinary session only"
        assert not any(pool.zones.held for pool in session.memory.hot.pools), "holds are the ordinary session's"
        self.session, self.model = session, model
        memory = self.memory = session.memory
        self.method, self.group = session.method, memory.shape.group
        self.method.keeps_journal, self.method.in_graph = False, True
        self.method.checks.enabled = False
        self.recall = StaticRecall(memory, self.method.factor_form(), kernels, host)
        self.ring = (
            Ring(ring, memory.shape, memory.device, memory.spans.capacity if record == "spans" else 0) if ring else None
        )
        self.kernels: Backend = kernels or (backend(memory.spans.is_hot) if fits(memory.shape.head_dim) else "torch")
        self.slots = SlotAttention(memory, self.kernels, self.ring is not None, self.method.selects_between_steps)
        self.aside = cuda.aside(memory.device)
        self.cache = SessionCache(self, memory.shape.layers)
        self.position = torch.full((1,), session.context.prompt_tokens, dtype=torch.long, device=memory.device)
        self._windows = [Window(pool, torch.zeros_like(self.position)) for pool in memory.hot.pools if pool.bag is None]
        self._window_of = {layer: window for window in self._windows for layer in window.pool.layers}
        self._all = torch.ones(memory.shape.kv_heads, dtype=torch.bool, device=memory.device)
        self._set: Selection | None = None
        self._shown: object = self
        if self.method.selects_between_steps:
            size = (memory.shape.kv_heads, self.group, memory.spans.capacity)
            none = torch.full((memory.shape.kv_heads, 0), -1, dtype=torch.long, device=memory.device)
            self._set = Selection(torch.ones(size, dtype=torch.bool, device=memory.device), none)

    @property
    def bytes(self) -> int:
        """Device bytes of what a static step keeps beside the session's memory; they are not in the budget."""
        buffers = (
            self.position,
            self._all,
            *(window.slot for window in self._windows),
            *(() if self._set is None else (self._set.fine,)),
        )
        rings = self.ring.bytes if self.ring is not None else 0
        return self.recall.bytes + self.slots.bytes + rings + sum(x.numel() * x.element_size() for x in buffers)

    # ---- between steps
    def between_steps(self, step: int, previous: StepEnd | None) -> None:
        """On the host: what the method does because a step has ended, tokens that leave the window, a selection made
        anew."""
        memory, spans = self.memory, len(self.memory.spans)
        self.session.between_steps(step, previous)
        position = self.session.context.prompt_tokens + step
        memory.advance(position)
        if memory.evictions is not None:
            memory.evictions.take(position)
            self.slots.fed()
        self.recall.publish()
        self.recall.check(memory.spans.rows[spans:])
        if len(memory.spans) > spans:
            self.slots.check()
        if self._set is not None:
            selection = self.method.select(0, torch.empty(0))
            if selection is not self._shown:
                self._set.fine.copy_(selection.fine) if selection is not None else self._set.fine.fill_(True)
                self._shown = selection

    def stepped(self) -> None:
        """A step has been issued."""
        if self.ring is not None:
            self.ring.stepped()

    # ---- in the step
    def begin(self) -> None:
        """Before the model: the step's token takes its slots."""
        for window in self._windows:
            window.take(self.position)
        self.slots.begin(self.position, self._set)
        if self.ring is not None:
            self.ring.begin()

    def end(self) -> None:
        """After the model: what was put aside is waited for, and the position moves on by one."""
        self.aside.join()
        self.position.add_(1)
        if self.ring is not None:
            self.ring.end()

    def tokens_seen(self, layer: int) -> int:
        """Positions are given to the model, so nobody may ask."""
        raise AssertionError("a static step passes position_ids")

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The step's token: keys, values [H_kv, 1, D]."""
        pool = self.memory.hot.pool(layer)
        row = layer - pool.layers.start
        if pool.bag is None:
            slot = self._window_of[layer].slot
            pool.keys[row].index_copy_(1, slot, keys)
            pool.values[row].index_copy_(1, slot, values)
        else:
            newest = pool.bag[row, :, None, None].expand_as(keys)
            pool.keys[row].scatter_(1, newest, keys)
            pool.values[row].scatter_(1, newest, values)

    def window_of(self, layer: int) -> Window:
        """Return the ring in which a layer's newest token lies."""
        return self._window_of[layer]

    def place(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return keys and values [H_kv, C, D] of a layer, and each KV head's slot of the step's token, int64 [H_kv]."""
        pool = self.memory.hot.pool(layer)
        row = layer - pool.layers.start
        slot = self._window_of[layer].slot.expand(len(self._all)) if pool.bag is None else pool.bag[row]
        return pool.keys[row], pool.values[row], slot

    def turn_and_write(self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See kvlens.lab.gpu.static.llama.Attention."""
        return rotary_write(qkv, cos, sin, *self.place(layer))

    def attend(self, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [1, Hq, 1, D] -> attention output of the same shape. The order is the ordinary session's: what is due now
        is moved, then attended, then the rest is moved for the next step."""
        selection = self._set if self._set is not None else self.method.select(layer, scored(q[0, :, 0], scaling))
        if selection is not None:
            self._bring(layer, selection, self._all if selection.now is None else selection.now, later=False)
        out, weights, attended = self.slots.attend(layer, q, selection, scaling)
        if self.ring is not None and weights is not None and attended is not None:
            self.ring.attention(layer, self.memory.hot.slots(layer), weights, attended)
        if selection is not None and selection.now is not None:
            with self.aside.later(selection):
                self._bring(layer, selection, ~selection.now, later=True)
        return out

    def _bring(self, layer: int, selection: Selection, fire: torch.Tensor, later: bool) -> None:
        moved = self.recall.bring(layer, selection, fire, self.position[0], later)
        if moved is not None and self.ring is not None:
            self.ring.recalled(layer, moved, later)
